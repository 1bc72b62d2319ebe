"""Functions whose annotations are texts, some of which cannot be resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genlight.adapter import JobContext as Context

if TYPE_CHECKING:
    from nowhere import Unknown

    from genlight.adapter import JobContext


def asks(other: Unknown = None, place: Context = None):
    return place


def asks_perhaps(place: Context | None = None):
    return place


def asks_by_a_name_that_is_never_imported(place: JobContext = None):
    return place


def names_what_is_not_there(job: Unknown = "mine"):
    return job
