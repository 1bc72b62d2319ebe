"""Refusals on several ranks, in one table for DDP and one for FSDP 2: reasons and ways out.

Building, sharding, a training step and ``genlight check`` raise these errors. All that is not in the tables works, or
torch itself fails with an error, to which `explained` adds the way out, or replicas differ, which `ReplicaGuard` names.
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

__all__ = [
    "REFUSED",
    "REFUSED_ON_RANKS",
    "explain_sharded_update_error",
    "explained",
    "needs",
    "refusal",
    "refused_on_ranks",
]

ALONE = "or use one device"
WITH_DDP = "or use `strategy: ddp`"

REFUSED_ON_RANKS = MappingProxyType(
    {
        "sparse": "an embedding has sparse gradients; leave out `sparse=True`",
        "post-accumulate hook": "a parameter has a hook that runs when its gradient was accumulated "
        "(register_post_accumulate_grad_hook), which is this rank's own then; update after backward, and change "
        "gradients by register_hook",
        "update in backward": "it is stepped in the middle of a backward call, where gradients are not yet those of "
        "all ranks; step it after backward",
        "gradients by hand": "torch.autograd.grad gives this rank's gradients by parameters that no optimizer holds, "
        "and nothing says when they are used; call backward() and read `.grad`",
        "gradients in an update": "it asks for gradients by parameters within its step (a product with the Hessian), "
        "which are this rank's own; use another optimizer",
    }
)
"""By a short name: what is refused under DDP and why; and what to do instead."""

REFUSED = MappingProxyType(
    {
        "lbfgs": "LBFGS needs all parameters in one vector; use another optimizer",
        "sparse": "an embedding has sparse gradients; leave out `sparse=True`",
        "torchscript": "a module of TorchScript cannot be sharded; leave out torch.jit",
        "own ddp": "a DistributedDataParallel of the class's own; leave it out, since genlight keeps the ranks equal",
        "parameter in a tuple": "a parameter stands in a place that cannot be changed, and sharding replaces it; ask "
        "the module for its parameters when you need them, or keep them in a list",
        "hook": "a gradient hook on a parameter, which autograd never calls with a shard; change `.grad` between "
        "backward and step",
        "data": "`.data` of a sharded parameter was set to a whole tensor, and later only one of the two was written; "
        "set it back before the next update, or write in place under torch.no_grad(), as in parameter.copy_(value)",
        "other data": "`.data` of a sharded parameter is set to a tensor of another shape or type; keep both",
        "random": "random numbers in the shape of a shard, equal on all ranks or not those of one process; draw them "
        "in `configure`, before modules are sharded",
        "gradients by parameters": "gradients are asked for by parameters (torch.autograd.grad, or backward with "
        "`inputs`), and modules compute with gathered ones; use backward() and read `.grad`",
        "differentiated gradients": "backward(create_graph=True): the gradients of shards have no graph; a penalty on "
        "gradients by inputs (torch.autograd.grad) is fine",
        "other parameters": "a module is called with other parameters than its own, as torch.func does; use the "
        "module's own parameters",
        "not reduced": "a backward left gradients that FSDP 2 did not reduce: the outputs of the module are nothing "
        "that torch finds tensors in, or what was used was kept by a hook or an attribute; return tensors, or tuples, "
        "dicts and dataclasses of them, from the module",
        "written in forward": "a module writes to its own parameters in its forward, where they are gathered copies; "
        "keep what moves by itself (a codebook, an average) in a buffer",
        "failed call": "a call of a module failed and the error was caught, which leaves weights gathered; let "
        "`train_step` fail",
        "collective": "ranks do different things with sharded modules (calls, backward, updates, values of sharded "
        "tensors), which take part in all of them; do the same on every rank",
        "unused parameters": "ranks used different parameters; set `unused_parameters` of FSDP2Strategy if ranks use "
        "different parts of a module (experts, heads)",
    }
)
"""By a short name: what is refused and why; and what to do instead."""


def refused_on_ranks(name: str, what: str) -> ContractError:
    """The error for the entry `name` of `REFUSED_ON_RANKS`; `what` says where."""
    return ContractError(f"Several ranks cannot train this class as it is: {what}: {REFUSED_ON_RANKS[name]}, {ALONE}.")


def refusal(name: str, what: str = "") -> ContractError:
    """The error for the entry `name`; `what` says where, or which rank does what."""
    return ContractError(f"FSDP 2 cannot train this class as it is: {what and f'{what}: '}{REFUSED[name]}, {WITH_DDP}.")


def needs() -> str:
    """A summary of what FSDP 2 takes and refuses, for somebody who chooses it."""
    return (
        f"FSDP 2 needs {SUPPORTED['torch']}, `unused_parameters` torch>=2.13; torch {torch.__version__} is installed; "
        f"what it cannot do is refused, with the way out, when a class is sharded or does it: {', '.join(REFUSED)}"
    )


_OF_SHARDS = re.compile(r"DTensor|[Ss]hard|placement|_local_tensor|storage of size 0|FSDP|c10d::")


def explained(error: BaseException, what: str = "`train_step`") -> ContractError | None:
    """An error that says what to do about `error`, raised in `what`; None where it is not about sharding."""
    if isinstance(error, ContractError) or not _OF_SHARDS.search(str(error)):
        return None
    first = str(error).strip().partition("\n")[0]
    return ContractError(
        f"{what} does what FSDP 2 cannot: torch has no such operation on sharded parameters, optimizer states or "
        "gradients. A part of a module that has a type of its own is made a unit by `units` of FSDP2Strategy, a method "
        "that computes with parameters by `forward_methods`; parameters that `ignored` names stay whole on every rank. "
        "A penalty on weights is added by `loss = loss + penalty`, not `penalty += loss`; an average of weights is "
        f"kept in a copy of the module, a list or a dict; {WITH_DDP}. torch says: {type(error).__name__}: {first}"
    )


def explain_sharded_update_error(error: BaseException, optimizer: Optimizer) -> ContractError | None:
    """The same for an error of ``optimizer.step``; None where its parameters are not sharded."""
    if not any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
        return None
    return explained(error, f"{type(optimizer).__name__}.step()")
