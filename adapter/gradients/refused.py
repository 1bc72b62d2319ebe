"""Refusals with their reasons and ways out: one table for DDP, one for FSDP 2, and one for updates.

Building, sharding, a training step and ``genlight check`` raise these errors. Everything that the tables do not list
works, with two exceptions: torch itself may fail, and `explain` then adds the way out to its error; or replicas may
differ, and `ReplicaGuard` then names them.
"""

from __future__ import annotations

import re
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...callbacks.lightning_internals import SUPPORTED
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError

WITH_ONE_DEVICE = "or use one device"
WITH_DDP = "or use `strategy: ddp`"
SKIP_HINT = (
    "`train_step` must update on all ranks or on none. If it skips a step for a reason that only one rank has (its "
    "own loss is nan, for example), decide by a value that is equal on all ranks: the norm of the gradients after "
    "backward, which are averaged over the ranks, or a flag that goes through torch.distributed.all_reduce. Or remove "
    "the test and set on_nonfinite to skip, which skips such an update on all ranks."
)
"""The way out if a rank ends its step without the update that other ranks make."""

REFUSED_ON_RANKS = MappingProxyType(
    {
        "sparse": "an embedding has sparse gradients; remove `sparse=True`",
        "post-accumulate hook": "a parameter has a hook that runs as soon as its gradient is accumulated "
        "(register_post_accumulate_grad_hook), before the gradient is averaged over the ranks; update after backward, "
        "and change gradients by register_hook",
        "update in backward": "it is stepped in the middle of a backward call, before gradients are averaged over the "
        "ranks; step it after backward",
        "gradients by hand": "torch.autograd.grad returns this rank's gradients of parameters that no optimizer holds, "
        "and genlight cannot know when they are used; call backward() and read `.grad`",
        "gradients in an update": "it computes gradients of parameters within its step (a product with the Hessian), "
        "and they are this rank's only; use another optimizer",
    }
)
"""Refusals under DDP by a short name: the reason, and the way out."""

REFUSED = MappingProxyType(
    {
        "lbfgs": "LBFGS needs all parameters in one vector; use another optimizer",
        "sparse": "an embedding has sparse gradients; remove `sparse=True`",
        "torchscript": "a module of TorchScript cannot be sharded; remove torch.jit",
        "own ddp": "the class wraps this module in DistributedDataParallel; remove the wrapper, since genlight keeps "
        "the ranks equal",
        "parameter in a tuple": "an object that cannot be changed holds a parameter, and sharding replaces parameters; "
        "read the module's parameters when you need them, or keep them in a list",
        "hook": "a parameter has a gradient hook, and autograd never calls it with a shard; change `.grad` between "
        "backward and step",
        "data": "`.data` of a sharded parameter was set to a full tensor, and later only one of the two was written; "
        "set it back before the next update, or write in place under torch.no_grad(), as in parameter.copy_(value)",
        "other data": "`.data` of a sharded parameter is set to a tensor of another shape or type; keep both",
        "random": "random numbers in the shape of a shard are equal on all ranks, or differ from those of one process; "
        "draw them in `configure`, before modules are sharded",
        "gradients by parameters": "gradients of parameters are requested (torch.autograd.grad, or backward with "
        "`inputs`), but modules compute with gathered copies; use backward() and read `.grad`",
        "differentiated gradients": "backward(create_graph=True): the gradients of shards have no graph; a penalty on "
        "gradients of inputs (torch.autograd.grad) is fine",
        "other parameters": "a module is called with parameters other than its own, as torch.func does; use the "
        "module's own parameters",
        "not reduced": "a backward call left gradients that FSDP 2 did not reduce: torch finds no tensors in the "
        "outputs of the module, or a hook or an attribute kept a tensor that was used; return tensors, or tuples, "
        "dicts and dataclasses of them, from the module",
        "written in forward": "a module writes to its own parameters in its forward, but they are gathered copies "
        "there; keep values that the module updates itself (a codebook, an average) in a buffer",
        "failed call": "a call of a module failed and the error was caught, so that weights stay gathered; let "
        "`train_step` fail",
        "collective": "ranks do different things with sharded modules (calls, backward, updates, values of sharded "
        "tensors), and each of these needs all ranks; do the same on every rank",
        "unused parameters": "ranks used different parameters; set `unused_parameters` of FSDP2Strategy if ranks use "
        "different parts of a module (experts, heads)",
    }
)
"""Refusals under FSDP 2 by a short name: the reason, and the way out."""


