"""Parse references to inputs, and resolve those to local files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urldefrag, urlsplit

from ...callbacks.checkpoint.selection import find_checkpoint
from ..contract.exceptions import InputError
from ..plumbing.text import is_storable
from ..plumbing.urls import PATTERN_CHARACTERS, is_http_url, looks_like_path, path_of_url, safe_url, url_fault

REPOSITORY = r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
HUB = re.compile(rf"{REPOSITORY}(@(?P<revision>[^:\s]+))?(:(?P<path>\S.*))?")
COZY = re.compile(rf"{REPOSITORY}(:(?P<tag>[\w.-]+))?(@(?P<digest>sha256:[0-9a-fA-F]{{64}}))?")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class HttpRef:
    """A file on a web server."""

    label: str
    """Its name in messages: the URL without user info and query."""
    url: str = field(repr=False)  # its query may be a credential
    digest: str | None = None
    """``sha256:`` and hexadecimal digits."""

    @property
    def file_name(self) -> str:
        """A safe local name for the file."""
        name = unquote(urlsplit(self.url).path).rpartition("/")[2]
        return re.sub(r"[^\w.=+-]", "_", name).lstrip(".")[-120:] or "download"


@dataclass(frozen=True)
class HubRef:
    """A repository on the Hugging Face hub, or a file, folder or pattern in it."""

    label: str
    repo_id: str
    revision: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class CozyRef:
    """A repository of a tensor hub, by tag or by digest."""

    label: str
    owner: str
    repo: str
    tag: str | None = None
    digest: str | None = None


Kind: TypeAlias = Literal["model", "dataset", "checkpoint"]
"""The purpose of an input."""

RemoteRef: TypeAlias = HttpRef | HubRef | CozyRef
Ref: TypeAlias = Path | RemoteRef
"""A path is a file or folder on this machine, or a pattern of files."""


def parse_ref(text: str) -> Ref:
    """Parse a reference. An existing path always has priority; a path may also be a pattern.

    Raises:
        InputError: The text is not a valid reference, or is a local path that does not exist.
    """
    if not (reference := text.strip()):
        raise _unknown(text, "it is empty")
    if not is_storable(reference):
        raise _unknown(text, "it contains control characters, or is not UTF-8")
    path = _path(reference)
    if path is not None and os.path.exists(path):
        return path.absolute()
    if is_http_url(reference):
        return _http_ref(reference)
    if reference.startswith("cozy:"):
        return _cozy_ref(reference)
    if reference.startswith("hf:"):
        return _hub_ref(reference.removeprefix("hf:").removeprefix("//"), reference)
    if path is None:
        raise _unknown(safe_url(reference), "the scheme is not supported")
    if looks_like_path(reference) and any(character in reference for character in PATTERN_CHARACTERS):
        return path
    if looks_like_path(reference) or path.is_absolute():
        raise InputError(f"There is no file or folder {reference!r}.")
    return _hub_ref(reference, reference)


def _unknown(text: str, reason: str) -> InputError:
    return InputError(
        f"Invalid reference {text!r}: {reason}. Expected a path, file://, http:// or https:// URL, "
        "hf:owner/name[@revision][:path], owner/name[@revision] or cozy:owner/repo[:tag][@digest]."
    )


def _path(reference: str) -> Path | None:
    """Return the path that a reference may mean; None if it has another scheme than ``file``."""
    if not reference.lower().startswith("file:"):
        return None if "://" in reference else Path(os.path.expanduser(reference))
    try:
        return Path(path_of_url(reference))
    except ValueError as error:
        raise _unknown(safe_url(reference), str(error)) from None


def _http_ref(text: str) -> HttpRef:
    """Parse the URL of a file, with its digest if the URL ends in ``#sha256=…``."""
    if problem := url_fault(text):
        raise _unknown(safe_url(text), problem)
    url, fragment = urldefrag(text)
    algorithm, separator, digest = fragment.partition("=")
    if algorithm != "sha256" or not separator:
        return HttpRef(safe_url(url), url)
    if not SHA256.fullmatch(digest):
        raise _unknown(safe_url(text), "`#sha256=` is followed by 64 hexadecimal digits")
    return HttpRef(safe_url(url), url, f"sha256:{digest.lower()}")


def _hub_ref(text: str, reference: str) -> HubRef:
    if (match := HUB.fullmatch(text)) is None:
        raise _unknown(reference, "there is no such path, and it is not a repository")
    return HubRef(f"hf:{text}", f"{match['owner']}/{match['name']}", match["revision"], match["path"])


def _cozy_ref(text: str) -> CozyRef:
    bare = text.removeprefix("cozy:").removeprefix("//")
    match = COZY.fullmatch(bare)
    if match is None or "" in (match["owner"].strip("."), match["name"].strip(".")):
        raise _unknown(text, "it is not of the form cozy:owner/repo[:tag][@sha256:<64 hexadecimal digits>]")
    digest = match["digest"]
    return CozyRef(f"cozy:{bare}", match["owner"], match["name"], match["tag"], digest.lower() if digest else None)


def check_ref(kind: Kind, text: str) -> Ref:
    """Parse a reference; resolve and check a local one with `resolve_path`.

    Raises:
        InputError: It is malformed, or its files do not exist or cannot be used for this purpose.
    """
    ref = parse_ref(text)
    return resolve_path(kind, ref) if isinstance(ref, Path) else ref


def resolve_path(kind: Kind, path: Path) -> Path:
    """Resolve a path for its purpose: to the folder of a model, or to the record of a checkpoint.

    The path of a dataset is returned unchanged, once its Parquet files are found.

    Raises:
        InputError: There are no such files, or they cannot be used for this purpose.
    """
    if kind == "checkpoint":
        return local_checkpoint(path)
    if kind == "dataset":
        parquet_files(str(path))
        return path
    return path if path.is_dir() else _readable(path).parent


def local_checkpoint(path: Path) -> Path:
    """Return the record for `path`: the file itself, the record of that name, or the newest in a folder.

    Raises:
        InputError: There is no record.
    """
    try:
        return find_checkpoint(path)
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; let this user read it") from error


def parquet_files(text: str) -> list[Path]:
    """Return the data files for a path (a file, a folder or a pattern), as the feed does.

    Raises:
        InputError: There is no such file, or it cannot be read.
    """
    from ..feed.files import expand  # loads pyarrow

    return [_readable(Path(file.path)) for file in expand(text)]


def _readable(path: Path) -> Path:
    if not path.is_file() or not os.access(path, os.R_OK):
        raise InputError(f"There is no file {str(path)!r} that this user can read.")
    return path.absolute()
