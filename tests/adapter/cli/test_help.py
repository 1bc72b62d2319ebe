"""The help of each command, and the suggestions for unknown words."""

from __future__ import annotations

import pytest

from genlight.adapter.cli import main
from genlight.adapter.cli.command_line import COMMANDS, LIGHTNING_COMMANDS
from support.messages import refusal

OURS = [name for name in COMMANDS if name not in LIGHTNING_COMMANDS]


@pytest.mark.parametrize("command", OURS)
def test_help_has_purpose_exit_codes_and_defaults_of_a_command(command, capsys):
    """No markup of a docstring."""
    with refusal(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in said
    for noise in ("default: None", "default: []", "default: False", "()", "``"):
        assert noise not in said
    assert command != "check" or "default: 7" in said
