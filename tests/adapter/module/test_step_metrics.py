"""Turning the result of a step into named numbers: aliases, the learning rate, and errors that name the metric."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepContext, StepResult, TrainingJobSpec
from genlight.adapter.module.step_metrics import metric_name, named_scalars, validate_result
from genlight.adapter.training_loop import BatchStream
from support.trainer_class import Stateless
from support.trainers import quiet_trainer

CTX = StepContext(job=TrainingJobSpec(run_id="r", max_steps=1))
ALIASES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}


def optimizer(rate):
    return SimpleNamespace(param_groups=[{"lr": rate}, {"lr": 99.0}])


def context(**given):
    return StepContext(job=CTX.job, **given)


@pytest.mark.parametrize(("name", "reported"), ALIASES.items())
@pytest.mark.parametrize("spelling", [str, str.upper, str.title, lambda name: f"  {name}\t"])
def test_an_alias_is_found_whatever_its_case_and_outer_blanks(name, reported, spelling):
    assert metric_name(spelling(name)) == reported


@settings(max_examples=60)
@given(st.text(min_size=1))
def test_any_other_name_stays_as_it_is(name):
    assert metric_name(name) == ALIASES.get(name.strip().lower(), name)


@pytest.mark.parametrize("name", [3, None, "", b"loss"])
def test_a_name_that_is_no_text_or_empty_is_named(name):
    with pytest.raises(ContractError, match=f"a metric named {name!r}; a name is a non-empty string"):
        named_scalars(StepResult(metrics={name: 0.5}), None, CTX)


def test_more_names_than_are_kept_are_reported_as_well():
    for start in range(0, 3000, 500):
        metrics = {f"{start + n}": 1.0 for n in range(500)}
        assert named_scalars(StepResult(metrics=metrics), None, CTX) == metrics


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"loss": 1.0}, r"returned a dict without `metrics`; return StepResult\(metrics=\{...\}\)"),
        (None, "returned a NoneType without `metrics`; return a StepResult"),
        (1.5, "returned a float without `metrics`"),
        (SimpleNamespace(metrics=None), "returned metrics that are a NoneType; they must be a mapping"),
        (SimpleNamespace(metrics=[("loss", 1)]), "returned metrics that are a list; they must be a mapping"),
        (StepResult({"loss": 1}, debug=["lr", 0.1]), "returned a `debug` that is a list; it must be a mapping"),
        (StepResult({"loss": 1}, debug="lr 0.1"), "returned a `debug` that is a str"),
        (SimpleNamespace(metrics={}, debug=0.1), "returned a `debug` that is a float"),
    ],
)
def test_a_result_without_a_mapping_of_metrics_is_refused(result, message):
    with pytest.raises(ContractError, match=message) as error:
        validate_result(result)
    assert isinstance(error.value, TypeError)


def test_any_object_with_metrics_is_a_result():
    result = SimpleNamespace(metrics={"loss": 2})

    validate_result(result)

    assert named_scalars(result, None, CTX) == {"train/loss": 2}


RATES = [
    {"metrics": {"LR": 1.0}},
    {"debug": {"Learning_Rate": 2.0}},
    {"state": {"train/lr": 3.0}},
    {"state": {"learning_rate": 4.0}},
    {"state": {"lr": 5.0}},
    {"ctx": optimizer(6.0)},
    {"state": {"optimizer": optimizer(7.0)}},
    {"found": [optimizer(8.0), optimizer(9.0)]},
]
"""Places of a learning rate, in order of priority."""


@pytest.mark.parametrize(("first", "rate"), [*enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, None])])
@pytest.mark.parametrize("unrelated", [{}, {"temperature": 0.5}])
def test_the_learning_rate_comes_from_the_first_place_that_has_one(first, rate, unrelated):
    """Each case has a rate in this place and in all later ones."""
    given, state = {}, {}
    for place in RATES[first:]:
        state.update(place.get("state", {}))
        given.update(place)

    result = StepResult(
        metrics={"loss": 0.0, **given.get("metrics", {})}, debug={**unrelated, **given.get("debug", {})}
    )
    named = named_scalars(result, state, context(optimizer=given.get("ctx")), given.get("found", ()))

    assert named.get("train/lr") == rate
    assert named["train/loss"] == 0.0


@pytest.mark.parametrize("value", [None, "cosine", [0.1, 0.2], lambda: 0.1, torch.zeros(3), {"lr": 1}])
def test_a_value_that_cannot_be_a_learning_rate_is_skipped(value):
    result = StepResult(debug={"lr": value})
    state = {"lr": value, "optimizer": optimizer(0.5)}

    assert named_scalars(result, state, CTX) == {"train/lr": 0.5}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (SimpleNamespace(lr=0.25), {"train/lr": 0.25}),
        (SimpleNamespace(optimizer=optimizer(0.5)), {"train/lr": 0.5}),
        ({"optimizer": SimpleNamespace(param_groups=[{}])}, {}),
        ({"lr": 0, "optimizer": optimizer(0.5)}, {"train/lr": 0}),
    ],
)
def test_the_state_may_be_an_object_a_group_may_lack_a_rate_and_zero_is_one(state, named):
    assert named_scalars(StepResult(), state, CTX) == named


def scalars_of(metrics):
    return named_scalars(StepResult(metrics=metrics), None, CTX)


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        np.float32(1),
        np.array(1.0),
        torch.tensor(1.0),
        torch.tensor([1.0]),
        np.array([1.0]),
        np.array([[1]]),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor(1.0, requires_grad=True),
    ],
)
def test_numbers_and_tensors_of_one_element_become_floats(value):
    scalars = scalars_of({"x": value})

    assert scalars == {"x": 1.0}
    assert type(scalars["x"]) is float
    assert [repr(scalars_of({"x": torch.tensor(n)})["x"]) for n in (math.inf, math.nan)] == ["inf", "nan"]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        (torch.zeros(0), r"a tensor of shape \(0,\)"),
        (np.zeros(4), r"a tensor of shape \(4,\)"),
        (None, r"None \(NoneType\)"),
        ("high", r"'high' \(str\)"),
        ([1.0], r"\[1.0\] \(list\)"),
        (1j, r"1j \(complex\)"),
        pytest.param(10**400, r"10+ \(int\)", id="too large"),
    ],
)
@pytest.mark.parametrize("when", ["at_a_cadence", "at_the_first_step"])
def test_a_metric_that_is_no_scalar_is_named_with_its_value(value, what, when):
    metrics = {"fine": 1, "grad": value}
    with pytest.raises(ContractError, match=f"metric 'grad' is {what}; a metric is one number or a 0-d tensor"):
        scalars_of(metrics) if when == "at_a_cadence" else validate_result(StepResult(metrics), reads_values=True)


class Returns(Stateless):
    """A trainer class whose `step` returns that result from `at` on."""

    def __init__(self, result, at=1):
        self.result, self.at, self.step = result, at, 0

    def train_step(self, batch, state, ctx):
        self.step += 1
        return self.result if self.step >= self.at else StepResult({"loss": 1.0})


@pytest.mark.parametrize(
    ("result", "at"),
    [
        (StepResult({"loss": "high"}), 1),
        (SimpleNamespace(metrics={"": 1.0}), 1),
        (StepResult({}, debug=[1]), 1),
        (StepResult({}, debug=[1]), 3),
    ],
)
def test_a_wrong_result_is_refused_in_its_step_although_no_cadence_reads_it(result, at):
    plugin = Returns(result, at)
    module = ContractModule(plugin, TrainingJobSpec("r", 5, metric_every=0))
    with pytest.raises(ContractError):
        quiet_trainer(max_steps=5).fit(module, BatchStream(range(9)))
    assert plugin.step == at
