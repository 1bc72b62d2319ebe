"""Each rank gets its own values back on a resume; values that cannot come back are named."""

import json
import random
import shutil
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from genlight.adapter.contract.exceptions import UnstorableStateError
from genlight.adapter.contract.types import StepResult, TrainingJobSpec
from genlight.adapter.discovery.discover import discover
from genlight.adapter.module.module import ContractModule
from genlight.adapter.module.state import ConfiguredState, take_own_part
from genlight.callbacks.checkpoint import Checkpoint, load, newest_valid
from genlight.callbacks.checkpoint.capture import CONTRACT_KEY
from genlight.callbacks.checkpoint.rank_state import apply_differences, differences_of_ranks, digests_of
from support.messages import refusal
from support.rank_processes import on_ranks

pytestmark = pytest.mark.promise(name="resume")


STEPS, INTERRUPTED_AT = 7, 3


class RunningMoments(nn.Module):
    """Statistics of this rank's observations, in a module that is not trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def update(self, rows):
        self.mean.lerp_(rows.mean(0), 0.5)


class OfItsOwn:
    """Generators seeded by rank, of which it saves one, a replay buffer of any length, hidden states, moments."""

    rank_local = ("moments",)

    def setup(self, ctx):
        torch.manual_seed(0)
        self.noise = torch.Generator().manual_seed(100 + ctx.rank)
        self.pick = random.Random(ctx.rank)

    def configure(self, ctx):
        cell, head = nn.GRUCell(4, 6), nn.Linear(6, 1)
        optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)
        hidden, replay = torch.zeros(2, 6), deque(maxlen=50)
        return {
            "cell": cell,
            "head": head,
            "moments": RunningMoments(),
            "optimizer": optimizer,
            "hidden": hidden,
            "replay": replay,
            "seen": 0,
        }

    def prepare_batch(self, raw, state, ctx):
        return torch.randn(2, 4, generator=self.noise)

    def train_step(self, batch, state, ctx):
        state["moments"].update(batch)
        state["replay"].extend(batch[: self.pick.randint(1, 2)])
        state["seen"] += len(batch)
        rows = torch.stack(self.pick.choices(state["replay"], k=2)) - state["moments"].mean
        hidden = state["cell"](rows, state["hidden"])
        loss = state["head"](hidden).square().mean() + 0.01 * state["seen"] * hidden.mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["hidden"] = hidden.detach()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {
            "noise": self.noise.get_state(),
            "replay": list(state["replay"]),
            "nested": {"hidden": state["hidden"], "of": "rank"},
            "seen": state["seen"],
        }

    def load_state_dict(self, state, payload, ctx):
        self.noise.set_state(payload["noise"])
        state["replay"].extend(payload["replay"])
        state["hidden"], state["seen"] = payload["nested"]["hidden"], payload["seen"]


class Steps:
    """A loader with a length and without a position."""

    def __len__(self):
        return STEPS

    def __iter__(self):
        return iter(range(STEPS))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_own(rank, directory, what, kind):
    steps = INTERRUPTED_AT if what == "interrupt" else STEPS
    saver = Checkpoint(directory, every_n_steps=INTERRUPTED_AT, save_final=False)
    module = ContractModule(OfItsOwn(), TrainingJobSpec(run_id="own", max_steps=steps, metric_every=0))
    resume_from = newest_valid(directory)[0].path if what == "resume" else None
    with rank.group():
        rank.trainer(saver, strategy=kind, max_steps=steps).fit(module, Steps(), ckpt_path=resume_from)
        state, plugin = module.contract_state, module.plugin
        weights = {name: whole(p.detach()) for m in ("cell", "head") for name, p in state[m].named_parameters(m)}
    return {
        "weights": weights,
        "mean": state["moments"].mean,
        "hidden": state["hidden"],
        "replay": list(state["replay"]),
        "noise": plugin.noise.get_state(),
        "pick": json.dumps(plugin.pick.getstate()),
    }


def run(folder, directory, what, *, kind="ddp", world_size=2):
    """The state of each rank at the end, and the output of the ranks."""
    return on_ranks(train_own, folder, directory, what, kind, world_size=world_size)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_gets_its_own_generator_buffer_hidden_state_and_statistics_back(tmp_path, kind):
    expected, said = run(tmp_path / "reference", tmp_path / "unused", "train", kind=kind)
    assert said.count("The 2 ranks differ in ") == 1, "at the first of two checkpoints"
    named = said.partition("The 2 ranks differ in ")[2].partition(": ")[0]
    assert {'state["replay"]', 'state["nested"]'} <= set(named.split(", ")), "and no state of a generator"
    assert "noise" not in named
    assert not same(expected[0]["hidden"], expected[1]["hidden"])
    assert not same(expected[0]["mean"], expected[1]["mean"])
    run(tmp_path / "interrupted", tmp_path / "c", "interrupt", kind=kind)

    resumed, output = run(tmp_path / "resumed", tmp_path / "c", "resume", kind=kind)

    for rank in range(2):
        differing = [name for name in expected[rank] if not same(resumed[rank][name], expected[rank][name])]
        assert not differing, f"rank {rank}"
    assert "saved by" not in output


@pytest.mark.slow
def test_values_that_another_number_of_ranks_cannot_keep_are_named(tmp_path):
    run(tmp_path / "interrupted", tmp_path / "c", "interrupt")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")

    parts = load(newest_valid(tmp_path / "c")[0].path)["genlight"]["of_ranks"]
    paths = [[".".join(map(str, entry["path"])) for entry in of_rank] for of_rank in parts]
    assert paths[0] == []
    assert {"state.noise", "state.nested"} <= set(paths[1])
    assert "state.seen" not in paths[1], "what is equal is stored once"
    assert not [path for path in paths[1] if "cell" in path or "optimizer" in path]

    _, fewer = run(tmp_path / "alone", tmp_path / "c", "resume", world_size=1)
    said = next(line for line in fewer.splitlines() if "are lost" in line)
    assert "saved by 2 ranks and is resumed by 1: the values stored for rank 1 are lost: " in said
    assert 'state["noise"]' in said
    assert 'state["nested"]' in said

    _, more = run(tmp_path / "three", tmp_path / "copy", "resume", world_size=3)
    assert more.count("rank 2 can only get the values of rank 0") == 1


class Declares:
    rank_local = ("losses",)


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (("state", "first"), 0.5, True),
        (("state", "first"), torch.ones(2), True),
        (("state", "first", 0), np.float32(1.0), True),
        (("state", "first"), {"task": [0.5]}, True),
        (("state", "seen"), 3, False),
        (("state", "generator"), torch.zeros(4, dtype=torch.uint8), False),
        (("state", "losses", "first"), 0.5, False),
        (("generators", "state.first"), 0.5, False),
        (("state_dict", "first"), 0.5, False),
    ],
)
def test_numbers_that_training_may_depend_on_are_named_once_with_a_remedy(caplog, path, value, names):
    state = ConfiguredState(nn.Module(), Declares(), {}, discover({}))
    checkpoint = {CONTRACT_KEY: {"of_ranks": [[], [{"path": list(path), "value": value}]]}}

    state.warn_of_rank_differences({CONTRACT_KEY: {}})
    state.warn_of_rank_differences(checkpoint)
    state.warn_of_rank_differences(checkpoint)

    assert len(caplog.messages) == names
    if names:
        assert 'The 2 ranks differ in state["first"]' in caplog.text
        assert "average it over all ranks, broadcast the value of rank 0, or name it in `rank_local`" in caplog.text


def test_a_checkpoint_without_parts_of_ranks_stays_unchanged():
    checkpoint = {"state_dict": {"a": 1}, "genlight": {"state": {"n": 1}}}

    assert take_own_part(checkpoint, rank=1, world_size=2) == {}
    assert checkpoint == {"state_dict": {"a": 1}, "genlight": {"state": {"n": 1}}}


def test_an_unstorable_value_is_refused_with_its_path_also_on_several_ranks():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    with refusal(UnstorableStateError):
        differences_of_ranks({"state": {"rows": nested}}, SimpleNamespace(size=2))


@pytest.mark.parametrize(
    ("zero", "own"),
    [({"a": 1, "b": 2}, {"a": 1, "c": 3}), ([1, 2], [1]), ([1, 2], [1, 3]), ((1,), (2,)), ({}, {"a": 1})],
)
def test_a_rank_with_other_entries_gets_its_own_back(zero, own):
    of_zero, of_one = {"state": zero, "same": {"x": 0}}, {"state": own, "same": {"x": 0}}
    messages = {"gather_everywhere": lambda digest: [digest, "another"], "share": lambda _: digests_of(of_zero)}
    channel = SimpleNamespace(size=2, rank=1, gather=lambda packed: [[], packed], **messages)

    _, differing = differences_of_ranks(of_one, channel)
    apply_differences(of_zero, differing)

    assert of_zero == of_one
    assert [each.path[0] for each in differing] == ["state"]
