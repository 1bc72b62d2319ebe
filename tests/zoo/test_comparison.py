"""``genlight compare`` finds no difference in any kind of class that trains correctly."""

from itertools import islice
from typing import Any

import pytest

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.check.compare import Comparison, step_comparison
from genlight.adapter.check.isolation import quiet, seeded
from genlight.adapter.check.plain_loop import plain_steps
from genlight.adapter.check.snapshot import Recording
from support.trainers import quiet_trainer
from zoo.harness import zoo
from zoo.runs import STEPS, context
from zoo.worker import Shares

pytestmark = pytest.mark.promise(name="equal")

RTOL = 1e-6
"""TorchScript rounds otherwise once it has seen a function twice."""


def compared(cls: Any) -> Comparison:
    """Compare the class with itself."""
    with Recording() as recording, quiet():
        comparison = Comparison(recording, rtol=RTOL)
        with seeded(0):
            for reached in plain_steps(cls(), context(), Shares(cls.rows, 0, 1, STEPS), steps=STEPS):
                recording.add(reached)
        with seeded(0):
            trainer = quiet_trainer(step_comparison(STEPS, comparison), max_steps=STEPS)
            module = ContractModule(cls(), TrainingJobSpec(run_id="plain", max_steps=STEPS))
            trainer.fit(module, Shares(cls.rows, 0, 1, STEPS))
    return comparison


@pytest.mark.slow
def test_every_fourth_class_of_the_zoo_is_equal_to_itself_in_a_plain_loop():
    """Compare metrics, settings, states and weights of GANs, averages, LBFGS, sparse gradients, accumulation."""
    results = {name: compared(cls) for name, cls in islice(zoo().items(), 0, None, 4)}

    assert {name: found.first for name, found in results.items() if found.first} == {}
    assert {len(found.steps) for found in results.values()} == {STEPS + 1}
