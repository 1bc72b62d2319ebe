"""Errors of a job's settings, collected so that one start shows all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..contract.exceptions import StartupContractError
from ..plumbing.redaction import redact

__all__ = ["ConfigError", "ConfigErrors"]

CODES = (
    "startup.missing_job_spec_path",
    "startup.invalid_job_spec",
    "startup.missing_trainer_import",
    "startup.invalid_artifact_paths",
    "startup.invalid_timeout",
    "startup.missing_capability_token",
)
"""Startup codes of settings. Of several errors the error carries the code that stands first here."""

MOST_SHOWN = 40


@dataclass(frozen=True)
class ConfigError:
    """One thing that is wrong, and the way out."""

    code: str
    text: str
    name: str = ""
    """The setting, if the error is about one."""


@dataclass
class ConfigErrors:
    """Collects errors and warnings while settings are read."""

    found: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, text: str, *, name: str = "", code: str = "startup.invalid_job_spec") -> None:
        """Note an error in free words."""
        self.found.append(ConfigError(code, text, name))

    def concern(self, name: str) -> bool:
        """Whether an error of the setting `name`, or of an element or key of it, was noted."""
        return any(error.name == name or error.name.startswith((f"{name}[", f"{name}.")) for error in self.found)

    def warn(self, text: str) -> None:
        """Note something that has no effect or looks like a mistake."""
        self.warnings.append(text)

    def exception(self, *, secrets: Iterable[str | None] = ()) -> StartupContractError | None:
        """All errors as one exception that holds none of `secrets`; None when there is no error."""
        if not self.found:
            return None
        known = tuple(secrets)
        code = min((error.code for error in self.found), key=CODES.index)
        lines = [error.text if error.code == code else f"{error.code}: {error.text}" for error in self.found]
        if len(lines) > MOST_SHOWN:
            lines = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN} more errors."]
        message = (
            lines[0] if len(lines) == 1 else "\n".join([f"{len(self.found)} errors", *(f"  - {x}" for x in lines)])
        )
        # A misspelled key is often why another one is missing.
        notes = [f"note: {warning}" for warning in self.warnings]
        return StartupContractError(code, redact("\n  ".join([message, *notes]), known))
