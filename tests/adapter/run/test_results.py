"""The last lines of a run: the paths of its results."""

from __future__ import annotations

from genlight.adapter.run.report import show_results


def test_missing_and_empty_places_are_omitted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "c").write_text("")
    places = {"checkpoints": tmp_path / "a", "events": tmp_path / "b", "final checkpoint": tmp_path / "c"}
    show_results("run r completed at step 3", {**places, "samples": None})
    assert capsys.readouterr().err == "run r completed at step 3\n  final checkpoint  c\n"
