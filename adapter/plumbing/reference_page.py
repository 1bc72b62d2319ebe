"""Paths of the reference pages that are installed with the package."""

from __future__ import annotations

import os
from typing import Final, Literal

_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PAGES: Final = {"a-jobs-keys": "job_reference.md", "all-commands": "commands.md", "the-hooks": "README.md"}


def reference(section: Literal["a-jobs-keys", "all-commands", "the-hooks"]) -> str:
    """Return the path of the page that has a section, with the section's anchor."""
    return f"{os.path.join(_FOLDER, _PAGES[section])}#{section}"
