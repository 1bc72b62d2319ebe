"""Compares the objects that `configure` built at a resume with the objects in the checkpoint.

`BuiltSettings` compares settings of optimizers, schedulers and scalers. A restored optimizer has the learning rate of
its checkpoint, whatever `configure` built. To notice that `configure` was changed, a checkpoint also holds the settings
that it had built. If `configure` builds other settings at a resume, these are logged, and used instead of the
checkpoint's if `keep` names them. A rate that a class or a schedule changed while training does not count: only
settings as they were built are compared.

`Replaced` finds objects that training replaced, for example by a new schedule, or by swapping two networks. At a
resume, each object that `configure` builds gets a saved state, which is right only if the object is at the same place
as at the save. So a checkpoint holds the states of schedules and scalers by their paths at that time, and names each
path at which training had put another object. A schedule of the same kind gets the state that was saved at its path.
The class has to put all other objects in place itself, in ``load_state_dict``; the resume checks that.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from ...callbacks.optimizer_state import put_setting
from ..contract.exceptions import CheckpointError, ContractError
from ..discovery.children import uncompiled
from ..discovery.discover import Discovered, Found

log = logging.getLogger(__name__)

SCHEDULE, SCALER = "schedule", "scaler"
"""Names that stand for all settings of schedulers and of scalers; settings of optimizers have their own names."""
SET_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that torch's schedulers put into parameter groups. They are no difference between a saved and a built group,
because a trainer may make a scheduler after `configure`."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Values of a parameter group that are scaled with a new learning rate."""
_NO_SETTING = {"params", "param_names", *SET_BY_SCHEDULERS}
"""Keys of a parameter group that are not compared."""
_RATE_ATTRIBUTES = {"base_lrs", "_last_lr"}
"""Attributes in which a scheduler keeps the rates of its optimizer."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


class BuiltSettings:
    """The settings with which `configure` built optimizers, schedulers and scalers.

    Args:
        discovered: The objects found in the result of `configure`.
        keep: Settings that stay as built instead of being taken from a checkpoint: settings of optimizers by name
            (``lr``, ``weight_decay``), ``schedule`` for all schedulers, ``scaler`` for all scalers.

    Raises:
        ContractError: `keep` names a setting that nothing has.
    """

    def __init__(self, discovered: Discovered, keep: Sequence[str] = ()) -> None:
        self._optimizers = [(found.path, found.value) for found in discovered.optimizers]
        self._schedulers = [found.value for found in discovered.schedulers]
        self._stateful: list[tuple[str, Any, str]] = [
            *((found.path, found.value, SCHEDULE) for found in discovered.schedulers),
            *((found.path, found.value, SCALER) for found in discovered.scalers),
        ]
        self._built = copy.deepcopy(self._current())
        self._in_effect = {path: _texts(settings) for path, settings in self._built.items()}
        self._keep = frozenset(keep)
        self.kept: list[str] = []
        """Descriptions of the settings that the last resume kept as built."""
        groups = [path for each in self._optimizers for path, _ in _groups_of(*each)]
        known = {name for path in groups for name in self._built[path]}
        unknown = sorted(self._keep - known - {SCHEDULE, SCALER})
        if unknown:
            raise ContractError(
                f"{', '.join(map(repr, unknown))} cannot be kept on a resume: no optimizer has such a setting. Choose "
                f"from {', '.join(sorted(known))}, {SCHEDULE} and {SCALER}."
            )

    def record(self) -> dict[str, dict[str, str]]:
        """Return the initial settings in effect, built or from a checkpoint, as texts by path and name."""
        return {path: dict(settings) for path, settings in self._in_effect.items()}

    def reconcile(self, saved: Mapping[str, Mapping[str, str]] | None, *, logs: bool) -> None:
        """Compare the built settings with those in the checkpoint; set the ones that `keep` names to the built values.

        Args:
            saved: The result of `record` in the checkpoint; None compares with the restored objects.
            logs: Whether this rank logs.
        """
        before = {path: _texts(settings) for path, settings in self._current().items()} if saved is None else saved
        overridden, names, self.kept = [], set(), []
        for path, built in self._built.items():
            for name, text in _texts(built).items():
                old = before.get(path, {}).get(name)
                if old is None or old == text:
                    continue
                name_to_keep = next((kind for at, _, kind in self._stateful if at == path), name)
                if name_to_keep in self._keep:
                    self._put(path, name, built[name])
                    self.kept.append(f"{path} {name} {text} ({old} in the checkpoint)")
                else:
                    self._in_effect[path][name] = old
                    names.add(name_to_keep)
                    overridden.append(f"{path} {name} {old} (`configure` built {text})")
        if overridden and logs:
            log.warning(
                "Settings from the checkpoint are in effect: %s. To use those from `configure`, start again with "
                "`genlight run %s`, or list them in `resume.keep` of the job.",
                "; ".join(overridden),
                " ".join(f"--reset {name}" for name in sorted(names)),
            )
        if self.kept and logs:
            log.info("settings from `configure` are in effect: %s", "; ".join(self.kept))

    def _current(self) -> dict[str, dict[str, Any]]:
        """Return the settings that the objects have now, by path and name."""
        settings: dict[str, dict[str, Any]] = {}
        for path, optimizer in self._optimizers:
            for group_path, group in _groups_of(path, optimizer):
                plain = {name: _number(value) for name, value in group.items() if name not in _NO_SETTING}
                if "lr" in plain:
                    plain["lr"] = _number(group.get("initial_lr", group["lr"]))  # a warm-up has changed `lr`
                settings[group_path] = {name: value for name, value in plain.items() if _is_plain(value)}
        for path, stateful, _ in self._stateful:
            settings[path] = dict(_settings("", stateful.state_dict()))
        return settings

    def _put(self, path: str, name: str, value: Any) -> None:
        """Set one setting of the object or the parameter group at `path`."""
        for at, stateful, _ in self._stateful:
            if at == path:
                state = dict(stateful.state_dict())
                _put_into(state, name, value)
                stateful.load_state_dict(state)
        for at, optimizer in self._optimizers:
            for group_path, group in _groups_of(at, optimizer):
                if group_path != path:
                    continue
                if name == "lr":
                    _set_rate(group, value)
                    self._update_schedulers(optimizer)
                else:
                    put_setting(group, name, value)

    def _update_schedulers(self, optimizer: Optimizer) -> None:
        """Give the schedulers of `optimizer` its new learning rates."""
        for scheduler in _with_inner(self._schedulers):
            if getattr(scheduler, "optimizer", None) is not optimizer:
                continue
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [_number(group["lr"]) for group in optimizer.param_groups]


def _groups_of(path: str, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """Return the parameter groups of the optimizer at `path`, with their paths."""
    groups = optimizer.param_groups
    return [(f"{path}.param_groups[{i}]" if len(groups) > 1 else path, group) for i, group in enumerate(groups)]


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a new learning rate for a group, scaled by the factor by which a schedule has changed the old rate so far."""
    first = _number(group.get("initial_lr", 0))
    if not first:
        put_setting(group, "lr", rate)
        return
    for name in _RATES:
        if name in group:
            put_setting(group, name, rate if name == "initial_lr" else _number(group[name]) / first * rate)


