"""A resume restores state that no state dict of torch or Lightning contains."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._pytree import tree_leaves

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.contract.exceptions import UnstorableStateError
from genlight.callbacks import Checkpoint
from support.trainer_class import Stateless
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")

STEPS, INTERRUPTED_AT = 5, 3


class Rows:
    """Five batches, with a position."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < STEPS:
            self.at += 1
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plain(Stateless):
    """One layer and Adam."""

    def setup(self, ctx: Any) -> None:
        torch.manual_seed(0)

    def configure(self, ctx: Any) -> Any:
        model = nn.Linear(3, 1)
        return {"model": model, "optimizer": self.optimizer(model.parameters())}

    def optimizer(self, parameters: Any) -> Optimizer:
        return Adam(parameters, lr=0.01)

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return (state["model"](batch) - batch.sum(1, keepdim=True)).square().mean()

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        state["optimizer"].step()
        return StepResult({})


class Wraps(Optimizer):
    base: Optimizer

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Wrapper(Wraps):
    """Its state dict lacks the state of the wrapped optimizer, as in published versions of SAM."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups


class Wrapped(Plain):
    def optimizer(self, parameters: Any) -> Optimizer:
        return Wrapper(parameters)


class WrapperOfAll(Wraps):
    """Shares groups and state with the wrapped optimizer, which replaces them when it loads, as LARC does."""

    def __init__(self, params: Any) -> None:
        self.base = SGD(params, lr=0.05, momentum=0.9)
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class WrapperOfGroups(Wraps):
    """Has a separate list with the groups of the wrapped optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base = SGD(self.param_groups, lr=0.05, momentum=0.9)


class WrapperOfOther(Wraps):
    """Does not save the rate of the wrapped optimizer, which has separate groups."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.05})
        self.base = SGD(params, lr=0.05)

    def step(self, closure: Any = None) -> None:
        self.base.param_groups[0]["lr"] *= 0.9
        super().step(closure)


class WrapsAll(Plain):
    wrapper: Any = WrapperOfAll

    def optimizer(self, parameters: Any) -> Optimizer:
        return self.wrapper(parameters)

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "schedule": torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], 0.8)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        state["schedule"].step()
        return result


class WrapsGroups(WrapsAll):
    wrapper = WrapperOfGroups


class WrapsOther(WrapsAll):
    wrapper = WrapperOfOther


class OwnSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Keeps a function in its ``state_dict``."""

    def __init__(self, optimizer: Optimizer, rate: Any) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.rate(self.last_epoch) for base in self.base_lrs]


class Scheduled(Plain):
    """Two schedules of one optimizer; Lightning saves the first."""

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        first = OwnSchedule(state["optimizer"], lambda step: 1 / (1 + step))
        return {**state, "first": first, "second": OwnSchedule(state["optimizer"], lambda step: 0.5**step)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        state["first"].step()
        state["second"].step()
        return result


class Momentum(Optimizer):
    """Keeps its moment in another type, in a list, and also a count and a text."""

    def __init__(self, params: Any, kept_as: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.05})
        self.kept_as = kept_as

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            entry = self.state[parameter]
            if not entry:
                history = [torch.zeros_like(parameter, dtype=self.kept_as)]
                entry |= {"history": history, "count": torch.tensor(300), "kind": "heavy"}
            moment = entry["history"][-1].float() * 0.9 + parameter.grad.float()
            entry["history"] = [*entry["history"][-1:], moment.to(self.kept_as)]
            entry["count"] += 1
            moment = moment if entry["kind"] == "heavy" else torch.zeros_like(moment)
            parameter -= (0.05 * entry["count"] / 300 * moment).to(parameter.dtype)


class InBfloat16(Plain):
    """The weights are bfloat16; NAdam keeps the product of its factors in fp32."""

    kind: Any = staticmethod(torch.optim.NAdam)

    def configure(self, ctx: Any) -> Any:
        model = nn.Linear(3, 1).to(torch.bfloat16)
        return {"model": model, "optimizer": self.kind(model.parameters(), lr=0.01)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw.to(torch.bfloat16)


class Averaged(InBfloat16):
    kind = staticmethod(torch.optim.ASGD)


class MastersInFp32(InBfloat16):
    kind = staticmethod(lambda parameters, lr: Momentum(parameters, torch.float32))


class MomentsInBfloat16(Plain):
    """The weights are fp32. It loads its optimizer itself, as the template of a class does."""

    def optimizer(self, parameters: Any) -> Optimizer:
        return Momentum(parameters, torch.bfloat16)

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"optimizer": state["optimizer"].state_dict()}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["optimizer"].load_state_dict(payload["optimizer"])


