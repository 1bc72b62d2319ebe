"""Whether the nodes of a run see the same folder and have the same code, before anything is trained."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import xxhash
from typing_extensions import override

from ....callbacks.checkpoint.sharded.rank_channel import Channel
from ...contract.exceptions import StartupContractError
from ...plumbing.safe_open import PRIVATE_FILE, make_directory
from .rank_files import FOLDER, host_name

__all__ = ["NodeCheck", "NodeFacts", "node_faults"]

log = logging.getLogger(__name__)

PACKAGES = ("genlight", "torch", "lightning", "numpy", "pyarrow", "safetensors")
PATIENCE_S = 10.0
"""How long a network file system may take to show a new file on another node."""
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class NodeFacts:
    """One rank's facts about its node."""

    host: str
    sees_folder: bool
    versions: Mapping[str, str]
    code: Mapping[str, str]
    """Digests of the files that the trainer class comes from, by name."""


class NodeCheck(pl.Callback):
    """Refuses a run on several nodes that do not share its folder, or have other versions of what trains.

    Without a shared folder each node would write a part of each checkpoint where no other finds it.

    Args:
        folder: The run's folder.
        plugin: The trainer class, or an instance of it.
    """

    def __init__(self, folder: Path, plugin: Any) -> None:
        self.folder = folder / FOLDER
        self.plugin = plugin

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look, on all ranks at the same time.

        Raises:
            StartupContractError: On every rank: what differs, with the names of the hosts.
        """
        if stage != "fit" or trainer.num_nodes == 1:
            return
        channel = Channel()
        name = channel.share(f"seen-by-all-{secrets.token_hex(8)}")
        path = self.folder / name
        if channel.rank == 0:
            make_directory(self.folder)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
        channel.share(None)  # by now it is there
        facts = channel.gather_everywhere(NodeFacts(host_name(), _appears(path), _versions(), _code_of(self.plugin)))
        if channel.rank == 0:
            path.unlink()
        faults = node_faults(facts, self.folder.parent)
        if faults:
            shares = all(each.sees_folder for each in facts)
            code = "startup.invalid_trainer" if shares else "startup.invalid_artifact_paths"
            raise StartupContractError(code, "; ".join(faults))


def node_faults(facts: Sequence[NodeFacts], folder: Path) -> list[str]:
    """The faults of the nodes of a run; `facts` are those of each rank, in order."""
    first, faults = facts[0], list[str]()
    blind = _hosts(each for each in facts if not each.sees_folder)
    if blind:
        faults.append(
            f"{', '.join(blind)} and {first.host} do not share the run's folder {str(folder)!r}. Put it on a file "
            "system that all nodes see at the same path"
        )
    for host, fact in {each.host: each for each in reversed(facts)}.items():
        for name in sorted(first.versions.keys() | fact.versions.keys()):
            here, there = first.versions.get(name), fact.versions.get(name)
            if here != there:
                faults.append(f"{host} has {name} {there}, and {first.host} has {here}. Install the same on all nodes")
        faults += [
            f"{name} on {host} is not the file that {first.host} has. Give all nodes the same code"
            for name in sorted(first.code.keys() | fact.code.keys())
            if first.code.get(name) != fact.code.get(name)
        ]
    return faults


def _hosts(facts: Iterable[NodeFacts]) -> list[str]:
    return list(dict.fromkeys(each.host for each in facts))


def _appears(path: Path) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def _code_of(plugin: Any) -> dict[str, str]:
    """Digests of the modules of a trainer class and of the classes that it builds on."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    files = {getattr(sys.modules.get(base.__module__), "__file__", None) for base in cls.__mro__}
    return {os.path.basename(file): xxhash.xxh3_128_hexdigest(Path(file).read_bytes()) for file in files if file}
