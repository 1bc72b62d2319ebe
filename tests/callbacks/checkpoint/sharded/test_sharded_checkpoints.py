"""Checkpoints whose slices several ranks write: complete or absent, and readable by any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genlight.adapter.cli.command_line import main as genlight
from genlight.adapter.contract.exceptions import BrokenCheckpointError
from genlight.callbacks.checkpoint import load, load_weights, loading, newest_valid, read_record, verify
from genlight.callbacks.checkpoint.export import export_lightning, export_safetensors
from genlight.callbacks.checkpoint.loading import load_record
from genlight.callbacks.witness.entry import FOLDER
from support import SUPPORT
from support.forked import Forked
from support.messages import refusal

PROGRAM = SUPPORT / "sharded_ranks.py"
STEPS = 7
SAVED = 3
NAMES = [f"{layer}.{name}" for layer in (0, 1, 3) for name in ("weight", "bias")]

pytestmark = [pytest.mark.promise(name="checkpoint"), pytest.mark.slow]


def phases(folder: Path) -> list[dict]:
    """Return the jobs of the ranks, and their directories."""

    def job(key, directory, kind="contract", strategy="fsdp", steps=STEPS, **more):
        return {
            "key": key,
            "directory": str(folder / directory),
            "kind": kind,
            "strategy": strategy,
            "steps": steps,
        } | more

    def module(key, directory, **more):
        return job(key, directory, kind="sharded", accumulate=3, **more)

    two = [
        job("reference", "unused"),
        job("save", "c", every=2, save_at=SAVED),
        job("resume", "c", resume=True),
        module("module reference", "unused"),
        module("module save", "l", save_at=2),
        module("module resume", "l", resume=True),
        job("sharded to ddp", "c", strategy="ddp", steps=SAVED, resume=True),
        job("ddp save", "d", strategy="ddp", save_at=SAVED),
        job("ddp to sharded", "d", steps=SAVED, resume=True),
        module("module ddp save", "ld", strategy="ddp", save_at=2),
        job("module save in the background", "b", kind="sharded", every=2, steps=2),
        module("module ddp to sharded", "ld", steps=2, resume=True),
        module("window", "w", save_after_batch=7),
        module("window resume", "w", resume=True),
        module("ddp reference", "unused", strategy="ddp"),
        module("ddp window", "wd", strategy="ddp", save_after_batch=7),
        module("ddp window resume", "wd", strategy="ddp", resume=True),
        job("save in memory", "m", every=4, memory_every=1, leave_at=6),
        job("resume from memory", "m", resume=True),
        job("full disk", "full", every=2, fail_at=4, fail_rank=1),
        job("full disk for once", "once", every=2, fail_at=4, fail_rank=1, on_error="continue", steps=9),
    ]
    one = [
        job("to one", "c", steps=SAVED, resume=True),
        job("to a single device", "c", strategy="single", steps=SAVED, resume=True),
        job("one save", "one", save_at=SAVED),
    ]
    four = [
        job("to four", "c", steps=SAVED, resume=True),
        job("one to four", "one", steps=SAVED, resume=True),
        job("replicas reference", "unused", kind="replicated", strategy="fsdp in pairs", steps=5),
        job("replicas save", "h", kind="replicated", strategy="fsdp in pairs", steps=5, save_at=2),
        job("replicas resume", "h", kind="replicated", strategy="fsdp in pairs", steps=5, resume=True),
        job("parallel reference", "unused", kind="parallel", strategy="fsdp in pairs", steps=5),
        job("parallel save", "p", kind="parallel", strategy="fsdp in pairs", steps=5, save_at=2),
        job("parallel resume", "p", kind="parallel", strategy="fsdp in pairs", steps=5, resume=True),
    ]
    return [
        {"name": "two", "world_size": 2, "jobs": two},
        {"name": "one", "world_size": 1, "jobs": one},
        {"name": "four", "world_size": 4, "jobs": four},
        {"name": "kill0", "world_size": 2, "jobs": [job("killed", "k0", every=2, kill_at=4, kill_rank=0)]},
        {"name": "after0", "world_size": 2, "jobs": [job("again", "k0", resume=True)]},
        {"name": "kill1", "world_size": 2, "jobs": [job("killed", "k1", every=2, kill_at=4, kill_rank=1)]},
        {"name": "after1", "world_size": 2, "jobs": [job("again", "k1", resume=True)]},
    ]


class Ranks:
    """Results of the ranks of all phases, their exit codes, and the names in the directories of killed jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ended = map(json.loads, (folder / "ended.jsonl").read_text().splitlines())
        self.phases = {phase["phase"]: phase for phase in ended}

    def results(self, phase: str, key: str) -> list[dict]:
        """Return the result of a job on each rank that lived to write it."""
        files = sorted(self.folder.glob(f"{phase}-rank*.pt"))
        return [torch.load(file, weights_only=True)[key] for file in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "phases.json").write_text(json.dumps(phases(folder)))
    process = Forked(str(PROGRAM), folder / "phases.json", environ=os.environ, folder=folder, log=folder / "log")
    assert process.wait(600) == 0, (folder / "log").read_text()
    done = Ranks(folder)
    for name, phase in done.phases.items():
        assert set(phase["codes"]) == {0} or name.startswith("kill"), (folder / "log").read_text()
    return done


