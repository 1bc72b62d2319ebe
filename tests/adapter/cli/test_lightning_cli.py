"""``genlight fit``: refusals and their messages, results, and resume."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from genlight.adapter.cli import main
from genlight.adapter.run.folder import lock_directory
from genlight.callbacks.checkpoint import read_record
from genlight.callbacks.stop.signals import REASON_OF_SIGNAL
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events

TRAINER = """
import signal
from pathlib import Path

from support.trainer_class import Counts


class Trainer(Counts):
    pass


class Scored(Counts):
    def evaluate(self, state, ctx):
        return {"steps done": state["steps"]}


class Collects(Counts):
    def rollout(self, state, ctx):
        return [1, 2]


class Files(Counts):
    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        Path(output_dir, "file").write_text(f"files of step {step}")

    def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx):
        Path("loaded").write_text(Path(checkpoint_dir, "file").read_text())


class Unmade(Counts):
    def __init__(self):
        raise ValueError("of the constructor")


class Signalled(Counts):
    def __init__(self):
        signal.raise_signal(signal.SIGTERM)


class Fails(Counts):
    def train_step(self, batch, state, ctx):
        raise ValueError("of the trainer's own")


class FailsAtTwo(Counts):
    def train_step(self, batch, state, ctx):
        if state["steps"] == 1:
            raise ValueError("of the second step")
        return super().train_step(batch, state, ctx)
"""


def cut_off(record):
    """Break the record of a checkpoint, but keep its beginning."""
    record.write_bytes(record.read_bytes()[:40])


@pytest.fixture
def own_signals():
    """Signals are handled as before, although a command that has run takes them until the end of its process."""
    before = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def genlight(tmp_path, monkeypatch, capsys, caplog, own_signals):
    """Run ``genlight`` in a folder with a configuration; return its exit code and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's own use of it
    (tmp_path / "fit_trainers.py").write_text(TRAINER)

    def run(command="fit", *arguments, plugin="fit_trainers:Trainer", callback=None, **trainer):
        arguments = [command, "--config", "fit.yaml", *arguments]
        checkpoint = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "c", **(callback or {})}}
        config = {
            "trainer": {"max_steps": 1, "accelerator": "cpu", "logger": False, "callbacks": [checkpoint], **trainer},
            "model": {"class_path": "genlight.adapter.ContractModule", "init_args": {"plugin": plugin}},
            "data": {"class_path": "genlight.adapter.MockDataModule", "init_args": {"batches": [1]}},
        }
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["genlight", *arguments])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr().err + "".join(f"{record.getMessage()}\n" for record in caplog.records)
        return code, said

    return run


def _stock(name, **arguments):
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments}


