"""Damage of any kind is detected before a tensor is used, and the previous checkpoint is used instead."""

import os
import random
import shutil

import pytest
import torch

from genlight.adapter.contract.exceptions import BrokenCheckpointError
from genlight.callbacks.checkpoint import RecordMeta, load, newest_valid, save, verify

pytestmark = pytest.mark.promise(name="checkpoint")

STEPS = (1, 2)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine")
    for step in STEPS:
        torch.manual_seed(step)
        checkpoint = {
            "global_step": step,
            "state_dict": {"a": torch.randn(300), "b": torch.randn(7, 3).bfloat16()},
            "optimizer_states": [{"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.zeros(300)}}}],
            "genlight": {"state": {"seen": list(range(40)), "table": torch.arange(50)}},
        }
        save(directory / f"step-{step:08d}", checkpoint, meta=RecordMeta(run_id="r", max_steps=9))
    return directory


def files_of(directory, step):
    name = f"step-{step:08d}"
    return [directory / f"{name}.json", *sorted((directory / name).iterdir())]


def flip_a_bit(path, chance, _):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path, chance, _):
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path, chance, _):
    with open(path, "ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 100)))


def fill_with_zeros(path, chance, _):
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randrange(1, 600))
    if not any(data[start:end]):
        start, end = 0, len(data)
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def take_from_the_other_checkpoint(path, chance, directory):
    if path.parent == directory:
        flip_a_bit(path, chance, directory)  # A record under another name describes itself, so that is no damage.
        return
    other = directory / "step-00000001" / path.name
    if other.read_bytes() == path.read_bytes():
        truncate(path, chance, directory)
    else:
        shutil.copyfile(other, path)


def swap_within_the_checkpoint(path, chance, directory):
    other = chance.choice([file for file in files_of(directory, 2) if file != path])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def remove(path, chance, directory):
    if path.parent == directory:
        path.write_bytes(b"")  # Without a record there would be no checkpoint.
    else:
        path.unlink()


DAMAGES = [
    *[flip_a_bit] * 6,
    truncate,
    append,
    fill_with_zeros,
    take_from_the_other_checkpoint,
    swap_within_the_checkpoint,
    remove,
]


@pytest.mark.timeout(7200)  # The long run has 10,000 trials.
def test_damage_is_detected_and_the_previous_checkpoint_is_used(pristine, tmp_path, is_long):
    work = tmp_path / "c"
    good = load(pristine / "step-00000001")
    shutil.copytree(pristine, work)
    for trial in range(10_000 if is_long else 400):
        chance = random.Random(trial)
        files = files_of(work, 2)
        path = chance.choices(files, [file.stat().st_size for file in files])[0]
        damage = chance.choice(DAMAGES)
        damage(path, chance, work)

        for check in (verify, load):
            with pytest.raises(BrokenCheckpointError):
                check(work / "step-00000002.json")
        record, warnings = newest_valid(work)
        assert record.step == 1, f"trial {trial}"
        assert "step-00000002" in warnings[0]

        for file in files_of(pristine, 2):
            shutil.copyfile(file, work / file.relative_to(pristine))
    assert torch.equal(load(record.path)["state_dict"]["a"], good["state_dict"]["a"])


def test_every_bit_of_a_small_record_matters(tmp_path):
    path = save(tmp_path / "a", {"genlight": {"state": {"é": 1.5}}}, meta=RecordMeta(run_id="r")).path
    data = path.read_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(BrokenCheckpointError):
                verify(path)
