"""What a communication hook keeps from exchange to exchange, which has to be in a checkpoint for a resume to be exact.

Of torch's own hooks that is a ``PowerSGDState``: the errors that a rank has not made up for yet, the last factors of
each bucket, a count of exchanges and a random generator. An object of another class says itself what is kept, by
``state_dict()`` and ``load_state_dict(state)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils._pytree import tree_map_only

from ...callbacks.lightning_internals import ddp_settings
from .torch_internals import POWER_SGD_MEMORY, power_sgd_state_class

__all__ = ["KeptHookState", "fault_of_hook_state", "is_hook_state", "kept_hook_state"]


def is_hook_state(state: Any) -> bool:
    """Whether `state`, as it was given to a strategy, changes with each exchange."""
    return state is not None and not isinstance(state, dist.ProcessGroup)


class KeptHookState:
    """Saves and restores the state of a hook.

    Args:
        state: As it was given to the strategy.
        device: Of this rank's gradients.
    """

    def __init__(self, state: Any, device: torch.device) -> None:
        self._state = state
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """What the hook keeps, without what its user has set."""
        if not _is_power_sgd(self._state):
            return dict(self._state.state_dict())
        kept = {name: getattr(self._state, name) for name in POWER_SGD_MEMORY}
        return {**kept, "rng": self._state.rng.get_state(legacy=False)}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Go on with what `state_dict` has returned."""
        kept = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), kept)
        if not _is_power_sgd(self._state):
            self._state.load_state_dict(kept)
            return
        for name in POWER_SGD_MEMORY:
            setattr(self._state, name, kept[name])
        self._state.rng.set_state(kept["rng"])


def kept_hook_state(strategy: Any) -> KeptHookState | None:
    """The state of the hook that `strategy` was given; None where there is none."""
    if not isinstance(strategy, DDPStrategy):
        return None
    state = ddp_settings(strategy).communication_state
    return KeptHookState(state, strategy.root_device) if is_hook_state(state) else None


def fault_of_hook_state(strategy: DDPStrategy) -> str | None:
    """Why a run with this strategy's hook could not be hosted, and the way out; None where it can."""
    state = ddp_settings(strategy).communication_state
    if not is_hook_state(state) or _is_power_sgd(state):
        return None
    name = type(state).__name__
    if name == "PostLocalSGDState":
        return (
            "post-local SGD averages models instead of gradients, which would have to know the optimizers. Use another "
            "hook, or none"
        )
    if callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None)):
        return None
    return (
        f"its communication hook keeps a {name} between steps, which no checkpoint would hold, so that no resume would "
        f"be exact. Give {name} the methods state_dict() and load_state_dict(state), or use a hook without state "
        "(fp16_compress_hook, bf16_compress_hook) or powerSGD_hook"
    )


def _is_power_sgd(state: Any) -> bool:
    return isinstance(state, power_sgd_state_class())