def test_files_of_a_fit_are_closed_to_other_users(genlight, tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        for again in ([], ["--resume", "never"]):
            code, said = genlight("fit", *again, logger=_event_logger())
            assert code == 0, said
    finally:
        os.umask(before)
    made = [path for folder in ("c", "logs") for path in (tmp_path / folder, *(tmp_path / folder).rglob("*"))]
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def _event_logger():
    return {"class_path": "genlight.reporters.EventLogger", "init_args": {"path": "logs/a/events.jsonl"}}


def _made(name, **arguments):
    return {"class_path": f"genlight.{name}", "init_args": arguments}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plugin": "fit_trainers:Trianer"}, "has no 'Trianer'; trainers in it: "),
        ({"callback": {"every_n_steps": -3}}, "Invalid `every_n_steps`. Expected a number >= 0, but received -3."),
        ({"callback": {"every_n_step": 3}}, "callbacks.Checkpoint': Option 'every_n_step' is not accepted"),
        ({"max_time": "x"}, "`Timer(duration='x')` is not a valid duration."),
        ({"precision": "bf17"}, "`trainer.precision`: Expected int or "),
        ({"logger": "no.Such"}, "`trainer.logger`: Problem with given class_path 'no.Such': No module named 'no'"),
        ({"logger": [{"class_path": "WandbLogger"}]}, "WandbLogger': Requirement 'wandb>=0.12.10' not met. HINT: Try "),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: the trainer class owns gradient accumulation"),
        ({"barebones": True, "logger": True}, "`Trainer(barebones=True, logger=True)` was passed."),
        ({"command": "predict"}, "Trainer is a trainer class and cannot predict; `predict` takes a LightningModule"),
        ({"command": "validate"}, "Trainer has no `evaluate(state, ctx)` to validate or test with."),
        ({"command": "test"}, "Trainer has no `evaluate(state, ctx)` to validate or test with."),
        ({"callback": {"dirpath": "fit.yaml/c"}}, "`dirpath` 'fit.yaml/c' cannot be written: Not a directory"),
        ({"callback": {"dirpath": "fit.yaml"}}, "'fit.yaml' cannot be written: it is not a directory. Choose another."),
        ({"default_root_dir": "fit.yaml/x", "callbacks": []}, "`trainer.default_root_dir` 'fit.yaml/x' cannot"),
        ({"logger": _made("reporters.EventLogger", path="fit.yaml/e", run_id="r")}, "or write to another file"),
        ({"val_check_interval": 9}, "`val_check_interval` (9) must be less than or equal to the number of"),
        ({"devices": -7}, "`devices` selected with `CPUAccelerator` should be an int > 0."),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_short_error_and_exit_code_2(genlight, given, said):
    code, words = genlight(given.pop("command", "fit"), **given)

    assert code == 2
    assert said in words
    assert "Traceback" not in words
    assert len(words.splitlines()) < 6, words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ckpt_path none.json", "there is nothing at none.json; name the JSON record of a checkpoint"),
        ("--ckpt_path fit.yaml", "fit.yaml is not a checkpoint; name the JSON record of a checkpoint, or the folder"),
        ("--resume never --ckpt_path c", "--ckpt_path and --resume contradict each other; remove one of them"),
        ("--resume auto --trainer.callbacks null", "--resume auto needs the callback genlight.callbacks.Checkpoint in"),
        ("--resume aut", "invalid choice: 'aut' (choose from 'auto', 'never'). Did you mean `auto`?"),
        ("--confg x", "unrecognized arguments: --confg x. Did you mean `--config`?"),
        ("--model.plugn x", "ContractModule': Option 'plugn' is not accepted"),
        ("--config trainr.yaml", "does not accept option 'trainr.max_steps'"),
        ("a.yaml", "unrecognized arguments: a.yaml. Name a configuration by --config"),
        ("--config job.json", "If the configuration is a job, start it with `genlight run`"),
        ("--config none.yaml", "File does not exist: '{}/none.yaml'"),
        ("--config=none.yaml", "File does not exist: '{}/none.yaml'"),
        ("-c none.yaml", "File does not exist: '{}/none.yaml'"),
        ("--config .", "Path is not a file: '{}/.'"),
        ("--config rows.parquet", "The configuration 'rows.parquet' is not text: 'utf-8' codec can't decode byte"),
        ("--config tab.yaml", "cannot start any token"),
        ("--config list.yaml", "Unexpected config: - a"),
        ("--config empty.yaml", "Unexpected config: "),
        ("--config twice.yaml", "the key 'a' appears twice\n  in \"<unicode string>\", line 3, column 5"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_short_error_and_exit_code_2(genlight, tmp_path, arguments, said):
    for name, content in {
        "trainr.yaml": b"trainr: {max_steps: 3}",
        "job.json": b'{"run_id": "r", "trainer": "m:T", "max_steps": 1}',
        "rows.parquet": b"PAR1\xff",
        "tab.yaml": b"trainer:\n\tx: 1",
        "list.yaml": b"- a\n- b",
        "empty.yaml": b"",
        "twice.yaml": b"t:\n  - a: 1\n    a: 3",
    }.items():
        (tmp_path / name).write_bytes(content)

    code, words = genlight("fit", *arguments.split())

    assert code == 2
    assert said.format(tmp_path) in words
    assert "Traceback" not in words
    assert len(words.splitlines()) < 6, words


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("not_python:T", 'model-load failure:   File "{}/not_python.py", line'),
        ("fit_trainers:Unmade", "ValueError: of the constructor\n  the complete traceback is in failures"),
    ],
)
def test_an_error_of_a_trainers_constructor_is_reported_without_jsonargparses_errors(genlight, tmp_path, plugin, said):
    (tmp_path / "not_python.py").write_text("def (\n")
    code, words = genlight("fit", plugin=plugin)
    assert code == 1
    assert said.format(tmp_path) in words
    assert "jsonargparse" not in words


