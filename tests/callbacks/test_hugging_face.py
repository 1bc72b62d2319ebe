"""A Hugging Face ``Trainer`` and TRL's with `GenlightCallback` are killed, stopped and continued; the real packages."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.ports import free_port

PACKAGES = Path(sys.prefix) / "guides"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None and not (PACKAGES / "trl").is_dir(),
        reason="`make` installs transformers, accelerate and trl into .venv/guides",
    ),
]

PROGRAM = """
# Forks a process for each rank of an attempt, and prints how they ended: these packages take seconds to load.
import json, os, signal, sys, traceback
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer
from genlight.callbacks.hugging_face import GenlightCallback


class Ends(TrainerCallback):
    # Ends its process in a step, or in the save after it: by a signal, or by a mistake.
    def __init__(self, number, step, in_save):
        self.number, self.step, self.in_save = number, step, in_save

    def end(self):
        os.kill(os.getpid(), self.number) if self.number else torch.zeros(1).no_such_method()

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.step and not self.in_save:
            self.end()

    def on_save(self, args, state, control, **_):
        if state.global_step == self.step and self.in_save:
            self.end()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x, y):
        out = self.body(x)
        return {"loss": (out - y).pow(2).mean(), "out": out}


def make(kind, folder, callbacks):
    torch.manual_seed(0)
    settings = dict(
        output_dir=folder, max_steps=32, per_device_train_batch_size=4, save_steps=5, logging_steps=3, seed=7,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.01, save_total_limit=3,
    )
    numbers = torch.Generator().manual_seed(1)
    if kind == "Trainer":
        data = [{"x": row[:2], "y": row[2:]} for row in torch.rand(64, 3, generator=numbers)]
        return Trainer(Net(), TrainingArguments(**settings), train_dataset=data, callbacks=callbacks)
    words = {"<pad>": 0, "<eos>": 1, **{letter: 2 + i for i, letter in enumerate("abcdefgh ")}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(
        vocab_size=len(words), n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1
    )
    data = Dataset.from_dict({"input_ids": torch.randint(2, 11, (64, 8), generator=numbers).tolist()})
    arguments = SFTConfig(**settings, max_length=8, bf16=False)
    model = GPT2LMHeadModel(config)
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokens, callbacks=callbacks)


def train(kind, folder, number, step, in_save):
    callback = GenlightCallback()
    trainer = make(kind, folder, [Ends(number, step, in_save), callback])
    callback.train(trainer)
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), folder + "/end.pt")


