"""The last lines of a run: where its results are, and one picture to open."""

from __future__ import annotations

from genlight.adapter.run.results import newest_picture, show_results


def test_the_picture_to_open_is_of_the_last_step_and_its_first_request_with_one(tmp_path):
    for name in (
        "step-00000900-00/a.png",
        "step-00001000-00/text.txt",
        "step-00001000-01/b.PNG",
        "step-00001000-02/a.jpg",
        "step-x/mine.png",
        "other/z.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert newest_picture(tmp_path) == tmp_path / "step-00001000-01" / "b.PNG"
    assert newest_picture(tmp_path / "other") is None
    assert newest_picture(tmp_path / "nowhere") is None


def test_places_that_are_not_there_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    show_results("run r completed at step 3", checkpoints=tmp_path / "a", logs={"events": tmp_path / "b"})
    assert capsys.readouterr().err == "run r completed at step 3\n  checkpoints       a\n"