class Noisy:
    """Draws from its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(5))


OF_THIS_FILE = random.Random(4)


class Draws(Plain):
    """Draws from a generator of each kind in each step: in the state, on the class, in an object and in this file."""

    pick = random.Random(7)

    def configure(self, ctx: Any) -> Any:
        OF_THIS_FILE.seed(4)
        self.old = np.random.RandomState(3)
        Draws.pick.seed(7)
        kept = [np.random.default_rng(2), Noisy()]
        noise = torch.Generator().manual_seed(1)
        return {**super().configure(ctx), "noise": noise, "kept": kept, "system": random.SystemRandom(), "step": 0}

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        drawn = [state["kept"][0].normal(), self.old.uniform(), self.pick.gauss(0, 1), state["kept"][1].rng.normal()]
        noise = torch.randn(batch.shape, generator=state["noise"])
        return super().loss(batch + noise + float(sum(drawn)) + OF_THIS_FILE.random(), state)


class RestoresOneItself(Draws):
    """A class may restore a generator itself, because genlight once did not find generators."""

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"noise": state["noise"].get_state()}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["noise"].set_state(payload["noise"])


class PutsAnotherInItsPlace(Draws):
    """Makes a separate generator for each second step, seeded by its number."""

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        if state["step"] % 2 == 0:
            state["noise"] = torch.Generator().manual_seed(state["step"])
        state["step"] += 1
        return super().loss(batch, state)

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"step": state["step"]}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["step"] = payload["step"]


class Averages:
    """Averages of parameters as libraries keep them; loading takes the state apart."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.shadows, self.count = [p.detach().clone() for p in self.parameters], 0

    def update(self) -> float:
        self.count += 1
        for shadow, parameter in zip(self.shadows, self.parameters, strict=True):
            shadow.lerp_(parameter.detach(), 1 / self.count)
        return float(sum(shadow.sum() for shadow in self.shadows))

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadows, self.count = state.pop("shadows"), state.pop("count")


class AveragesInALibrary(Plain):
    """Its rate depends on averages that its ``state_dict`` does not return."""

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        self.averages = Averages(state["model"].parameters())
        return state

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        state["optimizer"].param_groups[0]["lr"] = 0.01 * (1 + abs(self.averages.update()))
        return super().loss(batch, state)


class Rate:
    """A schedule like timm's; torch does not know its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 / self.calls

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class RateOfALibrary(Plain):
    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "rate": Rate(state["optimizer"])}

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        state["rate"].step()
        return super().loss(batch, state)


class Queue(nn.Module):
    """Keeps its last inputs, its place and its sums in attributes, not in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.place, self.sums, self.last = torch.zeros(2, 3), 0, [0.0], None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.rows[self.place] = batch[0]
        self.place = (self.place + 1) % 2
        self.sums.append(float(batch.sum()))
        past, self.last = self.last, batch[:1].detach()
        return batch + self.rows.mean(0) + len(self.sums) + (0 if past is None else past)


class QueueInAModule(Plain):
    def configure(self, ctx: Any) -> Any:
        self.queue = nn.ModuleDict({"inner": Queue()})
        return super().configure(ctx)

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return super().loss(self.queue["inner"](batch), state)


