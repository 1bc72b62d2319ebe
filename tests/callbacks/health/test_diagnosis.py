"""Planted faults are found and reported once when they begin and once when they end, and nothing else is."""

from pathlib import Path

import pytest
import torch

from genlight.adapter import StepResult
from genlight.callbacks import Checkpoint, Diagnosis, Hook
from genlight.reporters import EventLogger
from genlight.reporters.events.reader import read_events as read_log
from genlight.reporters.telemetry import read_events
from support.check_zoo import WithoutHooks
from support.messages import refusal
from support.trainer_class import Trains


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


class Planted(Trains):
    """Three layers on random batches; `plant(trainer, step, state)` may break something before a step."""

    def __init__(self, plant=lambda trainer, step, state: None, *, lr=0.01) -> None:
        self.plant, self.lr = plant, lr
        self.scale = torch.tensor(1.0)
        self.metrics = {}
        self.steps = 0
        self.uses_spare = True

    def configure(self, ctx):
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        self.model, self.spare = torch.nn.Sequential(*layers), torch.nn.Linear(2, 2)
        parameters = [*self.model.parameters(), *self.spare.parameters()]
        return {"optimizer": torch.optim.Adam(parameters, lr=self.lr)}

    def train_step(self, batch, state, ctx):
        self.steps += 1
        self.plant(self, self.steps, state)
        state["optimizer"].zero_grad()
        loss = (self.model(batch) - 1).square().mean() * self.scale
        if self.uses_spare:
            loss = loss + self.spare(torch.ones(2)).square().mean()
        loss.backward()
        self.before_update()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach(), **self.metrics})

    def before_update(self): ...

    def state_dict(self, state):
        return {"steps": self.steps}

    def load_state_dict(self, state, payload, ctx):
        self.steps = payload["steps"]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


def reported(path: Path) -> list[tuple[str, str, int]]:
    """Return fault, state (begins or ends) and step of each event."""
    events = [event for event in read_events(path) if event["event"] == "diagnostic"]
    return [(event["artifacts"]["fault"], event["artifacts"]["state"], event["step"]) for event in events]


def begun(path: Path, kind: str) -> dict:
    (event,) = [
        event
        for event in read_events(path)
        if (event["artifacts"]["fault"], event["artifacts"]["state"]) == (kind, "begins")
    ]
    return event


def within(first: int, last: int, action, otherwise=lambda trainer, state: None):
    """Call `action` in the steps from `first` to `last`, and `otherwise` in all others."""

    def plant(trainer, step, state):
        (action if first <= step <= last else otherwise)(trainer, state)

    return plant


def test_nothing_is_reported_or_changed_in_a_healthy_run_and_no_hook_remains(fit, path: Path) -> None:
    weights = []
    for callbacks in ([], [Diagnosis(5, path=path)], [Diagnosis(1, path=path, trace_modules=True)]):
        trainer = Planted()
        _, module = fit(trainer, callbacks, steps=81, batches=batches(81))
        weights.append(module.state_dict())
        (optimizer,) = module.trainer.optimizers
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not any(part._forward_hooks for part in trainer.model.modules())
        assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())

    assert all(torch.equal(weights[0][name], other[name]) for name in weights[0] for other in weights[1:])
    fit(Planted(lr=0.0), [Diagnosis(0, path=path)], steps=3, batches=batches(3))
    assert read_events(path) == []


def test_a_fault_has_one_event_when_it_begins_and_one_when_it_ends(fit, path: Path, caplog, tmp_path: Path) -> None:
    """It has figures, suggestions, a log message, metrics and `on_fault`; `success` says whether no fault is left."""
    heard = []

    class Listens(Hook):
        def on_fault(self, trainer, pl_module, fault):
            heard.append((fault.kind, fault.is_over, trainer.global_step))

    def stop(trainer, state):
        state["optimizer"].param_groups[0]["lr"] = 0.0

    def go(trainer, state):
        state["optimizer"].param_groups[0]["lr"] = 0.01

    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    callbacks = [Listens(), Diagnosis(5, path=path)]
    fit(Planted(within(11, 20, stop, go)), callbacks, steps=40, batches=batches(40), logger=logger)

    assert reported(path) == [
        ("zero_learning_rate", "begins", 15),
        ("rising_learning_rate", "begins", 25),
        ("zero_learning_rate", "ends", 30),
        ("rising_learning_rate", "ends", 35),
    ]
    first, _, third, _ = read_events(path)
    assert (first["success"], third["success"]) == (False, True)
    assert first["error"] == "the learning rate is 0: updates change nothing"
    assert first["suggestions"]
    assert first["artifacts"]["learning_rate"] == 0.0
    assert third["artifacts"]["began_at_step"] == 15
    assert [event[0] for event in heard] == [fault for fault, _, _ in reported(path)]
    assert "step 15: the learning rate is 0" in caplog.text
    logged = [event for event in read_log(tmp_path / "events.jsonl") if event.get("name", "").startswith("diagnosis/z")]
    assert [(event["value"], event["step"]) for event in logged] == [(1.0, 15), (0.0, 30)]


