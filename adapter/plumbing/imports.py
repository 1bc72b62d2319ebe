"""Import each public name of a package when it is first used (PEP 562), and collect garbage rarely meanwhile.

A package's ``__init__`` imports its names under ``if TYPE_CHECKING:``, each as itself (``Name as Name``, to export
it), and provides them with::

    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__)

`lazy_exports` reads these imports from the compiled code of the ``__init__``. So they are the only list of names, for
type checkers and at run time. The call is in the ``else``, because a type checker that sees a module's ``__getattr__``
accepts every misspelled name.

Importing torch and Lightning makes a million objects that stay. With Python's usual thresholds the garbage collector
visits all of them a few dozen times, which takes a quarter of the time from the start to the first step.

Modules that work only on Linux refuse their import elsewhere.
"""

from __future__ import annotations

import dis
import gc
import platform
import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any

_RARELY = (1_000_000, 50, 1000)
_usual = gc.get_threshold()


def lazy_exports(
    package: str, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of `package`; its ``__version__`` is the installed version.

    Args:
        package: Its ``__name__``.
        unlisted: Names that can be imported, but are not shown as public names.
    """
    home = dict(_imports_for_type_checkers(sys._getframe(1).f_code))
    listed = sorted(home.keys() - set(unlisted))

    def get_attribute(name: str) -> Any:
        if name == "__version__":
            return version("genlight")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *listed, "__version__"})  # without helpers such as `lazy_exports`

    return get_attribute, list_names, listed


def _imports_for_type_checkers(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield each name that `code` imports under ``if TYPE_CHECKING:``, with the module that has it."""
    instructions = list(dis.get_instructions(code))
    loads = [(each.argval, place) for place, each in enumerate(instructions) if each.opname == "LOAD_NAME"]
    start, end = dict(reversed(loads))["TYPE_CHECKING"], dict(loads)[lazy_exports.__name__]
    module = ""
    for place in range(start, end):
        each = instructions[place]
        if each.opname == "IMPORT_NAME":
            module = "." * instructions[place - 2].argval + each.argval  # after the level and the list of names
        elif each.opname == "IMPORT_FROM":
            yield each.argval, module


def collect_rarely() -> None:
    """Collect garbage rarely until `collect_as_usual` is called. Thresholds that somebody has changed stay."""
    if gc.get_threshold() == _usual:
        gc.set_threshold(*_RARELY)


def collect_as_usual() -> None:
    """Collect garbage as before `collect_rarely`, but never visit the objects that were made meanwhile.

    Thresholds that an imported module has set stay.
    """
    if gc.get_threshold() == _RARELY:
        gc.freeze()
        gc.set_threshold(*_usual)


def unsupported_system(what: str) -> str | None:
    """Return why `what` cannot work on this operating system, or None."""
    if platform.system() == "Linux":
        return None
    return (
        f"{what} needs Linux and this system is {platform.system()}: it lacks /proc, by which processes are "
        "distinguished, and the file locks and syncs that checkpoints and event logs rely on. Run it on Linux, for "
        "example in a container or WSL 2."
    )


def require_linux(module: str) -> None:
    """Refuse to import `module` on other systems than Linux.

    Raises:
        ImportError: This is another system.
    """
    if (fault := unsupported_system(module)) is not None:
        raise ImportError(fault)
