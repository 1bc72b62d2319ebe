"""The random states of a process."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from genlight.callbacks.checkpoint import load, newest_valid, save
from genlight.callbacks.checkpoint.rank_state import capture_rng, gradients_of_rank, loader_generators, restore_rng
from support.trainer_class import Trains
from support.witnessed import attempt

pytestmark = pytest.mark.promise(name="resume")


def draw():
    return [random.random(), random.gauss(0, 1), np.random.normal(), torch.randn(()).item(), random.getrandbits(70)]


def test_every_random_source_continues(tmp_path):
    random.gauss(0, 1)  # Python keeps a second value as part of the state.
    np.random.normal()
    save(tmp_path / "a", {"rng": capture_rng()})
    expected = draw()
    draw()
    assert restore_rng(load(tmp_path / "a")["rng"]) == []
    assert draw() == expected


def test_missing_devices_are_named():
    state = capture_rng() | {"devices": {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}}
    missing = 3 - (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    expected = [f"the random state of {missing} CUDA devices that are not here"] if missing > 0 else []
    assert restore_rng(state) == expected


def test_generators_of_the_training_loaders_are_restored(tmp_path):
    """A loader with `state_dict` replays its order, but not other numbers that its iterator drew."""
    given = torch.Generator().manual_seed(4)
    torch.rand(3, generator=given)
    save(tmp_path / "a", {"rng": capture_rng([given])})
    expected = torch.rand(3, generator=given)

    again = torch.Generator().manual_seed(9)
    assert restore_rng(load(tmp_path / "a")["rng"], [again]) == []
    assert torch.equal(torch.rand(3, generator=again), expected)


def test_each_generator_is_found_once_whichever_part_of_a_loader_holds_it():
    first, second = torch.Generator(), torch.Generator()
    own = DataLoader([1, 2], shuffle=True, generator=first)
    of_sampler = DataLoader([1, 2], sampler=RandomSampler([1, 2], generator=second))

    assert loader_generators(SimpleNamespace(train_dataloader={"a": own, "b": of_sampler})) == [first, second]
    assert loader_generators(SimpleNamespace(train_dataloader=[[1], [2]])) == []
    assert loader_generators(SimpleNamespace(train_dataloader=None)) == []


@pytest.mark.parametrize(
    ("world_size", "rank", "expected"),
    [(2, 0, {"w": 2.0, "same": 5.0}), (2, 1, {"w": 4.0, "same": 5.0}), (1, 0, {"w": 3.0, "same": 5.0}),
     (3, 2, {"w": 3.0, "same": 5.0})],
)  # fmt: skip
def test_gradients_of_an_open_window_keep_their_mean_over_the_ranks(world_size, rank, expected):
    """The same number of ranks get their own gradients back; otherwise no part is lost and none counts twice."""
    saved = [{"w": torch.tensor(2.0), "same": torch.tensor(5.0)}, {"w": torch.tensor(4.0)}]
    assert gradients_of_rank(saved, rank, world_size) == expected
    assert gradients_of_rank([], rank, world_size) == {}


@pytest.mark.parametrize(
    ("world_size", "rank", "expected"),
    [(3, 0, {"w": 3.0}), (3, 1, {}), (3, 2, {"w": 3.0, "late": 6.0}), (1, 0, {"w": 2.0, "late": 2.0}),
     (4, 3, {"w": 2.0, "late": 2.0})],
)  # fmt: skip
def test_a_rank_without_a_gradient_gets_none(world_size, rank, expected):
    """A rank that has not used a layer in this window contributes nothing to the mean."""
    saved = [{"w": torch.tensor(3.0)}, {"w": None}, {"late": torch.tensor(6.0)}]
    assert gradients_of_rank(saved, rank, world_size) == expected


class Embeds(Trains):
    def __init__(self, **options):
        self.options = options

    def model(self):
        return torch.nn.Embedding(5, 3, **self.options)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def loss(self, batch, state):
        return state["model"](batch).square().mean()


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"sparse": True, "dtype": torch.float64}], ids=str)
def test_a_checkpoint_with_gradients_of_any_layout_is_valid_and_resumed(options, tmp_path):
    data = DataLoader([torch.arange(4)] * 8, batch_size=None)
    assert attempt(tmp_path, Embeds(**options), data, until=5, every_n_steps=2, steps=8) == []

    assert newest_valid(tmp_path)[0].step == 4
    (proof,) = attempt(tmp_path, Embeds(**options), data, every_n_steps=2, steps=8)
    assert (proof.steps, proof.difference) == ((5,), None)