@pytest.mark.parametrize("traces", [True, False])
def test_the_first_module_that_returns_nan_is_named_if_every_step_is_traced(fit, path: Path, traces) -> None:
    """Without a trace the event names the step, and says how to trace modules."""

    def poison(trainer, state):
        trainer.model[2].weight.data[0, 0] = float("nan")

    fit(Planted(within(7, 7, poison)), [Diagnosis(5, path=path, trace_modules=traces)], steps=12, batches=batches(12))

    event = begun(path, "nonfinite_loss")
    assert event["step"] == 10
    assert event["artifacts"]["first_step"] == 7
    if traces:
        assert event["artifacts"]["origin"].rpartition(".")[2] == "2"
        assert event["artifacts"]["origin_step"] == 7
        assert "the first output that is not finite is that of" in event["error"]
    else:
        assert "origin" not in event["artifacts"]
        assert any("trace_modules=True" in suggestion for suggestion in event["suggestions"])


def test_a_backward_that_returns_nan_is_named(fit, path: Path) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    class Layer(torch.nn.Module):
        def forward(self, values):
            return Breaks.apply(values)

    class WithLayer(Planted):
        def configure(self, ctx):
            state = super().configure(ctx)
            self.model[3] = Layer()
            return state

    fit(WithLayer(), [Diagnosis(1, path=path)], steps=3, batches=batches(3))

    event = begun(path, "nonfinite_gradients")
    assert event["step"] == 1
    assert event["artifacts"]["origin"].endswith("3")
    assert "comes out of the backward of" in event["error"]
    assert ("nonfinite_loss", "begins", 2) in reported(path)  # the weights are nan after the first update


def test_gradients_are_seen_as_the_update_uses_them(fit, path: Path) -> None:
    """Gradients that the trainer clips do not count as exploding."""

    class Clips(Planted):
        def before_update(self):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def grow(trainer, step, state):
        trainer.scale = torch.tensor(1e9)

    fit(Clips(grow), [Diagnosis(5, path=path)], steps=10, batches=batches(10))
    assert "exploding_gradients" not in [fault for fault, _, _ in reported(path)]

    fit(Planted(grow), [Diagnosis(5, path=path)], steps=10, batches=batches(10))
    event = begun(path, "exploding_gradients")
    assert event["artifacts"]["largest_norm"] > event["artifacts"]["limit"]


def shrinks(trainer, step, state):
    trainer.scale, trainer.uses_spare = torch.tensor(1e-12), False


class Wraps(Planted):
    """Its optimizer has no hooks; the inner one has."""

    def configure(self, ctx):
        return {"optimizer": WithoutHooks(super().configure(ctx)["optimizer"])}


FIGURES = {
    "vanishing_gradients": (Planted, {"plant": shrinks}, "largest_norm", 0.0, 1e-8),
    "large_updates": (Planted, {"lr": 5.0}, "update_ratio", 0.3, 1e9),
    "large_updates of a wrapper": (Wraps, {"lr": 5.0}, "update_ratio", 0.3, 1e9),
    "small_updates": (Planted, {"lr": 1e-12}, "update_ratio", -1.0, 1e-8),
}


@pytest.mark.parametrize("fault", FIGURES)
def test_a_fault_has_the_figure_that_led_to_it(fit, path: Path, fault) -> None:
    kind, settings, figure, least, most = FIGURES[fault]
    fit(kind(**settings), [Diagnosis(2, path=path)], steps=2, batches=batches(2))

    assert least < begun(path, fault.split()[0])["artifacts"][figure] < most


