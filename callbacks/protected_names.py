"""Names of other packages that are not theirs to keep: looked up when a module that uses them is imported."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

__all__ = ["require_names"]


def require_names(supported: str, owner: type, *names: str) -> None:
    """Make sure that `owner` has attributes.

    Args:
        supported: The package and its releases that have them, such as ``torch>=2.6``.
        owner: A class of that package.
        names: The attributes: of the class, or those that its constructor sets.

    Raises:
        ImportError: It lacks some; names the release that is installed, and those to install.
    """
    code = getattr(inspect.unwrap(vars(owner).get("__init__", owner)), "__code__", None)
    set_by_constructor = getattr(code, "co_names", ())
    missing = [name for name in names if not hasattr(owner, name) and name not in set_by_constructor]
    if missing:
        package = re.split("[<>=]", supported)[0]
        raise ImportError(
            f"{package} {version(package)} has no {owner.__name__}.{', '.join(missing)}, which genlight uses; "
            f"install a release that it supports: {supported}"
        )
