"""Repositories of a tensor hub: a tag becomes a digest, the digest a list of files, each with its own digest.

Two requests below the base URL describe a repository:

``GET /api/v1/resolve/<owner>/<repo>?tag=<tag>``
    answers ``{"owner", "repo", "digest"}``; the digest is ``sha256:`` and 64 hexadecimal digits.
``GET /api/v1/manifest/<owner>/<repo>/<digest>``
    answers the manifest, ``{"files": [{"path", "sha256", "size_bytes"}]}``. Its bytes have that digest, so a reference
    with a digest names the same files for ever, whatever the server says.

A file lies at ``/api/v1/file/v1/<owner>/<repo>/<digest>/<path>``; the server may redirect from there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from ..contract.exceptions import InputError
from ..contract.types import ResolvedRef
from .http import Download, Transport, download
from .refs import CozyRef, parse_ref

__all__ = ["HttpResolveClient", "ManifestFile"]

DEFAULT_TAG = "latest"
PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[\w.+=@~#,() -]{1,255}")
"""A part of a path that means the same to each system, server and terminal."""
LARGEST_ANSWER_BYTES = 64 << 20


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a repository."""

    path: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Manifest(msgspec.Struct, frozen=True):
    """The files of a repository."""

    files: list[ManifestFile]


class Resolution(msgspec.Struct, frozen=True):
    """The server's answer to a tag."""

    owner: str
    repo: str
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]


# Made here, in one thread; see `http`.
_MANIFEST, _RESOLUTION = msgspec.json.Decoder(Manifest), msgspec.json.Decoder(Resolution)


@dataclass(frozen=True)
class HttpResolveClient:
    """A `ResolveClient` over HTTP.

    Args:
        base_url: ``TENSORHUB_URL``.
        transport: Sends the token to the origins that may have it.
        directory: Of the cache.
    """

    base_url: str
    transport: Transport
    directory: Path

    def resolve(self, *, ref: str) -> ResolvedRef:
        """The digest behind ``cozy:owner/repo[:tag][@digest]``; a digest in the reference is taken as it is.

        Raises:
            AuthError: The server refused the credentials.
            InputError: There is no such repository or tag, or the answer is malformed.
        """
        parsed = parse_ref(ref if ref.startswith("cozy:") else f"cozy:{ref}")
        assert isinstance(parsed, CozyRef)
        if parsed.digest is not None:
            return ResolvedRef(parsed.owner, parsed.repo, parsed.digest)
        tag = parsed.tag or DEFAULT_TAG
        path = f"resolve/{quote(parsed.owner)}/{quote(parsed.repo)}?tag={quote(tag, safe='')}"
        answer = _decode(self._get(path, f"resolve-{parsed.owner}-{parsed.repo}"), _RESOLUTION, parsed.label)
        if (answer.owner, answer.repo) != (parsed.owner, parsed.repo):
            named = f"{answer.owner}/{answer.repo}"
            raise InputError(f"{parsed.label}: the server answered for a different repository, {named!r:.200}.")
        return ResolvedRef(answer.owner, answer.repo, answer.digest)

    def fetch(self, ref: CozyRef) -> tuple[Path, ResolvedRef]:
        """Bring all files of a repository to this machine; the folder that they are in, and what was resolved.

        Raises:
            AuthError: The server refused the credentials.
            InputError: As `resolve`; the manifest has another digest or names that no file should have; a file is not
                what it says.
        """
        resolved = self.resolve(ref=ref.label)
        where = f"{quote(resolved.owner)}/{quote(resolved.repo)}/{quote(resolved.digest)}"
        label = f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}"
        files = _decode(self._get(f"manifest/{where}", "manifest", resolved.digest), _MANIFEST, label).files
        _refuse_unusual_names(files, label)
        folder = self.directory / resolved.owner / resolved.repo / resolved.digest.replace(":", "-")
        for file in files:
            url, digest = f"{self._base}/file/v1/{where}/{quote(file.path)}", f"sha256:{file.sha256.lower()}"
            download(Download(url, folder / file.path, digest, file.size_bytes), self.transport)
        return folder, resolved

    def _get(self, path: str, name: str, digest: str | None = None) -> bytes:
        target = self.directory / ".answers" / hashlib.sha256((digest or path).encode()).hexdigest() / f"{name}.json"
        request = Download(f"{self._base}/{path}", target, digest, most_bytes=LARGEST_ANSWER_BYTES)
        return download(request, self.transport).read_bytes()

    @property
    def _base(self) -> str:
        return f"{self.base_url.rstrip('/')}/api/v1"


def _decode(content: bytes, decoder: msgspec.json.Decoder[Any], label: str) -> Any:
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label}: the server's answer is malformed: {error}.") from None


def _refuse_unusual_names(files: Sequence[ManifestFile], label: str) -> None:
    """Two files of one name, or one that is the folder of another, would have one take the other's place."""
    for file in files:
        if not all(map(PLAIN_NAME.fullmatch, file.path.split("/"))):
            raise InputError(f"{label}: its manifest lists a file with unusual characters: {file.path!r:.200}.")
    paths = [PurePosixPath(file.path) for file in files]
    folders = {parent for path in paths for parent in path.parents}
    if len(set(paths)) < len(paths) or not folders.isdisjoint(paths):
        raise InputError(f"{label}: its manifest lists the same path twice.")