def test_an_error_of_the_trainer_is_logged_with_its_own_frames_and_a_file_with_the_rest(genlight, tmp_path):
    """The report is like the one of `genlight run`."""
    code, words = genlight("fit", plugin="fit_trainers:Fails")
    assert code == 1
    (whole,) = (tmp_path / "c" / "failures").iterdir()
    told = words.partition("train-step failure: ")[2].splitlines()
    assert told[1].endswith(", in train_step")
    assert told[2] == """    raise ValueError("of the trainer's own")"""
    assert told[3] == "ValueError: of the trainer's own"
    assert told[4] == f"  the complete traceback is in c/failures/{whole.name}"
    assert "trainer/call.py" in whole.read_text()


def test_each_attempt_of_a_fit_leaves_its_configuration_next_to_the_checkpoints(genlight, tmp_path):
    """A file in the working directory would belong to whichever fit came last."""
    assert genlight(max_steps=3)[0] == 0
    assert genlight("fit", "--resume", "auto", max_steps=4)[0] == 0
    assert genlight("fit", callback={"dirpath": "other"}, max_steps=5)[0] == 0
    steps = [
        yaml.safe_load((tmp_path / name).read_text())["trainer"]["max_steps"]
        for name in ("c/config-1.yaml", "c/config-2.yaml", "other/config-1.yaml")
    ]
    assert steps == [3, 4, 5]
    assert not list(tmp_path.glob("config*"))
    code, words = genlight("fit", "--config", "c/config-1.yaml", "--resume", "never")
    assert code == 0, words


@pytest.mark.parametrize("callbacks", [{}, {"callbacks": []}], ids=["saves", "saves nothing"])
def test_a_fit_that_is_stopped_at_its_start_reports_it_and_does_not_train(genlight, callbacks):
    code, words = genlight(plugin="fit_trainers:Signalled", **callbacks)
    assert code == 75
    assert ("stopped: preempted. No step was trained. To continue:\n  genlight fit" in words) != bool(callbacks)
    assert "With the callback genlight.callbacks.Checkpoint there would be" in words or not callbacks
    assert "fit completed" not in words


def test_a_fit_that_starts_over_does_not_mix_with_earlier_files(genlight, tmp_path):
    """A fit that fails early would be resumed from the end of the one before it."""
    often = {"every_n_steps": 1}
    assert genlight(callback=often, max_steps=3)[0] == 0
    code, words = genlight("fit", "--resume", "never", plugin="fit_trainers:FailsAtTwo", callback=often, max_steps=3)
    assert code == 1, words
    assert sorted(path.name for path in (tmp_path / "c").glob("*.json")) == ["step-00000001.json"]
    (aside,) = (tmp_path / "c").glob("before-*")
    assert read_record(aside / "c" / "final.json").step == 3

    code, words = genlight("fit", "--resume", "auto", callback=often, max_steps=3)
    assert code == 0, words
    assert "fit completed at step 3" in words


def test_a_fit_with_overlap_repeats_the_steps_up_to_the_newest_checkpoint(genlight, caplog):
    caplog.set_level(logging.INFO)
    often = {"every_n_steps": 1, "save_final": False}
    assert genlight(callback=often, max_steps=3)[0] == 0

    code, words = genlight("fit", "--resume", "auto", callback={**often, "overlap": True}, max_steps=4)

    assert code == 0, words
    assert "continuing after step 2" in words
    assert "step 3, repeated after the restart, has every value of step-00000003" in words


