"""Phases of a trainer with a rollout: counters, passes over a rollout, early ends, and a resume within a phase."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractError, ContractModule, Minibatches, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Hook
from genlight.callbacks.checkpoint import newest_valid
from genlight.callbacks.hook.events import run_state_of
from support.messages import refusal
from support.rank_processes import on_ranks
from support.trainer_class import Stateless, Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")

ROWS = 12


class Actor(Stateless):
    """A linear policy on a toy environment; the position is part of the environment's state."""

    update_epochs = 2

    def __init__(self, form: str = "minibatches") -> None:
        self.form = form
        self.position = 0.0
        self.rollouts = 0
        self.at_step: Callable[[Any], None] | None = None

    def configure(self, ctx: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        return {"losses": []}

    def rollout(self, state: Any, ctx: Any) -> Any:
        self.rollouts += 1
        rows = []
        for _ in range(ROWS):
            self.position = 0.9 * self.position + torch.randn(()).item()
            rows.append([self.position, 1.0])
        data = {"x": torch.tensor(rows), "noise": torch.randn(ROWS, 1)}
        stats = {"agent_steps": ROWS}
        minibatches = Minibatches(data, 5)
        if self.form == "minibatches":
            return minibatches, stats
        return (list(minibatches) if self.form == "list" else (batch for batch in minibatches)), stats

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        loss = (self.model(batch["x"]) - batch["noise"]).square().mean() + 0.01 * torch.randn(()) ** 2
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        state["losses"].append(loss.item())
        if self.at_step is not None:
            self.at_step(ctx)
        return StepResult(metrics={"loss": loss})


class Placed(Actor):
    """The same, with a saved position of its environment."""

    def rollout_state(self, state: Any) -> dict[str, Any]:
        return {"position": self.position}

    def load_rollout_state(self, state: Any, payload: Any, ctx: Any) -> None:
        self.position = payload["position"]


class Counters(Hook):
    """Records the counters of the run after each event."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def _note(self, trainer: pl.Trainer, name: str) -> None:
        state = run_state_of(trainer)
        self.seen.append((name, state.agent_step, state.epoch, state.update_epoch, state.minibatch_index))

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "rollout")

    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "mb")

    def on_train_phase_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "phase")


def fit(tmp_path: Path, plugin: Any, *callbacks: pl.Callback, steps: int, **options: Any) -> ContractModule:
    """Train with only the data that the trainer collects."""
    trainer = quiet_trainer(*callbacks, max_steps=steps, default_root_dir=tmp_path)
    module = ContractModule(plugin, TrainingJobSpec("actor", steps, metric_every=0))
    trainer.fit(module, **options)
    return module


def test_counters_are_true_in_every_event_of_two_phases(tmp_path: Path) -> None:
    counters = Counters()
    fit(tmp_path, Actor(), counters, steps=9)
    first = [("mb", 12, 0, epoch, index) for epoch in (0, 1) for index in (0, 1, 2)]
    second = [("mb", 24, 1, 0, index) for index in (0, 1, 2)]
    assert counters.seen == [
        ("rollout", 12, 0, 0, 0),
        *first,
        ("phase", 12, 0, 1, 2),
        ("rollout", 24, 1, 0, 0),
        *second,
        ("phase", 24, 1, 0, 2),
    ]


class WithoutEnvironments(Actor):
    """Returns an empty state: there is nothing to save."""

    def rollout_state(self, state: Any) -> dict[str, Any]:
        return {}


class SavesAlone(Actor):
    """Saves its environments and never loads them."""

    rollout_state = Placed.rollout_state


@pytest.mark.parametrize(("kind", "times"), [(Actor, 1), (SavesAlone, 1), (Placed, 0), (WithoutEnvironments, 0)])
def test_the_first_checkpoint_warns_of_environments_that_it_does_not_hold(
    tmp_path: Path, caplog: Any, kind: type[Actor], times: int
) -> None:
    fit(tmp_path, kind(), Checkpoint(tmp_path, every_n_steps=3), steps=9)

    assert caplog.text.count("has a `rollout` and no `") == times


def test_a_trainer_may_count_its_environment_steps_itself(tmp_path: Path) -> None:
    """It adds to the run state, in the rollout or while a generator collects."""
    actor = Actor()

    def collect(state: Any, ctx: Any) -> Iterator[Any]:
        for _ in range(3):
            ctx.run_state.agent_step += 4
            yield {"x": torch.ones(1, 2), "noise": torch.zeros(1, 1)}

    actor.rollout = collect  # type: ignore[method-assign]
    module = fit(tmp_path, actor, steps=7)
    assert run_state_of(module.trainer).agent_step == 16
    assert actor.update_epochs == 2


def test_a_rollout_of_a_second_fit_gets_the_context_of_that_fit(tmp_path: Path) -> None:
    actor, limits = Actor(), []
    collect = actor.rollout
    actor.rollout = lambda state, ctx: limits.append(ctx.job.max_steps) or collect(state, ctx)  # type: ignore[method-assign,func-returns-value]
    module = ContractModule(actor)
    for steps in (1, 8):
        quiet_trainer(max_steps=steps, default_root_dir=tmp_path).fit(module)
    assert limits == [1, 8, 8]


def test_times_and_environment_steps_are_metrics(tmp_path: Path) -> None:
    """The metrics describe the last rollout and the last finished update."""
    metrics = fit(tmp_path, Actor(), steps=7).metrics()
    assert metrics["trainer/agent_step"] == 24
    assert metrics["trainer/rollout_seconds"] > 0
    assert metrics["trainer/update_seconds"] > 0
    assert "trainer/update_seconds" not in fit(tmp_path, Actor(), steps=2).metrics()


@pytest.mark.parametrize("cls", [Actor, Placed])
def test_a_rollout_may_end_early_and_later_passes_use_its_batches(tmp_path: Path, cls: type[Actor]) -> None:
    """The generator would never end; it is collected in the steps or before them."""
    actor, seen = cls(), []

    def collect(state: Any, ctx: Any) -> Iterator[Any]:
        for index in range(1000):
            if index == 2:
                ctx.run_state.stop_rollout = True
            yield {"x": torch.full((1, 2), float(index)), "noise": torch.zeros(1, 1)}

    actor.rollout = collect  # type: ignore[method-assign]
    actor.prepare_batch = lambda raw, state, ctx: seen.append(int(raw["x"][0, 0])) or raw  # type: ignore[method-assign,func-returns-value]
    fit(tmp_path, actor, steps=8)
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]


FORMS = [("minibatches", Actor), ("list", Actor), ("generator", Placed), ("minibatches", Placed)]


@pytest.mark.parametrize(("form", "cls"), FORMS)
def test_a_run_resumed_between_any_two_minibatches_is_exact(
    tmp_path: Path, form: str, cls: type[Actor], caplog: Any
) -> None:
    """Resume from the checkpoint of each step of one phase, and of the first step of the next."""
    steps = 8 if cls is Placed else 6  # without a saved environment only the phase itself continues
    whole = fit(tmp_path, cls(form), Checkpoint(tmp_path / "c", every_n_steps=1, keep_last=None), steps=steps)
    losses, weights = whole.contract_state["losses"], whole.plugin.model.state_dict()
    for step in range(1, 8 if cls is Placed else 6):
        resumed = cls(form)
        path = tmp_path / "c" / f"step-{step:08d}.json"
        module = fit(tmp_path, resumed, Counters(), Checkpoint(tmp_path / "d"), steps=steps, ckpt_path=path)
        assert module.contract_state["losses"] == losses[step:]
        assert resumed.rollouts == (0 if step > 6 or steps == 6 else 1)
        for name, value in resumed.model.state_dict().items():
            assert torch.equal(value, weights[name])
        assert run_state_of(module.trainer).agent_step == run_state_of(whole.trainer).agent_step
    assert "starts with a new rollout" not in caplog.text
    assert "keeps no position" not in caplog.text, "that warning is for loaders"


def test_a_run_resumed_between_phases_does_not_warn_of_rollouts(tmp_path: Path, caplog: Any) -> None:
    """There is no unfinished phase to lose."""
    fit(tmp_path, Actor(), Checkpoint(tmp_path, every_n_epochs=1, save_final=False), steps=7)
    caplog.clear()
    fit(tmp_path, Actor(), Checkpoint(tmp_path), steps=8, ckpt_path=tmp_path / "step-00000006.json")
    assert "training phase of a rollout" not in caplog.text


def test_a_rollout_may_return_two_batches_without_statistics(tmp_path: Path) -> None:
    """They are not mistaken for a batch and its statistics, although both are pairs."""
    actor = Actor()
    batch = {"x": torch.ones(1, 2), "noise": torch.zeros(1, 1)}
    actor.rollout = lambda state, ctx: (batch, batch)  # type: ignore[method-assign]
    module = fit(tmp_path, actor, steps=2)
    assert len(module.contract_state["losses"]) == 2
    assert run_state_of(module.trainer).rollout_stats is None


def test_a_trainer_ends_an_update_early_and_it_stays_ended_over_a_resume(tmp_path: Path) -> None:
    """The update ends after two of six minibatches; the next one is of a new rollout, also after a checkpoint there."""

    def ending() -> Placed:
        actor = Placed()
        actor.at_step = lambda ctx: setattr(ctx.run_state, "stop_update_epoch", ctx.run_state.minibatch_index == 1)
        return actor

    actor, counters = ending(), Counters()
    fit(tmp_path, actor, counters, Checkpoint(tmp_path / "c", every_n_steps=2), steps=4)
    assert [name for name, *_ in counters.seen] == ["rollout", "mb", "mb", "phase"] * 2
    assert {update_epoch for *_, update_epoch, _ in counters.seen} == {0}
    assert actor.rollouts == 2
    resumed = ending()
    fit(tmp_path, resumed, Checkpoint(tmp_path / "d"), steps=3, ckpt_path=tmp_path / "c" / "step-00000002.json")
    assert resumed.rollouts == 1


class Opaque:
    """A value that no checkpoint can hold."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rollout_checkpoint_bytes": 100}, "its batches take 144 bytes, and `rollout_checkpoint_bytes` is 100"),
        ({"form": "generator"}, "its batches come from a generator"),
        ({"form": "opaque"}, "adapter.module.test_phases.Opaque cannot be stored"),
    ],
)
def test_a_phase_that_a_checkpoint_cannot_hold_starts_again_with_a_warning(
    tmp_path: Path, caplog: Any, change: dict[str, Any], why: str
) -> None:
    """The save does not fail, and the run does not silently continue with other batches."""

    def actor() -> Actor:
        made = Actor()
        vars(made).update(change)
        if made.form == "opaque":
            collect = made.rollout
            made.rollout = lambda state, ctx: [Opaque(batch) for batch in collect(state, ctx)[0]]  # type: ignore[method-assign]
            made.prepare_batch = lambda raw, state, ctx: raw.batch  # type: ignore[method-assign]
        return made

    fit(tmp_path, actor(), Checkpoint(tmp_path / "c"), steps=2)
    resumed = actor()
    fit(tmp_path, resumed, Checkpoint(tmp_path / "d"), steps=4, ckpt_path=tmp_path / "c" / "final.json")
    assert resumed.rollouts == 1
    (warning,) = [record.message for record in caplog.records if "starts with a new rollout" in record.message]
    assert why in warning


