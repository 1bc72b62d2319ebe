"""Arguments passed to a job's function and to its callbacks: the `JobContext`, if the signature asks, and the outcome.

The runner inside the job calls the callbacks, and so does the client that waits for the end of the job.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..cluster.job_context import JobContext

log = logging.getLogger("genlight.runner")

NAME = "job"
"""A parameter of this name asks for the context, whatever its annotation."""


@dataclass(frozen=True, kw_only=True)
class RunBeginContext:
    """The runner has started; the function is not imported yet."""

    job_context: JobContext | None
    """None if the scheduler's variables could not be read; that is a failure."""
    job_id: str | None
    module: str
    function: str
    args_file: Path | None = None
    kwargs_file: Path | None = None
    hostname: str
    process_id: int
    python_executable: str
    python_version: str
    working_directory: Path
    environment_snapshot: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All variables of the environment; values that look like secrets are hidden."""
    start_time: float
    """Seconds since 1970."""
    job_dir: Path | None = None
    stdout_path: Path | None = None
    stderr_path: Path | None = None
    pre_submission_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of the function."""

    status: Literal["success", "failure"]
    exit_code: int
    error_type: str | None = None
    error_message: str | None = None
    duration: float
    """Seconds since `start_time`; if the client reports the outcome, since it began to wait."""
    output_file: Path | None = None
    """The file with the result; None after a failure, and on ranks other than 0."""


@dataclass(frozen=True, kw_only=True)
class RunEndContext(Outcome, RunBeginContext):
    """The function returned, failed, or could not be called."""

    traceback: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletedContext(Outcome):
    """The runner is done and its process ends next, or the client has learned from Slurm that the job has ended."""

    job_context: JobContext | None
    pre_submission_id: str | None = None
    emitted_by: Literal["runner", "client"] = "runner"


def emit(callbacks: Iterable[Any], event: str, context: object) -> None:
    """Call the method named `event` of every callback that has it; a callback that fails or exits is only logged.

    Args:
        callbacks: Objects of any class.
        event: Name of the method.
        context: Its one argument.
    """
    for callback in callbacks:
        try:
            if (method := getattr(callback, event, None)) is not None:
                method(context)
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("%s.%s failed; the run continues", type(callback).__name__, event)


def bind_job_context(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], context: JobContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `function`: the given ones, and the context for each parameter that asks for it.

    A parameter asks for it by the annotation `JobContext`, also within ``Optional`` or a union, or by the name ``job``.
    Arguments of the caller or of a ``functools.partial`` are kept. A positional-only parameter after a missing one gets
    nothing. Partial objects, ``__wrapped__`` and methods are unwrapped. A call that cannot be bound is not changed, and
    fails with Python's own message.
    """
    given, named = tuple(args), dict(kwargs)
    try:
        parameters = inspect.signature(function).parameters
        bound = inspect.signature(function).bind_partial(*given, **named).arguments
    except (TypeError, ValueError):  # a call that Python will refuse, or a builtin without a signature
        return given, named
    layers = list(_layers(function))
    fixed = {name for each in layers if isinstance(each, functools.partial) for name in each.keywords}
    namespace = _namespace(layers[-1])
    for place, (name, parameter) in enumerate(parameters.items()):
        if name in bound or name in fixed or not _asks(parameter, namespace):
            continue
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY and place == len(given):
            given = (*given, context)
        elif parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            named[name] = context
    return given, named


def _asks(parameter: inspect.Parameter, namespace: dict[str, Any]) -> bool:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    return parameter.name == NAME or _allows_context(parameter.annotation, namespace)


def _allows_context(annotation: Any, namespace: dict[str, Any]) -> bool:
    """Return whether an annotation is `JobContext`, or a union with it."""
    # One at a time, because another annotation may name something that only type checkers import.
    holder: Any = types.SimpleNamespace(__annotations__={NAME: annotation})
    try:
        hint = typing.get_type_hints(holder, namespace)[NAME]
    except Exception:  # noqa: BLE001 - whatever it means, it is not the context
        return False
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return JobContext in (typing.get_args(hint) if is_union else (hint,))


def _layers(function: Any) -> Iterator[Any]:
    """Yield `function`, then the functions inside its partial objects and ``__wrapped__``, from outside to inside."""
    while function is not None:
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def _namespace(innermost: Any) -> dict[str, Any]:
    """Return the names for evaluating annotations: the module's, and three often imported for type checkers only."""
    if not hasattr(innermost, "__globals__"):  # a class, or an object that can be called
        kind: Any = innermost if isinstance(innermost, type) else type(innermost)
        innermost = inspect.unwrap(kind.__init__ if kind is innermost else kind.__call__)
    known = {"JobContext": JobContext, "Optional": typing.Optional, "Union": typing.Union}
    return {**known, **getattr(innermost, "__globals__", {})}
