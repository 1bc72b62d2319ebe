"""The help of each command, and what it offers for a word that it does not know."""

from __future__ import annotations

import pytest

from genlight.adapter.cli import main
from genlight.adapter.cli.command_line import COMMANDS, LIGHTNING_COMMANDS
from support.messages import refusal

OURS = [name for name in COMMANDS if name not in LIGHTNING_COMMANDS]


@pytest.mark.parametrize("command", OURS)
def test_help_says_what_a_command_does_how_it_ends_and_defaults_where_there_are_some(command, capsys):
    """No markup of a docstring."""
    with refusal(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in said
    for noise in ("default: None", "default: []", "default: False", "()", "``"):
        assert noise not in said
    assert command != "check" or "default: 7" in said
