"""Further destinations of checkpoints and samples: a Hugging Face repository, or anything that fsspec opens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.durable import temporary_name
from ...adapter.plumbing.retry import TransientError
from ...adapter.plumbing.urls import safe_url
from .wire import Interrupted, Refused, outcome_of_status

__all__ = ["FsspecTarget", "HuggingFaceTarget", "Target", "open_target", "target_fault"]


class Target(Protocol):
    """Somewhere to put a whole artifact.

    One method, because a target knows best what "all or nothing" means for it: one commit, or the record last.
    Delivering the same files again must leave the target as after the first time. Credentials are the target's own
    (``HF_TOKEN``, ``AWS_…``); a run's token never reaches it.
    """

    def deliver(self, files: Iterable[tuple[str, Path]], title: str) -> None:
        """Put every file there.

        Args:
            files: The path there and the local file, the one that makes the others count last. The iteration raises
                `Interrupted` when the uploader is closing.
            title: What they are.

        Raises:
            TransientError: It may succeed later.
            Refused: It can't.
        """


def open_target(url: str) -> Target:
    """The target that `url` names: ``hf://owner/name[@revision]``, or any URL that fsspec knows. Connects to nothing.

    Raises:
        ValueError: fsspec does not know the scheme.
        UploadError: The package for the scheme is not installed.
    """
    return HuggingFaceTarget(url) if url.startswith("hf://") else FsspecTarget(url)


def target_fault(url: str) -> str | None:
    """The fault of `url` as a target, as far as this machine knows."""
    try:
        open_target(url)
    except (UploadError, ValueError) as error:
        return str(error)
    return None


class HuggingFaceTarget:
    """A model repository; each artifact is one commit, so that a reader never sees half of it.

    Args:
        url: ``hf://owner/name``, which is made, private, when it does not exist; with ``@branch``, which exists.
    """

    def __init__(self, url: str) -> None:
        self._name = safe_url(url)
        repository, _, branch = url.removeprefix("hf://").partition("@")
        self._repository, self._branch = repository.strip("/"), branch or "main"

    def deliver(self, files: Iterable[tuple[str, Path]], title: str) -> None:
        """Commit the files; what the repository holds already is not sent again."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api = HfApi()
        try:
            operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files]
            api.create_repo(self._repository, private=True, exist_ok=True)
            api.create_commit(self._repository, operations, commit_message=title, revision=self._branch)
        except HfHubHTTPError as error:
            status = error.response.status_code
            advice = "set `HF_TOKEN` to a token that may write there"
            outcome = outcome_of_status(status, error.response.headers, self._name, advice=advice)
            raise outcome or TransientError(self._name) from error
        except Interrupted:
            raise
        except (FileNotFoundError, ValueError) as error:
            raise Refused(f"{self._name}: {type(error).__name__}") from error
        except Exception as error:
            raise TransientError(f"{self._name}: {type(error).__name__}") from error


class FsspecTarget:
    """A folder that fsspec opens; files keep their layout, and the record arrives last.

    Args:
        url: Such as ``s3://bucket/prefix`` or ``file:///mnt/archive``.

    Raises:
        ValueError: fsspec does not know the scheme.
        UploadError: The package for the scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._name, self._url = safe_url(url), url
        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except ImportError as error:
            raise UploadError(f"The upload target {self._name} needs another package: {error}") from error
        except ValueError as error:
            raise ValueError(f"Invalid upload target {self._name!r}. {str(error).removesuffix('.')}.") from error

    def deliver(self, files: Iterable[tuple[str, Path]], title: str) -> None:
        """Put the files one by one, each whole or not at all."""
        import fsspec

        try:
            filesystem, root = fsspec.core.url_to_fs(self._url)  # which is kept, and may connect
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise TransientError(f"the upload target {self._name} cannot be reached: {why}") from error
        for name, path in files:
            try:
                _put(filesystem, path, f"{str(root).rstrip('/')}/{name}")
            except PermissionError as error:
                raise Refused(f"{self._name}: {error.strerror or 'permission denied'}", auth=True) from error
            except Exception as error:
                if not path.exists():
                    raise Refused(f"{path.name} is gone") from error
                raise TransientError(f"{self._name}: {type(error).__name__}") from error


def _put(filesystem: Any, path: Path, destination: str) -> None:
    """Object stores show an object once it is whole; file systems need the rename."""
    folder, _, last = destination.rpartition("/")
    filesystem.makedirs(folder, exist_ok=True)
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    arriving = f"{folder}/{temporary_name(last)}" if {"file", "local"} & set(protocols) else destination
    filesystem.put_file(os.fspath(path), arriving)
    if arriving != destination:
        filesystem.mv(arriving, destination)
    if filesystem.size(destination) != path.stat().st_size:
        raise OSError("the target holds another number of bytes")
