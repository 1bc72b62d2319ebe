"""Names of other packages that are not theirs to keep: looked up when a module that uses them is imported."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Literal

__all__ = ["SUPPORTED", "require_names"]

SUPPORTED = {"lightning": "lightning>=2.6.4,<2.7", "torch": "torch>=2.6"}
"""The releases that genlight's own requirements name."""


def require_names(package: Literal["lightning", "torch"], owner: type, *names: str) -> None:
    """Make sure that `owner` has attributes.

    Args:
        package: Whose class it is.
        owner: The class.
        names: The attributes: of the class, or those that its constructor sets.

    Raises:
        ImportError: It lacks some; names the release that is installed, and those to install.
    """
    code = getattr(inspect.unwrap(vars(owner).get("__init__", owner)), "__code__", None)
    set_by_constructor = getattr(code, "co_names", ())
    missing = [name for name in names if not hasattr(owner, name) and name not in set_by_constructor]
    if missing:
        raise ImportError(
            f"{package} {version(package)} has no {owner.__name__}.{', '.join(missing)}, which genlight uses; "
            f"install a release that it supports: {SUPPORTED[package]}"
        )
