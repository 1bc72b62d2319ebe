"""What torch says when something cannot be done with sharded parameters, in words that help."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...contract.exceptions import ContractError

__all__ = ["about_sharded_update", "about_sharding", "without_collectives"]

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier", "gather", "scatter"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send", "recv", "batch_isend_irecv"),
)
"""The functions of ``torch.distributed`` that wait for other ranks; not all of them are there in every release."""

_ADVICE = {
    r"mixed torch\.Tensor and DTensor": (
        "a submodule is called by itself while its parameters are sharded with its parent (name its class in the shard "
        "policy), or a tensor made from the parameters in `configure` meets the sharded ones (make it in `train_step`)"
    ),
    r"_local_tensor": (
        "a gradient that is not sharded was assigned: change the gradients that backward left in place, or use ddp"
    ),
    r"out of bounds for storage of size 0": (
        "a module of the shard policy returns no tensor that torch finds (but an object of its own, say), so that its "
        "weights are not gathered for backward: let it return tensors, or leave its class out of the shard policy"
    ),
    r"uniform original parameter dtype": (
        "parameters of several types are sharded together: give each type a unit of its own by the shard policy"
    ),
    r"not support deepcopy": "copy modules in `configure`, before they are sharded, or use their `state_dict`",
    r"Inference tensors": "use torch.no_grad() in place of torch.inference_mode() where modules are sharded",
    r"DTensor|[Ss]harding|sharded|placement": (
        "torch has no sharded form of an operation on parameters or gradients. Leave the operation out, or use ddp"
    ),
}
"""By what torch's text has, the first that matches."""


@contextlib.contextmanager
def without_collectives(what: str, agree: Callable[[str], None]) -> Iterator[None]:
    """Refuse that `what`, an update of sharded parameters, talks to the other ranks by hand, as for replicas.

    All that ranks have of such a parameter are different parts, so that what is exchanged does not belong together.

    Args:
        what: The update.
        agree: Called first with what this rank is about to do, so that no other waits for it.

    Raises:
        ContractError: Names the collective, and the rank.
    """
    found = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def refusing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith(("torch.", "genlight.", "lightning.")):
                return found[name](*args, **kwargs)
            agree(f"call torch.distributed.{name} in {what}")
            raise ContractError(
                f"{what} calls torch.distributed.{name} on rank {dist.get_rank()}, but the parameters are sharded: "
                "each rank holds a different part of each. Let every rank update every parameter by operations on the "
                "whole tensors, which talk to the other ranks themselves, or use ddp."
            )

        return call

    for name in found:
        setattr(dist, name, refusing(name))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(dist, name, function)


def about_sharding(
    error: BaseException, what: str = "`train_step` does what sharded modules cannot"
) -> ContractError | None:
    """An error that says `what` went wrong and what to do about `error`; None where it is not about sharding."""
    if isinstance(error, ContractError):
        return None
    for pattern, advice in _ADVICE.items():
        if re.search(pattern, str(error)):
            return ContractError(f"{what}: {advice}. torch says: {_first(error)}")
    return None


def about_sharded_update(error: BaseException, optimizer: Optimizer) -> ContractError | None:
    """The same for an error of ``optimizer.step``; None where its parameters are not sharded."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if not sharded or about_sharding(error) is None:
        return None
    return ContractError(
        f"{type(optimizer).__name__} cannot update sharded parameters with this torch. Use one that works element by "
        f"element, such as AdamW or SGD without `fused`, or use ddp. torch says: {_first(error)}"
    )


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
