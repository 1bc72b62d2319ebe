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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar
from urllib.parse import quote, urljoin

import httpx2
import msgspec

from ..contract.exceptions import InputError
from ..contract.types import ResolvedRef
from ..plumbing.retry import RetryPolicy
from ..plumbing.urls import url_fault
from .http import Download, download
from .progress import Tracker
from .refs import CozyRef, parse_ref

__all__ = ["HttpResolveClient", "ManifestFile", "fetch_from_cozy"]

DEFAULT_TAG = "latest"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[\w.+=@~#,() -]{1,255}")
"""A part of a path that means the same to each system, server and terminal."""
LARGEST_ANSWER_BYTES = 64 << 20


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a repository."""

    path: Annotated[str, msgspec.Meta(max_length=1024)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    url: str | None = None


class Manifest(msgspec.Struct, frozen=True):
    """The files of a repository."""

    files: list[ManifestFile]


class Resolution(msgspec.Struct, frozen=True):
    """The server's answer to a tag."""

    owner: str
    repo: str
    digest: str


# Made here, in one thread; see `http`.
_MANIFEST, _RESOLUTION = msgspec.json.Decoder(Manifest), msgspec.json.Decoder(Resolution)
_T = TypeVar("_T")


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
        answer = _decode(content, _RESOLUTION, parsed.label)
        if (answer.owner, answer.repo) != (parsed.owner, parsed.repo):
            named = f"{answer.owner}/{answer.repo}"
            raise InputError(f"{parsed.label}: the server answered for a different repository, {named!r:.200}.")
        return ResolvedRef(answer.owner, answer.repo, _sound_digest(answer.digest, parsed.label))

    def manifest(self, resolved: ResolvedRef) -> list[ManifestFile]:
        """The files of a resolved reference, their URLs absolute.

        Raises:
            InputError: The manifest has another digest, or names a file outside of its repository.
        """
        where = f"{quote(resolved.owner)}/{quote(resolved.repo)}/{quote(resolved.digest)}"
        content = self._get(f"api/v1/manifest/{where}", "manifest", sha256=resolved.digest.removeprefix("sha256:"))
        label = f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}"
        files = _decode(content, _MANIFEST, label).files
        located = [self._located(file, where, label) for file in files]
        _refuse_same_places(located, label)
        return located

    def _located(self, file: ManifestFile, where: str, label: str) -> ManifestFile:
        if not all(map(PLAIN_NAME.fullmatch, file.path.split("/"))):
            raise InputError(
                f"{label}: its manifest lists a file whose name has unusual characters: {file.path!r:.200}."
            )
        given = file.url or f"api/v1/file/v1/{where}/{quote(file.path)}"
        try:
            url = urljoin(f"{self.base_url.rstrip('/')}/", given)
            fault = url_fault(url)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise InputError(f"{label}: its manifest has no sound address for {file.path!r}: {fault}.")
        return msgspec.structs.replace(file, url=url)

    def _get(self, path: str, name: str, sha256: str | None = None) -> bytes:
        target = self.directory / (sha256 or hashlib.sha256(path.encode()).hexdigest()) / f"{name}.json"
        url = urljoin(f"{self.base_url.rstrip('/')}/", path)
        request = Download(url, target, sha256=sha256, most_bytes=LARGEST_ANSWER_BYTES)
        return download(request, self.client, retry=self.retry).read_bytes()


def _decode(content: bytes, decoder: msgspec.json.Decoder[_T], label: str) -> _T:
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label}: the server's answer is malformed: {error}.") from None


def _refuse_same_places(files: Sequence[ManifestFile], label: str) -> None:
    """Two files of one name, or one that is the folder of another, would have one take the other's place."""
    paths = [PurePosixPath(file.path) for file in files]
    folders = {parent for path in paths for parent in path.parents}
    if len(set(paths)) < len(paths) or not folders.isdisjoint(paths):
        raise InputError(f"{label}: its manifest lists the same path twice.")


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
