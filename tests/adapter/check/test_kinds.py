"""``genlight check`` with its defaults: state that a resume easily loses is equal, or the difference is reported."""

from __future__ import annotations

import json

import pytest

from genlight.adapter.check.checks import CHECKS
from genlight.adapter.cli import main
from support import SUPPORT

pytestmark = pytest.mark.promise(name="equal")


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """A function that checks a class of `support.check_kinds` in a job; returns check, level and detail of findings."""

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(str(SUPPORT))

    def findings(name, *, ranks=False, **settings):
        if not ranks:
            monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))
        rows = [{"x": [[i / 9, j / 4] for j in range(4)], "y": [[i / 9 - j / 4] for j in range(4)]} for i in range(14)]
        data = {} if "data" in settings else {"mock_batches": rows}
        job_dict = {"run_id": "j", "trainer": f"check_kinds:{name}", "max_steps": 99, **data, **settings}
        (tmp_path / "job.json").write_text(json.dumps(job_dict))
        main(["check", str(tmp_path / "job.json"), "--json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        return [(each["check"], each["level"], each["detail"]) for each in found]

    return findings


def level_of(findings, check):
    return next(level for name, level, _ in findings if name == check)


@pytest.mark.parametrize("data", ["drawing", "persistent"])
def test_resume_with_the_loader_and_workers_of_the_job_is_checked_across_an_epoch(check, data):
    found = check("Plain", data=f"check_kinds:{data}")

    assert level_of(found, "resume") == "pass", found


def test_loader_that_loses_its_place_is_reported(check):
    found = check("Plain", data="check_kinds:endless")

    assert level_of(found, "resume") == "fail", found


@pytest.mark.parametrize(("name", "precision"), [("Nadam", "bf16-true"), ("SumsAside", "16-mixed")])
def test_resume_is_checked_in_the_precision_of_the_job(check, name, precision):
    found = check(name, lightning={"precision": precision})

    assert level_of(found, "resume") == "pass", found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Window", "OddState"])
def test_two_ranks_resume_within_a_window_under_each_strategy(check, name):
    found = check(name, ranks=True)
    resumed = {detail.split(" are ")[0]: level for name, level, detail in found if name == "resume on ranks"}

    assert level_of(found, "resume") == "pass", found
    expected = {"two processes under DDP": "pass"}
    if name != "Window":  # a layer that a rank skips is refused
        expected["two processes under FSDP 2"] = "pass"
    assert resumed == expected, found