@pytest.fixture
def saved(ranks, tmp_path):
    """A copy of a directory with checkpoints of steps 2 and 3 that a test may damage."""
    return Path(shutil.copytree(ranks.folder / "c", tmp_path / "c"))


def assert_same(actual: dict, expected: dict) -> None:
    assert not actual["problem"], actual["problem"]
    for what in ("weights", "moments"):
        assert actual[what].keys() <= expected[what].keys()
        assert all(torch.equal(tensor, expected[what][name]) for name, tensor in actual[what].items())


@pytest.mark.parametrize(
    ("phase", "run", "expected"),
    [
        ("two", "resume", "reference"),
        ("two", "resume from memory", "reference"),
        ("two", "module resume", "module reference"),
        ("two", "window resume", "module reference"),
        ("two", "ddp window resume", "ddp reference"),
        ("four", "replicas resume", "replicas reference"),
        ("four", "parallel resume", "parallel reference"),
    ],
)
def test_a_resumed_run_ends_bit_equal_to_an_uninterrupted_one(ranks, phase, run, expected):
    for actual, reference in zip(ranks.results(phase, run), ranks.results(phase, expected), strict=True):
        assert_same(actual, reference)
        assert actual["steps"] == reference["steps"]
        assert actual["messages"] == []


def test_sharded_checkpoints_in_memory_are_complete_and_removed_at_the_end(ranks):
    assert [result["is_from_memory"] for result in ranks.results("two", "resume from memory")] == [True, True]
    assert not (ranks.folder / "m" / ".memory").exists()


@pytest.mark.parametrize(
    ("phase", "run", "source"),
    [
        ("one", "to one", ("two", "save")),
        ("one", "to a single device", ("two", "save")),
        ("two", "sharded to ddp", ("two", "save")),
        ("four", "to four", ("two", "save")),
        ("four", "one to four", ("one", "one save")),
        ("two", "ddp to sharded", ("two", "ddp save")),
        ("two", "module ddp to sharded", ("two", "module ddp save")),
    ],
)
def test_other_numbers_of_ranks_get_the_same_state_and_a_warning_about_random_states(ranks, phase, run, source):
    (expected, *_), results = ranks.results(*source), ranks.results(phase, run)
    for actual in results:
        assert_same(actual, expected)
    has_other_ranks = len(results) != len(ranks.results(*source))
    assert any("ranks in both runs keep their random states" in text for text in results[0]["messages"]) == (
        has_other_ranks
    )


