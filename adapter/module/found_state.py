"""State that a class does not return from ``state_dict``: objects of libraries, attributes of modules, and values.

Objects with a ``state_dict``, such as averages of weights and schedules of other libraries, are stored and loaded. So
are plain attributes of modules that training changed, such as the index of a queue. The class has to return and restore
all other values itself. If training had changed one that the class does not restore, the resume names it.
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
from torch.optim import Optimizer

from ...callbacks.checkpoint.codec.tensors import is_plain, is_storable
from ...callbacks.witness.state import digest, values_in
from ..contract.types import StepContext
from ..discovery.children import SEARCHED_ITEMS, attributes_of, uncompiled
from ..discovery.discover import Discovered, globals_of, walk
from ..discovery.wrapped_optimizers import with_inner_optimizers
from ..plumbing.generators import GENERATORS

log = logging.getLogger(__name__)

_CONTAINERS = (list, tuple, dict, set, deque)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_OPTIMIZER_ATTRIBUTES = frozenset(vars(Optimizer([torch.zeros(())], {})))
"""Attributes that torch gives to every optimizer."""
_ABSENT = (object(), None)
"""A result of `_constant_and_fingerprint` that differs from all others, for an attribute that did not exist."""
_SAMPLED = 4096
"""About how many elements of a large tensor are compared; a sample is enough, because the result is only a warning."""
_CHANGES = itertools.count()
"""Numbers that make the fingerprint of an iterator new each time."""
_NAME = re.compile(r"(?:state|trainer)(?:\.\w+|\[[^\]]*\])?")
"""The first part of a path, by which the author of the class recognizes a value."""


class FoundState:
    """The state of the objects that ``configure`` built, as far as no other part of a checkpoint stores it.

    Args:
        built: The objects after ``configure``.
        host: The module that hosts the trainer; it is no part of the state.
    """

    def __init__(self, built: Discovered, host: nn.Module) -> None:
        self._host = host
        self._attributes = {
            path: {name: _constant_and_fingerprint(value) for name, value in _attributes_of(owner) if _is_data(value)}
            for path, owner in _owners(built)
        }
        self._values = self._fingerprints(built)

    def states(self, now: Discovered) -> dict[str, dict[str, Any]]:
        """Return the states of objects, and the attributes of modules that training changed, by path."""
        changed = {}
        for path, owner in _owners(now):
            before = self._attributes.get(path, {})
            for name, value in _attributes_of(owner):
                constant, fingerprint = before.get(name, _ABSENT)
                # Nearly all attributes are constants, and a digest of each would slow a save down.
                if value is not constant and _is_data(value) and fingerprint != _fingerprint(value):
                    changed[f"{path}.{name}"] = value
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
        owners = dict(_owners(now))
        for path, value in saved["attributes"].items():
            owner, _, name = path.rpartition(".")
            if isinstance(owners.get(owner), nn.Parameter):
                owners[owner].requires_grad_(value)
            elif owner in owners:
                _put(vars(owners[owner]), name, value)

    def changed_values(self, now: Discovered) -> dict[str, str]:
        """Return fingerprints of the values that training changed, by name."""
        return {name: each for name, each in self._fingerprints(now).items() if self._values.get(name) != each}

    def warn_of_lost(self, changed: Mapping[str, str], now: Discovered) -> None:
        """Warn of the values in `changed`, a result of `changed_values` at the save, that are different now."""
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
        """Return fingerprints of all values outside of modules, by name; values with the same name share a fingerprint.

        A name is the first part of a path (`_NAME`), an attribute of an optimizer, or a global variable.
        """
        parts: dict[str, list[Any]] = defaultdict(list)
        for name, path, node in self._values_of(now):
            # An iterator starts again after a resume. Its position cannot be read, so it counts as changed.
            is_iterator = isinstance(node, Iterator) and not isinstance(node, io.IOBase)
            parts[name].append((path, next(_CHANGES) if is_iterator else _fingerprint(node, sampled=True)))
        return {name: digest(repr(part)) for name, part in parts.items()}

    def _values_of(self, now: Discovered) -> Iterator[tuple[str, str, Any]]:
        """Yield name, path and value of each value that a step may use."""
        seen: dict[int, Any] = {id(self._host): self._host, **{id(each.value): each.value for each in now.modules}}
        contexts = ["-"]
        (state_name, state), (trainer_name, trainer) = now.roots
        for root, name, without in ((state, state_name, trainer), (trainer, trainer_name, None)):
            for path, node in walk(root, name, seen=seen, without=without):
                if isinstance(node, StepContext):
                    contexts.append(f"{path}.")
                if _is_leaf(node) and not path.startswith(tuple(contexts)):
                    yield _NAME.findall(path)[0], path, node
        for found in with_inner_optimizers(now):
            for name, value in _own_attributes(found.value):
                for _, node in walk(value, ""):  # without paths, because keys in them may be addresses
                    if _is_leaf(node):
                        yield f"{found.path}.{name}", "", node
        for name, value in globals_of(type(now.roots[1][1])):
            if _is_data(value) and not name.rpartition(".")[2].startswith("__"):
                yield name, "", value


def _is_leaf(node: Any) -> bool:
    is_parameter = isinstance(node, Tensor) and node.requires_grad
    return not is_parameter and not isinstance(node, (Mapping, list, tuple, deque, *GENERATORS))


def _states_of_objects(now: Discovered) -> Iterator[tuple[str, Any]]:
    """Yield the states of objects with a ``state_dict`` that a checkpoint can hold, by path."""
    for found in now.stateful:
        try:
            state = found.value.state_dict()
        except Exception as error:  # noqa: BLE001  # some objects do not support it; a resume names what is lost
            log.debug("%s returned no state: %r", found.path, error)
            continue
        if is_storable(state) and not any(isinstance(leaf, DTensor) for _, leaf, _ in values_in("", state)):
            yield found.path, state


def _owners(now: Discovered) -> Iterator[tuple[str, Any]]:
    """Yield modules, parameters and optimizers by path."""
    for found in now.modules:
        module = uncompiled(found.value)
        for name, owner in (*module.named_modules(), *module.named_parameters()):
            yield f"{found.path}.{name}".removesuffix("."), owner
    yield from ((found.path, found.value) for found in with_inner_optimizers(now))


def _own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an optimizer has in addition to torch's, by name."""
    if not type(optimizer).__module__.startswith("torch."):
        yield from ((name, value) for name, value in vars(optimizer).items() if name not in _OPTIMIZER_ATTRIBUTES)