def _with_inner(schedulers: Sequence[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))


def _settings(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a state dict; values of inner schedulers have dotted names."""
    for name, value in state.items():
        if name == "_schedulers":
            for index, inner in enumerate(value):
                yield from _settings(f"{prefix}{name}.{index}.", inner)
        elif name not in _RATE_ATTRIBUTES and _is_plain(_number(value)):
            yield f"{prefix}{name}", _number(value)


def _put_into(state: Any, name: str, value: Any) -> None:
    *inner, last = name.split(".")
    for part in inner:
        state = state[int(part)] if isinstance(state, list) else state[part]
    state[last] = value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in settings.items()}


@dataclass(frozen=True)
class Occupant:
    """The object at a path."""

    built_as: str | None
    """The path at which `configure` put it; None if it is new."""
    kind: str
    """Its class; for a schedule also its parts and its optimizer."""
    is_stored: bool
    """Whether a checkpoint holds its complete state, so that another object of its kind can take that state."""

    def __str__(self) -> str:
        return f"a new {self.kind}" if self.built_as is None else f"the {self.kind} that was built as {self.built_as}"

    def can_become(self, saved: Occupant) -> bool:
        """Whether this object equals `saved` after the saved state was loaded into it."""
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
        """Return the objects that replaced built ones, by path; None for a path whose object is gone.

        If `logs`, warn once of objects that the class itself has to put in place at a resume.
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
        """Load the state saved at the path of each schedule and scaler, if the saved object was of the same kind.

        Returns:
            The objects whose state was loaded; objects in `without` keep their state.
        """
        occupants, saved, loaded = self._occupants(now), self._saved(recorded), []
        for found in _stateful(now):
            was = saved.get(found.path)
            is_due = found.path in states and all(found.value is not other for other in without)
            if is_due and was is not None and occupants[found.path].can_become(was):
                found.value.load_state_dict(copy.deepcopy(states[found.path]))  # some classes modify this argument
                loaded.append(found.value)
        return loaded

    def check(self, recorded: Mapping[str, Any], now: Discovered, *, logs: bool) -> None:
        """Refuse objects that are at another path than at the save; if `logs`, warn of removed ones that exist again.

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
        """Return the object that was at each path at the save, by path; None if there was none."""
        return self._before | {path: None if it is None else Occupant(**it) for path, it in recorded.items()}

    def _occupants(self, now: Discovered) -> dict[str, Occupant]:
        """Return the object that is at each path now."""
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


def without_functions(scheduler: Any, state: Any) -> Any:
    """Return the `state` of a scheduler without functions; a resume uses those that ``configure`` passes to it.

    Torch's own schedulers skip functions; for a user's class, ``LRScheduler.state_dict`` returns all attributes.
    """
    if not isinstance(scheduler, LRScheduler) or type(scheduler).load_state_dict is not LRScheduler.load_state_dict:
        return state
    return {name: value for name, value in state.items() if not isinstance(value, _FUNCTIONS)}


def _stateful(discovered: Discovered) -> list[Found[Any]]:
    return [*discovered.scalers, *discovered.schedulers]


def _fault(path: str, saved: Occupant | None, here: Occupant | None) -> str | None:
    """Describe the object that was at `path` at the save, if `here` cannot become the same; otherwise return None."""
    if saved is None:
        return f"{path} is gone"
    return None if here is not None and here.can_become(saved) else f"{path} is {saved}"


def _kind(value: Any, optimizers: Mapping[int, str]) -> str:
    kind = type(value)
    if issubclass(kind, FSDPModule):  # the user's class comes next in the order of bases
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
