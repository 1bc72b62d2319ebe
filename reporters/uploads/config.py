"""Destinations and limits of a run's uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from ...adapter.plumbing.settings import (
    Block,
    NonBlank,
    Rule,
    Seconds,
    example,
    faults_of,
    is_read,
    keys_of,
    value_of,
    variable,
)
from ...adapter.plumbing.text import is_storable
from ...adapter.plumbing.urls import origin_of, safe_url, trusted_origins, url_fault

QUEUE_DIRECTORY = "uploads"
"""Name of the queue in the artifacts directory of a run."""
FILE_STORE, ENDPOINT = "file store", "endpoint"
"""Names of the two destinations that are not in `targets`."""

_TARGET = re.compile(r"hf://[^/@]+/[^/@]+/?(@.*)?|(?!hf:)[^:/]+://.+")
_TOKEN = Rule(
    "a string of printable ASCII characters",
    lambda token: token.isascii() and is_storable(token),
    secret=True,
    code="startup.missing_capability_token",
)


def _is_origin(text: str) -> bool:
    return is_read(origin_of, text if "://" in text else f"https://{text}")


Url: TypeAlias = Annotated[str, Rule("an http:// or https:// URL", lambda url: url_fault(url) is None)]
Target: TypeAlias = Annotated[
    str, Rule("a URL such as hf://owner/name or s3://bucket/folder", lambda url: _TARGET.fullmatch(url) is not None)
]
Origin: TypeAlias = Annotated[str, Rule("origins such as https://hub.example.com, separated by commas", _is_origin)]
CapabilityToken: TypeAlias = Annotated[str, _TOKEN, variable("TRAINER_CAPABILITY_TOKEN")]
FileStore: TypeAlias = Annotated[Url, variable("TENSORHUB_URL")]
TokenOrigins: TypeAlias = Annotated[frozenset[Origin], variable("TRAINER_TOKEN_ORIGINS")]
Deadline: TypeAlias = Annotated[Seconds, variable("TRAINER_UPLOAD_DEADLINE_SECONDS")]


class UploadUrls(Block, frozen=True, kw_only=True):
    """Destinations of results; None means that nothing is sent. URLs may contain credentials and are never shown."""

    metrics_url: Annotated[Url, variable("TRAINER_UPLOAD_METRICS_URL")] | None = None
    """Gets a POST with the metrics at each cadence."""
    checkpoint_url: Annotated[Url, variable("TRAINER_UPLOAD_CHECKPOINT_URL")] | None = None
    """Gets a POST for each durable checkpoint."""
    sample_url: Annotated[Url, variable("TRAINER_UPLOAD_SAMPLE_URL")] | None = None
    """Gets a POST for each sample."""
    terminal_url: Annotated[Url, variable("TRAINER_UPLOAD_TERMINAL_URL")] | None = None
    """Gets one POST when the run has ended."""
    targets: Annotated[tuple[Target, ...], example(["hf://owner/name", "s3://bucket/folder"])] = ()
    """Further destinations for checkpoints and samples."""

    def urls(self) -> dict[str, str]:
        """Return the configured endpoints by field name; they get the token."""
        return {name: url for name in self.__struct_fields__ if name.endswith("_url") and (url := getattr(self, name))}


class UploadConfig(UploadUrls, frozen=True):
    """Destinations, credentials and limits of a run's uploads; a destination that is not set is not used.

    Raises:
        ValueError: A value is invalid. The message lists every invalid value.
    """

    run_id: NonBlank
    queue_dir: str | Path
    """Directory of the queue, best inside the artifacts directory of the run: the queue stores paths relative to the
    parent of its directory, so that uploads still work after that parent was moved."""
    owner: str = ""
    token: CapabilityToken | None = None
    file_store_url: FileStore | None = None
    """Base of the file store; used if `owner` and `token` are also set."""
    token_origins: TokenOrigins = frozenset()
    """Origins that may receive the token, in addition to those of the URLs above."""
    roots: Sequence[str | Path] = ()
    """Folders that may contain files of an earlier process, in addition to the parent of the queue. Files of an earlier
    process outside of these folders are not sent."""
    deadline_s: Deadline = 60.0
    """Seconds to wait for uploads at the end of a run."""
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds without data after which a transfer counts as stalled."""

    def __post_init__(self) -> None:
        if faults := faults_of(self, UploadConfig):
            raise ValueError(" ".join(faults))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **settings: Any) -> UploadConfig:
        """Return the configuration from `environ`, replaced by the `settings` that are not None.

        Raises:
            ValueError: A value is invalid.
        """
        texts = {name: environ.get(key.variable, "").strip() for name, key in keys_of(cls).items() if key.variable}
        values = {name: value_of(keys_of(cls)[name], text) for name, text in texts.items() if text}
        return cls(**{**values, **{name: value for name, value in settings.items() if value is not None}})

    def origins(self) -> frozenset[str]:
        """Return the origins that may receive the token."""
        return trusted_origins(self.urls().values(), self.token_origins)

    def url_of(self, kind: str) -> str | None:
        """Return the endpoint for a ``metrics``, ``checkpoint``, ``sample`` or ``terminal`` message."""
        return self.urls().get(f"{kind}_url")

    def file_store_fault(self) -> str | None:
        """Return why nothing is sent to the configured file store, and the remedy; None if artifacts are sent."""
        required = {"`owner`": self.owner, "`TRAINER_CAPABILITY_TOKEN`": self.token}
        missing = " and ".join(name for name, value in required.items() if not value)
        if not self.file_store_url or not missing:
            return None
        store = safe_url(self.file_store_url)
        return f"no files are sent to the file store {store}: set {missing}, or remove the file store"

    def destinations(self, kind: str) -> tuple[str, ...]:
        """Return the names of all destinations of ``metrics``, ``checkpoint``, ``sample`` or ``terminal``, in order."""
        is_artifact = kind in ("checkpoint", "sample")
        store = [FILE_STORE] if is_artifact and self.file_store_url and self.owner and self.token else []
        targets = map(safe_url, self.targets) if is_artifact else []
        return (*store, *targets, *([ENDPOINT] if self.url_of(kind) else []))

    def lanes(self, kind: str) -> list[tuple[str, ...]]:
        """Return `destinations` in groups that do not wait for each other.

        The message to an endpoint contains the answer of the file store, so these two are in one group.
        """
        names = self.destinations(kind)
        linked = tuple(name for name in names if name in (FILE_STORE, ENDPOINT))
        return [*([linked] if linked else []), *((name,) for name in names if name not in linked)]

    def wants(self, kind: str) -> bool:
        """Return whether ``metrics``, ``checkpoint``, ``sample`` or ``terminal`` has a destination."""
        return bool(self.destinations(kind))
