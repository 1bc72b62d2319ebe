"""The last lines of a run: where its results are."""

from __future__ import annotations

from genlight.adapter.run.results import show_results


def test_places_that_are_not_there_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    show_results("run r completed at step 3", checkpoints=tmp_path / "a", logs={"events": tmp_path / "b"})
    assert capsys.readouterr().err == "run r completed at step 3\n  checkpoints       a\n"