def test_a_loss_spike_between_checks_is_found_with_its_step(fit, path: Path) -> None:
    def spike(trainer, state):
        trainer.scale = torch.tensor(1000.0)

    def usual(trainer, state):
        trainer.scale = torch.tensor(1.0)

    plant = within(53, 53, spike, usual)
    fit(Planted(plant, lr=1e-4), [Diagnosis(10, path=path)], steps=80, batches=batches(80))

    assert ("loss_spike", "begins", 60) in reported(path)
    assert ("loss_spike", "ends", 80) in reported(path)
    assert begun(path, "loss_spike")["artifacts"]["spike_step"] == 53


@pytest.mark.parametrize(
    ("metrics", "is_collapsed"),
    [
        ({"latent_std": 1e-7}, True),
        ({"latent_std": torch.tensor(0.5), "z_std": 0.0}, False),
        ({"vae/z_std": torch.tensor(0.0)}, True),
        ({"z_var": 1e-10}, False),
        ({"latent_var": 1e-13}, True),
    ],
)
def test_collapsed_latent_values_are_reported(fit, path, metrics, is_collapsed) -> None:
    def set_metrics(trainer, step, state):
        trainer.metrics = metrics

    fit(Planted(set_metrics), [Diagnosis(3, path=path)], steps=3, batches=batches(3))

    assert [fault for fault, _, _ in reported(path)] == ["latent_collapse"] * is_collapsed


def test_an_overflow_that_the_scaler_skips_is_no_fault(fit, path: Path) -> None:
    """The first scale of fp16 is so large that the first updates are skipped."""
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))
    fit(Planted(), [Diagnosis(1, path=path)], steps=6, batches=batches(6), plugins=[plugin])

    assert "nonfinite_gradients" not in [fault for fault, _, _ in reported(path)]


def test_a_fault_continues_over_a_resume_and_begins_once(fit, path: Path, tmp_path: Path) -> None:
    def skip(trainer, step, state):
        trainer.uses_spare = False

    for steps, resumes in ((6, {}), (12, {"ckpt_path": tmp_path / "c" / "final.json"})):
        diagnosis = Diagnosis(2, path=path)
        callbacks = [Checkpoint(tmp_path / "c", replace_existing=True), diagnosis]
        settings = {"steps": steps, "batches": batches(20), "enable_checkpointing": True, **resumes}
        fit(Planted(skip), callbacks, **settings)

        assert reported(path) == [("dead_parameters", "begins", 6)]
        assert list(diagnosis.faults) == ["dead_parameters"]


def test_diagnosis_works_with_any_module_and_with_accumulated_gradients(fit_plain, path: Path, monkeypatch) -> None:
    monkeypatch.setattr("genlight.callbacks.health.rules.LARGEST_UPDATE", 0.0)
    fit_plain([Diagnosis(2, path=path)], steps=4, accumulate_grad_batches=3)

    assert reported(path) == [("large_updates", "begins", 2)]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"check_interval": -1}, ["check_interval"]),
        ({"gradient_min_norm": -1.0, "latent_std_min": float("nan")}, ["gradient_min_norm", "latent_std_min"]),
        ({"gradient_min_norm": -2.0, "scenario": ""}, ["gradient_min_norm", "scenario"]),
    ],
)
def test_all_invalid_arguments_are_named_at_once(arguments, names) -> None:
    with refusal(ValueError) as refused:
        Diagnosis(**arguments)
    assert all(f"`{name}`" in str(refused.value) for name in names)


def test_a_check_that_fails_inside_a_step_does_not_fail_the_step(fit, path, caplog, monkeypatch) -> None:
    def fails(*args, **kwargs):
        raise NotImplementedError("no norm of such a type")

    monkeypatch.setattr("genlight.callbacks.health.readings._norms", fails)
    diagnosis = Diagnosis(2, path=path)
    trainer, _ = fit(Planted(), [diagnosis], steps=6, batches=batches(6))

    assert trainer.global_step == 6
    assert diagnosis.failures == {"on_train_batch_end": 3}
    assert "no norm of such a type" in caplog.text


@pytest.mark.parametrize("batch", [torch.zeros(6, 4), None, 0, "go", {}, []])
def test_the_same_batch_twice_in_a_row_is_repeated_data_unless_it_has_no_data(fit, path: Path, batch) -> None:
    class MakesItsData(Planted):
        def prepare_batch(self, raw, state, ctx):
            return torch.randn(6, 4)

    fit(MakesItsData(), [Diagnosis(5, path=path)], steps=10, batches=[*batches(8), batch, batch])

    assert reported(path) == [("repeated_data", "begins", 10)] * isinstance(batch, torch.Tensor)
