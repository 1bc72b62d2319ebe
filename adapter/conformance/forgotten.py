"""What a resumed run has otherwise at its end, though its weights are those of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plumbing.finding import Finding
from .snapshot import differences

__all__ = ["Snapshots", "forgotten_values"]

Snapshots = dict[int, dict[str, Any]]
"""What a trainer keeps, by path, for each step."""


def forgotten_values(
    whole: Snapshots, again: Snapshots, resumed: Snapshots, *, at: int, said: str, modules: Sequence[str] = ()
) -> Finding | None:
    """A finding where a resume loses what no step has read yet: an average, a best value, a counter, statistics.

    Args:
        whole: Of an uninterrupted run.
        again: Of a second one; what differs between the two, such as a clock, is no fault of the class.
        resumed: Of a run from the checkpoint of step `at`.
        at: The step of the interruption.
        said: What was run, in words.
        modules: Paths of modules, whose own attributes a first call may set (a lazy layer's sizes).
    """
    end = max(whole)
    unstable = {path for step in (at, end) for path in differences(whole[step], again[step])}
    lost = [path for path in differences(whole[end], resumed[end]) if path not in unstable]
    if lost:
        return Finding(
            "resume",
            "fail",
            f"{said}: the weights are bit-equal, but {lost[0]} differs at the end ({len(lost)} values): it matters "
            "to later steps, or to what uses it",
            f"Return {lost[0]} from state_dict and restore it in load_state_dict.",
        )
    both = whole[at].keys() & resumed[at].keys()
    written_anew = [
        path
        for path in differences(whole[at], resumed[at])
        if path in both and path not in unstable and not path.startswith(tuple(f"{module}." for module in modules))
    ]
    if written_anew:
        return Finding(
            "resume",
            "warn",
            f"{said}: bit-equal, but {written_anew[0]} was not restored ({len(written_anew)} values) and came out the "
            "same because a later step wrote it",
            "Save it if it is more than the last step's value, such as the best loss so far.",
        )
    return None
