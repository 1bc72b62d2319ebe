"""The table of releases is what pytest said, and a release that nobody tried is told."""

from __future__ import annotations

import datetime as dt

import pytest
import versions

from genlight.callbacks import lightning_internals


def test_a_new_row_takes_the_place_of_the_old_one_of_its_release():
    page = f"before\n{versions.BEGIN}{versions.HEAD}| 2.15.0 | 2026-01-01 | 1 | 2 | 3 |\n{versions.END}\nafter\n"
    date = dt.date(2026, 2, 3)
    newest = versions.row("2.15.0", date, "...\n1 failed, 20 passed, 4 skipped, 9 deselected in 3.00s\n")
    lowest = versions.row("2.9.1", date, "30 passed, 1 error in 1.00s")

    assert newest == "| 2.15.0 | 2026-02-03 | 20 | 1 | 4 |\n"
    assert versions.written(page, [newest, lowest]) == (
        f"before\n{versions.BEGIN}{versions.HEAD}| 2.9.1 | 2026-02-03 | 30 | 1 | 0 |\n{newest}{versions.END}\nafter\n"
    )


@pytest.mark.parametrize(("installed", "untested"), [("2.9.1", False), ("2.15.3+cu132", False), ("2.16.0a0", True)])
def test_a_release_after_the_newest_tested_one_is_known(monkeypatch, installed, untested):
    monkeypatch.setattr(lightning_internals, "version", lambda package: installed)
    monkeypatch.setattr(lightning_internals, "NEWEST_TORCH", "2.15")

    assert lightning_internals.is_untested_torch() == untested
