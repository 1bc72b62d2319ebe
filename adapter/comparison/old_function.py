"""A training function that was there before: found by its name, and called with what its signature asks for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..contract.exceptions import ContractError

__all__ = ["arguments_for", "find_function", "run_until"]


class _Enough(BaseException):
    """Ends a function from inside of its ``optimizer.step``; not an Exception, which it may well catch."""


def find_function(import_path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises:
        ContractError: There is no such module or name, or it is not a function that can be called here.
        Exception: What importing the module raises.
    """
    module_name, _, name = import_path.strip().partition(":")
    if not module_name or not name:
        raise ContractError(f"--against {import_path!r} names no function; write it as 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise
        raise ContractError(
            f"--against {import_path!r}: there is no module {error.name!r} beside the job, in the working directory or "
            "among the installed packages"
        ) from None
    function: Any = getattr(module, name, None)
    if function is None:
        raise ContractError(f"--against {import_path!r}: module {module_name!r} has no {name!r}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"of type {type(function).__name__}"
        raise ContractError(f"--against {import_path!r} is {kind}; name a plain function")
    called: Callable[..., Any] = function
    return called


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any], *, named: str) -> dict[str, Any]:
    """Those of `offered` that the signature of `function` names, or all of them where it takes any.

    Raises:
        ContractError: It requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
        and (parameter.name not in offered or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if required:
        raise ContractError(
            f"--against {named!r} requires {', '.join(required)}; it is called with those of {', '.join(offered)} that "
            "it names. Wrap it in a function that gives it the rest"
        )
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def run_until(function: Callable[[Callable[[], None]], None]) -> None:
    """Call `function` with what ends it: that raises what only this call catches."""
    enough = _Enough()

    def end() -> None:
        raise enough

    try:
        function(end)
    except _Enough as raised:
        if raised is not enough:
            raise
