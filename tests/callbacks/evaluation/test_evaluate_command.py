"""A command scores durable checkpoints during training, and always ends, whatever it does."""

import csv
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger

from genlight.adapter import EvaluationError
from genlight.callbacks import Checkpoint, EvaluateCommand, Hook, LogMetrics
from genlight.callbacks.evaluation.evaluate_command import ScoreCommand
from genlight.callbacks.hook.events import run_state_of
from support.messages import refusal
from support.score_waiting import WaitsForScores

PATIENCE_S = 120.0


def program(folder: Path, body: str) -> list[str]:
    """A command that imports `sys`, `json`, `os`, `time` and `signal`, then runs `body`."""
    path = folder / "score.py"
    path.write_text("import json, os, signal, sys, time\n" + textwrap.dedent(body))
    return [sys.executable, str(path)]


def run_score_command(arguments: list[str], *, time_limit_s: float) -> dict[str, float]:
    command = ScoreCommand(arguments, SimpleNamespace(step=1, path=Path("step-1.json")), time_limit_s=time_limit_s)
    while not command.is_over():
        time.sleep(0.01)
    return command.scores()


class Heard(Hook):
    reads = ("eval_scores",)

    def __init__(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []

    def on_scores(self, trainer, pl_module, scores, step):
        self.scores.append((step, dict(scores)))


SCORES_THE_STEP = """
    record = json.load(open(sys.argv[1]))
    print("loaded", sys.argv[1])
    print(json.dumps({"val/step": record["step"], "rank": float("RANK" in os.environ)}))
"""


def test_scores_belong_to_the_step_of_the_checkpoint(fit, counting_trainer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    evaluate, heard = EvaluateCommand(program(tmp_path, SCORES_THE_STEP)), Heard()
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=1)

    trainer, _ = fit(
        counting_trainer(),
        [LogMetrics(1), heard, WaitsForScores(evaluate), evaluate, checkpoint],
        steps=7,
        logger=CSVLogger(tmp_path / "log", "", ""),
        enable_checkpointing=True,
    )

    steps = [step for step, _ in heard.scores]
    assert steps == sorted(set(steps))
    assert steps[-1] == 7  # the final checkpoint; the end of the fit waits for its score
    assert len(steps) > 1
    assert heard.scores == [(step, {"val/step": float(step), "rank": 0.0}) for step in steps]
    assert run_state_of(trainer).eval_scores == heard.scores[-1][1]
    rows = list(csv.DictReader((tmp_path / "log" / "metrics.csv").read_text().splitlines()))
    sent = [(int(row["step"]), float(row["val/step"])) for row in rows if row["val/step"]]
    assert sent == sorted(sent)
    assert {score for _, score in sent} <= set(steps)  # of those that come after the same step the newest stays
    assert sent[-1] == (7, 7.0)  # although no step follows
    assert trainer.callback_metrics["val/step"] == 7


def test_one_command_runs_at_a_time_while_the_newest_checkpoint_waits(fit, counting_trainer, tmp_path) -> None:
    go = tmp_path / "go"
    command = program(
        tmp_path,
        f"""
        step = json.load(open(sys.argv[1]))["step"]
        with open({str(tmp_path / "begun")!r}, "a") as begun:
            begun.write(str(step) + "\\n")
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        json.load(open(sys.argv[1]))
        print(json.dumps({{"step": step}}))
        """,
    )

    class LetsGo(Hook):
        def on_train_end(self, *_):
            go.touch()

    evaluate, heard = EvaluateCommand(command), Heard()
    checkpoint = Checkpoint(
        tmp_path / "c", every_n_steps=2, keep_last=1, keep_best=0, asynchronous=False, save_final=False
    )
    fit(counting_trainer(), [evaluate, checkpoint, heard, LetsGo()], steps=9, enable_checkpointing=True)

    assert heard.scores == [(2, {"step": 2.0}), (8, {"step": 8.0})]
    assert (tmp_path / "begun").read_text().split() == ["2", "8"]


def test_a_critical_failure_ends_the_run(fit, counting_trainer, tmp_path) -> None:
    evaluate = EvaluateCommand(program(tmp_path, "os.kill(os.getpid(), 9)"), critical=True)
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=1)
    with refusal(EvaluationError):
        fit(counting_trainer(), [evaluate, WaitsForScores(evaluate), checkpoint], enable_checkpointing=True)