def test_no_rank_gathers_copies_or_writes_more_than_its_slices(ranks):
    first, second = ranks.results("two", "module save in the background")
    assert first["gathered"] == second["gathered"] == 0
    assert second["copied"] == second["held"], "weights and both moments"
    not_sharded = 32_768  # Random states of both ranks, statistics of the norm, steps of the optimizer.
    assert first["copied"] < first["held"] + not_sharded

    record = verify(ranks.folder / "b" / "step-00000002")
    for rank, result in enumerate((first, second)):
        written = [file.size for file in record.files if f"/rank-{rank:05d}/" in file.path]
        headers_and_index = 16_384
        assert result["held"] < sum(written) < result["held"] + headers_and_index


def test_gradients_of_a_window_are_saved_per_rank_or_once_if_all_are_equal(ranks):
    def gradients(directory, step):
        return load(ranks.folder / directory / f"step-{step:08d}")["genlight"]

    accumulated = gradients("wd", 2)["gradients"]
    assert accumulated[0].keys() == accumulated[1].keys() == {f"body.{name}" for name in NAMES}
    averaged = gradients("d", SAVED)["gradients"]
    assert averaged[0].keys() == {f"model.{name}" for name in NAMES}
    assert averaged[1] == {}
    sharded = gradients("w", 2)
    assert sharded["sharded_gradients"].keys() == accumulated[0].keys()
    assert "gradients" not in sharded


def test_a_resumed_rank_reads_its_own_slices_only(ranks):
    for result in ranks.results("two", "module resume"):
        # Weights and both moments once; the last window was complete, so there are no gradients.
        assert result["read"] == result["held"]
        assert result["gathered"] == 0


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_after_the_same_step(ranks):
    first, second = ranks.results("two", "full disk")

    assert second["problem"].startswith("UnwrittenCheckpointError: checkpoint step-00000004 (")
    assert "No space left on device" in second["problem"]
    assert first["problem"].startswith("CheckpointError: rank 1 could not write its part of step-00000004")
    assert first["steps"] == second["steps"]
    assert sorted(os.listdir(ranks.folder / "full")) == [FOLDER, "step-00000002", "step-00000002.json"]
    verify(ranks.folder / "full" / "step-00000002")


def test_a_run_that_continues_after_a_failed_save_saves_the_next_one(ranks):
    for result in ranks.results("two", "full disk for once"):
        assert (result["problem"], result["steps"]) == ("", 9)
    assert newest_valid(ranks.folder / "once")[0].step == 8


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_the_previous_checkpoint_and_no_debris(ranks, killed):
    phase = ranks.phases[f"kill{killed}"]
    assert phase["codes"][killed] == -signal.SIGKILL
    complete = [FOLDER, "step-00000002", "step-00000002.json"]
    debris = [name for name in phase["left"]["killed"] if name.startswith(".tmp-")]
    assert sorted({*phase["left"]["killed"]} - {*debris}) == complete
    # Debris of step 4, and of step 6 if training got that far while the writer was busy.
    assert bool(debris) == (killed == 0), "only rank 0 clears up"

    resumed, expected = ranks.results(f"after{killed}", "again"), ranks.results("two", "reference")

    for actual, reference in zip(resumed, expected, strict=True):
        assert_same(actual, reference)
    assert sorted(os.listdir(ranks.folder / f"k{killed}")) == complete


def part(directory: Path, name: str = "model.safetensors", rank: int = 1, step: int = SAVED) -> Path:
    return directory / f"step-{step:08d}" / f"rank-{rank:05d}" / name


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def take_the_part_of_another_save(directory):
    shutil.rmtree(part(directory).parent)
    shutil.copytree(part(directory, step=2).parent, part(directory).parent)


def swap_the_parts(directory):
    first, second = part(directory, rank=0).parent, part(directory, rank=1).parent
    aside = first.rename(first.with_name("aside"))
    second.rename(first)
    aside.rename(second)


