"""Handing the `JobContext` to a function whose signature asks for it."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .job_context import JobContext

__all__ = ["bind_job_context"]

NAME = "job"
"""A parameter of this name asks for the context, unless it is annotated as something else."""

_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def bind_job_context(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], context: JobContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which to call `function`: those given, and the context for each parameter that asks for it.

    A parameter asks for it by the annotation `JobContext`, also within ``Optional`` or a union, or by the name ``job``,
    whatever its annotation. What the caller or a ``functools.partial`` gives stays. Partial objects, ``__wrapped__``
    and methods are looked through. A call that cannot be bound is left as it is, and fails in the words of Python.
    """
    given, named = tuple(args), dict(kwargs)
    try:
        parameters = inspect.signature(function).parameters
        bound = inspect.signature(function).bind_partial(*given, **named).arguments
    except (TypeError, ValueError):  # a call that Python will refuse, or a builtin without a signature
        return given, named
    fixed = _fixed_by_partials(function)
    namespace = _namespace(function)
    for place, (name, parameter) in enumerate(parameters.items()):
        if name in bound or name in fixed or not _asks(parameter, namespace):
            continue
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY and place == len(given):
            given = (*given, context)
        elif parameter.kind in _BY_NAME:
            named[name] = context
        elif parameter.kind is _POSITIONAL_ONLY:
            before = [each.default for each in list(parameters.values())[len(given) : place]]
            if inspect.Parameter.empty not in before:
                given = (*given, *before, context)
    return given, named


def _asks(parameter: inspect.Parameter, namespace: Mapping[str, Any]) -> bool:
    if parameter.kind not in (_POSITIONAL_ONLY, *_BY_NAME):
        return False
    return parameter.name == NAME or _allows_context(parameter.annotation, namespace)


def _allows_context(annotation: Any, namespace: Mapping[str, Any]) -> bool:
    """Whether an annotation is the context, or a union with it."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        try:
            # Each on its own: another annotation may name what is imported for type checkers alone.
            annotation = eval(annotation, dict(namespace))  # noqa: S307 - the source of the function itself
        except Exception:  # noqa: BLE001 - whatever it means, it is not the context
            return False
        return _allows_context(annotation, namespace)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _allows_context(typing.get_args(annotation)[0], namespace)
    if origin in (typing.Union, types.UnionType):
        return any(_allows_context(each, namespace) for each in typing.get_args(annotation))
    return annotation is JobContext


def _fixed_by_partials(function: Any) -> set[str]:
    """Names for which a partial object already has a value."""
    names: set[str] = set()
    while function is not None:
        if isinstance(function, functools.partial):
            names |= set(function.keywords)
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    return names


def _namespace(function: Any) -> dict[str, Any]:
    """Where the texts of annotations are looked up: the module of the function, then the names of this rule."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif hasattr(function, "__globals__"):
            break
        else:
            called = vars(function).get("__init__") if isinstance(function, type) else type(function).__call__
            if not hasattr(called, "__globals__"):
                break
            function = called
    known = {"JobContext": JobContext, "Optional": typing.Optional, "Union": typing.Union}
    return {**known, **getattr(function, "__globals__", {})}
