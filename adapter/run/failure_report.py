"""The log lines of a failure: one where the message says all, else the frames of the user's code.

The whole traceback of an error in the user's code goes to a file.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ..contract.exceptions import GenlightError, ReplayWriterError, StartupContractError
from ..plumbing.durable import write_bytes_durably
from ..plumbing.failures import Failure
from ..plumbing.redaction import hide_secrets, text_of, traceback_of
from ..plumbing.reference_page import reference_for
from ..plumbing.safe_open import make_directory
from .explained import way_out_of
from .ranks.this_rank import this_rank
from .results import shown_path

__all__ = ["FAILURES_DIRECTORY", "log_failure"]

log = logging.getLogger(__name__)

FAILURES_DIRECTORY: Final = "failures"
"""Where a run keeps whole tracebacks, in its artifacts directory."""
_LONGEST_LINE = 1000
_MOST_FRAMES = 20
_OURS: Final = tuple(Path(__file__).resolve().parents[2] / name for name in ("adapter", "callbacks", "reporters"))
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


def log_failure(
    error: BaseException,
    failure: Failure,
    *,
    secrets: Sequence[str | None],
    environ: Mapping[str, str] | None = None,
    tracebacks: Path | None = None,
) -> None:
    """Say what failed, with a traceback where the message alone does not tell.

    Args:
        error: What ended the run.
        failure: How it is reported.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
        tracebacks: The folder for the whole traceback of an error of the user's code, of which the log then shows the
            user's frames; None logs it whole.
    """

    def hide(text: str) -> str:
        return hide_secrets(text, secrets=secrets, environ=environ)

    # Ours say all, and a traceback would bury it; but of a write from a wrong thread, where that was.
    if isinstance(error, GenlightError) and not isinstance(error, ReplayWriterError):
        text = hide(text_of(error))
    elif tracebacks is None:
        text = hide(traceback_of(error))
    else:
        text = _shown_traceback(error, tracebacks, hide)
    log.error("%s failure: %s", failure.category, text)
    if isinstance(error, StartupContractError) and (about := reference_for(error.code)) is not None:
        log.info(about)


def _shown_traceback(error: BaseException, directory: Path, hide: Callable[[str], str]) -> str:
    """The log lines of an exception: the frames of the user's code, and where the rest is.

    An exception that never was in the user's code and whose way out is not known, and one whose traceback cannot be
    written to a file, is logged whole.

    Args:
        error: What was raised.
        directory: The folder for whole tracebacks; it is made when it is needed.
        hide: Takes secrets out of a text.
    """
    whole = hide(traceback_of(error))
    frames, way_out = list(_user_frames(error)), way_out_of(error)
    if not frames and way_out is None:
        return whole
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = directory / f"{stamp}-rank-{this_rank()}-{os.getpid()}.txt"
    try:
        make_directory(directory)
        write_bytes_durably(path, f"{whole}\n".encode(errors="backslashreplace"), mode=0o600)
    except OSError as problem:
        return f"{whole}\n(the traceback could not be written to {str(path)!r}: {problem.strerror or problem})"
    said = f"{type(error).__name__}: {text_of(error)}".strip().removesuffix(":")
    shown = frames[-_MOST_FRAMES:]
    return "\n".join(
        [
            hide(said.partition("\n")[0] if way_out else said),
            *([] if way_out is None else [f"  {way_out}"]),
            *(hide(frame) for frame in shown),
            f"  the whole traceback is in {shown_path(path)}",
        ]
    )


def _user_frames(error: BaseException) -> Iterator[str]:
    """The frames of the user's code: of an exception that was raised from another, first those of the other."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    for each in reversed(chain):
        frames = [frame for frame in traceback.extract_tb(each.__traceback__) if _is_users(frame.filename)]
        yield from (_frame_line(frame) for frame in frames)
        if isinstance(each, SyntaxError) and each.filename and _is_users(each.filename):  # it has no frame of its own
            frames.append(traceback.FrameSummary(each.filename, each.lineno, "<module>", line=each.text))
            yield _frame_line(frames[-1])
        if frames and each is not error:
            yield f"  {type(each).__name__}: {text_of(each)[:_LONGEST_LINE]}, and then:"


def _frame_line(frame: traceback.FrameSummary) -> str:
    place = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    place = place.removesuffix(", in <module>")
    return f"{place}\n    {frame.line[:_LONGEST_LINE]}" if frame.line else place


def _is_users(filename: str) -> bool:
    """Whether a file is neither genlight's, nor installed, nor part of Python."""
    path = Path(filename)
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.resolve().is_relative_to(folder) for folder in (*_OURS, *_INSTALLED))
