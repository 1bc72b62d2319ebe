"""Inputs from the Hugging Face hub, in huggingface_hub's own cache and with its own credentials.

The run's capability token is never shown to the hub: ``HF_TOKEN`` is what it knows. ``HF_ENDPOINT`` and ``HF_HOME``
count as huggingface_hub has them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ..contract.exceptions import AuthError, InputError
from ..plumbing.failures import causes_of
from ..plumbing.http import failure_text
from ..plumbing.retry import RetryPolicy, TransientError, is_transient, with_retries
from ..plumbing.text import HUB_LOGIN
from .progress import InputProgress, Tracker
from .refs import HubRef

__all__ = ["fetch_from_hub"]


def fetch_from_hub(
    ref: HubRef,
    *,
    kind: Literal["model", "dataset"],
    patterns: list[str] | None = None,
    retry: RetryPolicy | None = None,
    tracker: Tracker,
) -> Path:
    """Bring a repository, or the part that ``ref.path`` names, to this machine; the folder of its snapshot.

    Args:
        ref: What to fetch.
        kind: Which kind of repository it is.
        patterns: What to fetch of it; None takes the path of the reference, or all files.
        retry: How often and how patiently to ask a hub that cannot be reached.
        tracker: Told of the progress.

    Raises:
        AuthError: The hub refused the credentials, or the repository is gated.
        InputError: There is no such repository or revision, or the hub cannot be reached.
    """
    if patterns is None and ref.path is not None:
        patterns = [ref.path, f"{ref.path.rstrip('/')}/*"]
    try:
        folder = with_retries(lambda: _snapshot(ref, kind, patterns), retry or RetryPolicy(), tracker.wait)
    except TransientError as error:
        raise InputError(f"{ref.label} cannot be fetched: {error}, after {error.failures} attempts.") from None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    tracker.tell(InputProgress(ref.label, size, size, finished=True))
    return folder


def _snapshot(ref: HubRef, kind: str, patterns: list[str] | None) -> Path:
    """One attempt; the files that are there already are not fetched again."""
    from huggingface_hub import snapshot_download

    with _errors_of_hub(ref, kind):
        folder = snapshot_download(
            ref.repo_id,
            repo_type=kind,
            revision=ref.revision,
            allow_patterns=patterns,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    return Path(folder)


@contextlib.contextmanager
def _errors_of_hub(ref: HubRef, kind: str) -> Iterator[None]:
    """Errors of huggingface_hub as ours.

    Its own wrapper for "no answer and nothing in the cache" is looked through: its causes know what the answer was.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise InputError(f"{ref.label} is not the name of a repository: {error}.") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        for cause in causes_of(error):
            if isinstance(cause, errors.HfHubHTTPError):
                raise _http_error(ref, kind, cause) from None
            if isinstance(cause, errors.OfflineModeIsEnabled):
                text = f"{ref.label} is not in the hub's cache, and `HF_HUB_OFFLINE` forbids asking the hub."
                raise InputError(text) from None
        raise TransientError("the hub cannot be reached, and its cache has no complete copy") from None
    except httpx2.HTTPError as error:
        raise TransientError(failure_text(error)) from None


def _http_error(ref: HubRef, kind: str, error: Any) -> Exception:
    """The meaning of an answer of the hub."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(error.response, "status_code", 0)
    if isinstance(error, GatedRepoError):
        return AuthError(f"{ref.label} is gated. Ask for access on the hub, then {HUB_LOGIN}.")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{ref.label}: the repository has no revision {ref.revision or 'main'!r}.")
    if status in (401, 403):
        why = "nobody is logged in" if get_token() is None else "the token that was sent may not read it"
        return AuthError(
            f"The hub refused {ref.label} (status {status}): the {kind} does not exist, or it is private and {why}. "
            f"Check its name, or log in as somebody who may read it: {HUB_LOGIN}."
        )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return InputError(f"{ref.label}: this machine has no such path, and the hub no such {kind} on the hub.")
    if is_transient(status):
        return TransientError(f"the hub answered with status {status}")
    return InputError(f"{ref.label} cannot be fetched: the hub answered with status {status}.")
