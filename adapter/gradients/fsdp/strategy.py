"""The strategy that shards a trainer class by FSDP 2, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import distributed as dist, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ....callbacks.checkpoint.plugins import install_plugin
from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from .shard import Sharding, shard


class FSDP2Strategy(ModelParallelStrategy):
    """Shards the modules of a trainer class over all ranks by torch's ``fully_shard``.

    Lightning's `ModelParallelStrategy` shards a trainer class, too, with the defaults of these settings.

    Args:
        units: Class names of parts of modules that are gathered separately, such as the blocks of a transformer, and
            that may be called separately. Without any, each module is one unit.
        param_dtype: Type in which parameters are gathered and used, such as ``bfloat16``; None keeps their type.
        reduce_dtype: Type in which gradients are reduced; None means `param_dtype`.
        output_dtype: Type to which outputs of units are cast; None keeps their type.
        cast_forward_inputs: Whether inputs of units are cast to `param_dtype`.
        reshard_after_forward: Whether units free gathered weights after their forward and gather them again in
            backward, which costs time and saves memory. None, the default, means all units except for the outermost
            ones, as in torch, since backward needs the weights of an outermost unit right after its forward.
        cpu_offload: Whether shards, their gradients and optimizer states are kept in host memory.
        replicas: Number of copies of the weights. With more than one, each copy is sharded over a part of the ranks
            (HSDP), for example over the ranks of a node; the first `world_size / replicas` ranks have the first copy.
        ignored: Patterns of names of parameters, such as ``head.*``, that stay unsharded.
        forward_methods: Methods of units other than ``forward`` that compute with their parameters, such as ``encode``.
        unused_parameters: Whether ranks may use different parts of a unit (experts, heads). A parameter that no rank
            used then gets a gradient of zeros, as in torch, instead of None as under DDP and on one device. So an
            optimizer with momentum or weight decay (Adam, for example) still changes it. Needs torch 2.13 or later.
        process_group_backend: As in Lightning's strategies.
        timeout: As in Lightning's strategies.

    Raises:
        ValueError: A type is not one of torch's.
    """

    def __init__(
        self,
        units: Sequence[str] = (),
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        cast_forward_inputs: bool = True,
        reshard_after_forward: bool | None = None,
        cpu_offload: bool = False,
        replicas: int = 1,
        ignored: Sequence[str] = (),
        forward_methods: Sequence[str] = (),
        unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.replicas = replicas
        self.sharding = Sharding(
            units=tuple(units),
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            output_dtype=output_dtype,
            cast_forward_inputs=cast_forward_inputs,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            ignored=tuple(ignored),
            forward_methods=tuple(forward_methods),
            unused_parameters=unused_parameters,
        )

    @override
    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if self.replicas < 1 or ranks % self.replicas:
            raise ContractError(
                f"Invalid `replicas` of FSDP2Strategy: {self.replicas}. Expected a divisor of the {ranks} ranks."
            )
        device = self.root_device.type
        if self.sharding.cpu_offload and device == "cpu":
            raise ContractError("On a CPU, FSDP2Strategy keeps shards in host memory anyway; remove `cpu_offload`.")
        if self.sharding.cpu_offload and self._process_group_backend is None:
            from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device

            # Gradients are in host memory then, and so are their norms, which ranks exchange.
            backend = _get_default_process_group_backend_for_device(self.root_device)
            self._process_group_backend = f"cpu:gloo,{device}:{backend}"
        self._data_parallel_size = ranks
        super().setup_environment()

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        group = dist.group.WORLD
        assert group is not None
        # Lightning binds the group to its device. Torch makes the groups of a mesh by splitting a bound group, but
        # hardly any backend except NCCL can split. If the group is not bound, torch makes new groups, as on a CPU.
        if group.bound_device_id is not None and not group._get_backend(self.root_device).supports_splitting:
            group.bound_device_id = None

    @override
    def model_to_device(self) -> None:
        if not self.sharding.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for module in self.model.modules():
            _move_whole(module, self.root_device)

    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh of ranks over which modules are sharded."""
        if self.replicas == 1:
            return self.device_mesh["data_parallel"]
        ranks = self.device_mesh["data_parallel"].size()
        shape, names = (self.replicas, ranks // self.replicas), ("replicate", "shard")
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)


def _move_whole(module: nn.Module, device: Any) -> None:
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None and not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)


def shard_for(strategy: Strategy, discovered: Discovered) -> bool:
    """Shard the discovered modules if `strategy` shards; return whether it does.

    Call it in ``configure_model``, right after ``configure``, on every rank.

    Raises:
        ContractError: An object cannot be sharded; see `shard`.
        TypeError: The trainer has a checkpoint plugin other than `DurableCheckpointIO`.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return False
    if isinstance(strategy, FSDP2Strategy):
        shard(discovered, strategy.shard_mesh(), strategy.sharding, strategy.root_device)
    else:
        shard(discovered, strategy.device_mesh["data_parallel"], device=strategy.root_device)
    install_plugin(strategy)
    return True