@pytest.mark.parametrize("returned", [[], iter([]), ([], {"agent_steps": 3})])
def test_a_rollout_that_gives_nothing_is_an_error(tmp_path: Path, returned: Any) -> None:
    """Also in a later phase; a run once ended there as if it were complete."""
    actor = Actor("list")
    collect = actor.rollout
    actor.rollout = lambda state, ctx: returned if actor.rollouts else collect(state, ctx)  # type: ignore[method-assign]
    with refusal(ContractError):
        fit(tmp_path, actor, steps=9)


@pytest.mark.parametrize("cls", [Actor, Placed])
def test_an_exception_of_a_generator_is_the_error_of_the_run(tmp_path: Path, cls: type[Actor]) -> None:
    """Whether it is collected in the steps or before them."""
    actor = cls()

    def collect(state: Any, ctx: Any) -> Iterator[Any]:
        yield {"x": torch.ones(1, 2), "noise": torch.zeros(1, 1)}
        raise OSError("the simulator is gone")

    actor.rollout = collect  # type: ignore[method-assign]
    with refusal(OSError):
        fit(tmp_path, actor, steps=9)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("update_epochs", 0, "`update_epochs` of Actor is 0; it must be an integer >= 1"),
        ("update_epochs", 1.5, "`update_epochs` of Actor is 1.5"),
        ("rollout_checkpoint_bytes", -1, "`rollout_checkpoint_bytes` of Actor is -1"),
        ("agent_steps", -3, "`agent_steps` in the statistics of a rollout is -3"),
        ("agent_steps", "many", "`agent_steps` in the statistics of a rollout is 'many'"),
    ],
)
def test_settings_of_phases_are_checked(tmp_path: Path, name: str, value: Any, message: str) -> None:
    actor = Actor()
    if name == "agent_steps":
        actor.rollout = lambda state, ctx: ([1], {name: value})  # type: ignore[method-assign]
    else:
        setattr(actor, name, value)
    with pytest.raises(ContractError, match=message):
        fit(tmp_path, actor, Checkpoint(tmp_path / "c", every_n_steps=1), steps=2)


