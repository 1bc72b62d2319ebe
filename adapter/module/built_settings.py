"""Settings of optimizers, schedulers and scalers: as `configure` has just built them, and as a resume restores them.

A restored optimizer brings the learning rate of its checkpoint, whatever `configure` built. A checkpoint therefore
holds the settings that were built for it. Where a resume builds others, that is said; those that the caller names are
put in force instead. A rate that a class or a schedule changed while training is no difference: what is compared is
what was built, then and now.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.optimizer_state import put_setting
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered

__all__ = ["SET_BY_SCHEDULERS", "BuiltSettings"]

log = logging.getLogger(__name__)

SCHEDULE, SCALER = "schedule", "scaler"
"""Names for the settings of all schedulers, and of all scalers; those of optimizers have their own."""
SET_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that schedulers of torch, which a trainer may make later, put into groups."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Of a group: what a new rate scales, where a schedule has changed it since."""
_NO_SETTING = {"params", "param_names", *SET_BY_SCHEDULERS}
_OF_THE_RATE = {"base_lrs", "_last_lr"}
"""Attributes in which a scheduler keeps the rates of its optimizer."""


class BuiltSettings:
    """The settings with which `configure` built optimizers, schedulers and scalers.

    Args:
        discovered: What was found in what `configure` returned.
        keep: Settings that stay as built, whatever a checkpoint has: of optimizers by their names (``lr``,
            ``weight_decay``), ``schedule`` for those of schedulers, ``scaler`` for those of scalers.

    Raises:
        ContractError: `keep` names a setting that nothing has.
    """

    def __init__(self, discovered: Discovered, keep: Sequence[str] = ()) -> None:
        self._optimizers = [(found.path, found.value) for found in discovered.optimizers]
        self._schedulers = [found.value for found in discovered.schedulers]
        self._stateful: list[tuple[str, Any, str]] = [
            (found.path, found.value, SCHEDULE) for found in discovered.schedulers
        ]
        self._stateful += [(found.path, found.value, SCALER) for found in discovered.scalers]
        self._built = copy.deepcopy(self._live())
        self._in_force = {path: dict(_texts(settings)) for path, settings in self._built.items()}
        self._keep = frozenset(keep)
        known = {name for path, _ in self._optimizers for each in self._of_groups(path) for name in self._built[each]}
        unknown = sorted(self._keep - known - {SCHEDULE, SCALER})
        if unknown:
            raise ContractError(
                f"{', '.join(map(repr, unknown))} cannot be kept on a resume: no optimizer has such a setting. There "
                f"are {', '.join(sorted(known))}, {SCHEDULE} and {SCALER}."
            )

    def record(self) -> dict[str, dict[str, str]]:
        """For a checkpoint: by path and name, the settings that are in force as they were built, as texts."""
        return {path: dict(settings) for path, settings in self._in_force.items()}

    def restored(self, saved: Mapping[str, Mapping[str, str]] | None, *, says: bool) -> None:
        """Compare with a checkpoint, of which everything is restored by now, and put in force what is to be kept.

        Args:
            saved: What `record` gave for it; None compares with what was restored.
            says: Whether this rank logs.
        """
        before = {path: dict(_texts(settings)) for path, settings in self._live().items()} if saved is None else saved
        overridden, kept, names = [], [], set()
        for path, built in self._built.items():
            for name, text in _texts(built):
                old = before.get(path, {}).get(name)
                if old is None or old == text:
                    continue
                word = next((kind for at, _, kind in self._stateful if at == path), name)
                if word in self._keep:
                    self._put(path, name, built[name])
                    kept.append(f"{path} {name} {text} ({old} in the checkpoint)")
                else:
                    self._in_force[path][name] = old
                    names.add(word)
                    overridden.append(f"{path} {name} {old} (`configure` built {text})")
        if overridden and says:
            log.warning(
                "In force is what the checkpoint has: %s. To train with what was built, start again with `genlight "
                "run %s`, or list it in `resume.keep` of the job.",
                "; ".join(overridden),
                " ".join(f"--reset {name}" for name in sorted(names)),
            )
        if kept and says:
            log.info("in force is what `configure` built: %s", "; ".join(kept))

    def _live(self) -> dict[str, dict[str, Any]]:
        settings: dict[str, dict[str, Any]] = {}
        for path, optimizer in self._optimizers:
            for each, group in zip(self._of_groups(path), optimizer.param_groups, strict=True):
                plain = {name: _number(value) for name, value in group.items() if name not in _NO_SETTING}
                if "lr" in plain:
                    plain["lr"] = _number(group.get("initial_lr", group["lr"]))  # a warm-up begins at another one
                settings[each] = {name: value for name, value in plain.items() if _is_plain(value)}
        for path, stateful, _ in self._stateful:
            settings[path] = dict(_settings("", stateful.state_dict()))
        return settings

    def _of_groups(self, path: str) -> list[str]:
        """The paths of the groups of an optimizer."""
        count = next(len(optimizer.param_groups) for at, optimizer in self._optimizers if at == path)
        return [path] if count == 1 else [f"{path}.param_groups[{index}]" for index in range(count)]

    def _put(self, path: str, name: str, value: Any) -> None:
        for at, stateful, _ in self._stateful:
            if at == path:
                state = dict(stateful.state_dict())
                _put_into(state, name, value)
                stateful.load_state_dict(state)
        for at, optimizer in self._optimizers:
            for each, group in zip(self._of_groups(at), optimizer.param_groups, strict=True):
                if each != path:
                    continue
                if name == "lr":
                    _set_rate(group, value)
                    self._tell_schedulers(optimizer)
                else:
                    put_setting(group, name, value)

    def _tell_schedulers(self, optimizer: Optimizer) -> None:
        for scheduler in _with_inner(self._schedulers):
            if getattr(scheduler, "optimizer", None) is not optimizer:
                continue
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [_number(group["lr"]) for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """A new rate for a group; where a schedule has changed the old one, by the same factor from now on."""
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
    """Plain values of a state, those of inner schedulers by dotted names."""
    for name, value in state.items():
        if name == "_schedulers":
            for index, inner in enumerate(value):
                yield from _settings(f"{prefix}{name}.{index}.", inner)
        elif name not in _OF_THE_RATE and _is_plain(_number(value)):
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


def _texts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, repr(value)) for name, value in settings.items())
