"""Standard output and error of the command line, whoever reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genlight.adapter.cli import command_line, main

LOOKS = """
import os, sys
from genlight.adapter.cli.terminal import fill_closed_descriptors, ignoring_broken_pipe
fill_closed_descriptors()
with ignoring_broken_pipe():
    for number in range(1000):
        print("to output", number)
        print("to error", number, file=sys.stderr)
    sys.stdout.buffer.write(b"bytes")
    with open(sys.argv[1], "w") as file:
        file.write("not a standard stream" if file.fileno() > 2 else "in place of one")
"""


def ended(tmp_path, **streams):
    """Exit code of a process that writes a thousand lines to both streams, and the text that it wrote to a file."""
    file = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", LOOKS, file], **streams, timeout=120, check=False)
    return done.returncode, file.read_text()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_training_continues_when_nobody_reads_its_output_or_the_disk_is_full(tmp_path, stream):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        streams = dict.fromkeys(("stdout", "stderr"), full) | {stream: writer}
        assert ended(tmp_path, **streams) == (0, "not a standard stream")
    os.close(writer)


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_no_file_of_a_run_takes_the_place_of_a_closed_stream(tmp_path, closed):
    def close():
        for descriptor in closed:
            os.close(descriptor)

    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    assert ended(tmp_path, preexec_fn=close, **streams) == (0, "not a standard stream")


def test_output_arrives_complete_and_in_order(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, tmp_path / "file"], capture_output=True, timeout=120, check=True
    )
    assert done.stdout.decode() == "".join(f"to output {number}\n" for number in range(1000)) + "bytes"
    assert done.stderr.decode() == "".join(f"to error {number}\n" for number in range(1000))


HOSTILE = "\x1b]0;owned\x07\u202egnp\x9b31m"


def test_no_character_of_a_file_controls_the_terminal(tmp_path, capsys):
    """A log or a checkpoint from elsewhere could hide a line, or write into the clipboard."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": HOSTILE, HOSTILE: 1}) + "\n", encoding="utf-8")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001.json").write_text(json.dumps({"step": 1, "run_id": HOSTILE, "state": {HOSTILE: HOSTILE}}))
    (folder / "step-00000002.json").write_text(json.dumps({"step": HOSTILE, HOSTILE: 1, "state": 3}))
    (tmp_path / HOSTILE).mkdir()
    for words in (
        *(["events", tmp_path, *option] for option in ([], ["--check"], ["--metrics"], ["--json"])),
        *(["checkpoints", action, folder] for action in ("list", "verify", "show")),
        *(["checkpoints", action, tmp_path / HOSTILE / "x"] for action in ("list", "verify", "show")),
        ["uploads", "list", tmp_path / HOSTILE],
        ["check", HOSTILE],
        ["doctor", tmp_path / HOSTILE],
    ):
        main([str(word) for word in words])
        written = "".join(capsys.readouterr())
        assert written
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(written), words


def test_every_line_of_a_command_is_written_by_the_terminal_module():
    """Two commands may write raw text of their user: the script for sbatch, the configuration of `genlight fit`."""
    folder = Path(command_line.__file__).parent
    own = [path for path in folder.rglob("*.py") if path.name not in ("terminal.py", "parser.py", "lightning_cli.py")]
    writers = sorted(
        path.name
        for path in own
        if re.search(r"(?<![.])\bprint\(|std(out|err)\.write", path.read_text(encoding="utf-8"))
    )
    assert writers == ["slurm.py"]