def test_a_state_of_environments_must_be_a_dict(tmp_path: Path) -> None:
    actor = Placed()
    actor.rollout_state = lambda state: [1.0]  # type: ignore[method-assign,return-value,assignment]
    with refusal(ContractError):
        fit(tmp_path, actor, Checkpoint(tmp_path / "c"), steps=2)


def test_minibatches_that_cannot_be_made_are_refused() -> None:
    for columns in ({"a": torch.ones(3), "b": torch.ones(2)}, {}, {"a": torch.tensor(1.0)}, {"a": torch.ones(0)}):
        with refusal(ValueError):
            Minibatches(columns, 1)
    with refusal(ValueError):
        Minibatches({"a": torch.ones(3)}, 0)
    with refusal(ValueError):
        Minibatches({"a": torch.ones(3)}, 4, drop_last=True)
    assert [len(batch["a"]) for batch in Minibatches({"a": torch.ones(5)}, 2, drop_last=True)] == [2, 2]
    (whole,) = Minibatches({"a": torch.arange(3)}, 3, shuffle=False)
    assert whole["a"].tolist() == [0, 1, 2]


STEPS, INTERRUPTED_AT = 11, 5


class Collector(Trains):
    """Ranks collect 6 and 8 rows: three minibatches on rank zero and four on rank one, twice.

    Only rank one ends the update of the second rollout, after its first minibatch.
    """

    update_epochs = 2

    def setup(self, ctx):
        torch.manual_seed(7 + ctx.rank)
        self.position, self.rollouts, self.minibatches = float(ctx.rank), 0, 0

    def trainer_hooks(self, state, ctx):
        return [self]

    def on_mb_end(self, trainer_state):
        self.minibatches += 1

    def configure(self, ctx):
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05), "seen": []}

    def rollout(self, state, ctx):
        self.rollouts += 1
        rows = 6 + 2 * ctx.rank
        self.position += 1
        data = torch.randn(rows, 2) + self.position
        return Minibatches({"x": data}, 2), {"agent_steps": rows}

    def prepare_batch(self, raw, state, ctx):
        return raw["x"]

    def loss(self, batch, state):
        return (state["model"](batch) - 1).square().mean()

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        run = ctx.run_state
        state["seen"].append([run.agent_step, run.update_epoch, run.minibatch_index])
        if ctx.rank == 1 and self.rollouts == 2 and run.minibatch_index == 0:
            run.stop_update_epoch = True
        return result

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...

    def rollout_state(self, state):
        return {"position": self.position, "rollouts": self.rollouts, "minibatches": self.minibatches}

    def load_rollout_state(self, state, payload, ctx):
        self.position, self.rollouts, self.minibatches = (payload[n] for n in ("position", "rollouts", "minibatches"))