def start(rank, attempt):
    if (process := os.fork()) != 0:
        return process
    log = os.open(attempt["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    if attempt["ranks"] > 1:
        os.environ |= {name: str(value) for name, value in {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": attempt["ranks"], "LOCAL_WORLD_SIZE": attempt["ranks"],
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": attempt["port"],
        }.items()}
    code, is_faulty = 1, rank == attempt["ranks"] - 1
    try:
        train(attempt["kind"], attempt["folder"], attempt["number"], attempt["step"] if is_faulty else -1,
              attempt["in_save"])
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


print("ready", flush=True)
for line in sys.stdin:
    attempt = json.loads(line)
    ranks = {start(rank, attempt): rank for rank in range(attempt["ranks"])}
    codes = [None] * len(ranks)
    while None in codes:
        process, status = os.wait()
        codes[ranks[process]] = os.waitstatus_to_exitcode(status)
        if codes[ranks[process]] == -signal.SIGKILL:  # a launcher ends the others, which wait for this one
            for other, rank in ranks.items():
                if codes[rank] is None:
                    os.kill(other, signal.SIGKILL)
    print(json.dumps(codes), flush=True)
"""

Run = Callable[..., tuple[list[int], str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Trains to the end, or until the last rank gets a signal in a step (0: until it fails); exit codes and log."""
    path = os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def attempt(folder: Path, number: int = 0, step: int = -1, **more: Any) -> tuple[list[int], str]:
        log = folder.with_suffix(".log")
        settings = {"kind": "Trainer", "ranks": 1, "in_save": False, "port": free_port(), **more}
        settings |= {"folder": str(folder), "log": str(log), "number": int(number), "step": step}
        server.stdin.write(json.dumps(settings) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        return codes, log.read_text()

    yield attempt
    server.stdin.close()
    server.stdout.close()
    assert server.wait(60) == 0


def weights(folder: Path) -> Any:
    import torch

    state = torch.load(folder / "end.pt", weights_only=True)
    return torch.cat([each.flatten() for each in state.values()])


def ends(folder: Path) -> list[tuple[str, Any]]:
    assert validate_events(folder / "events.jsonl") == []
    kinds = ("started", "completed", "failed")
    return [(e["event"], e.get("step")) for e in read_events(folder / "events.jsonl") if e["event"] in kinds]


@pytest.mark.promise(name="resume")
def test_a_killed_stopped_or_torn_run_continues_to_the_same_weights(tmp_path: Path, run: Run) -> None:
    whole, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    assert run(whole)[0] == [0]

    assert run(killed, signal.SIGKILL, 13)[0] == [-signal.SIGKILL]
    newest = max(killed.glob("checkpoint-*"), key=lambda each: int(each.name[11:]))
    largest = max(newest.iterdir(), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])  # as a crash of the machine leaves it
    code, said = run(killed)
    assert code == [0], said
    assert "checkpoint-10 is skipped" in said
    assert (weights(killed) == weights(whole)).all()
    assert ends(killed) == [("started", None), ("started", None), ("completed", 32)]

    code, said = run(stopped, signal.SIGTERM, 8)
    assert code == [75], said
    assert (stopped / "checkpoint-8" / "genlight.json").is_file(), "saved after the step in which the signal came"
    assert run(stopped)[0] == [0]
    assert (weights(stopped) == weights(whole)).all()
    assert ends(stopped) == [("started", None), ("failed", 8), ("started", None), ("completed", 32)]

    metrics = [e for e in read_events(stopped / "events.jsonl") if e["event"] == "metric"]
    steps = [e["step"] for e in metrics if e["name"] == "train/loss"]
    assert steps == sorted(set(steps)), "no step twice"
    assert {e["step"] for e in metrics if e["name"] == "trainer/resumed_from_step"} == {8}


def test_a_failing_run_has_its_end_in_the_log_and_its_exit_code(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "fails"
    code, said = run(folder, 0, 7)
    assert code == [1]
    assert "no_such_method" in said
    assert ends(folder) == [("started", None), ("failed", 6)]


@pytest.mark.promise(name="resume")
@pytest.mark.parametrize(("kind", "ranks"), [("SFTTrainer", 1), ("Trainer", 2)])
def test_a_checkpoint_of_several_ranks_is_complete_or_absent(tmp_path: Path, run: Run, kind: str, ranks: int) -> None:
    """The last rank is killed in a save, so that this checkpoint has the files of all ranks and no mark."""
    how = {"kind": kind, "ranks": ranks}
    whole, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    code, said = run(whole, **how)
    assert code == [0] * ranks, said

    code, said = run(killed, signal.SIGKILL, 10, in_save=True, **how)
    assert code[-1] == -signal.SIGKILL, said
    assert 0 not in code
    assert (killed / "checkpoint-10").is_dir()
    assert not (killed / "checkpoint-10" / "genlight.json").exists()
    code, said = run(killed, **how)
    assert code == [0] * ranks, said
    assert "checkpoint-10 is skipped" in said
    assert (weights(killed) == weights(whole)).all()
    # A rank that loses the killed one may have reported that before the launcher killed it too.
    attempts = [end for end in ends(killed) if ranks == 1 or end != ("failed", 10)]
    assert attempts == [("started", None), ("started", None), ("completed", 32)]

    code, said = run(stopped, signal.SIGTERM, 8, **how)  # only the last rank gets it
    assert code == [75] * ranks, said
    (step,) = {step for kind, step in ends(stopped) if kind == "failed"}
    saved = stopped / f"checkpoint-{step}"
    states = {f"rng_state_{rank}.pth" for rank in range(ranks)} if ranks > 1 else {"rng_state.pth"}
    assert states <= json.loads((saved / "genlight.json").read_text()).keys()
    if ranks > 1:
        (saved / "rng_state_1.pth").unlink()
    code, said = run(stopped, **how)
    assert code == [0] * ranks, said
    assert (f"checkpoint-{step} is skipped" in said) is (ranks > 1)
    assert (weights(stopped) == weights(whole)).all()