class Counting(Momentum):
    """Counts its steps in an attribute, and lets weights decay by them."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter *= 1 - 0.1 / self.count


class CountsInAnOptimizer(Plain):
    def optimizer(self, parameters: Any) -> Optimizer:
        return Counting(parameters, torch.float32)


class FreezesAtTheSecondStep(Plain):
    """Freezes a layer and turns off its dropout in one step, for all later ones."""

    def configure(self, ctx: Any) -> Any:
        self.first, self.seen = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), 0
        state = super().configure(ctx)
        state["optimizer"].add_param_group({"params": list(self.first.parameters())})
        return state

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen == 2:
            self.first.eval().requires_grad_(False)
        return super().loss(self.first(batch), state)


SHARED = {"count": 0}
ATTEMPTS = iter(range(9))


class Forgets(Plain):
    """Keeps a hidden state, an iterator, a global count and its attempt; returns only a count, by ``state_dict``."""

    def configure(self, ctx: Any) -> Any:
        self.hidden, self.rates, self.attempt, self.count = None, iter((1.0, 2.0, 3.0, 4.0, 5.0)), next(ATTEMPTS), 0
        return {**super().configure(ctx), "seen": {}, "unusual": torch.eye(2).to_sparse_csr()}

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.hidden, self.count = batch[0] * next(self.rates), self.count + 1
        state["seen"][self.count] = batch.sum()
        SHARED["count"] += 1
        return super().loss(batch + self.hidden, state)

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"count": self.count}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        self.count = payload["count"]


class Scripted(Plain):
    def configure(self, ctx: Any) -> Any:
        model = torch.jit.script(nn.Linear(3, 1))
        return {"model": model, "optimizer": self.optimizer(model.parameters())}


def fit(folder: Path, plugin: Any, resume_from: Path | None = None) -> Any:
    trainer = quiet_trainer(
        Checkpoint(folder, every_n_steps=INTERRUPTED_AT, save_final=False, asynchronous=False), max_steps=STEPS
    )
    module = ContractModule(plugin, TrainingJobSpec("exact", STEPS, metric_every=0))
    trainer.fit(module, Rows(), ckpt_path=resume_from)
    return module.contract_state


def warnings_in(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def assert_equal_weights(whole: Any, resumed: Any) -> None:
    weights = (state["model"].state_dict().values() for state in (whole, resumed))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


OPTIMIZERS = [
    Wrapped,
    WrapsAll,
    WrapsGroups,
    WrapsOther,
    Scheduled,
    InBfloat16,
    Averaged,
    MastersInFp32,
    MomentsInBfloat16,
]


FOUND = [AveragesInALibrary, RateOfALibrary, QueueInAModule, CountsInAnOptimizer, FreezesAtTheSecondStep]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *FOUND, Draws, RestoresOneItself, PutsAnotherInItsPlace])
def test_a_resume_ends_with_the_same_bits(tmp_path: Path, kind: type[Plain]) -> None:
    """Resume at the third of five steps. The zoo covers open windows and optimizers keyed by address."""
    whole = fit(tmp_path, kind())

    resumed = fit(tmp_path, kind(), tmp_path / "step-00000003.json")

    assert_equal_weights(whole, resumed)
    kept = (leaf for state in (whole, resumed) for leaf in tree_leaves(state["optimizer"].state_dict()))
    types = [leaf.dtype for leaf in kept if isinstance(leaf, torch.Tensor)]
    assert types[: len(types) // 2] == types[len(types) // 2 :]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_resume_names_the_values_that_the_class_does_not_restore(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path, Forgets())
    assert not warnings_in(caplog)

    fit(tmp_path, Forgets(), tmp_path / "step-00000003.json")

    (warning,) = warnings_in(caplog)
    assert f'does not hold state["seen"], trainer.hidden, trainer.rates, {__name__}.SHARED, which' in warning


def test_an_object_that_has_no_state_or_cannot_load_it_stops_no_run(tmp_path: Path, caplog: Any) -> None:
    class Unfinished(Averages):
        def state_dict(self) -> dict[str, Any]:
            raise NotImplementedError

    class Renamed(Averages):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("shadow")

    class Both(AveragesInALibrary):
        def configure(self, ctx: Any) -> Any:
            state = super().configure(ctx)
            parameters = list(state["model"].parameters())
            return {**state, "unfinished": Unfinished(parameters), "renamed": Renamed(parameters)}

    fit(tmp_path, Both())
    fit(tmp_path, Both(), tmp_path / "step-00000003.json")

    (warning,) = warnings_in(caplog)
    assert 'state["renamed"] could not load its state: KeyError' in warning


class OwnLoop(pl.LightningModule):
    """Trains in bfloat16, without a trainer class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).to(torch.bfloat16)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(batch.to(torch.bfloat16)).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.NAdam(self.parameters(), lr=0.01)


