"""``genlight VERB THING``: one order of words, with the commands of the things behind it."""

from __future__ import annotations

import pytest

from genlight.adapter.cli import main
from genlight.adapter.cli.command_line import COMMANDS, build_parser
from genlight.adapter.cli.verbs import VERBS, as_command
from genlight.reporters.events.event_log import EventLog


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("list checkpoints runs/a --json", "checkpoint ls runs/a --json"),
        ("show checkpoint runs/a", "checkpoint show runs/a"),
        ("verify checkpoint runs/a", "checkpoint verify runs/a"),
        ("export checkpoints runs/a --to b", "checkpoint export runs/a --to b"),
        ("show events e.jsonl", "events e.jsonl"),
        ("follow events e.jsonl", "events --follow e.jsonl"),
        ("verify events e.jsonl", "events --check e.jsonl"),
        ("list uploads runs/a", "uploads list runs/a"),
        ("retry uploads runs/a --deadline 3", "uploads retry runs/a --deadline 3"),
        ("export upload runs/a --to b", "uploads export runs/a --to b"),
        ("events e.jsonl --check", "events e.jsonl --check"),
        ("run list", "run list"),
        ("list", "list"),
    ],
)
def test_a_verb_and_its_thing_are_a_command(words, meant):
    assert as_command(words.split()) == meant.split()


@pytest.mark.parametrize(("verb", "thing"), [(verb, thing) for verb, things in VERBS.items() for thing in things])
def test_every_verb_leads_to_arguments_that_its_command_takes(verb, thing):
    words = as_command([verb, thing, "path"])
    assert getattr(build_parser(words).parse_args(words), words[0]) is not None


def test_both_orders_say_the_same(tmp_path, capsys):
    with EventLog(tmp_path / "e.jsonl", run_id="r") as log:
        log.started()
        log.completed(step=0, final_checkpoint=None)
    said = []
    for words in (["verify", "events"], ["events", "--check"]):
        assert main([*words, str(tmp_path / "e.jsonl")]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == "sound: 2 events\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "checkpints"], "Did you mean `checkpoints`?"),
        (["retry"], "the following arguments are required: {upl"),
    ],
)
def test_what_a_verb_does_not_take_is_told(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_where_there_are_some(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = capsys.readouterr().out
    for noise in ("default: null", "default: []", "default: False", "()"):
        assert noise not in said
    assert command != "check" or "default: 3" in said


def test_a_completion_that_needs_the_extra_names_it(capsys):
    """As jsonargparse refuses it where shtab is not installed."""
    with pytest.raises(SystemExit, match="2"):
        build_parser().error("argument --print_completion: invalid choice: 'shtab-bash' (choose from 'jsonschema')")
    assert "pip install 'genlight[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_how_it_ends(command, capsys):
    """Not what a folder of code may import, and no markup of a docstring."""
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in said
    assert "``" not in said
    assert "May import" not in said


def test_help_of_run_lists_the_keys_of_a_job_in_groups(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert "\ncadences:\n  metric_every            Steps between metrics" in said
    assert "parquet_paths, batch_size, readahead, columns" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
