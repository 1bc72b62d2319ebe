"""The settings of a feed, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .row_plan import SHARD_MODES, Shard

__all__ = ["FeedOptions", "collate_function", "imported"]

_LEAST = {
    "batch_size": 1,
    "readahead": 0,
    "seed": 0,
    "epochs": 1,
    "world_size": 1,
    "shuffle_window": 1,
    "workers": 0,
}


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """The arguments of `ArrowFeed` other than the data; see there for the meaning.

    Raises:
        ValueError: Values are out of range; the message names all of them.
        TypeError: Numbers are not integers.
    """

    batch_size: int
    readahead: int
    shuffle: bool
    seed: int
    epochs: int | None
    drop_last: bool
    shard: Shard
    rank: int
    world_size: int
    per_epoch: bool
    shuffle_window: int
    workers: int
    pin_memory: bool | None
    copy_ahead: bool

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _LEAST if not (name == "epochs" and self.epochs is None)}
        no_integers = [name for name, value in given.items() if not isinstance(value, int) or isinstance(value, bool)]
        faults = [
            f"Invalid `{name}`. Expected an integer >= {_LEAST[name]}, but received {value!r}."
            for name, value in given.items()
            if name in no_integers or value < _LEAST[name]
        ]
        if "world_size" not in no_integers and not 0 <= self.rank < self.world_size:
            faults.append(f"Invalid `rank`. Expected 0 <= rank < {self.world_size}, but received {self.rank}.")
        if self.shard not in SHARD_MODES:
            faults.append(f"Invalid `shard`. Expected one of {SHARD_MODES}, but received {self.shard!r}.")
        if faults:
            raise (TypeError if no_integers else ValueError)(" ".join(faults))


def collate_function(chosen: Callable[[Any], Any] | str | None) -> Callable[[Any], Any] | None:
    """The function that turns a record batch into a batch, as the caller or a job names it.

    Raises:
        TypeError: It is neither a callable nor the name of one.
        ValueError: The name cannot be imported.
    """
    if chosen == "torch":
        from .collate import to_torch

        return to_torch
    return None if chosen is None else imported(chosen, "collate", "a callable, 'torch', 'module:function' or None")


def imported(
    function: Callable[..., Any] | str, setting: str, expected: str = "a callable or 'module:function'"
) -> Callable[..., Any]:
    """`function`, or the one behind ``module:function``, or ``module.function`` as configurations of Lightning have it.

    Args:
        function: The function, or its name.
        setting: What gives it, for messages.
        expected: What it may be, for messages.

    Raises:
        TypeError: It is neither a callable nor the name of one.
        ValueError: The name cannot be imported.
    """
    found = _named(function, setting) if isinstance(function, str) else function
    if not callable(found):
        raise TypeError(f"Invalid `{setting}`. Expected {expected}, but received {function!r}.")
    return found


def _named(path: str, setting: str) -> Any:
    """What a name stands for; `path` itself where it is none."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module or not name:
        return path
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Invalid `{setting}`. {path!r} cannot be imported: {error}.") from None
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"Invalid `{setting}`. {path!r} cannot be imported: {type(error).__name__}: {error}."
        ) from error