REFUSED_UPDATES = MappingProxyType(
    {
        "lasting": "`train_step` updates by an optimizer ({optimizer}) that is neither in the state nor on the "
        "trainer, so that ranks would diverge and overflows of fp16 would not be found. Build every module and "
        "optimizer in `configure`, and keep it in the state or on the trainer.",
        "late": "`train_step` updates a module by a {optimizer} that did not exist after `configure`, so the strategy "
        "does not know it. Build every optimizer in `configure`, and keep it in the state or on the trainer.",
        "kept": "{setting} cannot skip an update of {optimizer} whose `step` was kept or compiled in `configure`: call "
        "`optimizer.step()` in `train_step`, or compile it there.",
        "elsewhere": "{optimizer}.step() is called outside of `train_step` or in another thread, so that gradients are "
        "not averaged over the ranks. Call backward and step in `train_step`, in its own thread, or use one device.",
        "in backward": "{setting} cannot skip an update of {optimizer} in the middle of a backward call, before "
        "gradients are checked: step it after backward.",
        "closure": "{setting} cannot host {optimizer}.step(closure): an optimizer that is not torch's may evaluate "
        "the closure at other weights, and an overflow there could not be skipped. Call backward and its steps in "
        "`train_step` yourself, or {instead}.",
    }
)
"""Refusals of an update by a short name. `{setting}` is the setting that can skip updates."""


def refused_update(name: str, optimizer: Optimizer, **words: str) -> ContractError:
    """Return the error for the entry `name` of `REFUSED_UPDATES`; `words` fill its other placeholders."""
    return ContractError(REFUSED_UPDATES[name].format(optimizer=type(optimizer).__name__, **words))


def refused_on_ranks(name: str, what: str) -> ContractError:
    """Return the error for the entry `name` of `REFUSED_ON_RANKS`; `what` is the object or place concerned."""
    reason = f"{what}: {REFUSED_ON_RANKS[name]}"
    return ContractError(f"Several ranks cannot train this class as it is: {reason}, {WITH_ONE_DEVICE}.")


def refusal(name: str, what: str = "") -> ContractError:
    """Return the error for the entry `name` of `REFUSED`; `what` is the place, or describes what each rank does."""
    return ContractError(f"FSDP 2 cannot train this class as it is: {what and f'{what}: '}{REFUSED[name]}, {WITH_DDP}.")


def describe_fsdp_limits() -> str:
    """Return a summary of the requirements and limits of FSDP 2, for users who consider it."""
    return (
        f"FSDP 2 needs {SUPPORTED['torch']}, `unused_parameters` torch>=2.13; torch {torch.__version__} is installed; "
        "genlight refuses the following with the way out, when it shards a class or when the class does it: "
        f"{', '.join(REFUSED)}"
    )


_SHARDING_WORDS = re.compile(r"DTensor|[Ss]hard|placement|_local_tensor|storage of size 0|FSDP|c10d::")


def explain(error: BaseException, what: str = "`train_step`") -> ContractError | None:
    """Return an error with the way out for `error`, raised in `what`; None if it is not about sharding."""
    if isinstance(error, ContractError) or not _SHARDING_WORDS.search(str(error)):
        return None
    first = str(error).strip().partition("\n")[0]
    return ContractError(
        f"{what} does what FSDP 2 cannot: torch has no such operation on sharded parameters, optimizer states or "
        "gradients. If a part of a module has another dtype, name its class in `units` of FSDP2Strategy; if a method "
        "computes with parameters, name it in `forward_methods`; to keep parameters whole on every rank, name them in "
        "`ignored`. Add a penalty on weights by `loss = loss + penalty`, not `penalty += loss`; keep an average of "
        f"weights in a copy of the module, a list or a dict; {WITH_DDP}. torch says: {type(error).__name__}: {first}"
    )


def explain_sharded_update_error(error: BaseException, optimizer: Optimizer) -> ContractError | None:
    """Like `explain`, for an error of ``optimizer.step``; None if its parameters are not sharded."""
    if not any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
        return None
    return explain(error, f"{type(optimizer).__name__}.step()")
