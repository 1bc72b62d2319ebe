"""Entries of a witness: their file, which survives a kill, and their comparison.

Each rank has one file. Its first line is a header: version, run, and the facts about each attempt that affect exact
numbers. Entries of a fixed size follow, each with a digest of itself. They are appended without a sync: the kernel
keeps what a killed process wrote, and after a power cut a torn end is ignored.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from ...adapter.plumbing.durable import make_directory, write_bytes_durably
from ...adapter.plumbing.safe_open import UnsafeFileError, open_own, read_own
from ...reporters.events.run_metadata import changed_numerics

log = logging.getLogger(__name__)

FOLDER = ".witness"
"""Name of the folder of a run's witness, in its folder of checkpoints."""
RANDOM_STATES = (
    "Python's `random`",
    "NumPy",
    "torch on the CPU",
    "torch on the accelerator",
    "the data loaders' generators",
    "generators that the model holds",
)
"""Kinds of random states, in the order of `Entry.random`."""
ON_DEVICE, OF_MODEL = 3, 5
"""Indices in `RANDOM_STATES` of the states on the accelerator, and of the generators that the model holds."""

Kind = Literal["rows", "random numbers", "settings", "loss", "checkpoint"]
Key = tuple[int, int, int]
"""Completed steps, epoch and batch of the epoch. With accumulation, several batches have the same number of steps."""

_MAGIC = b"genlight-witness 1 "
_BODY = struct.Struct("<13Q2d")
_SIZE = _BODY.size + 8
_LARGEST_FILE = 64 << 20
_MOST_ATTEMPTS = 8
"""Attempts whose facts the header keeps."""


class Entry(msgspec.Struct, frozen=True):
    """A record of one batch that one rank has trained. All digests are 64-bit numbers."""

    step: int
    """Completed steps after the batch."""
    epoch: int
    batch: int
    """Index of the batch in its epoch."""
    attempt: int
    """Attempt that trained it, from 1; a key of `Header.attempts`."""
    rows: int
    """Digest of the batch as the loader gave it."""
    random: tuple[int, ...]
    """Digests of the random states after the batch, one for each of `RANDOM_STATES`."""
    rates: int
    """Digest of the learning rates of all optimizers."""
    losses: int
    """Digest of all losses; 0 if there is none."""
    rate: float = math.nan
    """The first learning rate; nan if there is none."""
    loss: float = math.nan
    """The first loss; nan if there is none."""

    @property
    def key(self) -> Key:
        """The place of the batch in the training. A repeated batch has the same key."""
        return self.step, self.epoch, self.batch

    def pack(self) -> bytes:
        """Return the bytes of this entry in a file."""
        place = (self.step, self.epoch, self.batch, self.attempt)
        body = _BODY.pack(*place, self.rows, *self.random, self.rates, self.losses, self.rate, self.loss)
        return body + xxhash.xxh3_64_digest(body)


def unpack(data: bytes) -> Entry | None:
    """Return the entry in bytes that `pack` made, or None if the bytes are no entry."""
    body = data[: _BODY.size]
    if len(data) != _SIZE or xxhash.xxh3_64_digest(body) != data[_BODY.size :]:
        return None
    step, epoch, batch, attempt, rows, *random, rates, losses, rate, loss = _BODY.unpack(body)
    return Entry(step, epoch, batch, attempt, rows, tuple(random), rates, losses, rate, loss)