class Stream(Collector):
    """Batches come from a generator, between steps; only rank one has enough after its second."""

    update_epochs = 2
    rollout_state = None

    def rollout(self, state, ctx):
        for index in range(5):
            if ctx.rank == 1 and index == 1:
                ctx.run_state.stop_rollout = True
            ctx.run_state.agent_step += 2
            yield {"x": torch.randn(2, 2)}

    def train_step(self, batch, state, ctx):
        state["seen"].append([ctx.run_state.update_epoch, ctx.run_state.minibatch_index])
        return Trains.train_step(self, batch, state, ctx)


def train_stream(rank):
    """Return the batches that a rank trained from a generator that one rank ends."""
    module = ContractModule(Stream(), TrainingJobSpec(run_id="stream", max_steps=8, metric_every=0))
    rank.trainer(max_steps=8).fit(module)
    return module.contract_state["seen"]


def train_phases(rank, directory, what):
    steps = INTERRUPTED_AT if what == "interrupt" else STEPS
    saver = Checkpoint(directory, every_n_steps=INTERRUPTED_AT, save_final=False)
    trainer = rank.trainer(saver, max_steps=steps)
    module = ContractModule(Collector(), TrainingJobSpec(run_id="phases", max_steps=steps, metric_every=0))
    with rank.group():
        trainer.fit(module, ckpt_path=newest_valid(directory)[0].path if what == "resume" else None)
        state, plugin = module.contract_state, module.plugin
        end = {"position": plugin.position, "minibatches": plugin.minibatches, "seen": state["seen"]}
        end["agent_step"] = run_state_of(trainer).agent_step
        end["metrics"] = sorted(module.metrics())
        if what == "train":
            end["stream"] = train_stream(rank)
    return end, dict(state["model"].state_dict())


