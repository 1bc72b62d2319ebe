"""The zoo of trainer classes on a CUDA device: every precision, and sharding, against plain torch on the CPU.

CI has no such device and skips it: ``pytest tests/gpu -m gpu``.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from zoo import runs, small as zoo

from genlight.adapter import FSDP2Strategy
from genlight.adapter.contract.exceptions import ContractError
from support.messages import refusal
from support.rank import Ranks

pytestmark = [
    pytest.mark.promise(name="equal"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


GPU = {"accelerator": "gpu", "devices": 1}
FROM_THE_TABLE = (
    "zoo.accumulation:LooksInBetween",
    "zoo.accumulation:UnevenMicroBatches",
    "zoo.meta_learning:FunctionalGradients",
    "zoo.meta_learning:WritesGradients",
)
UNSHARDED = ("Checkpointed", "GradientsOfBothKinds", "UnusedOnOneRank", "OwnDdp")
HALF_TRUE = ("Base", "Gan", "Accumulating", "ClippedByValue", "AdamClosure", "Scheduled", "WithEma", "Tied")
LOSS_OF_ONE_TYPE = ("Gan",)
"""Classes of `HALF_TRUE` that compute their loss only from outputs of modules."""


def run(name: str, **arguments: Any) -> tuple[dict[str, torch.Tensor], Any]:
    module, _ = runs.hosted_run(name, **{**GPU, **arguments})
    return runs.weights(module.contract_state, module.plugin), module


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(tensor.double().abs().max().item(), 1e-2)
        difference = (actual[name].double() - tensor.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name} differs by {difference / scale:.2e} relative"


@pytest.fixture
def one_rank(tmp_path):
    """A process group of one rank, so that strategies of several ranks need no port."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=device
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [*zoo.ZOO, *FROM_THE_TABLE, "zoo.optimizers:LbfgsClosure"])
def test_fp32_on_cuda_gives_the_weights_of_plain_torch_on_the_cpu(name):
    actual, module = run(name)

    assert_near(actual, runs.plain_run(name), 1e-4 if not name.startswith("Own") else 0.02)
    assert module.hosted_trainer.router is None


@pytest.mark.parametrize("name", [*zoo.ZOO, *FROM_THE_TABLE])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_on_cuda_stays_near_fp32(name, precision):
    if precision == "16-mixed" and name == "UpdatesByHand":  # no update could be skipped
        with refusal(ContractError):
            run(name, **runs.precision_of(precision, "cuda"))
        return
    actual, _ = run(name, **runs.precision_of(precision, "cuda"))

    assert_near(actual, runs.plain_run(name), 0.1)


def losses_take_two_types() -> bool:
    """Whether a torch loss of bf16 outputs and fp32 targets has gradients on this device, as in torch 2.13."""
    outputs = torch.ones(2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    try:
        torch.nn.functional.mse_loss(outputs, torch.zeros(2, device="cuda")).backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", HALF_TRUE)
def test_bf16_true_on_cuda_stays_near_fp32(name):
    if name not in LOSS_OF_ONE_TYPE and not losses_take_two_types():
        with refusal(ContractError):
            run(name, precision="bf16-true")
        return
    actual, module = run(name, precision="bf16-true")

    assert all(t.dtype is torch.bfloat16 for t in actual.values() if t.is_floating_point())
    assert_near(actual, runs.plain_run(name), 0.3)
    assert module.ctx.dtype == "bf16"


def test_an_fp16_overflow_on_cuda_skips_the_update_and_is_counted():
    _, module = run("OverflowOnOneRank", **runs.precision_of("16-mixed", "cuda"))

    assert module.hosted_trainer.router.overflow_steps == 1
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in UNSHARDED])
@pytest.mark.parametrize("units", [(), ("Linear",)])
def test_fsdp2_of_one_rank_on_cuda_gives_the_weights_of_plain_torch(one_rank, name, units):
    if units and name in ("Untrainable", "WithoutTorch", "UpdatesByHand", "UpdatesByHandFromAutograd"):
        pytest.skip("nothing to shard by blocks")
    strategy = FSDP2Strategy(units=units)
    strategy.cluster_environment = Ranks(0, 1)

    actual, _ = run(name, strategy=strategy)

    assert_near(actual, runs.plain_run(name), 1e-4 if not name.startswith("Own") else 0.02)


@pytest.mark.parametrize("name", ["Base", "Accumulating", "WithEma"])
def test_shards_on_the_host_give_the_weights_of_plain_torch(one_rank, name):
    strategy = FSDP2Strategy(units=["Linear"], cpu_offload=True)
    strategy.cluster_environment = Ranks(0, 1)

    actual, module = run(name, strategy=strategy)

    assert all(p.device.type == "cpu" for p in module.discovered.optimized())
    assert_near(actual, runs.plain_run(name), 1e-4)


@pytest.mark.parametrize("name", ["Base", "Gan", "Accumulating", "WithoutTorch", "Untrainable"])
def test_ddp_of_one_rank_on_cuda_gives_the_weights_of_plain_torch(one_rank, name):
    strategy = DDPStrategy(cluster_environment=Ranks(0, 1))

    actual, _ = run(name, strategy=strategy)

    assert_near(actual, runs.plain_run(name), 1e-4)


class Devices(Callback):
    """Records the devices during training, because Lightning moves modules to the host at the end of a fit."""

    def on_train_end(self, trainer, pl_module):
        discovered = pl_module.discovered
        states = [v for f in discovered.optimizers for entry in f.value.state.values() for v in entry.values()]
        self.trained = {t.device.type for t in discovered.optimized()}
        self.moments = {t.device.type for t in states if torch.is_tensor(t) and t.dim()}
        self.modules = {t.device.type for t in (*pl_module.parameters(), *pl_module.buffers())}


@pytest.mark.parametrize("name", ["WithEma", "Scheduled", "WarmOptimizer", "LooseTensor", "OnTrainer"])
def test_modules_loose_tensors_and_optimizer_states_are_on_the_device(name):
    devices = Devices()
    run(name, callbacks=[devices])

    assert devices.trained == devices.moments == devices.modules == {"cuda"}


class SynchronizationIsAnError(Callback):
    """Fails a run whose steps, after the first, wait for the device."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if batch_idx else "default")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


class Resident(zoo.Base):
    """Keeps its rows on the device, so that the class itself never waits."""

    def configure(self, ctx):
        self.rows = {k: v.to(ctx.device) for k, v in runs.rows(0).items()}
        return super().configure(ctx)

    def prepare_batch(self, raw, state, ctx):
        dtype = state["model"][0].weight.dtype  # some releases of torch have no gradients for a loss of two types
        return {k: v.to(dtype) for k, v in self.rows.items()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_step_does_not_wait_for_the_device_to_report_its_metrics(precision):
    zoo.ZOO["Resident"] = Resident
    try:
        run("Resident", precision=precision, callbacks=[SynchronizationIsAnError()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        del zoo.ZOO["Resident"]
