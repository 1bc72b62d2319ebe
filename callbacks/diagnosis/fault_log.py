"""Which faults there are: each begins once and ends once, with a cool-down in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from .readings import Fault

__all__ = ["FaultLog"]


class FaultLog:
    """The faults that have begun and not ended.

    Args:
        cool_down_checks: After how many checks in a row without it a fault is over; one that comes and goes is told
            once.
    """

    def __init__(self, cool_down_checks: int) -> None:
        self.cool_down_checks = cool_down_checks
        self.active: dict[str, Fault] = {}
        """By kind, as each was when it began."""
        self._clean_checks: dict[str, int] = {}

    def update(self, found: Iterable[Fault], step: int) -> list[Fault]:
        """Take over what a check has found.

        Returns:
            The faults that begin, and those that are over, as each was when it began.
        """
        now = {fault.kind: fault for fault in found}
        begins = [fault for kind, fault in now.items() if kind not in self.active]
        self.active.update((fault.kind, fault) for fault in begins)
        over = []
        for kind in list(self.active):
            self._clean_checks[kind] = 0 if kind in now else self._clean_checks.get(kind, 0) + 1
            if self._clean_checks[kind] >= self.cool_down_checks:
                del self._clean_checks[kind]
                over.append(replace(self.active.pop(kind), is_over=True))
        return [*begins, *over]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: plain data."""
        active = [{**asdict(fault), "suggestions": list(fault.suggestions)} for fault in self.active.values()]
        return {"active": active, "clean_checks": dict(self._clean_checks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds."""
        faults = [Fault(**{**saved, "suggestions": tuple(saved["suggestions"])}) for saved in state["active"]]
        self.active = {fault.kind: fault for fault in faults}
        self._clean_checks = dict(state["clean_checks"])
