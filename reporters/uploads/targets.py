"""Further destinations of checkpoints and samples: a Hugging Face repository, or anything that fsspec opens."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.durable import temporary_name
from ...adapter.plumbing.text import folder_name
from ...adapter.plumbing.urls import safe_url
from .wire import Interrupted, Refused, TryAgain, outcome_of_status

__all__ = ["FsspecTarget", "HuggingFaceTarget", "Shipment", "Target", "open_target", "target_fault"]


@dataclass(frozen=True)
class Shipment:
    """The files of one artifact on their way to a target."""

    run_id: str
    folder: str
    """``checkpoints`` or ``samples``."""
    title: str
    """``step-00000200`` or ``final``."""
    files: tuple[tuple[str, Path], ...]
    """Path below `folder` and local file, the one that makes the others count last."""
    interrupted: Callable[[], bool] = lambda: False


class Target(Protocol):
    """Somewhere to put a whole artifact.

    One method, because a target knows best what "all or nothing" means for it: one commit, or the record last.
    Delivering the same shipment again must leave the target as after the first time. Credentials are the target's own
    (``HF_TOKEN``, ``AWS_…``); a run's token never reaches it.
    """

    @property
    def name(self) -> str:
        """Its name in the queue and in messages; no secrets."""
        ...

    def deliver(self, shipment: Shipment) -> None:
        """Put every file of `shipment` there.

        Raises:
            TryAgain: It may succeed later.
            Refused: It can't.
            Interrupted: The uploader is closing.
        """


def open_target(url: str) -> Target:
    """The target that `url` names: ``hf://owner/name[@revision]``, or any URL that fsspec knows. Connects to nothing.

    Raises:
        ValueError: The URL has no scheme, or names no repository.
        UploadError: The package for the scheme is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not scheme or not separator or not rest:
        raise ValueError(
            "Invalid upload target. Expected hf://owner/name, s3://…, gs://… or file://…, "
            f"but received {safe_url(url)!r}."
        )
    if scheme == "hf":
        repository, _, revision = rest.strip("/").partition("@")
        return HuggingFaceTarget(repository, revision or "main")
    return FsspecTarget(url)


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
        repository: ``owner/name``; made, private, when it does not exist.
        revision: Branch.
        endpoint: Address of the hub; None means huggingface_hub's own (``HF_ENDPOINT``).

    Raises:
        ValueError: `repository` is not ``owner/name``.
    """

    def __init__(self, repository: str, revision: str = "main", endpoint: str | None = None) -> None:
        if repository.count("/") != 1 or not all(repository.split("/")):
            raise ValueError(f"Invalid upload target. Expected hf://owner/name, but received 'hf://{repository}'.")
        self.repository = repository
        self.revision = revision
        self._endpoint = endpoint
        self._repository_exists = False

    @property
    def name(self) -> str:
        """``hf://owner/name@branch``."""
        return f"hf://{self.repository}@{self.revision}"

    def deliver(self, shipment: Shipment) -> None:
        """Commit the files; what the repository holds already is not sent again."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api = HfApi(endpoint=self._endpoint)
        folder = f"{folder_name(shipment.run_id)}/{shipment.folder}"
        operations = [
            CommitOperationAdd(path_in_repo=f"{folder}/{name}", path_or_fileobj=path) for name, path in shipment.files
        ]
        message = f"{shipment.run_id}: {shipment.folder[:-1]} {shipment.title}"
        try:
            if not self._repository_exists:
                api.create_repo(self.repository, private=True, exist_ok=True)
                self._repository_exists = True
            api.create_commit(self.repository, operations, commit_message=message, revision=self.revision)
        except HfHubHTTPError as error:
            status = error.response.status_code
            advice = "set `HF_TOKEN` to a token that may write there"
            outcome = outcome_of_status(status, error.response.headers, self.name, advice=advice)
            raise outcome or TryAgain(self.name) from error
        except (FileNotFoundError, ValueError) as error:
            raise Refused(f"{self.name}: {type(error).__name__}") from error
        except Exception as error:
            raise TryAgain(f"{self.name}: {type(error).__name__}") from error


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

        self.name, self._url = safe_url(url), url
        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except ImportError as error:
            raise UploadError(f"The upload target {self.name} needs another package: {error}") from error
        except ValueError as error:
            raise ValueError(f"Invalid upload target {self.name!r}. {str(error).removesuffix('.')}.") from error

    @functools.cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, some of which connect here, and the folder in it."""
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self._url)
        return filesystem, str(root).rstrip("/")

    def deliver(self, shipment: Shipment) -> None:
        """Put the files one by one, each whole or not at all."""
        try:
            _, root = self._place
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise TryAgain(f"the upload target {self.name} cannot be reached: {why}") from error
        for name, path in shipment.files:
            if shipment.interrupted():
                raise Interrupted
            try:
                self._put(path, f"{root}/{folder_name(shipment.run_id)}/{shipment.folder}/{name}")
            except PermissionError as error:
                raise Refused(f"{self.name}: {error.strerror or 'permission denied'}", auth=True) from error
            except Exception as error:
                if not path.exists():
                    raise Refused(f"{path.name} is gone") from error
                raise TryAgain(f"{self.name}: {type(error).__name__}") from error

    def _put(self, path: Path, destination: str) -> None:
        """Object stores show an object once it is whole; file systems need the rename."""
        filesystem, _ = self._place
        folder, _, last = destination.rpartition("/")
        filesystem.makedirs(folder, exist_ok=True)
        protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
        arriving = f"{folder}/{temporary_name(last)}" if {"file", "local"} & set(protocols) else destination
        filesystem.put_file(os.fspath(path), arriving)
        if arriving != destination:
            filesystem.mv(arriving, destination)
        if filesystem.size(destination) != path.stat().st_size:
            raise OSError("the target holds another number of bytes")