def test_a_configuration_needs_no_data_if_the_model_has_its_own(genlight, tmp_path):
    code, words = genlight("fit", "--data", "null", plugin="fit_trainers:Collects")
    assert code == 0, words
    assert (tmp_path / "c" / "final.json").exists()

    code, words = genlight("fit", "--data", "null", "--resume", "never")
    assert code == 2
    assert "`train_dataloader` must be implemented" in words
    assert "Traceback" not in words


def test_lightnings_timer_can_be_configured_and_a_configuration_may_be_text(genlight):
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:10:00"}}
    text = "trainer: &x {max_steps: 3, <<: {log_every_n_steps: 3}}"
    code, words = genlight("fit", "--config", text, callbacks=[timer])

    assert code == 0, words


def test_the_end_of_an_older_runtimes_run_is_not_trained_further(genlight, tmp_path):
    """Its record has no step; the step checkpoint next to it would be trained to the end again."""
    (tmp_path / "c").mkdir()
    for name, facts in [("step-00000001", {"step": 1}), ("final", {"final": True})]:
        (tmp_path / "c" / f"{name}.json").write_text(json.dumps({**facts, "run_id": "r", "state": {"steps": 1}}))
    counts = {"plugin": "fit_trainers:Trainer", "max_steps": 2}

    code, words = genlight("fit", "--resume", "auto", **counts)
    assert code == 2
    assert "has the final checkpoint of an older runtime: there is nothing to train" in words
    assert sorted(path.name for path in (tmp_path / "c").glob("*.json")) == ["final.json", "step-00000001.json"]

    code, words = genlight("fit", "--ckpt_path", "c/step-00000001.json", callback={"dirpath": "new"}, **counts)
    assert code == 0, words
    assert json.loads((tmp_path / "new" / "final.json").read_text())["step"] == 2


def test_checkpoints_of_an_earlier_fit_are_replaced_only_on_request(genlight, tmp_path):
    assert genlight()[0] == 0
    record = tmp_path / "c" / "final.json"
    first = record.read_bytes()

    code, words = genlight()
    assert code == 2
    assert (
        "'c' holds checkpoints already: continue from them with `--resume auto`, choose another `dirpath`, or" in words
    )
    assert record.read_bytes() == first
    assert genlight("fit", "--resume", "never")[0] == 0
    assert record.read_bytes() != first


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_two_fits_at_once_do_not_share_a_folder_of_checkpoints(genlight, tmp_path, resume):
    (tmp_path / "c").mkdir()
    held = lock_directory(tmp_path / "c", "another")
    try:
        code, words = genlight("fit", *resume)
    finally:
        held.release()
    assert code == 2
    assert f"c' is in use by a live run (process {os.getpid()} on " in words

    assert genlight("fit")[0] == 0
    lock_directory(tmp_path / "c", "the next").release()  # given back


def test_a_fit_ends_with_its_outcome_and_the_paths_of_its_results(genlight):
    """Like `genlight run`; a fit that was complete reports that it trained nothing."""
    logger = {"class_path": "genlight.reporters.EventLogger"}

    code, said = genlight("fit", logger=logger)
    assert code == 0, said
    assert "fit completed at step 1\n  final checkpoint  c/final.json\n  checkpoints       c\n" in said
    assert "  events            events.jsonl\n" in said

    code, said = genlight("fit", "--resume", "auto", logger=logger)
    assert code == 0, said
    assert "the fit had already completed at step 1; there was nothing to train\n  final checkpoint" in said


