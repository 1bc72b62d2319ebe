"""A dictionary that remembers which of its names were asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CountedDict", "uncounted"]


class CountedDict(dict[str, Any]):
    """`values`, and which of them were read; whoever asks for all at once, to copy them say, has read them all.

    It is stored, copied and pickled as a plain dictionary.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(uncounted(values))
        self.read: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """Names that nobody has asked for."""
        return [name for name in dict.keys(self) if name not in self.read]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Also for copies. Not by the name of `dict`: files of torch that are read without pickle do not know it.
        return OrderedDict, (), None, None, iter(self.items())


def uncounted(values: Mapping[str, Any]) -> dict[str, Any]:
    """A plain copy of `values`, which counts as no reading."""
    return dict(dict.items(values)) if isinstance(values, dict) else dict(values)


def _counting(name: str, *, of_one: bool) -> Callable[..., Any]:
    """A method of `dict` that notes the name that it is asked for, or all of them."""
    method = getattr(dict, name)

    def counting(self: CountedDict, *arguments: Any) -> Any:
        self.read.update(arguments[:1] if of_one else dict.keys(self))
        return method(self, *arguments)

    return counting


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(CountedDict, _name, _counting(_name, of_one=True))
for _name in ("__iter__", "__reversed__", "__or__", "__ror__", "__eq__", "keys", "values", "items", "copy", "popitem"):
    setattr(CountedDict, _name, _counting(_name, of_one=False))