@pytest.mark.slow
def test_each_rank_collects_its_own_batches_and_all_end_their_passes_together(tmp_path: Path) -> None:
    """Counts are summed, one rank's early end ends the phase on all ranks, and a resume within a phase is exact.

    One rank's early end of a rollout from a generator ends it on all ranks, too.
    """
    whole, said = on_ranks(train_phases, tmp_path / "whole", tmp_path / "c", "train")
    in_full = [[14 * phase, epoch, index] for phase in (1, 3) for epoch in (0, 1) for index in (0, 1, 2)]
    for end, _ in whole:
        assert end["seen"] == [*in_full[:6], [28, 0, 0], *in_full[6:10]]
        assert end["agent_step"] == 42
        assert end["minibatches"] == 11, "a hook of the class gets these events on each rank"
        assert end.pop("stream") == [[0, 0], [0, 1], [1, 0], [1, 1]] * 2, "a rollout that one rank ends is over on all"
        assert {"trainer/rollout_seconds", "trainer/update_seconds", "trainer/agent_step"} <= set(end["metrics"])
    assert said.count("Rank 1 has more than the 3 minibatches") == 1

    on_ranks(train_phases, tmp_path / "interrupted", tmp_path / "d", "interrupt")
    resumed, said = on_ranks(train_phases, tmp_path / "resumed", tmp_path / "d", "resume")
    assert "starts with a new rollout" not in said
    for (found, found_weights), (expected, weights) in zip(resumed, whole, strict=True):
        assert found == {**expected, "seen": expected["seen"][5:]}
        assert all(torch.equal(found_weights[name], value) for name, value in weights.items())
