"""What an earlier process of a run left in the spool."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence

from ...adapter.contract.exceptions import StartupContractError, UploadError
from .artifact import files_outside, unpack
from .config import UploadConfig
from .hard_links import release_others
from .journal import Description, fault_of, read_description
from .outcome import REQUIRED_KINDS
from .spool import Spool

__all__ = ["claim", "look_through"]

log = logging.getLogger(__name__)


def claim(spool: Spool, config: UploadConfig, targets: Sequence[str]) -> int:
    """Write down whose spool it is; how often an uploader was made for it, this time included.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: uploads of another run wait in it; they are not sent under
            this one's name.
    """
    try:
        before = read_description(spool.directory)
    except UploadError:
        before = Description(config.run_id)
    if before.run_id != config.run_id:
        if spool.entries():
            raise StartupContractError(
                "startup.artifacts_in_use",
                f"The upload spool {spool.directory} holds uploads of run {before.run_id!r}, not of "
                f"{config.run_id!r}. Deliver them by `genlight uploads {shlex.quote(str(spool.directory.parent))} "
                "retry`, or use another directory.",
            )
        spool.forget_everything()
        before = Description(config.run_id)
    starts = max(before.starts, 0) + 1
    facts = {"run_id": config.run_id, "owner": config.owner, "targets": list(targets)}
    spool.describe({**facts, "starts": starts, "stores_files": config.stores_files()})
    return starts


def look_through(spool: Spool, config: UploadConfig, *, keep_terminal: bool) -> None:
    """An earlier attempt's terminal message is out of date; what has vanished from disk is lost."""
    if not keep_terminal:
        for entry in spool.entries("terminal"):
            spool.remove(entry)
    _drop_malformed(spool)
    _drop_vanished(spool)
    _refuse_files_outside(spool, config)
    for kind in REQUIRED_KINDS:
        if spool.count(kind) and not config.wants(kind):
            log.warning("uploads of kind %s wait in %s, but no URL is set for them", kind, spool.directory)
    artifacts = [unpack(entry.body) for entry in (*spool.entries("sample"), *spool.entries("checkpoint"))]
    links = [artifact.files[-1].location(spool.directory.parent) for artifact in artifacts if artifact.held]
    release_others(spool.directory, links)


def _drop_malformed(spool: Spool) -> None:
    for entry in spool.entries():
        fault = fault_of(entry)
        if fault is not None:
            log.warning("an upload of kind %s in %s is ignored: %s", entry.kind, spool.directory, fault)
            spool.remove(entry)


def _refuse_files_outside(spool: Spool, config: UploadConfig) -> None:
    """A journal that came with a folder from elsewhere could name any file of this machine."""
    root = spool.directory.parent
    for entry in (*spool.entries("sample"), *spool.entries("checkpoint")):
        found = files_outside(unpack(entry.body), root, config.roots)
        if found:
            reason = f"{found[0]} lies outside of the run's folders; name its folder as another root"
            spool.fail(entry, reason, auth=False)


def _drop_vanished(spool: Spool) -> None:
    root = spool.directory.parent
    for entry in (*spool.entries("sample"), *spool.entries("checkpoint")):
        missing = [file.path for file in unpack(entry.body).files if not file.location(root).exists()]
        if missing:
            log.warning("the %s of step %d is no longer there to upload: %s", entry.kind, entry.step, missing)
            spool.remove(entry)
