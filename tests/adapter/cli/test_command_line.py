"""The command line: its commands, its errors, and the time that it needs for both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import shtab

from genlight.adapter.cli.command_line import COMMANDS, LIGHTNING_COMMANDS, completion_parser, main
from genlight.reporters import read_events

OURS = [name for name in COMMANDS if name not in LIGHTNING_COMMANDS]


@pytest.fixture
def genlight(tmp_path):
    """Run ``genlight`` in an empty folder, without variables that name a job."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}

    def run(*arguments, stdout=subprocess.PIPE, stdin=None, **more):
        return subprocess.run(
            [sys.executable, "-c", "import sys; from genlight.adapter.cli import main; sys.exit(main())", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            input=stdin,
            text=True,
            cwd=tmp_path,
            env={**environ, **more},
            timeout=120,
            check=False,
        )

    return run


def test_help_names_every_command_also_without_a_command(capsys):
    for words in ([], ["--help"]):
        with contextlib.suppress(SystemExit):
            assert main(words) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"^  {name}\b", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("words", [["events"], ["uploads", "list"], ["checkpoints", "list"], ["doctor"]], ids=" ".join)
def test_a_path_that_the_system_refuses_is_reported_without_a_traceback(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    too_long = "x" * 300

    assert main([*words, too_long]) == 2
    out, err = capfd.readouterr()
    assert too_long in out + err
    assert "File name too long" in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["events", "none"], "no event log at none; name the folder of a run, or its event log"),
        (["uploads", "list", "none"], "there is no directory none; name the folder of a run"),
        (["uploads", "list", "data.parquet"], "data.parquet is not a directory; name the folder of a run"),
        (
            ["checkpoints", "list", "data.parquet"],
            "data.parquet is not a checkpoint; name the JSON record of a checkpoint, or the folder",
        ),
        (["checkpoints", "show", "none"], "there is nothing at none; name the JSON record of a checkpoint"),
        (
            ["check", "fit.yaml"],
            " is not JSON: Expecting value: line 1 column 1 (char 0). A LightningCLI ",
        ),
        (["run", "fit.yaml"], " is not JSON: Expecting value: line 1 column 1 (char 0). A LightningCLI "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_path_is_reported_as_typed_with_the_way_out(words, said, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    (tmp_path / "fit.yaml").write_text("trainer: {}")

    assert main(words) == 2
    shown = capsys.readouterr().err + caplog.text
    assert said in shown
    assert "Errno" not in shown


def test_ctrl_c_while_the_command_line_is_being_imported_ends_it_without_a_traceback():
    script = (
        "import builtins, sys\n"
        "from genlight.adapter.cli import main\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *more):\n"
        "    if name == 'argparse': raise KeyboardInterrupt\n"
        "    return real(name, *more)\n"
        "builtins.__import__ = interrupted\n"
        "sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_job_spec_may_come_through_a_pipe_whose_paths_are_relative_to_the_working_directory(genlight, tmp_path):
    spec = {"run_id": "piped", "trainer": "m:T", "max_steps": 1, "dataset": {"parquet_paths": ["no.parquet"]}}

    done = genlight("run", "-", stdin=json.dumps(spec))
    assert done.returncode == 1
    assert f"There is no file '{tmp_path}/no.parquet' that this user can read." in done.stderr

    done = genlight("run", "/dev/stdin", stdin=json.dumps({**spec, "max_steps": 0}))
    assert done.returncode == 2
    *_, last = read_events(tmp_path / "runs" / "piped" / "metrics" / "events.jsonl")
    assert "Invalid `max_steps`" in last["error"]

    done = genlight("run", "-", stdin="")

    assert done.returncode == 2
    assert "is empty; a pipe can be read once, and each process of a run reads its job spec" in done.stderr


@pytest.mark.parametrize(
    ("words", "name", "value"), [(["run", "job.json"], "RANK", ""), (["fit", "--help"], "SLURM_PROCID", "abc")]
)
def test_a_rank_that_is_no_number_is_reported_without_lightnings_traceback(genlight, tmp_path, words, name, value):
    (tmp_path / "job.json").write_text('{"run_id": "r", "trainer": "m:T", "max_steps": 1}')

    done = genlight(*words, **{name: value})
    assert done.returncode == 2
    assert f"Invalid `{name}`. Expected a rank (a whole number from 0), as launchers set it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_cannot_start_leaves_one_failed_event_if_it_has_a_folder(genlight, tmp_path):
    (tmp_path / "job.json").write_text('{"run_id": "r", "max_steps": 0}')

    done = genlight("run", "job.json", TRAINER_EVENTS_PATH=str(tmp_path / "events.jsonl"))

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert done.returncode == 2
    assert [(event["event"], event["category"], event["step"]) for event in events] == [("failed", "startup", 0)]


@pytest.mark.parametrize("name", OURS)
def test_help_has_purpose_exit_codes_and_defaults_of_a_command(name, capsys):
    """No markup of a docstring."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in said
    for noise in ("default: None", "default: []", "default: False", "()", "``"):
        assert noise not in said
    assert name != "check" or "default: 7" in said


def test_a_completion_script_knows_commands_and_their_options():
    script = shtab.complete(completion_parser(), "bash")

    assert all(name in script for name in COMMANDS)
    assert "--allow-changed" in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "invalid choice: 'rnu' (choose from "),
        (["rnu"], ". Did you mean `run`?"),
        (["train"], ". Did you mean `run`?"),
        (["kill", "runs/a"], ". Did you mean `stop`?"),
        (["check", "m:T", "--steps", "0"], "argument --steps: expected a number >= 1, but received 0"),
        (["compare", "job.json", "--rtol", "nan"], "argument --rtol: expected a number >= 0, but received nan"),
        (["run", "job.json", "--fesh"], "unrecognized arguments: --fesh. Did you mean `--fresh`?"),
        (["checkpoints", "lst", "x"], "Did you mean `list`?"),
        (["events"], "are required: RUN\n"),
        (["uploads"], "usage: genlight uploads "),
    ],
)
def test_a_usage_error_suggests_the_nearest_name_for_the_right_command(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)

    assert end.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(("words", "more"), [([], {}), ([""], {"TRAINER_JOB_SPEC_PATH": "other.json"})])
def test_without_a_name_of_a_job_nothing_is_run(genlight, words, more):
    done = genlight("run", *words, **more)

    assert done.returncode == 2
    assert "startup.missing_job_spec_path: No job file was given." in done.stderr


@pytest.fixture
def directory_of_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.json").write_text('{"step": 1, "state": {"note": "\u2026"}}')
    return tmp_path


def test_a_listing_escapes_characters_that_the_terminal_lacks(genlight, directory_of_checkpoints):
    ascii_terminal = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = genlight("checkpoints", "show", str(directory_of_checkpoints), **ascii_terminal)

    assert done.returncode == 0, done.stderr
    assert "note: \\u2026" in done.stdout


@pytest.mark.parametrize("arguments", [("checkpoints", "list", "{}"), ("--help",)])
def test_a_listing_ends_quietly_when_its_reader_has_gone(genlight, directory_of_checkpoints, arguments):
    reader, writer = os.pipe()
    os.close(reader)

    done = genlight(*(word.format(directory_of_checkpoints) for word in arguments), stdout=writer)

    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_listing_that_cannot_be_written_fails_and_says_why(genlight, directory_of_checkpoints):
    with open("/dev/full", "wb") as full:
        done = genlight("checkpoints", "list", str(directory_of_checkpoints), stdout=full)

    assert done.returncode == 1
    assert done.stderr == "genlight: the output cannot be written: No space left on device\n"


def test_the_command_runs_as_a_module_too():
    """The console script may not be on the path, as in a container that only calls python."""
    for module in ("genlight", "genlight.adapter.cli"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
        version = f"genlight {metadata.version('genlight')} (lightning {metadata.version('lightning')}"
        assert (done.returncode, done.stdout[: len(version)]) == (0, version)


@pytest.mark.parametrize(
    ("words", "section"),
    [([], "all-commands"), (["run"], "a-jobs-keys"), (["doctor"], "a-jobs-keys"), (["check"], "the-hooks")],
)
def test_help_names_the_reference(words, section, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])

    path, _, anchor = capsys.readouterr().out.splitlines()[-1].rpartition(": ")[2].partition("#")
    assert anchor == section
    assert f"## {section.replace('-', ' ')}" in Path(path).read_text().lower().replace("'", "")


@pytest.mark.parametrize(
    ("job", "section"), [({"max_steps": "x"}, "a-jobs-keys"), ({"trainer": "no_such_module_at_all:T"}, "the-hooks")]
)
def test_an_error_in_a_job_names_the_reference(job, section, tmp_path, caplog):
    whole = {"run_id": "r", "trainer": "m:T", "max_steps": 1, "mock_batches": [1]} | job
    (tmp_path / "job.json").write_text(json.dumps(whole))

    with caplog.at_level("INFO"):
        assert main(["run", str(tmp_path / "job.json")]) == 2

    assert any(f".md#{section}" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_messages_of_lightning_appear_once(genlight):
    """Its logger has a handler in addition to the one that shows our messages."""
    done = genlight(
        *("fit", "--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--seed_everything", "3"),
        *("--trainer.accelerator", "cpu", "--trainer.fast_dev_run", "true", "--data", "null"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Seed set to 3") == 1
