"""State that a trainer declares to differ by rank, and state that must be equal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.rank_local import RankLocal, rank_local_of
from support.messages import refusal

pytestmark = pytest.mark.promise(name="resume")


def paths(state: dict[str, Any], *names: str) -> list[str]:
    return [path for path, _ in RankLocal(names).tensors(discover(state))]


@pytest.mark.parametrize(
    ("path", "is_covered"),
    [
        ('state["replay"]', True),
        ("state.replay", True),
        ('state["replay"]["rows"][3]', True),
        ("trainer.replay.data", True),
        ('state["nets"].memory.kept', True),
        ('state["nets"].weight', False),
        ('state["replays"]', False),
        ('state["other"].replay', False),
    ],
)
def test_a_name_covers_a_part_of_the_state_and_everything_below_it(path, is_covered):
    assert (path in RankLocal(("replay", "nets.memory"))) == is_covered


def test_parameters_buffers_and_trained_tensors_are_compared_except_declared_ones():
    state = {
        "model": nn.BatchNorm1d(2, affine=False),
        "table": nn.Embedding(2, 2),
        "scale": torch.ones(1, requires_grad=True),
        "last_loss": torch.ones(1),
    }

    assert 'state["last_loss"]' not in paths(state)
    assert paths(state)[:2] == ['state["table"].weight', 'state["scale"]']
    assert paths(state, "table", "model.running_mean") == [
        'state["scale"]',
        'state["model"].running_var',
        'state["model"].num_batches_tracked',
    ]


def test_optimizer_states_are_compared_unless_the_trainer_or_their_class_declares_them_local():
    class Sharded(torch.optim.SGD):
        rank_local = True

    model = nn.Linear(2, 1, bias=False)
    for cls, names, expected in ((torch.optim.SGD, (), 1), (torch.optim.SGD, ("optimizer",), 0), (Sharded, (), 0)):
        optimizer = cls(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found = list(RankLocal(names).optimizer_states(discover({"model": model, "optimizer": optimizer})))
        assert [name for name, _ in found] == [
            'momentum_buffer of state["model"].weight in state["optimizer"]'
        ] * expected


def test_a_parameter_that_replaced_a_bare_one_is_compared():
    tensor = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    discovered = discover({"points": tensor, "optimizer": optimizer})
    optimizer.param_groups[0]["params"][0] = new = torch.ones(3, requires_grad=True)

    assert [t for _, t in RankLocal().optimizer_states(discovered)] == [new]


@pytest.mark.parametrize("names", ["replay", ("replay", 1), ("",), 3])
def test_anything_but_a_tuple_of_names_is_refused_with_an_example(names):
    with refusal(ContractError):
        rank_local_of(SimpleNamespace(rank_local=names))
