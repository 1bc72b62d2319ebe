"""Replicas that drift apart end the run with an error that names the tensor and the likely cause."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import nn

from genlight.adapter.check.snapshot import flatten
from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.rank_local import RankLocal
from genlight.callbacks.checkpoint.codec.tensors import content_digests, device_digest, digest_of_all
from genlight.callbacks.replica_guard import _next_double
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="ranks")


def digest(tensor):
    return digest_of_all([tensor], tensor.device)


@pytest.mark.parametrize("has_own_state", [False, True])
@pytest.mark.parametrize("rank_local", [(), ("model.2",), ("other",)], ids=["all equal", "a layer", "an optimizer"])
def test_the_tensors_that_are_compared_are_those_that_a_difference_is_named_by(rank_local, has_own_state):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.BatchNorm1d(4), nn.Linear(4, 4), nn.PReLU(), shared)
    model.register_parameter("absent", None)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model[1].register_buffer("gone", None)
    latent, code = torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)
    state = {
        "model": model,
        "copy": copy.deepcopy(model),
        "latent": latent,
        "optimizer": torch.optim.AdamW([*model.parameters(), latent], lr=0.1),
        "other": torch.optim.SGD([code], lr=0.1, momentum=0.5),
    }
    sum(p.sum() for p in (*model.parameters(), code, latent)).backward()
    state["optimizer"].step()
    state["other"].step()
    state["optimizer"].rank_local = has_own_state
    discovered, names = discover(state), RankLocal(rank_local)
    named = [tensor for _, tensor in names.replicated(discovered)]
    values = names.replicated_values(discovered)
    assert {id(tensor) for tensor in values} == {id(tensor) for tensor in named}
    assert any(tensor is code for tensor in values) is (rank_local != ("other",))
    assert any(tensor is state["optimizer"].state[latent]["exp_avg"] for tensor in values) is not has_own_state


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of several short DDP trainings on each rank."""
    folder = tmp_path_factory.mktemp("guard")
    run_ranks("replica_guard_ranks.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_equal_replicas_train_to_the_end_also_when_their_weights_are_nan(outcomes):
    for rank in outcomes:
        assert rank["none at 0 checked 1"] == "finished 6"
        assert rank["nan at 0 checked 1"] == "finished 6"


@pytest.mark.slow
def test_one_different_bit_is_found_at_the_next_check_on_every_rank(outcomes):
    for rank in outcomes:
        found = rank["one bit at 2 checked 1"]
        assert found.startswith("ReplicaDriftError: after step 3 1 of 9 tensors differ between ranks")
        assert "the first is net.2.weight: rank 0 (" in found
        assert re.search(r"rank 0 \(\S+ at 0\) and rank 1 \(\S+ at 0\) hold different values", found)
        assert "an update that some ranks did not make" in found
        assert "after step 4 " in rank["one bit at 2 checked 4"]


@pytest.mark.slow
def test_two_flipped_signs_are_found_and_named_with_the_first_value(outcomes):
    for rank in outcomes:
        found = rank["two signs at 2 checked 1"]
        assert found.startswith("ReplicaDriftError: after step 3 1 of 9 tensors differ between ranks")
        assert re.search(r"rank 0 \((-?)\S+ at 1\) and rank 1 \((?!\1\d)-?\S+ at 1\)", found)


@pytest.mark.slow
def test_replicas_are_compared_at_steps_that_double_and_with_each_checkpoint(outcomes):
    for rank in outcomes:
        assert "after step 4 1 of 9 tensors differ" in rank["one bit at 2 checked by default"]
        assert "after step 3 1 of 9 tensors differ" in rank["one bit at 2 checked with a checkpoint"]


@pytest.mark.slow
def test_the_end_of_training_is_checked_and_0_disables_the_guard(outcomes):
    for rank in outcomes:
        assert "after step 6 " in rank["one bit at 5 checked 100"]
        assert rank["one bit at 2 checked 0"] == "finished 6"


@pytest.mark.slow
def test_the_likely_cause_depends_on_the_tensor_that_drifted(outcomes):
    for rank in outcomes:
        assert "SyncBatchNorm" in rank["buffer at 1 checked 2"]
        assert "gradients that are not averaged" in rank["all at 1 checked 2"]


@pytest.mark.slow
def test_different_settings_are_named_by_path_and_rank_under_ddp_and_fsdp_2(outcomes):
    """Shards hide the effect of different rates, so under FSDP 2 settings and schedules are compared."""
    for rank in outcomes:
        assert (
            "settings differ between ranks, the first is optimizers[0].param_groups[0].lr"
            in rank["rate at 2 checked 1"]
        )
        assert "lr: rank 0 (0.1) and rank 1 (0.05) hold" in rank["rate at 2 checked 1"]
        assert rank["sharded SharedRate"] == "finished 6"
        assert "after step 1 1 of " in rank["sharded OwnRate"]
        assert 'state["optimizer"].param_groups[0].lr: rank 0 (0.1) and rank 1 (0.05)' in rank["sharded OwnRate"]
        assert 'the first is state["plateau"].best: rank 0 (' in rank["sharded OwnSchedule"]


def swap_rows(values):
    values[[10, 11]] = values[[11, 10]]


def swap_distant_rows(values):
    values[[0, -1]] = values[[-1, 0]]


def flip_two_signs(values):
    values.view(-1)[[1, 3]] *= -1


def flip_the_sign_of_a_zero(values):
    values.view(-1)[5] = -0.0


def change_the_bits_of_a_nan(values):
    values.view(torch.int32).view(-1)[6] ^= 1


def move_a_difference(values):
    values.view(torch.int64).view(-1)[[2, 3]] += torch.tensor([1, -1])


@pytest.mark.parametrize("rows", [100, 20_000], ids=["small", "large"])
@pytest.mark.parametrize(
    "change",
    [
        swap_rows,
        swap_distant_rows,
        flip_two_signs,
        flip_the_sign_of_a_zero,
        change_the_bits_of_a_nan,
        move_a_difference,
    ],
)
def test_guard_snapshot_and_checkpoint_detect_every_change_of_bits(change, rows):
    values = torch.randn(rows, 4)
    values.view(-1)[5:7] = torch.tensor([0.0, torch.nan])
    others = values.clone()
    change(others)

    assert digest(values) != digest(others)
    assert digest(values) == digest(values.clone())
    assert flatten(values, "values").differences(flatten(others, "values")) == ["values"]
    assert content_digests([values]) != content_digests([others])
    assert not torch.equal(device_digest(values), device_digest(others))


@pytest.mark.parametrize("count", [1, 2])
def test_the_digest_of_all_is_that_of_the_values_that_a_view_shows(count):
    numbers = torch.complex(torch.randn(3), torch.randn(3)).conj()
    for view in (numbers, numbers.imag):
        assert digest_of_all([view] * count, view.device) == digest_of_all([view.clone()] * count, view.device)


def test_the_digest_of_all_changes_with_any_tensor_its_shape_and_its_position():
    device = torch.device("cpu")
    tensors = [torch.zeros(2, 3), torch.ones(3, 2), torch.ones(3, dtype=torch.int64), torch.rand(200, 200)]
    tensors += [torch.ones(2, 3), torch.rand(200, 200), torch.rand(100, 100), torch.rand(100, 100)]
    same = digest_of_all([t.clone() for t in tensors], device)

    assert digest_of_all(tensors, device) == same
    assert digest_of_all([tensors[0], tensors[1], tensors[2].view(torch.float64), *tensors[3:]], device) != same
    assert digest_of_all([tensors[1], tensors[0], *tensors[2:]], device) != same
    assert digest_of_all([tensors[0].view(3, 2), *tensors[1:]], device) != same
    assert digest_of_all([*tensors[:2], tensors[2].view(3, 1), *tensors[3:]], device) != same
    assert digest_of_all([*tensors[:6], *tensors[:5:-1]], device) != same
    assert digest_of_all([*tensors, tensors[0]], device) != same
    for i, tensor in enumerate(tensors):
        assert digest_of_all([*tensors[:i], tensor + 1, *tensors[i + 1 :]], device) != same


@pytest.mark.parametrize("count", [1, 3, 8191, 2 * 8192, 2 * 8192 + 1, 50_001])
def test_every_element_counts_in_a_tensor_of_any_length_and_offset(count):
    storage = torch.arange(count + 1, dtype=torch.float32)
    tensor = storage[1:]
    same = digest(tensor)
    assert digest(tensor.clone()) == same
    for place in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[place] += 0.5
        assert digest(other) != same


def test_steps_double_from_the_first_step_of_an_attempt():
    steps, step = [], 100
    while len(steps) < 5:
        step = _next_double(step, 100)
        steps.append(step - 100)

    assert steps == [1, 2, 4, 8, 16]
