"""The wording of errors, tested in one place: `tests/messages.json` has each message that a test provokes.

A test says which type of error it expects and checks its fields; `refusal` compares the message with the catalogue::

    with refusal(InputError):
        feed.open()

After a message was changed on purpose, ``make messages`` writes the catalogue again; its diff shows the new wording.
"""

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from genlight.adapter.plumbing.text import shortened

TESTS = Path(__file__).resolve().parents[1]
CATALOGUE = TESTS / "messages.json"
PINNED = ((3, 11), "2.13.0", "2.6.6")
"""Python, torch and Lightning that the catalogue was written with; others word their own errors differently."""

LONGEST = 2000
"""Characters of a message that the catalogue keeps."""

Catalogue = dict[str, dict[str, list[str]]]
"""The messages of each test, in the order in which they appear, by file and name."""


class Messages:
    """The catalogue, and the messages of the tests that this process has run."""

    def __init__(self, *, writing: bool) -> None:
        self.writing = writing
        self.expected: Catalogue = json.loads(CATALOGUE.read_text()) if CATALOGUE.exists() else {}
        self.seen: Catalogue = {}

    def check(self, error: BaseException) -> None:
        """Compare the message of `error`, the next one of the running test, with the catalogue."""
        file, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
        file = file.removeprefix("tests/")
        seen = self.seen.setdefault(file, {}).setdefault(name, [])
        seen.append(shortened(f"{type(error).__name__}: {_without_places(str(error))}", LONGEST))
        if self.writing or _versions() != PINNED:
            return
        expected = self.expected.get(file, {}).get(name, [])[len(seen) - 1 : len(seen)]
        assert seen[-1:] == expected, "the message is not the one in tests/messages.json; see `make messages`"

    def merge(self, seen: Catalogue) -> None:
        """Add the messages of another process."""
        for file, tests in seen.items():
            self.seen.setdefault(file, {}).update(tests)

    def write(self) -> None:
        """Write the catalogue: new messages for the tests that ran, the recorded ones for those that did not."""
        catalogue: Catalogue = {}
        for file in {*self.expected, *self.seen}:
            source = (TESTS / file).read_text() if (TESTS / file).exists() else ""
            tests = {**self.expected.get(file, {}), **self.seen.get(file, {})}
            catalogue[file] = {
                name: messages for name, messages in tests.items() if f"def {name.partition('[')[0]}(" in source
            }
        catalogue = {file: tests for file, tests in catalogue.items() if tests}
        CATALOGUE.write_text(json.dumps(catalogue, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@contextmanager
def refusal(*types: type[BaseException]) -> Iterator[Any]:
    """Expect one of `types` and compare its message with the catalogue; yields pytest's `ExceptionInfo`.

    Raises:
        AssertionError: The message is not the recorded one.
    """
    with pytest.raises(types) as caught:
        yield caught
    pytest.messages.check(caught.value)  # type: ignore[attr-defined]  # set by tests/conftest.py


def _versions() -> tuple[tuple[int, int], str, str]:
    return sys.version_info[:2], version("torch").partition("+")[0], version("lightning")


_TEMPORARY = re.escape(os.path.realpath(tempfile.gettempdir()))
_PLACES = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(_TEMPORARY + r"/pytest-of-\w+/pytest-\d+/(?:popen-gw\d+/)?[\w.-]+?\d+(?![\w-])"), "TMP"),
    (re.compile(_TEMPORARY + r"/pytest-of-\w+/pytest-\d+(?:/popen-gw\d+)?"), "TMP"),
    (re.compile(_TEMPORARY + r"/tmp\w{8}"), "TMP"),
    (re.compile(r"(\.tmp-[\w.-]+)-\d+-[0-9a-f]{8}\b"), r"\1-N"),
    (re.compile(re.escape(str(TESTS.parent))), "REPOSITORY"),
    (re.compile(re.escape(sys.prefix)), "PREFIX"),
    (re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+"), r"\1:PORT"),
    (re.compile(r"\b(process|pid) \d+"), r"\1 N"),
    (re.compile(r'", line \d+, in '), '", line N, in '),
    (re.compile(r"[\d,.]+ MB free"), "N MB free"),
    (re.compile(r"(\.tmp-[\w.-]+?)-\d+-[0-9a-f]{8}\b"), r"\1-N"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "HOST"),
)
"""Parts of a message that differ from run to run or from machine to machine, and the words that replace them."""


def _without_places(message: str) -> str:
    for pattern, word in _PLACES:
        message = pattern.sub(word, message)
    return message
