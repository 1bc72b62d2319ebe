"""The commands of the page about clusters, on a cluster."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.promise(name="old names"), pytest.mark.slurm, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "examples/guides/cluster.md"


def test_a_job_is_submitted_seen_and_cancelled_as_the_page_says(slurm, tmp_path):
    (submit,) = re.findall(r"^genlight (slurm submit demo.*)$", PAGE.read_text(), re.MULTILINE)

    def genlight(*words):
        return slurm.call(sys.executable, "-m", "genlight.adapter.cli", *words, cwd=tmp_path)

    genlight("init", "demo")
    job = genlight(*submit.split()).strip()
    assert job in slurm.call("squeue", "--me", "--noheader")
    slurm.call("scancel", job)
    assert slurm.wait(job)[0] == "CANCELLED"