def test_a_resumed_fit_names_its_checkpoint_and_the_skipped_ones(genlight, tmp_path, caplog):
    caplog.set_level("INFO", logger="genlight")
    often = {"callback": {"every_n_steps": 1}}
    assert genlight(**often)[0] == 0

    assert genlight("fit", "--resume", "auto", **often)[0] == 0
    assert "continuing after step 1, from c/final.json" in caplog.messages

    caplog.clear()
    cut_off(tmp_path / "c" / "final.json")
    assert genlight("fit", "--resume", "auto", **often)[0] == 0
    assert "checkpoint final is broken" in caplog.text
    assert "continuing after step 1, from c/step-00000001.json" in caplog.messages

    caplog.clear()
    for record in (tmp_path / "c").glob("*.json"):
        cut_off(record)
    code, words = genlight("fit", "--resume", "auto", **often)
    assert code == 2
    assert "no checkpoint in 'c' can be resumed from: checkpoint final is broken" in words
    assert "Restore one, or move them aside and start at step 0 with `--resume never`." in words
    assert genlight("fit", "--resume", "never", **often)[0] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [("c", "{}/c/final.json"), ("last", "{}/c/final.json"), ("best", "best")],
    ids=["c", "last", "best"],
)
def test_a_fit_continues_from_a_named_checkpoint_and_logs_it(genlight, caplog, tmp_path, given, told):
    caplog.set_level("INFO", logger="genlight")
    files = {"plugin": "fit_trainers:Files"}
    assert genlight(**files)[0] == 0
    (tmp_path / "best.json").write_text("{}")  # is not what `best` means
    caplog.clear()

    assert genlight("fit", "--ckpt_path", given, max_steps=2, **files)[0] == 0
    assert f"continuing after the checkpoint {told.format(tmp_path)}" in caplog.messages
    assert (tmp_path / "loaded").read_text() == "files of step 1"
    assert read_record(tmp_path / "c" / "final.json").step == 2


def test_the_final_checkpoint_of_a_fit_is_not_a_later_one_of_another_fit(genlight):
    counts = {"plugin": "fit_trainers:Trainer", "callback": {"every_n_steps": 1, "keep_last": 9}}
    assert genlight(**counts, max_steps=5)[0] == 0
    assert genlight("fit", "--resume", "auto", **counts, max_steps=6)[0] == 0  # the final one of step 5 gets its name

    code, words = genlight("fit", "--ckpt_path", "c/step-00000002.json", **counts, max_steps=3)
    assert (code, read_record("c/final.json").step) == (0, 3)
    assert "fit completed at step 3\n  final checkpoint  c/final.json\n" in words


def test_the_command_that_continues_a_fit_from_a_named_checkpoint_takes_its_own_newest_one(genlight, tmp_path):
    often = {"every_n_steps": 1}
    assert genlight(callback=often)[0] == 0
    given = ("--ckpt_path", "c/final.json", "--trainer.callbacks.dirpath", "other")
    code, words = genlight("fit", *given, plugin="fit_trainers:FailsAtTwo", callback=often, max_steps=3)
    assert code == 1
    (told,) = [line.split() for line in words.splitlines() if line.startswith("  genlight fit")]
    assert told[-4:] == ["--ckpt_path", "null", "--resume", "auto"]

    code, words = genlight("fit", *told[4:], callback=often, max_steps=3)
    assert code == 0, words
    assert read_record(tmp_path / "other" / "final.json").step == 3


