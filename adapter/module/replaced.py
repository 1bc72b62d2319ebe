"""Objects that training puts in the place of those that `configure` built: a schedule made again, two swapped networks.

A resume builds what `configure` builds and gives each object its state. That is right only if each object is where it
was at the save. So a checkpoint holds the states of schedules and scalers by their paths at that time, and names each
path at which another object was than `configure` had put there. A schedule of the same kind gets the state that was
saved at its path. Everything else the class has to put in place itself, in ``load_state_dict``; the resume checks that.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from ..contract.exceptions import CheckpointError
from ..discovery.children import uncompiled
from ..discovery.discover import Discovered, Found

__all__ = ["Replaced", "without_functions"]

log = logging.getLogger(__name__)

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class Standing:
    """The object at a path."""

    built_as: str | None
    """The path at which `configure` put it; None if it is new."""
    kind: str
    """Its class, and for a schedule the parts and the optimizer that it has."""
    is_stored: bool
    """Whether a checkpoint has all of it, so that another object of its kind can take its place."""

    def __str__(self) -> str:
        return f"a new {self.kind}" if self.built_as is None else f"the {self.kind} that was built as {self.built_as}"

    def can_become(self, saved: Standing) -> bool:
        """Whether this object is the same as `saved` once it has its state."""
        are_stored = self.is_stored and saved.is_stored
        return self.kind == saved.kind and (are_stored or self.built_as == saved.built_as)


class Replaced:
    """What training has put in the place of the objects that `configure` built.

    Args:
        built: The objects after `configure`.
    """

    def __init__(self, built: Discovered) -> None:
        self._built = built
        objects: list[Found[Any]] = [*built.modules, *built.optimizers, *_stateful(built)]
        self._paths = {id(found.value): found.path for found in objects}
        self._before = self._standing(built)
        self._has_warned = False

    @staticmethod
    def states(now: Discovered) -> dict[str, Any]:
        """The states of all schedules and scalers, by path."""
        return {found.path: without_functions(found.value, found.value.state_dict()) for found in _stateful(now)}

    def record(self, now: Discovered, *, says: bool) -> dict[str, dict[str, Any] | None]:
        """By path, the object that is now where `configure` put another one; None if it is gone.

        Warns once of those that the class has to put in place itself, on the rank that `says` so.
        """
        standing = self._standing(now)
        other = {path: standing.get(path) for path in {**self._before, **standing}}
        other = {path: it for path, it in other.items() if it != self._before.get(path)}
        faults = [fault for path, it in other.items() if (fault := _fault(path, it, self._before.get(path)))]
        if faults and says and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Training replaced what `configure` built: %s. A resume is right only if `load_state_dict` does the "
                "same, from what `state_dict` returned.",
                "; ".join(faults),
            )
        return {path: None if it is None else asdict(it) for path, it in other.items()}

    def load(
        self, states: Mapping[str, Any], recorded: Mapping[str, Any], now: Discovered, without: Sequence[Any] = ()
    ) -> list[Any]:
        """Give each schedule and scaler the state that was saved at its path, if that was one of its kind.

        Returns:
            These objects; those of `without` keep the state that they have.
        """
        standing, saved, loaded = self._standing(now), self._saved(recorded), []
        for found in _stateful(now):
            was = saved.get(found.path)
            is_wanted = found.path in states and all(found.value is not other for other in without)
            if is_wanted and was is not None and standing[found.path].can_become(was):
                found.value.load_state_dict(copy.deepcopy(states[found.path]))  # some classes take the state apart
                loaded.append(found.value)
        return loaded

    def check(self, recorded: Mapping[str, Any], now: Discovered, *, says: bool) -> None:
        """Refuse objects that are not where they were at the save; warn of those that were gone and are there again.

        Raises:
            CheckpointError: Names each path, and the object that was there at the save.
        """
        standing, saved = self._standing(now), self._saved(recorded)
        back = [path for path in recorded if recorded[path] is None and path in standing]
        if back and says:
            log.warning(
                "%s was gone when the checkpoint was saved, and is there again. Remove it in `load_state_dict`, as "
                "training does.",
                ", ".join(back),
            )
        faults = [_fault(path, was, standing.get(path)) for path, was in saved.items() if was is not None]
        if told := "; ".join(fault for fault in faults if fault is not None):
            raise CheckpointError(
                f"Training replaced what `configure` built, and `load_state_dict` did not: at the save {told}. Put it "
                "in place in `load_state_dict`, from what `state_dict` returned, or build it in `configure`."
            )

    def _saved(self, recorded: Mapping[str, Any]) -> dict[str, Standing | None]:
        """What was at each path at the save."""
        return self._before | {path: None if it is None else Standing(**it) for path, it in recorded.items()}

    def _standing(self, now: Discovered) -> dict[str, Standing]:
        optimizers = {id(found.value): found.path for found in self._built.optimizers}
        schedules = {found.path: found.value for found in _stateful(now)}
        found = self._built.look_up(self._paths.values()) | schedules
        return {
            path: Standing(
                self._paths.get(id(uncompiled(value))),
                _kind(value, optimizers),
                path in schedules and _is_stored(value),
            )
            for path, value in found.items()
        }


def without_functions(kept: Any, state: Any) -> Any:
    """The state of a scheduler without functions, of which it keeps on a resume what ``configure`` gave it.

    Torch's own schedulers skip theirs; for a class of the user's, ``LRScheduler.state_dict`` gives all attributes.
    """
    if not isinstance(kept, LRScheduler) or type(kept).load_state_dict is not LRScheduler.load_state_dict:
        return state
    return {name: value for name, value in state.items() if not isinstance(value, _FUNCTIONS)}


def _stateful(discovered: Discovered) -> list[Found[Any]]:
    return [*discovered.scalers, *discovered.schedulers]


def _fault(path: str, saved: Standing | None, here: Standing | None) -> str | None:
    """How the object at `path` was at the save, if `here` is no object that can become the same."""
    if saved is None:
        return f"{path} is gone"
    return None if here is not None and here.can_become(saved) else f"{path} is {saved}"


def _kind(value: Any, optimizers: Mapping[int, str]) -> str:
    kind = type(value)
    if issubclass(kind, FSDPModule):  # it was built as the class after that
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    name, parts = kind.__qualname__, [_kind(part, {}) for part in getattr(value, "_schedulers", ())]
    path = optimizers.get(id(getattr(value, "optimizer", None)))
    return name + (f"({', '.join(parts)})" if parts else "") + (f" of {path}" if path else "")


def _is_stored(schedule: Any) -> bool:
    """Whether the state of a schedule has no function in it that a user gave."""
    parts = [schedule, *getattr(schedule, "_schedulers", ())]
    given = [value for part in parts for name, value in vars(part).items() if name != "optimizer"]
    functions = [leaf for leaf in tree_leaves(given) if isinstance(leaf, _FUNCTIONS)]
    return all((getattr(function, "__module__", None) or "").startswith("torch.") for function in functions)
