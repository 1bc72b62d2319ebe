"""A dictionary that remembers which of its keys were read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any


class CountedDict(dict[str, Any]):
    """A dictionary that records which keys were read; an access to all at once, such as `items`, reads all of them.

    Copies of it, also by pickle, record nothing.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(uncounted(values))
        self.read: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """Keys that nobody has read."""
        return [name for name in dict.keys(self) if name not in self.read]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # `pickle` and `copy` make an `OrderedDict`: `torch.load` with `weights_only` refuses the name `dict`.
        return OrderedDict, (), None, None, iter(self.items())


def uncounted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain copy of `values` without recording a read."""
    return dict(dict.items(values)) if isinstance(values, dict) else dict(values)


def _counting(name: str, *, of_one: bool) -> Callable[..., Any]:
    """Wrap the method `name` of `dict` so that it records the key that it reads, or all keys."""
    method = getattr(dict, name)

    def counting(self: CountedDict, *arguments: Any) -> Any:
        self.read.update(arguments[:1] if of_one else dict.keys(self))
        return method(self, *arguments)

    return counting


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(CountedDict, _name, _counting(_name, of_one=True))
for _name in ("__iter__", "__reversed__", "__or__", "__ror__", "__eq__", "keys", "values", "items", "copy", "popitem"):
    setattr(CountedDict, _name, _counting(_name, of_one=False))