def test_a_lightning_module_gets_the_state_of_its_optimizer_back_as_it_was_stored(tmp_path: Path) -> None:
    def fit_module(resume_from: Path | None = None) -> Any:
        saver = Checkpoint(tmp_path, every_n_steps=INTERRUPTED_AT, save_final=False)
        module = OwnLoop()
        quiet_trainer(saver, max_steps=STEPS).fit(module, Rows(), ckpt_path=resume_from)
        return module

    whole = fit_module()
    resumed = fit_module(tmp_path / "step-00000003.json")

    assert torch.equal(whole.model.weight, resumed.model.weight)
    assert {entry["mu_product"].dtype for entry in resumed.optimizers().state.values()} == {torch.float32}


@pytest.mark.parametrize("kind", [Wrapped, WrapsAll, WrapsGroups])
def test_a_wrapper_and_the_optimizer_in_it_share_their_groups_after_a_resume(tmp_path: Path, kind: type[Plain]) -> None:
    """Otherwise a schedule of the wrapper would no longer reach the steps."""
    whole = fit(tmp_path, kind())["optimizer"]

    optimizer = fit(tmp_path, kind(), tmp_path / "step-00000003.json")["optimizer"]

    assert optimizer.base.param_groups[0] is optimizer.param_groups[0]
    assert (optimizer.base.param_groups is optimizer.param_groups) == (whole.base.param_groups is whole.param_groups)
    assert (optimizer.base.state is optimizer.state) == (whole.base.state is whole.state)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")  # torch 2.15
def test_a_resume_of_a_scripted_module_warns_of_different_rounding(tmp_path: Path, caplog: Any) -> None:
    """TorchScript optimizes after its first calls, and no checkpoint holds its progress."""
    fit(tmp_path, Scripted())
    assert "TorchScript" not in caplog.text

    fit(tmp_path, Scripted(), tmp_path / "step-00000003.json")

    assert 'state["model"] is compiled by TorchScript' in caplog.text


class Within(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that contains another one, as many published warm-ups do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return self.base_lrs


class ScheduledWithin(Plain):
    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "schedule": Within(state["optimizer"])}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        raise AssertionError("this run was to end before its first step")


class KeepsAnIterator(ScheduledWithin):
    def configure(self, ctx: Any) -> Any:
        state = super(ScheduledWithin, self).configure(ctx)
        state["optimizer"].param_groups[0]["rows"] = iter([1])
        return state


@pytest.mark.parametrize(
    ("kind", "path"),
    [(ScheduledWithin, 'state["schedule"]["after"]'), (KeepsAnIterator, '["param_groups"][0]["rows"]')],
)
def test_state_that_no_checkpoint_can_hold_fails_before_the_first_step(
    tmp_path: Path, kind: type[Plain], path: str
) -> None:
    with pytest.raises(UnstorableStateError) as refused:
        fit(tmp_path, kind())

    assert refused.value.path.endswith(path)


class CompiledPart(Plain):
    """Keeps gradients from step to step, and a buffer that grows."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles

    def configure(self, ctx: Any) -> Any:
        part = nn.BatchNorm1d(3)
        part.register_buffer("seen", torch.zeros(0))
        model = nn.Sequential(torch.compile(part, backend="eager") if self.compiles else part, nn.Linear(3, 1))
        return {"model": model, "part": part, "optimizer": self.optimizer(model.parameters())}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.loss(batch, state).backward()
        if len(state["part"].seen) % 2:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        state["part"].seen = torch.ones(len(state["part"].seen) + 1)
        return StepResult({})


@pytest.mark.parametrize("compiles", [True, False])
def test_a_part_may_be_compiled_in_one_attempt_and_not_in_the_next(tmp_path: Path, compiles: bool) -> None:
    whole = fit(tmp_path, CompiledPart(compiles=compiles))
    resumed = fit(tmp_path, CompiledPart(compiles=not compiles), tmp_path / "step-00000003.json")
    assert_equal_weights(whole, resumed)
