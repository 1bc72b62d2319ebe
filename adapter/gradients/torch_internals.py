"""All protected names of torch that this package reads, overrides or assigns.

Most names are looked up when this module is imported. So a release of torch without one of them causes one clear
`ImportError`, instead of a run that fails or trains wrongly later. A name that is only assigned would fail silently, so
`torch_hooks.hold` checks once per process that a backward call goes through the function that it assigns.

Names of FSDP 2 differ between releases; `require_fsdp` checks them before the first module is sharded. The name of
torch.compile is looked up in `keep_out_of_graphs`, because importing the compiler takes long.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...callbacks.lightning_internals import NEWEST_TORCH, SUPPORTED, is_untested_torch, require_names

log = logging.getLogger(__name__)


def protected(module: str, name: str) -> Any:
    """Return the object `name` of `module`; torch may remove it in any release.

    Raises:
        ImportError: It does not exist; names the installed release and the supported ones.
    """
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {version('torch')} has no {module}.{name}, which genlight uses; install a release that it "
            f"supports: {SUPPORTED['torch']}"
        ) from error


_ENGINE = "_engine_run_backward"

engine_run_backward: Callable[..., Any] = protected("torch.autograd.graph", _ENGINE)
"""Torch's entry for Tensor.backward, autograd.backward and autograd.grad, also if these are imported by name.

Its arguments are the outputs, their gradients, and then the other arguments of the engine."""
current_graph_task_id: Callable[[], int] = protected("torch", "_C._current_graph_task_id")
"""Number of the backward call that this thread of torch's engine works for; -1 outside of one."""
_disable_dynamo: Callable[..., Any] = protected("torch._compile", "_disable_dynamo")
disabled_torch_function: Any = protected("torch", "_C._disabled_torch_function_impl")
"""A ``__torch_function__`` with which results have the class that torch gives them."""
without_torch_function_of_subclasses: Callable[[], Any] = protected("torch", "_C.DisableTorchFunctionSubclass")
"""A context in which torch does not call ``__torch_function__`` of subclasses of Tensor."""
TensorBase: type[Any] = protected("torch", "_C.TensorBase")
"""The class with the accessors of tensors' attributes."""
amp_foreach_non_finite_check_and_unscale: Callable[[Sequence[Tensor], Tensor, Tensor], None] = protected(
    "torch", "_amp_foreach_non_finite_check_and_unscale_"
)
"""The kernel of torch's gradient scaler."""

_CLASS_MEMBERS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Tensor, ("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_values")),
    (nn.Module, ("_parameters", "_buffers", "_apply")),
    (GradScaler, ("_scale", "_per_optimizer_states")),
    (Optimizer, ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")),
    (DTensor, ("_local_tensor", "__torch_function__")),
    *([(dist.ProcessGroup, ("_get_backend", "_device_types"))] if dist.is_available() else []),
)
for _owner, _names in _CLASS_MEMBERS:
    require_names("torch", _owner, *_names)
for _name in ("_foreach_copy_", "_foreach_mul_"):
    protected("torch", _name)


post_accumulate_hooks: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks of a parameter that run after its gradient was accumulated; None or empty if there are none."""


def engine_entry() -> Callable[..., Any]:
    """Return the function that backward calls go through now."""
    return vars(torch.autograd)[_ENGINE]  # type: ignore[no-any-return]


def set_engine_run_backward(entry: Callable[..., Any]) -> None:
    """Send every backward call of the process through `entry`; pass `engine_run_backward` to restore torch's entry."""
    for owner in (torch.autograd, torch.autograd.graph):
        setattr(owner, _ENGINE, entry)


@functools.cache
def keep_out_of_graphs(*modules: str) -> None:
    """Make torch.compile run the functions of these modules uncompiled, and compile only the functions they call.

    Otherwise its graphs would break at each access to a thread, a frame or a process group.

    Raises:
        ImportError: This torch does not support it; names the installed release and the supported ones.
    """
    add = protected("torch._dynamo.trace_rules", "add")
    for module in modules:
        add(module)


def outside_of_graphs(call: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of `call` that torch.compile does not trace. This does not import the compiler."""

    def uncompiled(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)

    marked: Callable[..., None] = _disable_dynamo(uncompiled)
    return marked


def default_store() -> torch._C._distributed_c10d.Store:
    """Return the store of the default process group, through which all ranks connect."""
    store: torch._C._distributed_c10d.Store = _default_store()
    return store


_default_store: Any = (
    protected("torch.distributed.distributed_c10d", "_get_default_store") if dist.is_available() else None
)


def group_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of collectives in `group`; None means all ranks.

    If a third-party backend has no timeout, return the default of torch.
    """
    group = group or dist.group.WORLD
    assert group is not None
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = dist.default_pg_timeout if options is None else options._timeout
    return timeout


@functools.cache
def warn_of_untested_torch() -> None:
    """Warn once if this torch is later than the releases that genlight was tested with."""
    if is_untested_torch():
        log.warning(
            "torch %s is later than %s, the newest release that genlight was tested with",
            version("torch"),
            NEWEST_TORCH,
        )


@functools.cache
def require_fsdp(*, unused_parameters: bool = False) -> None:
    """Check that this torch has all names of FSDP 2 that genlight uses.

    Args:
        unused_parameters: Whether ranks may use different parameters; this needs torch 2.13 or later.

    Raises:
        ImportError: A name is missing; names the installed release and the supported ones.
    """
    module = protected("torch.distributed.fsdp", "FSDPModule")
    if unused_parameters and not hasattr(module, "set_reduce_scatter_unused_params"):
        raise ImportError(
            f"torch {version('torch')} cannot reduce gradients of parameters that a rank did not use, but "
            "`unused_parameters` of FSDP2Strategy needs that; install torch>=2.13, remove the setting, or use "
            "`strategy: ddp`"
        )
    state = protected("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
    require_names("torch", state, "_lazy_init", "_root_post_backward_final_callback")
    require_names("torch", module, "_get_fsdp_state")
    parameter = protected("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam")
    require_names("torch", parameter, "reset_sharded_param")


def initialize_sharded(root: Any) -> None:
    """Make `root` the outermost unit of FSDP 2; otherwise that would be the unit that is called first."""
    root._get_fsdp_state()._lazy_init()


def reduce_sharded_gradients(root: Any) -> None:
    """Reduce the gradients in the units of `root`, after a backward call with reduction turned off."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def take_data(unit: Any, shard: DTensor) -> None:
    """Make the FSDP unit `unit` gather `shard`, one of its parameters, from its new local tensor."""
    for group in _parameter_groups(unit):
        for parameter in group.fsdp_params:
            if parameter.sharded_param is shard:
                parameter.reset_sharded_param()


def wait_for_reduction(unit: Any) -> None:
    """Make the current stream wait until FSDP 2 has added gradients to the shards of `unit` on another stream."""
    for group in _parameter_groups(unit):
        if group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)


def _parameter_groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return groups