DAMAGES = {
    "flip_header": lambda directory: flip(part(directory), 0.01),
    "flip_slice": lambda directory: flip(part(directory), 0.9),
    "flip_moment": lambda directory: flip(part(directory, "training_state.safetensors", rank=0), 0.5),
    "flip_index": lambda directory: flip(directory / f"step-{SAVED:08d}" / "slices.json", 0.5),
    "cut_short": lambda directory: os.truncate(part(directory), 100),
    "lose_a_file": lambda directory: part(directory).unlink(),
    "lose_a_part": lambda directory: shutil.rmtree(part(directory).parent),
    "take_the_part_of_another_save": take_the_part_of_another_save,
    "swap_the_parts": swap_the_parts,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_detected_and_the_previous_checkpoint_is_used(saved, damage):
    DAMAGES[damage](saved)

    for use in (verify, load, load_weights):
        if use is not load_weights or damage != "flip_moment":
            with refusal(BrokenCheckpointError):
                use(saved / "step-00000003")
    record, warnings = newest_valid(saved)
    assert record.step == 2
    assert len(warnings) == 1
    assert ("slices.json" if damage == "flip_index" else "rank-0000") in warnings[0]


def test_a_slice_that_is_damaged_after_verification_is_detected_when_it_is_read(saved, monkeypatch):
    record = read_record(saved / "step-00000003.json")
    of_other_rank = load_record(record, share=(0, 2))
    monkeypatch.setattr(loading, "free_memory", lambda: 0)
    loading.read_ahead(record)
    not_kept = load_record(record, share=(1, 2))
    flip(part(saved), 0.99)

    for checkpoint in (of_other_rank, not_kept):
        with refusal(BrokenCheckpointError):
            sum(value.sum() for value in checkpoint["state_dict"].values())


def test_slices_are_loaded_from_the_memory_in_which_they_were_proven(saved, monkeypatch):
    record = read_record(saved / "step-00000003.json")
    expected = load_record(record)["state_dict"]
    monkeypatch.setenv("RANK", "1")
    loading.read_ahead(record)
    loaded = [load_record(record, share=share)["state_dict"] for share in ((0, 2), (1, 2))]
    shutil.rmtree(part(saved).parent)

    for name, value in expected.items():
        assert all(torch.equal(values[name] + 0, value) for values in loaded)
    assert not loading._slices_ahead


def test_a_rank_verifies_only_its_share_of_the_files(saved):
    flip(part(saved, rank=1), 0.99)
    record = read_record(saved / "step-00000003.json")

    for share in ((0, 2), (0, 4), (1, 4), (3, 4)):
        load_record(record, share=share)
    for share in ((1, 2), (2, 4), (0, 1)):
        with pytest.raises(BrokenCheckpointError):
            load_record(record, share=share)


def test_exports_are_complete(ranks, tmp_path):
    expected = ranks.results("two", "save")[0]["weights"]
    path = ranks.folder / "c" / "step-00000003"

    weights = load_file(export_safetensors(path, tmp_path / "complete.safetensors", strip_prefix="model."))
    checkpoint = torch.load(export_lightning(path, tmp_path / "complete.ckpt"), weights_only=True)

    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in weights.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint["state_dict"].items())
    assert checkpoint["state_dict"].keys() == expected.keys()
    moments = checkpoint["optimizer_states"][0]["state"][0]
    assert tuple(moments["exp_avg"].shape) == tuple(expected["model.0.weight"].shape)


def test_the_command_line_shows_complete_tensors_and_verifies_every_part(ranks, saved, capsys):
    assert genlight(["checkpoints", "show", str(saved), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert tensors["model.safetensors:model.0.weight"] == ["F32", [301, 8]]
    assert not any("rank-" in name for name in tensors)

    assert genlight(["checkpoints", "verify", str(saved)]) == 0
    DAMAGES["flip_slice"](saved)
    assert genlight(["checkpoints", "verify", str(saved)]) == 1
    assert "broken: step-00000003/rank-00001/model.safetensors" in capsys.readouterr().out
