"""The rehearsals of ``genlight prove``: two unbroken runs, and one for each of `_cases`.

Each case breaks one run, starts it again until it has completed, and compares the witness of its steps and its final
state with the unbroken run.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint import list_checkpoints
from ...callbacks.witness.entry import HINTS
from ..check.finding import Finding
from ..contract.exceptions import GenlightError, UsageError
from ..plumbing.failures import EXIT_COMPLETED, EXIT_FAILED, EXIT_STOPPED
from .evidence import Evidence, first_difference
from .faults import Fault, marker
from .rehearsal import Attempt, OutOfTime, Rehearsal, Scene

SLACK = 10.0
"""If two unbroken runs differ, a broken run may differ from them by this many times as much."""
SLOWER = 20.0
"""An attempt may take this many times as long as the first unbroken run."""
MIN_LIMIT_S = 60.0
MOST_ATTEMPTS = 4
HANG_S = 10
"""Seconds without a step after which a rehearsal with a paused rank counts as hung."""


@dataclass(frozen=True)
class _Case:
    """A rehearsal with a fault."""

    name: str
    faults: Sequence[Fault]
    codes: tuple[int, ...]
    """Exit codes that the first attempt may have, negative for a signal."""
    damage: Callable[[Path], None] | None = None
    """Damages a file of the newest checkpoint, after the first attempt."""
    settings: tuple[str, ...] = ()
    ranks_after: int | None = None
    """Number of ranks of later attempts; None leaves it as it is."""
    check: Callable[[Rehearsal], str | None] = lambda _: None
    """Returns what is wrong after the first attempt, or None."""


def prove(
    scene: Scene,
    folder: Path,
    *,
    minutes: float,
    only: Sequence[str] = (),
    keep: bool = False,
    interrupted: threading.Event,
) -> Iterator[Finding]:
    """Rehearse a job, and yield the outcome of each rehearsal when it is known.

    Args:
        scene: The job.
        folder: An empty folder for all files of the rehearsals.
        minutes: Time for all rehearsals; those that do not fit are reported as skipped.
        only: Names of rehearsals, as in `_cases`; empty means all that are possible with the job's number of ranks.
        interrupted: Ends the rehearsals once it is set, with KeyboardInterrupt.
        keep: Whether the files of each rehearsal stay in `folder`.

    Raises:
        UsageError: `only` has a name that no rehearsal has.
    """
    names = [case.name for case in _cases(every=1, ranks=2)]
    if unknown := [name for name in only if name not in names]:
        raise UsageError(f"there is no rehearsal {unknown[0]!r}; name one of {', '.join(names)}")
    deadline = time.monotonic() + 60 * minutes
    runs = [
        Rehearsal(scene, folder / f"unbroken-{number}", limit_s=60 * minutes, interrupted=interrupted)
        for number in (1, 2)
    ]
    found = []
    for run in runs:
        outcome = _complete(run, run.start)
        if isinstance(outcome, str):
            yield Finding("unbroken", "fail", outcome, "Make `genlight run` of this job complete first.")
            return
        found.append(outcome)
    reference, second = found
    difference = first_difference(reference, second)
    # If the unbroken runs are equal, broken runs must be, too.
    tolerance = SLACK * difference[1] if difference else -1.0
    yield _unbroken(difference, runs, reference)
    limit_s = max(MIN_LIMIT_S, SLOWER * runs[0].attempts[0].seconds)
    cases = list(_cases(scene.every_n_steps, len(reference.witness)))
    for name in [name for name in only if name not in [case.name for case in cases]]:
        yield Finding(name, "skip", "the job has one rank", "Give --ranks 2.")
    for case in cases:
        if only and case.name not in only:
            continue
        if time.monotonic() > deadline:
            yield Finding(case.name, "skip", f"the {minutes:g} minutes are over", "Give more --minutes.")
            continue
        run = Rehearsal(scene, folder / case.name.replace(" ", "-"), case.faults, case.settings, limit_s, interrupted)
        yield _judge(case, run, reference, tolerance)
        if not keep:
            shutil.rmtree(run.folder)


def _unbroken(difference: tuple[str, float] | None, runs: Sequence[Rehearsal], reference: Evidence) -> Finding:
    """Return the finding about the two runs without a fault."""
    seconds = " and ".join(f"{run.attempts[0].seconds:.1f}" for run in runs)
    if difference is None:
        same = f"two runs have the same bits, {reference.digest} ({seconds} s)"
        if (step := reference.first_nonfinite) is not None:
            lost = f"{same}, but the loss of step {step} is not finite: later differences may not show"
            return Finding("unbroken", "warn", lost, "Lower the learning rate, or give fewer --steps.")
        return Finding("unbroken", "pass", same)
    return Finding(
        "unbroken",
        "warn",
        f"two runs without a fault differ: {difference[0]}",
        "A resume can only be compared within this difference. Take all random numbers from seeded generators, and see "
        "`lightning.deterministic`.",
    )


def _cases(every: int, ranks: int) -> Iterator[_Case]:
    """Yield the rehearsals of a job with a checkpoint after `every` steps."""
    late, early = 2 * every + 2, every + 2
    killed = (-9,)
    yield _Case("kill", [Fault("kill", late)], killed)
    yield _Case("kill while saving", [Fault("kill while saving", 2 * every)], killed)
    yield _Case("stop", [Fault("stop", early)], (EXIT_STOPPED,), check=lambda run: _is_saved(run, early))
    yield _Case("two kills", [Fault("kill", early), Fault("kill", late)], killed)
    yield _Case("cut file", [Fault("kill after saving", 1)], killed, damage=_cut)
    yield _Case("flipped bit", [Fault("kill after saving", 1)], killed, damage=_flip)
    yield _Case(
        "full disk", [Fault("full disk", every + 1)], (EXIT_COMPLETED, EXIT_FAILED, EXIT_STOPPED), check=_is_clean
    )
    if ranks > 1:
        last = ranks - 1
        hangs = json.dumps({"floor_s": HANG_S, "end_run": True})
        yield _Case("killed rank", [Fault("kill", late, last)], (EXIT_FAILED,))
        yield _Case(
            "paused rank", [Fault("pause", late, last)], (EXIT_FAILED,), settings=(f"callbacks.WatchHangs={hangs}",)
        )
        yield _Case("fewer ranks", [Fault("kill", late)], killed, ranks_after=last)


def _judge(case: _Case, run: Rehearsal, reference: Evidence, tolerance: float) -> Finding:
    """Carry out one rehearsal, and compare its run with the unbroken one."""

    def fail(detail: str) -> Finding:
        return Finding(case.name, "fail", detail, "Resume it by hand with `--keep`, and see `genlight check`.")

    try:
        first = run.start()
    except OutOfTime as error:
        return fail(str(error))
    if not marker(run.folder, 0).exists():
        return Finding(case.name, "skip", "the fault could not happen in so few steps", "Give more --steps.")
    if first.code not in case.codes:
        return fail(f"exit code {first.code} instead of {' or '.join(map(str, case.codes))}:\n{first.output}")
    if (wrong := case.check(run)) is not None:
        return fail(wrong)
    if case.damage is not None and not _damage_newest(run, case.damage):
        return Finding(case.name, "skip", "there was no checkpoint to damage", "Give more --steps.")
    outcome = _complete(run, lambda: run.start(ranks=case.ranks_after)) if first.code else _complete(run, lambda: first)
    if isinstance(outcome, str):
        return fail(outcome)
    costs = (
        f"{outcome.repeated} steps repeated, {sum(attempt.seconds for attempt in run.attempts[1:]):.1f} s to the end"
    )
    if case.ranks_after is not None:
        text = (
            f"completed on {case.ranks_after} of {len(reference.witness)} ranks, whose steps have other rows; {costs}"
        )
        return Finding(case.name, "pass", text)
    if (difference := first_difference(reference, outcome, HINTS)) is None:
        return Finding(case.name, "pass", f"the same bits; {costs}")
    if tolerance == math.inf:
        return Finding(
            case.name, "warn", f"it completed, but cannot be compared with a run of other random numbers; {costs}"
        )
    text, size = difference
    if size <= tolerance:
        return Finding(case.name, "pass", f"no further apart than two unbroken runs; {costs}")
    return fail(f"{text} ({costs})")


def _complete(run: Rehearsal, start: Callable[[], Attempt]) -> Evidence | str:
    """Start the run until it has completed; return its evidence, or what went wrong."""
    try:
        attempt = start()
        while attempt.code < 0 and len(run.attempts) < MOST_ATTEMPTS:  # killed by a signal
            attempt = start()
        if attempt.code:
            return f"exit code {attempt.code}:\n{attempt.output}"
        return run.evidence()
    except (OutOfTime, GenlightError, LookupError) as error:
        return str(error)


def _is_saved(run: Rehearsal, step: int) -> str | None:
    """Return what is wrong if a stop in `step` left no checkpoint of this step or of a later one, otherwise None."""
    newest = max((record.step for record in run.records()), default=0)
    return None if newest >= step else f"after the stop in step {step}, the newest checkpoint is of step {newest}"


def _is_clean(run: Rehearsal) -> str | None:
    """Return what is wrong if a full disk left broken checkpoints, otherwise None."""
    broken = [each.path.name for each in list_checkpoints(run.checkpoints) if each.is_own_but_broken]
    return f"it left broken checkpoints: {', '.join(broken)}" if broken else None


def _damage_newest(run: Rehearsal, damage: Callable[[Path], None]) -> bool:
    """Damage the largest file of the newest checkpoint; return False if there is no older one to resume from."""
    records = run.records()
    if len(records) < 2:
        return False
    newest = records[-1]
    damage(newest.path.parent / max(newest.files, key=lambda file: file.size).path)
    return True


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
