"""What runs inside the user's step must not fail it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["contained"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def contained(method: _Method) -> _Method:
    """A method that torch calls within a step: what it raises goes to ``self.failures``, for the check to raise."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised by the check, under the policy of its callback
            self.failures.append(error)

    return call  # type: ignore[return-value]