def _attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes to compare, by name; a module also has ``training``, a parameter only ``requires_grad``."""
    if isinstance(owner, nn.Module):
        yield from attributes_of(owner)
        yield "training", owner.training
    elif isinstance(owner, nn.Parameter):
        yield "requires_grad", owner.requires_grad
    else:
        yield from _own_attributes(owner)


def _constant_and_fingerprint(value: Any) -> tuple[Any, Any]:
    """Return `value` if it is immutable, otherwise an object that no attribute is; and the fingerprint of `value`."""
    items = value if type(value) is tuple else (value,)
    return value if all(type(item) in _NUMBERS for item in items) else _ABSENT[0], _fingerprint(value)


def _is_data(value: Any) -> bool:
    """Whether a value consists of numbers, texts, and tensors that nothing trains."""
    if isinstance(value, Tensor):
        return is_plain(value) and not value.requires_grad
    if type(value) in _CONTAINERS:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return len(value) <= SEARCHED_ITEMS and all(map(_is_data, items))
    return type(value) in _NUMBERS


def _fingerprint(value: Any, *, sampled: bool = False) -> Any:
    """Return a fingerprint that is equal for equal types, shapes and bits; `sampled` skips most of a large tensor."""
    if type(value) in _NUMBERS:
        return type(value), value
    leaves = [(path, leaf) for path, leaf, _ in values_in("", value, others=_is_data(value))]
    return [(path, digest(_sample(leaf) if sampled else leaf)) for path, leaf in leaves]


def _sample(value: Any) -> Any:
    """Return the value to take a digest of: a sample of a large tensor, or the type of an unusual tensor."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor) and not is_plain(value):
        return f"{type(value).__name__} {value.layout} {value.dtype}"
    is_large = isinstance(value, Tensor) and value.numel() > _SAMPLED
    return value.reshape(-1)[:: value.numel() // _SAMPLED | 1] if is_large else value


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; in place if possible, because something else may refer to the same object."""
    old = attributes.get(name)
    if isinstance(old, Tensor) and isinstance(value, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, list | deque | set | dict) and type(old) is type(value):
        old.clear()
        old.extend(value) if isinstance(old, list | deque) else old.update(value)
    else:
        attributes[name] = value
