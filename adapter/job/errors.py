"""Errors of a job's settings, collected so that one start shows all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..contract.exceptions import StartupContractError
from ..plumbing.redaction import HIDDEN, redact
from ..plumbing.urls import hide_urls
from .spec import Rule

__all__ = ["ConfigError", "ConfigErrors", "render_text", "render_value"]

CODES = (
    "startup.missing_job_spec_path",
    "startup.invalid_job_spec",
    "startup.missing_trainer_import",
    "startup.invalid_artifact_paths",
    "startup.invalid_timeout",
    "startup.missing_capability_token",
)
"""Startup codes of settings. Of several errors the error carries the code that stands first here."""

LONGEST_VALUE = 80
MOST_SHOWN = 40
_NUMBER_LIKE = re.compile(r"[-+]?(\d{1,12}(\.\d{0,12})?(e[-+]?\d{1,4})?|nan|inf(inity)?)", re.IGNORECASE)


@dataclass(frozen=True)
class ConfigError:
    """One thing that is wrong, and the way out."""

    code: str
    text: str
    name: str = ""
    """The setting, if the error is about one."""


def render_value(value: Any, *, secret: bool = False) -> str:
    """`value` as a message may show it: short, on one line, without credentials of URLs; hidden if `secret`."""
    if secret:
        return HIDDEN
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except (ValueError, RecursionError):
        text = type(value).__name__
    text = hide_urls(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def render_text(value: Any) -> str:
    """A variable's value as a message may show it: a number as it is, of anything else the length alone.

    Variables get mixed up, and then this one holds a token.
    """
    return str(value) if _NUMBER_LIKE.fullmatch(str(value)) else f"a string of length {len(str(value))}"


@dataclass
class ConfigErrors:
    """Collects errors and warnings while settings are read."""

    found: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, text: str, *, name: str = "", code: str = "startup.invalid_job_spec") -> None:
        """Note an error in free words."""
        self.found.append(ConfigError(code, text, name))

    def concern(self, name: str) -> bool:
        """Whether an error of the setting `name` was noted."""
        return any(error.name == name for error in self.found)

    def concern_part(self, name: str) -> bool:
        """Whether an error of the setting `name`, or of an element or key of it, was noted."""
        return any(error.name == name or error.name.startswith((f"{name}[", f"{name}.")) for error in self.found)

    def invalid(self, name: str, rule: Rule, value: Any, *, expected: str = "", variable: str = "") -> None:
        """Note that a setting has a value that does not keep to its rule.

        Args:
            name: The setting.
            rule: Its rule.
            value: The value.
            expected: What was expected, where that is more than the rule says.
            variable: The environment variable that gives it, if any.
        """
        received = render_text(value) if variable else render_value(value, secret=rule.secret)
        text = f"Invalid `{variable or name}`. Expected {expected or rule.expected}, but received {received}."
        self.add(f"{text} {rule.way_out}".rstrip(), name=name, code=rule.code)

    def warn(self, text: str) -> None:
        """Note something that has no effect or looks like a mistake."""
        self.warnings.append(text)

    def exception(self, *, secrets: Iterable[str | None] = ()) -> StartupContractError | None:
        """All errors as one exception that holds none of `secrets`; None when there is no error."""
        if not self.found:
            return None
        known = tuple(secrets)
        code = min((error.code for error in self.found), key=CODES.index)
        lines = [_line(error, code) for error in self.found]
        if len(lines) > MOST_SHOWN:
            lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN} more errors."]
        message = (
            lines[0] if len(lines) == 1 else "\n".join([f"{len(self.found)} errors", *(f"  - {x}" for x in lines)])
        )
        # A misspelled key is often why another one is missing.
        notes = [f"note: {warning}" for warning in self.warnings]
        return StartupContractError(code, redact("\n  ".join([message, *notes]), known))


def _line(error: ConfigError, code: str) -> str:
    return error.text if error.code == code else f"{error.code}: {error.text}"
