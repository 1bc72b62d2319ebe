"""Where the artifacts of a run go and with which patience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...adapter.plumbing.urls import parse_origins, safe_url, trusted_origins, url_fault

__all__ = ["ENVIRONMENT", "QUEUE_DIRECTORY", "UploadConfig"]

QUEUE_DIRECTORY = "uploads"
"""Name of the queue within a run's artifacts directory."""


ENVIRONMENT = {
    "token": "TRAINER_CAPABILITY_TOKEN",
    "metrics_url": "TRAINER_UPLOAD_METRICS_URL",
    "checkpoint_url": "TRAINER_UPLOAD_CHECKPOINT_URL",
    "sample_url": "TRAINER_UPLOAD_SAMPLE_URL",
    "terminal_url": "TRAINER_UPLOAD_TERMINAL_URL",
    "file_store_url": "TENSORHUB_URL",
}
"""Which variable sets which field of `UploadConfig`."""


@dataclass(frozen=True)
class UploadConfig:
    """Destinations, credentials and limits of a run's uploads; a destination that is not set is not used.

    URLs are left out of ``repr`` like the token: they may hold a signature.

    Raises:
        ValueError: `run_id` is empty, a number is out of range, a URL is none, or the token cannot be sent; all faults
            are named.
    """

    run_id: str
    queue_dir: str | Path
    """Directory of the queue, best within the run's artifacts: paths inside its parent are kept relative, so that a
    folder that was moved still delivers."""
    owner: str = ""
    token: str | None = field(default=None, repr=False)
    metrics_url: str | None = field(default=None, repr=False)
    checkpoint_url: str | None = field(default=None, repr=False)
    sample_url: str | None = field(default=None, repr=False)
    terminal_url: str | None = field(default=None, repr=False)
    file_store_url: str | None = field(default=None, repr=False)
    """Base of the file store (``TENSORHUB_URL``); used where `owner` and `token` are set too."""
    token_origins: Sequence[str] = ()
    """Further origins that may be sent the token, besides those of the URLs above."""
    targets: Sequence[str] = field(default=(), repr=False)
    """Further destinations of checkpoints and samples: ``hf://owner/name``, or any URL that fsspec opens."""
    roots: Sequence[str | Path] = ()
    """Folders that files of an earlier process may lie in, besides the parent of the queue; files that an
    entry names elsewhere are not sent."""
    deadline_s: float = 60.0
    """Seconds that the end of a run waits for uploads."""
    timeout_s: float = 30.0
    """Seconds without a byte moving after which a transfer counts as stalled."""
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 60.0
    max_pending_metrics: int = 2000
    """Metric entries kept while the endpoint is away; the oldest are dropped first."""

    def __post_init__(self) -> None:
        faults = []
        if not self.run_id.strip():
            faults.append(f"Invalid `run_id`. Expected a non-empty string, but received {self.run_id!r}.")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            received = f"a string of length {len(self.token)}"
            faults.append(f"Invalid `token`. Expected printable ASCII characters, but received {received}.")
        numbers = {"deadline_s": ">=", "backoff_base_s": ">=", "backoff_cap_s": ">="}
        numbers |= {"timeout_s": ">", "max_pending_metrics": ">"}
        for name, relation in numbers.items():
            number = getattr(self, name)
            if number < 0 or (relation == ">" and number == 0):
                faults.append(f"Invalid `{name}`. Expected a number {relation} 0, but received {number}.")
        # Not the URL, which may hold a signature.
        urls = {name: fault for name, url in self.urls().items() if (fault := url_fault(url)) is not None}
        faults += [f"Invalid `{name}`. Expected an http:// or https:// URL, but {urls[name]}." for name in urls]
        if isinstance(self.targets, str):
            faults.append(f"Invalid `targets`. Expected a list of URLs, but received {safe_url(self.targets)!r}.")
        if faults:
            raise ValueError(" ".join(faults))
        self.origins()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> UploadConfig:
        """The configuration that `environ` holds; what is `given` and not None wins.

        Raises:
            ValueError: As the constructor.
        """
        found: dict[str, Any] = {
            name: text for name, key in ENVIRONMENT.items() if (text := environ.get(key, "").strip())
        }
        try:
            found["token_origins"] = parse_origins(environ.get("TRAINER_TOKEN_ORIGINS", ""))
        except ValueError as error:
            raise ValueError(f"Invalid `TRAINER_TOKEN_ORIGINS`. Expected {error}.") from None
        return cls(**{**found, **{name: value for name, value in given.items() if value is not None}})

    def urls(self) -> dict[str, str]:
        """The contract's destinations that are set, by field name."""
        return {name: url for name in ENVIRONMENT if name != "token" and (url := getattr(self, name))}

    def origins(self) -> frozenset[str]:
        """Origins that may be sent the token."""
        return trusted_origins(self.urls().values(), self.token_origins)

    def url_of(self, kind: str) -> str | None:
        """The endpoint for a ``metrics``, ``checkpoint``, ``sample`` or ``terminal`` message."""
        return self.urls().get(f"{kind}_url")

    def stores_files(self) -> bool:
        """Whether the bytes of artifacts go to the file store."""
        return bool(self.file_store_url and self.owner and self.token)

    def lacks_for_files(self) -> str | None:
        """Why no bytes go to the file store that is set, and what to do about it; None where they do."""
        if not self.file_store_url or self.stores_files():
            return None
        lacking = [
            name for name, value in (("`owner`", self.owner), ("`TRAINER_CAPABILITY_TOKEN`", self.token)) if not value
        ]
        store = safe_url(self.file_store_url)
        return f"no files are sent to the file store {store}: set {' and '.join(lacking)}, or leave the store out"

    def wants(self, kind: str) -> bool:
        """Whether anything is to be sent for a ``metrics``, ``checkpoint``, ``sample`` or ``terminal``."""
        if self.url_of(kind):
            return True
        return kind in ("checkpoint", "sample") and (self.stores_files() or bool(self.targets))
