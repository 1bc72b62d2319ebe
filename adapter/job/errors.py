"""Faults of a job's settings, collected so that one start shows all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..contract.exceptions import StartupContractError
from ..plumbing.redaction import HIDDEN, redact
from ..plumbing.urls import hide_urls

__all__ = ["Fault", "FaultList", "render_value"]

CODES = (
    "startup.missing_job_spec_path",
    "startup.invalid_job_spec",
    "startup.missing_trainer_import",
    "startup.invalid_artifact_paths",
    "startup.invalid_timeout",
    "startup.missing_capability_token",
)
"""Startup codes of settings. Of several faults the error carries the code that stands first here."""

LONGEST_VALUE = 80
MOST_SHOWN = 40


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and the way out."""

    code: str
    text: str
    name: str = ""
    """The setting, if the fault is about one."""


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


@dataclass
class FaultList:
    """Collects faults and warnings while settings are read."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, text: str, *, name: str = "", code: str = "startup.invalid_job_spec") -> None:
        """Note a fault in free words."""
        self.faults.append(Fault(code, text, name))

    def concern(self, name: str) -> bool:
        """Whether a fault of the setting `name` was noted."""
        return any(fault.name == name for fault in self.faults)

    def concern_part(self, name: str) -> bool:
        """Whether a fault of the setting `name`, or of an element or key of it, was noted."""
        return any(fault.name == name or fault.name.startswith((f"{name}[", f"{name}.")) for fault in self.faults)

    def invalid(
        self,
        name: str,
        expected: str,
        value: Any,
        *,
        way_out: str = "",
        code: str = "startup.invalid_job_spec",
        secret: bool = False,
    ) -> None:
        """Note that the setting `name` has a value that cannot be used."""
        received = render_value(value, secret=secret)
        text = f"Invalid `{name}`. Expected {expected}, but received {received}."
        self.add(f"{text} {way_out}".rstrip(), name=name, code=code)

    def warn(self, text: str) -> None:
        """Note something that has no effect or looks like a mistake."""
        self.warnings.append(text)

    def error(self, *, secrets: Iterable[str | None] = ()) -> StartupContractError | None:
        """All faults as one exception that holds none of `secrets`; None when there is no fault."""
        if not self.faults:
            return None
        known = tuple(secrets)
        code = min((fault.code for fault in self.faults), key=CODES.index)
        lines = [_line(fault, code) for fault in self.faults]
        if len(lines) > MOST_SHOWN:
            lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN} more faults."]
        message = (
            lines[0] if len(lines) == 1 else "\n".join([f"{len(self.faults)} faults", *(f"  - {x}" for x in lines)])
        )
        # A misspelled key is often why another one is missing.
        notes = [f"note: {warning}" for warning in self.warnings]
        return StartupContractError(code, redact("\n  ".join([message, *notes]), known))


def _line(fault: Fault, code: str) -> str:
    return fault.text if fault.code == code else f"{fault.code}: {fault.text}"
