"""References to inputs: what their text means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urldefrag, urlsplit

from ..contract.exceptions import InputError
from ..plumbing.text import is_storable
from ..plumbing.urls import is_http_url, looks_like_path, path_of_url, safe_url, url_fault

__all__ = [
    "CozyRef",
    "HttpRef",
    "HubRef",
    "Kind",
    "LocalRef",
    "Ref",
    "parse_ref",
]

REPOSITORY = r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
HUB = re.compile(rf"{REPOSITORY}(@(?P<revision>[^:\s]+))?(:(?P<path>\S.*))?")
COZY = re.compile(rf"{REPOSITORY}(:(?P<tag>[\w.-]+))?(@(?P<digest>[A-Za-z0-9]+:[0-9a-fA-F]+))?")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class LocalRef:
    """A file or folder on this machine."""

    path: Path

    @property
    def label(self) -> str:
        """How messages name it."""
        return str(self.path)


@dataclass(frozen=True)
class HttpRef:
    """A file on a web server. The URL is left out of ``repr``, since its query may be a credential."""

    url: str
    sha256: str | None = None

    def __repr__(self) -> str:
        return f"HttpRef({self.label!r}, sha256={self.sha256!r})"

    @property
    def label(self) -> str:
        """The URL without user info and query."""
        return safe_url(self.url)

    @property
    def file_name(self) -> str:
        """A safe local name for the file."""
        name = unquote(urlsplit(self.url).path).rpartition("/")[2]
        return re.sub(r"[^\w.=+-]", "_", name).lstrip(".")[-120:] or "download"


@dataclass(frozen=True)
class HubRef:
    """A repository on the Hugging Face hub, or a file, folder or pattern in it."""

    repo_id: str
    revision: str | None = None
    path: str | None = None

    @property
    def label(self) -> str:
        """The reference in its full spelling."""
        return (
            f"hf:{self.repo_id}"
            + (f"@{self.revision}" if self.revision else "")
            + (f":{self.path}" if self.path else "")
        )


@dataclass(frozen=True)
class CozyRef:
    """A repository of a tensor hub, by tag or by digest."""

    owner: str
    repo: str
    tag: str | None = None
    digest: str | None = None

    @property
    def label(self) -> str:
        """The reference in its full spelling."""
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"cozy:{self.owner}/{self.repo}{tag}{digest}"


Kind: TypeAlias = Literal["model", "dataset", "checkpoint"]
"""The purpose of an input."""

Ref: TypeAlias = LocalRef | HttpRef | HubRef | CozyRef


def parse_ref(text: str) -> Ref:
    """The meaning of a reference; a path that exists is always that path.

    Raises:
        InputError: The text is none of the known kinds, or a local path that does not exist.
    """
    reference = text.strip()
    if not reference:
        raise _unknown(text, "it is empty")
    if not is_storable(reference):
        raise _unknown(text, "it contains control characters, or is not UTF-8")
    path = Path(os.path.expanduser(reference))
    if "://" not in reference and os.path.exists(path):
        return LocalRef(path.absolute())
    if reference.lower().startswith("file:"):
        return _file_ref(reference)
    if is_http_url(reference):
        return _http_ref(reference)
    if reference.startswith("cozy:"):
        return _cozy_ref(reference)
    if reference.startswith("hf:"):
        return _hub_ref(reference.removeprefix("hf:").removeprefix("//"), reference)
    if "://" in reference:
        raise _unknown(safe_url(reference), "the scheme is not supported")
    if looks_like_path(reference):
        raise InputError(f"There is no file or folder {reference!r}.")
    return _hub_ref(reference, reference)


def _unknown(text: str, reason: str) -> InputError:
    return InputError(
        f"Invalid reference {text!r}: {reason}. Expected a path, file://, http:// or https:// URL, "
        "hf:owner/name[@revision][:path], owner/name[@revision] or cozy:owner/repo[:tag][@digest]."
    )


def _file_ref(text: str) -> LocalRef:
    try:
        path = Path(path_of_url(text))
    except ValueError as error:
        raise _unknown(safe_url(text), str(error)) from None
    if not path.exists():
        raise InputError(f"There is no file or folder {str(path)!r}.")
    return LocalRef(path)


def _http_ref(text: str) -> HttpRef:
    problem = url_fault(text)
    if problem:
        raise _unknown(safe_url(text), problem)
    url, fragment = urldefrag(text)
    algorithm, separator, digest = fragment.partition("=")
    if algorithm != "sha256" or not separator:
        return HttpRef(url)
    if not SHA256.fullmatch(digest):
        raise _unknown(safe_url(text), "`#sha256=` is followed by 64 hexadecimal digits")
    return HttpRef(url, digest.lower())


def _hub_ref(text: str, whole: str) -> HubRef:
    match = HUB.fullmatch(text)
    if match is None:
        raise _unknown(whole, "there is no such path, and it is not a repository")
    return HubRef(f"{match['owner']}/{match['name']}", match["revision"], match["path"])


def _cozy_ref(text: str) -> CozyRef:
    match = COZY.fullmatch(text.removeprefix("cozy:").removeprefix("//"))
    if match is None or "" in (match["owner"].strip("."), match["name"].strip(".")):
        raise _unknown(text, "it is not of the form cozy:owner/repo[:tag][@digest]")
    digest = match["digest"]
    return CozyRef(match["owner"], match["name"], match["tag"], digest.lower() if digest else None)
