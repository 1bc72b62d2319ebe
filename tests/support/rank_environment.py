"""For a program that is one rank: tells Lightning which, in place of a launcher."""

from __future__ import annotations

from lightning.fabric.plugins.environments import LightningEnvironment

__all__ = ["Ranks"]


class Ranks(LightningEnvironment):
    """Ranks that are there already and know each other by a file."""

    creates_processes_externally = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, world_size

    def local_rank(self) -> int:
        return self._rank

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size

    def set_global_rank(self, rank: int) -> None: ...

    def set_world_size(self, size: int) -> None: ...