def test_a_failing_run_ends_the_command(fit, counting_trainer, tmp_path) -> None:
    command = program(tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    evaluate = EvaluateCommand(command)
    begun = threading.Event()

    class Fails(Hook):
        critical = True

        def on_train_batch_end(self, *_):
            while evaluate._running is not None and not _text(tmp_path / "pid"):
                begun.wait(0.01)
            if _text(tmp_path / "pid"):
                raise RuntimeError("broke")

    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=1, asynchronous=False)
    with refusal(RuntimeError):
        fit(counting_trainer(), [evaluate, checkpoint, Fails()], enable_checkpointing=True)
    assert not _lives(int(_text(tmp_path / "pid")))


def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path) -> None:
    command = program(
        tmp_path,
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child}}")
        while True:
            time.sleep(1)
        """,
    )
    running = ScoreCommand(command, SimpleNamespace(step=1, path=Path("step-1.json")), time_limit_s=3)
    running._ends_at = time.monotonic() + PATIENCE_S  # its time is over once both processes run
    while len(_text(tmp_path / "pids").split()) < 2 and not running.is_over():
        time.sleep(0.01)
    running._ends_at = 0.0
    assert running.is_over()
    with refusal(EvaluationError):
        running.scores()
    pids = [int(pid) for pid in _text(tmp_path / "pids").split()]
    assert len(pids) == 2
    assert not any(_lives(pid) for pid in pids)


def test_children_of_a_command_do_not_delay_its_scores(tmp_path) -> None:
    command = program(
        tmp_path,
        f"""
        child = os.fork()
        if not child:
            time.sleep(1000)
        open({str(tmp_path / "pids")!r}, "w").write(str(child))
        print(json.dumps({{"score": 1}}))
        """,
    )
    assert run_score_command(command, time_limit_s=PATIENCE_S) == {"score": 1.0}
    assert not _lives(int(_text(tmp_path / "pids")))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "printed nothing"),
        ("print('rubbish')", r"printed 'rubbish' \(.*; its last line must be a JSON object"),
        ("print('[' * 100000)", "must be a JSON object"),
        ("print('{\"a\": true}')", "got `bool` - at "),
        ('print(\'{"a": NaN, "b": true, "c": "x"}\')', "must be a JSON object of finite numbers"),
        ("sys.stdout.buffer.write(bytes(range(256)))", "must be a JSON object"),
        ("raise ValueError('no such layer')", "ended with exit code 1: (.|\n)*ValueError: no such layer"),
    ],
)
def test_invalid_output_is_one_clear_error(tmp_path, body, said) -> None:
    with pytest.raises(EvaluationError, match=said):
        run_score_command(program(tmp_path, body), time_limit_s=PATIENCE_S)


def test_a_command_that_cannot_be_started_is_refused(fit, counting_trainer) -> None:
    with refusal(EvaluationError):
        run_score_command(["/nowhere/score"], time_limit_s=PATIENCE_S)
    for command in ([], "score 'it"):
        with refusal(ValueError):
            EvaluateCommand(command)
    with refusal(EvaluationError):  # there are no checkpoints to score
        fit(counting_trainer(), [EvaluateCommand("true")])


def test_a_waiting_checkpoint_is_scored_although_the_one_before_failed(fit, counting_trainer, tmp_path) -> None:
    command = program(
        tmp_path,
        """
        step = json.load(open(sys.argv[1]))["step"]
        time.sleep(0.5)
        print(json.dumps({"step": step}) if step == 3 else "rubbish")
        """,
    )
    evaluate, heard = EvaluateCommand(command), Heard()
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=2)
    fit(counting_trainer(), [evaluate, checkpoint, heard], steps=3, enable_checkpointing=True)

    assert heard.scores == [(3, {"step": 3.0})]
    assert sum(evaluate.failures.values()) == 1


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _lives(pid: int) -> bool:
    """Whether a process that was killed is still there after a patient while; one that nobody has reaped is not."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
        time.sleep(0.02)
    return True
