"""Whether the nodes of a run see the same folder and have the same code, before anything is trained."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import xxhash
from typing_extensions import override

from ...callbacks.checkpoint.sharded.rank_channel import Channel
from ..contract.exceptions import StartupContractError
from ..plumbing.safe_open import PRIVATE_FILE, make_directory
from .ranks import FOLDER
from .this_rank import host_name

__all__ = ["NodeCheck", "node_faults"]

PACKAGES = ("genlight", "torch", "lightning", "numpy", "pyarrow", "safetensors")
PATIENCE_S = 10.0
"""How long a network file system may take to show a new file on another node."""
LOOK_EVERY_S = 0.1


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
        path = self.folder / channel.share(f"seen-by-all-{secrets.token_hex(8)}")
        if channel.rank == 0:
            make_directory(self.folder)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
        channel.share(None)  # by now it is there
        folder = "shared" if _appears(path) else f"another one ({self.folder.parent})"
        facts = channel.gather_everywhere((host_name(), {"the run's folder": folder, **_installed(self.plugin)}))
        if channel.rank == 0:
            path.unlink()
        if faults := node_faults(facts):
            way_out = "All nodes need the same folder, packages and code, at the same path"
            raise StartupContractError("startup.invalid_artifact_paths", f"{'; '.join(faults)}. {way_out}.")


def node_faults(facts: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """The facts in which nodes differ from the first one; `facts` are the host and the facts of each rank, in order."""
    first, here = facts[0]
    faults = [
        f"{name} is {there.get(name)} on {host}, and {here.get(name)} on {first}"
        for host, there in facts
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    ]
    return list(dict.fromkeys(faults))  # the ranks of a node have the same


def _appears(path: Path) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _installed(plugin: Any) -> dict[str, str]:
    cls = plugin if isinstance(plugin, type) else type(plugin)
    files = {getattr(sys.modules.get(base.__module__), "__file__", None) for base in cls.__mro__}
    code = {os.path.basename(file): xxhash.xxh3_64_hexdigest(Path(file).read_bytes()) for file in files if file}
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}, **code}