class Header(msgspec.Struct, frozen=True):
    """The first line of a file."""

    run: str
    """Identity of the training: made at its first step, and stored in its checkpoints."""
    rank: int
    attempts: dict[int, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Facts about each attempt, by its number: ``numerics``, ``packages``, ``host``, ``device`` and ``ranks``;
    ``built``, a digest of the initial settings of optimizers, schedulers and scalers; and ``kept``, descriptions of the
    settings that the resume left as `configure` built them, instead of restoring them."""


@dataclass
class Recorded:
    """The content of a witness file."""

    header: Header
    entries: dict[Key, Entry] = field(default_factory=dict)
    """The newest entry for each batch."""
    is_torn: bool = False
    """Whether the end of the file is not an entry, so that the entries from there on are lost."""


def file_of_rank(directory: Path, rank: int) -> Path:
    """Return the file of `rank` for a folder of checkpoints."""
    return directory / FOLDER / f"rank-{rank:05d}"


def read_witness(path: Path) -> Recorded | None:
    """Read the witness of one rank.

    Returns:
        None if there is no file.

    Raises:
        ValueError: It is not a witness, or one of another version.
        UnsafeFileError: It is a link, a pipe, or another user's file.
        OSError: It cannot be read.
    """
    _refuse_linked_folder(path)
    try:
        data = read_own(path, limit=_LARGEST_FILE)
    except FileNotFoundError:
        return None
    line, _, rest = data.partition(b"\n")
    if not line.startswith(_MAGIC):
        raise ValueError("it is of another version, or no witness")
    digest, _, text = line.removeprefix(_MAGIC).partition(b" ")
    if xxhash.xxh3_64_hexdigest(text).encode() != digest:
        raise ValueError("its first line is damaged")
    recorded = Recorded(msgspec.json.decode(text, type=Header))
    for begin in range(0, len(rest), _SIZE):
        entry = unpack(rest[begin : begin + _SIZE])
        if entry is None:
            recorded.is_torn = True
            break
        recorded.entries.pop(entry.key, None)  # the newest comes last
        recorded.entries[entry.key] = entry
    return recorded


def _refuse_linked_folder(path: Path) -> None:
    if path.parent.is_symlink():
        raise UnsafeFileError(errno.ELOOP, "it is a link; remove it", os.fspath(path.parent))


class WitnessFile:
    """The file of this rank, open while an attempt trains. A full disk ends the recording, but not the training.

    Args:
        path: The file.
        header: Its first line.
        entries: Entries of earlier attempts to keep.
    """

    def __init__(self, path: Path, header: Header, entries: Mapping[Key, Entry]) -> None:
        self.path = path
        attempts = dict(sorted(header.attempts.items())[-_MOST_ATTEMPTS:])
        self.header = msgspec.structs.replace(header, attempts=attempts)
        self._descriptor: int | None = None
        try:
            self._write_again([entry for entry in entries.values() if entry.attempt in attempts])
        except OSError as error:
            self._give_up(error)

    def append(self, entry: Entry) -> None:
        """Add an entry; it survives a kill of the process when this returns."""
        if self._descriptor is None:
            return
        try:
            # If the disk is full, only a part of the entry may be written; readers ignore such a torn end.
            os.write(self._descriptor, entry.pack())
        except OSError as error:
            self._give_up(error)

    def drop(self, *, before: int = 0, after: int | None = None) -> None:
        """Remove the entries up to the step `before`, and those after the step `after`."""
        if self._descriptor is None:
            return
        try:
            recorded = read_witness(self.path)
            entries = [] if recorded is None else recorded.entries.values()
            self._write_again([e for e in entries if e.step > before and (after is None or e.step <= after)])
        except (OSError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Later entries are not written."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _write_again(self, entries: Iterable[Entry]) -> None:
        """Replace the file by its header and `entries`, and open it for more."""
        self.close()
        _refuse_linked_folder(self.path)
        if os.path.lexists(self.path):
            os.close(open_own(self.path, os.O_RDONLY))  # refuses a link and another user's file
        text = msgspec.json.encode(self.header)
        line = _MAGIC + xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"
        make_directory(self.path.parent, shared=None)
        data = line + b"".join(entry.pack() for entry in entries)
        write_bytes_durably(self.path, data, waits_for_disk=False)
        self._descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _give_up(self, error: OSError | ValueError) -> None:
        self.close()
        log.warning(
            "This attempt keeps no further witness, so the steps that a restart repeats are not compared: %s: %s",
            getattr(error, "filename", None) or self.path,
            getattr(error, "strerror", None) or error,
        )


@dataclass(frozen=True)
class StepDifference:
    """The first difference between a repeated batch and the same batch of an earlier attempt."""

    kind: Kind
    key: Key
    rank: int
    text: str
    """The difference in words, with both values if they are numbers; a sentence without its period."""

    @property
    def step(self) -> int:
        """Completed steps after the batch."""
        return self.key[0]


HINTS: Mapping[str, str] = {
    "rows": "The loader or its sampler does not continue where the checkpoint was saved: an iterator or a position "
    "that no checkpoint holds, or an order that depends on something outside of the run",
    "random numbers": "Something draws from them that does not repeat: code outside of the training step, another "
    "thread, or a generator that no checkpoint holds",
    "settings": "A schedule is not stored, or was changed for this start",
    "loss": "State that no checkpoint holds may be the reason (a counter, a cache, a schedule, a function that still "
    "uses an object from before the restart), or kernels that are not deterministic",
}
"""Usual causes of a difference after a restart, by kind."""


def compare(
    earlier: Entry,
    now: Entry,
    *,
    rank: int,
    facts: Mapping[int, Mapping[str, Any]],
    with_values: bool = True,
    hints: Mapping[str, str] = HINTS,
) -> StepDifference | None:
    """Compare a repeated batch with the same batch of an earlier attempt.

    Args:
        earlier: The entry of the earlier attempt.
        now: The entry of the repetition.
        rank: The rank that trained both.
        facts: Facts about attempts, as in `Header`: they limit what is compared, and name reasons for another loss.
        with_values: Whether losses, learning rates and random states of an accelerator are compared.
        hints: Usual causes, by kind.

    Returns:
        The first that differs of rows, random numbers, settings and loss, in this order; None if nothing does.
    """
    before_and_now = facts.get(earlier.attempt, {}), facts.get(now.attempt, {})
    can_compare, limit = limit_between(*before_and_now)
    if not can_compare:
        return None
    with_values = with_values and not limit
    left_out = {OF_MODEL} if with_values else {OF_MODEL, ON_DEVICE}
    states = [at for at, pair in enumerate(zip(earlier.random, now.random, strict=True)) if pair[0] != pair[1]]
    generators = [RANDOM_STATES[at] for at in states if at not in left_out]
    has_other_loss = with_values and earlier.losses != now.losses
    if has_other_loss and OF_MODEL in states and not generators:
        # The model's generators count only if the loss differs, too: a model may make a generator at any time.
        generators = [RANDOM_STATES[OF_MODEL]]

    def differing(kind: Kind, text: str) -> StepDifference:
        return StepDifference(kind, now.key, rank, f"{text}. {hints[kind]}" if kind in hints else text)

    if earlier.rows != now.rows:
        return differing("rows", f"the rows of batch {now.batch} in epoch {now.epoch} are others")
    if generators:
        named = generators[0] if len(generators) == 1 else f"{', '.join(generators[:-1])} and {generators[-1]}"
        return differing("random numbers", f"the same rows came, but the random state of {named} differs")
    if with_values and earlier.rates != now.rates:
        values = "" if earlier.rate == now.rate else f" is {now.rate!r}, was {earlier.rate!r}"
        return differing("settings", f"the learning rate{values or ' of an optimizer differs'}")
    if has_other_loss:
        is_same = earlier.loss == now.loss or (math.isnan(earlier.loss) and math.isnan(now.loss))
        values = "is the same, but another one differs" if is_same else f"is {now.loss!r}, was {earlier.loss!r}"
        text = f"the loss {values}, although rows, random numbers and learning rates agree"
        changed = changed_facts(*before_and_now)
        return differing("loss", f"{text}. Since then: {'; '.join(changed)}" if changed else text)
    return None


def limit_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether steps of two attempts can be compared, and in words what prevents or limits that.

    If there is only a limit, losses, learning rates and random states of an accelerator are not compared.

    Args:
        before: Facts about one attempt, as in `Header`.
        now: Facts about the other one.
    """
    if before.get("ranks") != now.get("ranks"):
        return False, f"{before.get('ranks')} and {now.get('ranks')} ranks get other rows"
    reason = ""
    if before.get("device") != now.get("device"):
        reason = f"{before.get('device')} and {now.get('device')} round differently"
    elif before.get("built") != now.get("built") and (kept := now.get("kept") or before.get("kept")):
        reason = f"a start changed {', '.join(kept)} on purpose"
    return True, reason and f"losses and learning rates are not compared, because {reason}"


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each fact that differs between two attempts and may change exact numbers."""
    others = [
        f"{name} is {now.get(name)}, was {before.get(name)}"
        for name in ("host", "device", "ranks")
        if name in before and before[name] != now.get(name)
    ]
    return [*changed_numerics(before, now), *others]


@dataclass(frozen=True)
class Proof:
    """The result of a comparison of repeated steps."""

    steps: tuple[int, ...]
    """Repeated steps that were compared and are equal, in order."""
    ranks: int
    difference: StepDifference | None = None
    limits: str = ""
    """The values that could not be compared, in words."""
    against: str = ""
    """Name of the checkpoint with which the step was compared; empty if entries were compared."""

    @property
    def step(self) -> int:
        """The first step that differs, or the last step that was compared."""
        return self.steps[-1] if self.difference is None else self.difference.step

    @property
    def text(self) -> str:
        """The result in one or more sentences, without the last period."""
        if self.difference is None:
            return self._equal()
        where = f" on rank {self.difference.rank}" if self.ranks > 1 else ""
        before = f". Before it, {self._equal()}" if self.steps else ""
        found = self.difference
        return f"step {found.step}, repeated after the restart, is not the same{where}: {found.text}{before}"

    def _equal(self) -> str:
        """Return the words for the steps that are equal."""
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        if self.against:
            return f"step {self.steps[-1]}, repeated after the restart, has every value of {self.against}{ranks}"
        named, has, compared = describe_steps(self.steps)
        same = "rows and random numbers" if self.limits else "bits"
        limits = self.limits and f"; {self.limits}"
        return f"{named}, repeated after the restart, {has} the same {same}{ranks}{compared}{limits}"


def describe_steps(steps: Sequence[int]) -> tuple[str, str, str]:
    """Return the words for `steps`, which are sorted: their name, ``has`` or ``have``, and a remark on gaps in them."""
    first, last, count = steps[0], steps[-1], len(steps)
    compared = f" ({count} of them compared)" if count < last - first + 1 else ""
    return (f"step {first}", "has", compared) if first == last else (f"steps {first} to {last}", "have", compared)


def summarize(results: Sequence[tuple[Iterable[int], StepDifference | None]], limits: str = "") -> Proof | None:
    """Return the result over all ranks; None if no rank compared anything.

    Args:
        results: For each rank, in order: the equal steps, and the first difference.
        limits: As in `Proof`.
    """
    differences = [difference for _, difference in results if difference is not None]
    first = min(differences, key=lambda each: (each.key, each.rank), default=None)
    steps = sorted({step for equal, _ in results for step in equal if first is None or step < first.step})
    return Proof(tuple(steps), len(results), first, limits) if steps or first else None
