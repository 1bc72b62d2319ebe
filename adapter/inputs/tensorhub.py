"""Repositories of a tensor hub: a tag becomes a digest, the digest a list of files, each with its own digest.

Two requests below the base URL describe a repository:

``GET /api/v1/resolve/<owner>/<repo>?tag=<tag>``
    answers ``{"owner", "repo", "digest"}``; the digest is ``sha256:`` and 64 hexadecimal digits.
``GET /api/v1/manifest/<owner>/<repo>/<digest>``
    answers the manifest, ``{"files": [{"path", "sha256", "size_bytes", "url"?}]}``. Its bytes have that digest, so a
    reference with a digest names the same files for ever, whatever the server says.

A file without ``url`` lies at ``/api/v1/file/v1/<owner>/<repo>/<digest>/<path>``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urljoin

import httpx2
import msgspec

from ..contract.exceptions import InputError
from ..contract.types import ResolvedRef
from ..job.refs import CozyRef, parse_ref
from .http import Download, RetryPolicy, download
from .progress import Tracker

__all__ = ["HttpResolveClient", "ManifestFile", "fetch_from_cozy"]

DEFAULT_TAG = "latest"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a repository."""

    path: str
    sha256: str
    size_bytes: int
    url: str | None = None


class Manifest(msgspec.Struct, frozen=True):
    """The files of a repository."""

    files: list[ManifestFile]


class Resolution(msgspec.Struct, frozen=True):
    """The server's answer to a tag."""

    owner: str
    repo: str
    digest: str


@dataclass(frozen=True)
class HttpResolveClient:
    """A `ResolveClient` over HTTP.

    Args:
        base_url: ``TENSORHUB_URL``.
        client: Sends the token to the origins that may have it.
        directory: Where answers are kept while they are read.
    """

    base_url: str
    client: httpx2.Client
    directory: Path
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def resolve(self, *, ref: str) -> ResolvedRef:
        """The digest behind ``cozy:owner/repo[:tag][@digest]``; a digest in the reference is taken as it is.

        Raises:
            AuthError: The server refused the credentials.
            InputError: There is no such repository or tag, or the answer is malformed.
        """
        parsed = parse_ref(ref if ref.startswith("cozy:") else f"cozy:{ref}")
        assert isinstance(parsed, CozyRef)
        if parsed.digest is not None:
            return ResolvedRef(parsed.owner, parsed.repo, _sound_digest(parsed.digest, parsed.label))
        tag = parsed.tag or DEFAULT_TAG
        where = f"{quote(parsed.owner)}/{quote(parsed.repo)}"
        content = self._get(
            f"api/v1/resolve/{where}?tag={quote(tag, safe='')}", f"resolve-{parsed.owner}-{parsed.repo}"
        )
        answer = _decode(content, Resolution, parsed.label)
        return ResolvedRef(answer.owner, answer.repo, _sound_digest(answer.digest, parsed.label))

    def manifest(self, resolved: ResolvedRef) -> list[ManifestFile]:
        """The files of a resolved reference, their URLs absolute.

        Raises:
            InputError: The manifest has another digest, or names a file outside of its repository.
        """
        where = f"{quote(resolved.owner)}/{quote(resolved.repo)}/{quote(resolved.digest)}"
        content = self._get(f"api/v1/manifest/{where}", "manifest", sha256=resolved.digest.removeprefix("sha256:"))
        label = f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}"
        files = _decode(content, Manifest, label).files
        return [self._located(file, where, label) for file in files]

    def _located(self, file: ManifestFile, where: str, label: str) -> ManifestFile:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in file.path:
            raise InputError(f"{label}: its manifest names a file outside of the repository: {file.path!r}.")
        given = file.url or f"api/v1/file/v1/{where}/{quote(file.path)}"
        return msgspec.structs.replace(file, url=urljoin(f"{self.base_url.rstrip('/')}/", given))

    def _get(self, path: str, name: str, sha256: str | None = None) -> bytes:
        target = self.directory / (sha256 or hashlib.sha256(path.encode()).hexdigest()) / f"{name}.json"
        request = Download(urljoin(f"{self.base_url.rstrip('/')}/", path), target, sha256=sha256)
        return download(request, self.client, retry=self.retry).read_bytes()


def _decode(content: bytes, kind: type[Any], label: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise InputError(f"{label}: the server's answer is malformed: {error}.") from None


def _sound_digest(digest: str, label: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise InputError(f"{label}: Expected a digest sha256:<64 hexadecimal digits>, but received {digest!r}.")
    return digest


def fetch_from_cozy(
    ref: CozyRef, resolver: HttpResolveClient, directory: Path, *, tracker: Tracker
) -> tuple[Path, ResolvedRef]:
    """Bring all files of a repository below `directory`; the folder that they are in, and what was resolved."""
    resolved = resolver.resolve(ref=ref.label)
    folder = directory / resolved.owner / resolved.repo / resolved.digest.replace(":", "-")
    for file in resolver.manifest(resolved):
        assert file.url is not None
        request = Download(file.url, folder / file.path, sha256=file.sha256.lower(), size_bytes=file.size_bytes)
        download(request, resolver.client, retry=resolver.retry, tracker=tracker)
    return folder, resolved
