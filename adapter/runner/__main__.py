"""Call one function inside a scheduler's job: context, load, import, inject, begin, run, result, end, completed.

Exit codes: 0 the function returned; what it gave to `sys.exit`; 143 after SIGTERM; 1 for every other failure.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..cluster.injection import bind_job_context
from ..cluster.job_context import JobContext, current_job_context
from .contexts import CompletedContext, RunBeginContext, RunEndContext, emit
from .transport import read_pickle, travelling, write_result

__all__ = ["main"]

log = logging.getLogger("genlight.runner")

EXIT_TERMINATED = 128 + signal.SIGTERM


class _Terminated(SystemExit):
    """SIGTERM, as an exception that ``except Exception`` of the function lets pass."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)

    def __str__(self) -> str:
        return "SIGTERM: the scheduler ended the job"


@dataclass
class _Termination:
    """Raises on the first SIGTERM, as long as there is a function to interrupt."""

    interrupts: bool = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupts:
            self.interrupts = False
            raise _Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.loglevel, format="%(levelname)s: %(message)s", stream=sys.stderr)
    termination = _Termination()
    before = signal.signal(signal.SIGTERM, termination.handle)
    try:
        return _run(options, termination)
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m genlight.adapter.runner", description=__doc__, allow_abbrev=False)
    parser.add_argument("--module", required=True, help="the module that has the function")
    parser.add_argument("--function", required=True, help="its name there, dotted if it is in a class")
    parser.add_argument("--output-file", required=True, type=Path, help="where rank 0 writes the result")
    parser.add_argument("--callbacks-file", required=True, type=Path, help="the pickled callbacks, or base64 of them")
    parser.add_argument("--args-file", type=Path, help="the pickled positional arguments, likewise")
    parser.add_argument("--kwargs-file", type=Path, help="the pickled keyword arguments, likewise")
    parser.add_argument("--result", choices=("json", "pickle"), default="pickle", help="how the result is written")
    parser.add_argument("--job-dir", type=Path)
    parser.add_argument("--stdout-path", type=Path)
    parser.add_argument("--stderr-path", type=Path)
    parser.add_argument("--pre-submission-id")
    parser.add_argument("--loglevel", default="INFO", type=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser


def _run(options: argparse.Namespace, termination: _Termination) -> int:
    callbacks: list[Any] = []
    begin, error, output = _begin(options), None, None
    try:
        try:
            begin = replace(begin, job_context=_job_context(options.job_dir))
        finally:  # so that the callbacks are called
            callbacks = travelling(read_pickle(options.callbacks_file))
        args = tuple(read_pickle(options.args_file)) if options.args_file else ()
        kwargs = dict(read_pickle(options.kwargs_file)) if options.kwargs_file else {}
        function = _function(options.module, options.function)
        context = begin.job_context
        assert context is not None
        args, kwargs = bind_job_context(function, args, kwargs, context)
        if not context.rank:
            options.output_file.unlink(missing_ok=True)  # of an attempt that was requeued
        emit(callbacks, "on_begin_run_job_ctx", begin, passing=(_Terminated,))
        result = _call(function, args, kwargs)
        termination.interrupts = False
        if not context.rank:
            write_result(options.output_file, result, options.result)
            output = options.output_file
    except BaseException as caught:  # noqa: BLE001 - whatever ended it, the callbacks are called
        error = caught
    termination.interrupts = False
    end = _end(begin, error, output)
    if end.traceback is not None:
        log.error("%s:%s failed\n%s", options.module, options.function, end.traceback.rstrip())
    emit(callbacks, "on_end_run_job_ctx", end)
    emit(callbacks, "on_completed_ctx", _completed(end))
    return end.exit_code


def _begin(options: argparse.Namespace) -> RunBeginContext:
    given = {each.name: getattr(options, each.name) for each in fields(RunBeginContext) if each.name in options}
    return RunBeginContext(
        **given,
        job_context=None,
        hostname=socket.gethostname(),
        process_id=os.getpid(),
        python_executable=sys.executable,
        python_version=platform.python_version(),
        working_directory=Path.cwd(),
        started_at=time.time(),
    )


def _job_context(job_dir: Path | None) -> JobContext:
    context = current_job_context()
    return context if job_dir is None else replace(context, output_dir=job_dir)


def _function(module: str, name: str) -> Callable[..., Any]:
    """The function; `module` is imported from the working directory or from where packages are."""
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{module}:{name} is not a function, but {type(function).__name__}")
    return function


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        return None


def _end(begin: RunBeginContext, error: BaseException | None, output: Path | None) -> RunEndContext:
    failed: dict[str, Any] = {}
    if error is not None:
        kind = SystemExit.__name__ if isinstance(error, SystemExit) else type(error).__name__
        lines = traceback.format_exception(error)
        failed = {"error_type": kind, "error_message": str(error), "traceback": "".join(lines)}
    return RunEndContext(
        **vars(begin),
        **failed,
        status="failure" if failed else "success",
        exit_code=_exit_code(error),
        duration=time.time() - begin.started_at,
        output_file=output,
    )


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        # The system keeps eight bits, and no failure may become a 0.
        return (error.code & 0xFF or 1) if isinstance(error.code, int) else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _completed(end: RunEndContext) -> CompletedContext:
    names = {each.name for each in fields(CompletedContext)}
    return CompletedContext(**{name: value for name, value in vars(end).items() if name in names})


if __name__ == "__main__":
    sys.exit(main())
