"""Handing the `JobContext` to a function whose signature asks for it."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    layers = list(_layers(function))
    fixed = {name for each in layers if isinstance(each, functools.partial) for name in each.keywords}
    namespace = _namespace(layers[-1])
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


def _layers(function: Any) -> Iterator[Any]:
    """`function`, and what its partial objects and ``__wrapped__`` stand for, one within the other."""
    while function is not None:
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def _namespace(innermost: Any) -> dict[str, Any]:
    """Where the texts of annotations are looked up: the module of the function, then the names of this rule."""
    if not hasattr(innermost, "__globals__"):  # a class, or an object that can be called
        called = vars(innermost).get("__init__") if isinstance(innermost, type) else type(innermost).__call__
        *_, innermost = _layers(called or innermost)
    known = {"JobContext": JobContext, "Optional": typing.Optional, "Union": typing.Union}
    return {**known, **getattr(innermost, "__globals__", {})}
