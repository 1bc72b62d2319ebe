"""State that a class does not return from ``state_dict``: of libraries' objects, of modules, and its own values.

Objects with a ``state_dict`` of their own, such as averages of weights and schedules of other libraries, are stored and
loaded. So are plain attributes of modules that training changed, such as the index of a queue. All other values belong
to the class. If it neither returns nor restores one that training had changed, the resume names it.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...callbacks.checkpoint.codec.tensors import is_storable
from ...callbacks.witness.state import digest, values_in
from ..contract.types import StepContext
from ..discovery.children import SEARCHED_ITEMS, attributes_of_module, uncompiled
from ..discovery.discover import Discovered, walk
from ..plumbing.generators import GENERATORS

log = logging.getLogger(__name__)

_CONTAINERS = (list, tuple, dict, set, deque)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_SAMPLED = 4096
"""Elements of a large tensor that are compared, only for a warning."""
_MOVES = itertools.count()
_NAME = re.compile(r"(?:state|trainer)(?:\.\w+|\[[^\]]*\])?")
"""The first part of a path, by which the class's author knows a value."""


class FoundState:
    """The state that is found on what ``configure`` built, as training changes it.

    Args:
        built: The objects after ``configure``.
        host: The module that hosts the trainer; it is no part of the state.
    """

    def __init__(self, built: Discovered, host: nn.Module) -> None:
        self._host = host
        self._attributes = {path: _fingerprint(value) for path, value in _plain_attributes(built)}
        self._values = self._fingerprints(built)

    def states(self, now: Discovered) -> dict[str, dict[str, Any]]:
        """Return the states of objects, and the attributes of modules that training changed, by path."""
        changed = {
            path: value
            for path, value in _plain_attributes(now)
            if path not in self._attributes or self._attributes[path] != _fingerprint(value)
        }
        return {"objects": dict(_states_of_objects(now)), "attributes": changed}

    @staticmethod
    def load(saved: Mapping[str, Mapping[str, Any]], now: Discovered) -> None:
        """Load a result of `states`."""
        for found in now.stateful:
            if found.path in saved["objects"]:
                try:
                    found.value.load_state_dict(saved["objects"][found.path])
                except Exception as error:  # noqa: BLE001  # the class may restore the object itself
                    log.warning("%s could not load its state: %s: %s", found.path, type(error).__name__, error)
        modules = dict(_modules(now))
        for path, value in saved["attributes"].items():
            owner, _, name = path.rpartition(".")
            if owner in modules:
                _put(vars(modules[owner]), name, value)

    def changed_values(self, now: Discovered) -> dict[str, str]:
        """Return fingerprints of the values that training changed, by name."""
        return {name: each for name, each in self._fingerprints(now).items() if self._values.get(name) != each}

    def warn_of_lost(self, changed: Mapping[str, str], now: Discovered) -> None:
        """Warn of values that are not as they were when `changed_values` returned `changed`."""
        values = self._fingerprints(now)
        lost = [name for name, each in changed.items() if values.get(name) != each]
        if lost:
            log.warning(
                "The checkpoint does not hold %s, which training had changed. If a step depends on them, this run is "
                "not equal to an uninterrupted one: return them from `state_dict` and restore them in "
                "`load_state_dict`. `genlight check` tells whether weights depend on them.",
                ", ".join(lost),
            )

    def _fingerprints(self, now: Discovered) -> dict[str, str]:
        """Return fingerprints of all values outside of modules, by the first part of their paths."""
        seen: dict[int, Any] = {id(self._host): self._host, **{id(each.value): each.value for each in now.modules}}
        parts, contexts = defaultdict(list), ["-"]
        (state_name, state), (trainer_name, trainer) = now.roots
        for root, name, without in ((state, state_name, trainer), (trainer, trainer_name, None)):
            for path, node in walk(root, name, seen=seen, without=without):
                if isinstance(node, StepContext):
                    contexts.append(f"{path}.")
                if not isinstance(node, (Mapping, list, tuple, deque, *GENERATORS)) and not (
                    path.startswith(tuple(contexts)) or (isinstance(node, Tensor) and node.requires_grad)
                ):
                    # An iterator has moved on, and starts again after a resume; nothing tells its position.
                    moves = isinstance(node, Iterator) and not isinstance(node, io.IOBase)
                    known = next(_MOVES) if moves else _fingerprint(node, sampled=True)
                    parts[_NAME.findall(path)[0]].append((path, known))
        return {name: digest(repr(part)) for name, part in parts.items()}


def _states_of_objects(now: Discovered) -> Iterator[tuple[str, Any]]:
    for found in now.stateful:
        try:
            state = found.value.state_dict()
        except Exception as error:  # noqa: BLE001  # some objects do not support it; a resume names what is lost
            log.debug("%s returned no state: %r", found.path, error)
            continue
        if is_storable(state) and not any(isinstance(leaf, DTensor) for leaf in tree_leaves(state)):
            yield found.path, state


def _modules(now: Discovered) -> Iterator[tuple[str, nn.Module]]:
    for found in now.modules:
        for name, module in uncompiled(found.value).named_modules():
            yield f"{found.path}.{name}".removesuffix("."), module


def _plain_attributes(now: Discovered) -> Iterator[tuple[str, Any]]:
    for found in now.modules:
        for reference in attributes_of_module(found.path, uncompiled(found.value)):
            if _is_plain(reference.value):
                yield reference.path, reference.value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, texts, and tensors that nothing trains."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad
    if type(value) in _CONTAINERS:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return len(value) <= SEARCHED_ITEMS and all(map(_is_plain, items))
    return type(value) in _NUMBERS


def _fingerprint(value: Any, *, sampled: bool = False) -> Any:
    """Return a value that is equal for equal types, shapes and bits, or for equal samples of large tensors."""
    if type(value) in _NUMBERS:
        return type(value), value
    leaves = [(path, leaf) for path, leaf, _ in values_in("", value, others=_is_plain(value))]
    return [(path, digest(_sample(leaf) if sampled else leaf)) for path, leaf in leaves]


def _sample(value: Any) -> Any:
    is_large = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > _SAMPLED
    return value.reshape(-1)[:: value.numel() // _SAMPLED | 1] if is_large else value


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Replace an attribute; in place if possible, because something else may refer to the same object."""
    old = attributes.get(name)
    if isinstance(old, Tensor) and isinstance(value, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, list | deque | set | dict) and type(old) is type(value):
        old.clear()
        old.extend(value) if isinstance(old, list | deque) else old.update(value)
    else:
        attributes[name] = value
