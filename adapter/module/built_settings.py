"""Settings of optimizers, schedulers and scalers: as `configure` has just built them, and as a resume restores them.

A restored optimizer has the learning rate of its checkpoint, whatever `configure` built. A checkpoint therefore also
holds the settings that `configure` had built. If a resume builds others, it logs them, and uses those that the caller
names. A rate that a class or a schedule changed while training is no difference: only settings as they were built are
compared.
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

log = logging.getLogger(__name__)

SCHEDULE, SCALER = "schedule", "scaler"
"""Names for the settings of all schedulers and of all scalers; settings of optimizers have their own names."""
SET_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that torch's schedulers put into groups; a trainer may make such a scheduler later."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Values of a group that a new rate scales if a schedule has changed the rate."""
_NO_SETTING = {"params", "param_names", *SET_BY_SCHEDULERS}
_RATE_ATTRIBUTES = {"base_lrs", "_last_lr"}
"""Attributes in which a scheduler keeps the rates of its optimizer."""


class BuiltSettings:
    """The settings with which `configure` built optimizers, schedulers and scalers.

    Args:
        discovered: The objects found in the result of `configure`.
        keep: Settings that stay as built, whatever a checkpoint has: settings of optimizers by name (``lr``,
            ``weight_decay``), ``schedule`` for all schedulers, ``scaler`` for all scalers.

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
        self._in_effect = {path: dict(_texts(settings)) for path, settings in self._built.items()}
        self._keep = frozenset(keep)
        known = {name for path, _ in self._optimizers for each in self._of_groups(path) for name in self._built[each]}
        unknown = sorted(self._keep - known - {SCHEDULE, SCALER})
        if unknown:
            raise ContractError(
                f"{', '.join(map(repr, unknown))} cannot be kept on a resume: no optimizer has such a setting. Choose "
                f"from {', '.join(sorted(known))}, {SCHEDULE} and {SCALER}."
            )

    def record(self) -> dict[str, dict[str, str]]:
        """Return the built settings in effect by path and name, as texts for a checkpoint."""
        return {path: dict(settings) for path, settings in self._in_effect.items()}

    def reconcile(self, saved: Mapping[str, Mapping[str, str]] | None, *, logs: bool) -> None:
        """Compare the restored settings with the checkpoint's, and reset those to keep as built.

        Args:
            saved: The result of `record` in the checkpoint; None compares with the restored objects.
            logs: Whether this rank logs.
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
                    self._in_effect[path][name] = old
                    names.add(word)
                    overridden.append(f"{path} {name} {old} (`configure` built {text})")
        if overridden and logs:
            log.warning(
                "Settings from the checkpoint are in effect: %s. To use those from `configure`, start again with "
                "`genlight run %s`, or list them in `resume.keep` of the job.",
                "; ".join(overridden),
                " ".join(f"--reset {name}" for name in sorted(names)),
            )
        if kept and logs:
            log.info("settings from `configure` are in effect: %s", "; ".join(kept))

    def _live(self) -> dict[str, dict[str, Any]]:
        settings: dict[str, dict[str, Any]] = {}
        for path, optimizer in self._optimizers:
            for each, group in zip(self._of_groups(path), optimizer.param_groups, strict=True):
                plain = {name: _number(value) for name, value in group.items() if name not in _NO_SETTING}
                if "lr" in plain:
                    plain["lr"] = _number(group.get("initial_lr", group["lr"]))  # a warm-up begins at another rate
                settings[each] = {name: value for name, value in plain.items() if _is_plain(value)}
        for path, stateful, _ in self._stateful:
            settings[path] = dict(_settings("", stateful.state_dict()))
        return settings

    def _of_groups(self, path: str) -> list[str]:
        """Return the paths of the groups of an optimizer."""
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
                    self._update_schedulers(optimizer)
                else:
                    put_setting(group, name, value)

    def _update_schedulers(self, optimizer: Optimizer) -> None:
        for scheduler in _with_inner(self._schedulers):
            if getattr(scheduler, "optimizer", None) is not optimizer:
                continue
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [_number(group["lr"]) for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a new rate for a group; if a schedule has changed the old one, scale the new one by the same factor."""
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
    """Yield the plain values of a state; values of inner schedulers have dotted names."""
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


def _texts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, repr(value)) for name, value in settings.items())
