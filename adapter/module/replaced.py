"""Objects with which training replaces those that `configure` built: a new schedule, two swapped networks.

On a resume, `configure` builds its objects and each gets its state. That is right only if each object is at the same
place as at the save. So a checkpoint holds the states of schedules and scalers by their paths at that time, and names
each path at which training had put another object. A schedule of the same kind gets the state that was saved at its
path. The class has to put all other objects in place itself, in ``load_state_dict``; the resume checks that.
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

log = logging.getLogger(__name__)

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class Occupant:
    """The object at a path."""

    built_as: str | None
    """The path at which `configure` put it; None if it is new."""
    kind: str
    """Its class; for a schedule also its parts and its optimizer."""
    is_stored: bool
    """Whether a checkpoint holds its complete state, so that another object of its kind can replace it."""

    def __str__(self) -> str:
        return f"a new {self.kind}" if self.built_as is None else f"the {self.kind} that was built as {self.built_as}"

    def can_become(self, saved: Occupant) -> bool:
        """Whether this object is the same as `saved` once it has its state."""
        are_stored = self.is_stored and saved.is_stored
        return self.kind == saved.kind and (are_stored or self.built_as == saved.built_as)


class Replaced:
    """Objects with which training has replaced those that `configure` built.

    Args:
        built: The objects after `configure`.
    """

    def __init__(self, built: Discovered) -> None:
        self._built = built
        objects: list[Found[Any]] = [*built.modules, *built.optimizers, *_stateful(built)]
        self._paths = {id(found.value): found.path for found in objects}
        self._before = self._occupants(built)
        self._has_warned = False

    @staticmethod
    def states(now: Discovered) -> dict[str, Any]:
        """Return the states of all schedules and scalers, by path."""
        return {found.path: without_functions(found.value, found.value.state_dict()) for found in _stateful(now)}

    def record(self, now: Discovered, *, logs: bool) -> dict[str, dict[str, Any] | None]:
        """Return, by path, the objects that replaced those of `configure`; None for a path whose object is gone.

        On a rank that `logs`, warn once of those that the class has to put in place itself.
        """
        occupants = self._occupants(now)
        other = {path: occupants.get(path) for path in {**self._before, **occupants}}
        other = {path: it for path, it in other.items() if it != self._before.get(path)}
        faults = [fault for path, it in other.items() if (fault := _fault(path, it, self._before.get(path)))]
        if faults and logs and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Training replaced objects that `configure` built: %s. A resume is right only if `load_state_dict` "
                "does the same, from the result of `state_dict`.",
                "; ".join(faults),
            )
        return {path: None if it is None else asdict(it) for path, it in other.items()}

    def load(
        self, states: Mapping[str, Any], recorded: Mapping[str, Any], now: Discovered, without: Sequence[Any] = ()
    ) -> list[Any]:
        """Load into each schedule and scaler the state saved at its path, if the saved object was of its kind.

        Returns:
            The objects that were loaded; objects in `without` keep their state.
        """
        occupants, saved, loaded = self._occupants(now), self._saved(recorded), []
        for found in _stateful(now):
            was = saved.get(found.path)
            is_due = found.path in states and all(found.value is not other for other in without)
            if is_due and was is not None and occupants[found.path].can_become(was):
                found.value.load_state_dict(copy.deepcopy(states[found.path]))  # some classes take the state apart
                loaded.append(found.value)
        return loaded

    def check(self, recorded: Mapping[str, Any], now: Discovered, *, logs: bool) -> None:
        """Refuse objects that are not at their places of the save; warn of removed objects that exist again.

        Raises:
            CheckpointError: Names each path, and the object that was there at the save.
        """
        occupants, saved = self._occupants(now), self._saved(recorded)
        back = [path for path in recorded if recorded[path] is None and path in occupants]
        if back and logs:
            log.warning(
                "%s did not exist any more when the checkpoint was saved, but exists now. Remove it in "
                "`load_state_dict`, as training does.",
                ", ".join(back),
            )
        faults = [_fault(path, was, occupants.get(path)) for path, was in saved.items() if was is not None]
        if text := "; ".join(fault for fault in faults if fault is not None):
            raise CheckpointError(
                f"Training replaced objects that `configure` built, and `load_state_dict` did not: at the save {text}. "
                "Put them in place in `load_state_dict`, from the result of `state_dict`, or build them in `configure`."
            )

    def _saved(self, recorded: Mapping[str, Any]) -> dict[str, Occupant | None]:
        """Return the object that was at each path at the save."""
        return self._before | {path: None if it is None else Occupant(**it) for path, it in recorded.items()}

    def _occupants(self, now: Discovered) -> dict[str, Occupant]:
        optimizers = {id(found.value): found.path for found in self._built.optimizers}
        schedules = {found.path: found.value for found in _stateful(now)}
        objects = self._built.look_up(self._paths.values()) | schedules
        return {
            path: Occupant(
                self._paths.get(id(uncompiled(value))),
                _kind(value, optimizers),
                path in schedules and _is_stored(value),
            )
            for path, value in objects.items()
        }


def without_functions(kept: Any, state: Any) -> Any:
    """Return the state of a scheduler without functions: on a resume it keeps those that ``configure`` passed to it.

    Torch's own schedulers skip functions; for a user's class, ``LRScheduler.state_dict`` returns all attributes.
    """
    if not isinstance(kept, LRScheduler) or type(kept).load_state_dict is not LRScheduler.load_state_dict:
        return state
    return {name: value for name, value in state.items() if not isinstance(value, _FUNCTIONS)}


def _stateful(discovered: Discovered) -> list[Found[Any]]:
    return [*discovered.scalers, *discovered.schedulers]


def _fault(path: str, saved: Occupant | None, here: Occupant | None) -> str | None:
    """Return what was at `path` at the save, if `here` cannot become the same object."""
    if saved is None:
        return f"{path} is gone"
    return None if here is not None and here.can_become(saved) else f"{path} is {saved}"


def _kind(value: Any, optimizers: Mapping[int, str]) -> str:
    kind = type(value)
    if issubclass(kind, FSDPModule):  # the class that was built comes next in the order of bases
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    name, parts = kind.__qualname__, [_kind(part, {}) for part in getattr(value, "_schedulers", ())]
    path = optimizers.get(id(getattr(value, "optimizer", None)))
    return name + (f"({', '.join(parts)})" if parts else "") + (f" of {path}" if path else "")


def _is_stored(schedule: Any) -> bool:
    """Whether a schedule has no functions of the user, so that its state is complete."""
    parts = [schedule, *getattr(schedule, "_schedulers", ())]
    attributes = [value for part in parts for name, value in vars(part).items() if name != "optimizer"]
    functions = [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, _FUNCTIONS)]
    return all((getattr(function, "__module__", None) or "").startswith("torch.") for function in functions)
