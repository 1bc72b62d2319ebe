"""Call one function inside a scheduler's job, write its result, and call the callbacks.

The callbacks are called before the function is imported, and after its outcome has been written. A failure is also
written, as JSON, next to the file of the result.

Exit codes: 0 the function returned; its own code if it called `sys.exit`; 143 after SIGTERM; 1 for every other failure.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # a SIGTERM during the imports is delivered once `_run` can report it
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

import argparse
import functools
import importlib
import logging
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..cluster.job_context import current_job_context
from ..plumbing.redaction import without_secrets
from .contexts import CompletedContext, RunBeginContext, RunEndContext, bind_job_context, emit
from .transport import callbacks_for_runner, prepare_output, read_pickle, write_failure, write_result

log = logging.getLogger("genlight.runner")


class Terminated(BaseException):
    """SIGTERM. Not an `Exception`, so that neither the function nor a callback catches it by accident."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, _ignore)
    raise Terminated("SIGTERM: the scheduler ended the job")


def _ignore(*_: object) -> None:
    """Ignore SIGTERM: the function has ended, and its outcome is being reported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.loglevel, format="%(levelname)s: %(message)s", stream=sys.stderr)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m genlight.adapter.runner", description=__doc__, allow_abbrev=False)
    parser.add_argument("--module", required=True, help="the module that has the function")
    parser.add_argument("--function", required=True, help="its name there, dotted if it is in a class")
    parser.add_argument("--output-file", required=True, type=Path, help="file to which rank 0 writes the result")
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


def _run(options: argparse.Namespace) -> int:
    """Call the function, write the result or the failure, and call the callbacks; return the exit code."""
    callbacks: list[Any] = []
    begin, error, output = _begin_context(options), None, None
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            context = current_job_context()
            context = context if options.job_dir is None else replace(context, output_dir=options.job_dir)
            begin = replace(begin, job_context=context)
            prepare_output(options.output_file, context.rank or 0, context.world_size or 1)
        finally:  # also after a failure, which the callbacks report
            callbacks = callbacks_for_runner(read_pickle(options.callbacks_file))
            emit(callbacks, "on_begin_run_job_ctx", begin)
        args = tuple(read_pickle(options.args_file)) if options.args_file else ()
        kwargs = dict(read_pickle(options.kwargs_file)) if options.kwargs_file else {}
        function = _function(options.module, options.function)
        args, kwargs = bind_job_context(function, args, kwargs, context)
        result = _call(function, args, kwargs)
        signal.signal(signal.SIGTERM, _ignore)
        if not context.rank:
            write_result(options.output_file, result, options.result)
            output = options.output_file
    except BaseException as caught:  # noqa: BLE001 - whatever ended it, the callbacks are called
        error = caught
    signal.signal(signal.SIGTERM, _ignore)
    end = _end_context(begin, error, output)
    if end.traceback is not None:
        log.error("%s:%s failed\n%s", options.module, options.function, end.traceback.rstrip())
        try:
            write_failure(options.output_file, end, None if begin.job_context is None else begin.job_context.rank)
        except OSError:
            log.exception("the reason cannot be written next to %s", options.output_file)
    emit(callbacks, "on_end_run_job_ctx", end)
    emit(callbacks, "on_completed_ctx", _completed_context(end))
    return end.exit_code


def _begin_context(options: argparse.Namespace) -> RunBeginContext:
    """Return the context for the callbacks before the function is called."""
    given = {each.name: getattr(options, each.name) for each in fields(RunBeginContext) if each.name in options}
    return RunBeginContext(
        **given,
        job_context=None,
        job_id=os.environ.get("SLURM_JOB_ID"),
        hostname=socket.gethostname(),
        process_id=os.getpid(),
        python_executable=sys.executable,
        python_version=platform.python_version(),
        working_directory=Path.cwd(),
        environment_snapshot=without_secrets(dict(os.environ)),
        start_time=time.time(),
    )


def _function(module: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of `module`, which is imported from the working directory or an installed package."""
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


def _end_context(begin: RunBeginContext, error: BaseException | None, output: Path | None) -> RunEndContext:
    """Return the context for the callbacks after the function has ended, with `error` if it failed."""
    duration = time.time() - begin.start_time
    if error is None:
        return RunEndContext(**vars(begin), status="success", exit_code=0, duration=duration, output_file=output)
    return RunEndContext(
        **vars(begin),
        status="failure",
        exit_code=_exit_code(error),
        error_type=type(error).__name__,
        error_message=str(error),
        traceback="".join(traceback.format_exception(error)),
        duration=duration,
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1  # The system keeps eight bits, and no failure may become a 0.
    return 128 + signal.SIGTERM if isinstance(error, Terminated) else 1


def _completed_context(end: RunEndContext) -> CompletedContext:
    names = {each.name for each in fields(CompletedContext)}
    return CompletedContext(**{name: value for name, value in vars(end).items() if name in names})


if __name__ == "__main__":
    sys.exit(main())