def test_a_contract_trainer_is_evaluated_newly_built_or_from_a_checkpoint(genlight, caplog):
    caplog.set_level("INFO", logger="genlight")
    events = {"class_path": "genlight.reporters.EventLogger", "init_args": {"path": "e.jsonl", "run_id": "r"}}
    counts = {"plugin": "fit_trainers:Scored", "logger": events}
    assert genlight(**counts)[0] == 0

    for arguments, score, told in (
        ([], 0.0, "using the newly built model; to use a checkpoint, add --ckpt_path or --resume auto"),
        (["--ckpt_path", "c/final.json"], 1.0, None),
        (["--resume", "auto"], 1.0, "using step 1, from c/final.json"),
    ):
        caplog.clear()
        assert genlight("validate", *arguments, **counts)[0] == 0
        assert told in [None, *caplog.messages]
        metrics = [event for event in read_events("e.jsonl") if event["event"] == "metric"]
        assert (metrics[-1]["name"], metrics[-1]["value"], metrics[-1]["step"]) == ("steps done", score, int(score))
    assert validate_events("e.jsonl") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fit --ckpt_path last", "no checkpoint in c can be read: final: its record final.json is not JSON"),
        ("test --resume auto", "checkpoint final is broken: {}. Restore one, or name another by `--ckpt_path`."),
        ("validate --ckpt_path none.json", "there is nothing at none.json"),
    ],
)
def test_without_a_complete_checkpoint_nothing_starts_at_step_0(genlight, tmp_path, caplog, words, said):
    scored = {"plugin": "fit_trainers:Scored"}
    assert genlight(**scored)[0] == 0
    (tmp_path / "c" / "final.json").write_text("{")
    caplog.set_level("INFO")

    code, told = genlight(*words.split(), **scored)
    assert code == 2
    assert all(part in told for part in said.split("{}"))
    assert "using the checkpoint" not in told
    assert (tmp_path / "c" / "final.json").read_text() == "{"


def test_predictions_use_the_named_checkpoint_or_the_newest(genlight, caplog):
    caplog.set_level("INFO")
    model = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--data", "null"]
    assert genlight("fit", *model)[0] == 0
    for arguments, said in (
        (["--resume", "auto"], "using step 1, from c/final.json"),
        (["--ckpt_path", "c"], "using the checkpoint "),
        ([], "using the newly built model"),
    ):
        code, words = genlight("predict", *model, *arguments)
        assert (code, said in words) == (0, True), words


COLLATED = """
from genlight.adapter.feed.collate import to_torch
from support.trainer_class import Counts


class Sums(Counts):
    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch["x"].sum()
"""


@pytest.mark.parametrize("collate", ["torch", "collated:to_torch"])
def test_the_configuration_that_a_fit_saves_collates_as_that_fit_did(genlight, tmp_path, collate):
    (tmp_path / "collated.py").write_text(COLLATED)
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "x.parquet")
    data = ["genlight.adapter.ArrowDataModule", "--data.parquet_paths", "x.parquet", "--data.collate", collate]

    code, words = genlight("fit", "--data", *data, plugin="collated:Sums")

    assert (code, "serialize" in words) == (0, False), words
    saved = yaml.safe_load((tmp_path / "c" / "config-1.yaml").read_text())
    assert saved["data"]["init_args"]["collate"] == collate


@pytest.mark.parametrize(
    ("option", "value"),
    [("collate", "collated:nope"), ("batch_size", "0")],
)
def test_an_option_of_the_data_that_cannot_be_used_is_one_error_without_a_traceback(genlight, tmp_path, option, value):
    (tmp_path / "collated.py").write_text(COLLATED)
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "x.parquet")
    data = ["genlight.adapter.ArrowDataModule", "--data.parquet_paths", "x.parquet", f"--data.{option}", value]

    code, words = genlight("fit", "--data", *data, plugin="collated:Sums")

    assert code == 2
    assert f"Invalid `{option}`." in words
    assert "Traceback" not in words


SHORT_NAMES = """
import jsonargparse
from lightning.pytorch.callbacks import Callback
import genlight.adapter.cli.lightning_cli, genlight.adapter.run.training
parser = jsonargparse.ArgumentParser()
parser.add_argument("--callback", type=Callback)
chosen = parser.parse_args(["--callback=EarlyStopping", "--callback.monitor=loss"])
assert chosen.callback.class_path == "lightning.pytorch.callbacks.EarlyStopping", chosen
"""


def test_the_imports_of_the_command_line_leave_short_names_of_callbacks_to_lightning():
    subprocess.run([sys.executable, "-W", "ignore", "-c", SHORT_NAMES], check=True, timeout=240)
