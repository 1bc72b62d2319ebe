"""Batches that a trainer collects by itself, one rollout before each training phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...callbacks.hook.events import fire, run_state_of
from ..contract.exceptions import ContractError
from ..loop.hosted_module import HostedModule

__all__ = ["RolloutBatches"]


class RolloutBatches:
    """A loader whose every pass is a rollout of the trainer: one epoch is a rollout and its training phase.

    A run that is resumed within a phase begins with a new rollout: what a trainer collected is its own, and it alone
    could put it into its state.
    """

    begins_anew = True
    told_on_resume = (
        "The checkpoint was saved within the training phase of a rollout and holds none of the batches that may have "
        "been left of it: the run begins with a new rollout, and will not be bit-equal to one that was never "
        "interrupted. Save between phases with Checkpoint(every_n_epochs=1) to resume exactly."
    )

    def __init__(self, module: HostedModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[Any]:
        module = self._module
        run_state = run_state_of(module.trainer)
        fire(module.trainer, "on_rollout_start")
        returned = module.plugin.rollout(module.contract_state, module.ctx)  # type: ignore[attr-defined]
        batches, run_state.rollout_stats = _parted(returned)
        fire(module.trainer, "on_rollout_end")
        for index, batch in enumerate(batches):
            run_state.minibatch_index = index
            yield batch


def _parted(returned: Any) -> tuple[Iterable[Any], dict[str, Any] | None]:
    """The batches, and the statistics where the rollout gave a pair."""
    if isinstance(returned, tuple) and len(returned) == 2 and _is_stats(returned[1]) and not _is_stats(returned[0]):
        return _checked(returned[0]), None if returned[1] is None else dict(returned[1])
    return _checked(returned), None


def _is_stats(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _checked(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise ContractError(
            f"rollout returned a {type(batches).__qualname__}; it must be an iterable of raw batches, or a pair of "
            "that and statistics"
        )
    return batches
