"""Commands and the page about clusters, on a cluster."""

import json
import re
import sys
from pathlib import Path

import pytest

from support.saving_trainer import SAVING_TRAINER

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
]

MODEL = """
from pathlib import Path

import torch
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_end(self):
        trainer = self.trainer
        Path(f"fit-{trainer.global_rank}").write_text(f"{trainer.world_size} {trainer.node_rank} {trainer.local_rank}")
"""

TRAINER = SAVING_TRAINER.replace(
    "def setup(self, ctx): ...",
    """def setup(self, ctx):
        from pathlib import Path

        Path(f"run-{ctx.rank}").write_text(f"{ctx.world_size} {ctx.job_context.world_size}")
""",
)


def test_fit_takes_its_ranks_from_srun_and_run_in_a_batch_script_starts_its_own(slurm, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "counts.py").write_text(TRAINER)
    trainer = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_progress_bar": False}
    (tmp_path / "fit.yaml").write_text(json.dumps({"model": {"class_path": "model.Model"}, "trainer": trainer}))
    job = {"run_id": "r", "trainer": "counts:Counts", "max_steps": 2, "mock_batches": [1, 2, 3, 4]}
    job["lightning"] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    genlight = f"{sys.executable} -m genlight.adapter.cli"
    fit = slurm.submit(
        "--nodes=2", "--ntasks=2", "--output=fit.out", f"--wrap=srun {genlight} fit --config fit.yaml", cwd=tmp_path
    )
    run = slurm.submit("--nodes=2", "--ntasks=3", "--output=run.out", f"--wrap={genlight} run job.json", cwd=tmp_path)

    for job_id, output in ((fit, "fit.out"), (run, "run.out")):
        assert slurm.wait(job_id) == ("COMPLETED", 0), (tmp_path / output).read_text()
    assert [(tmp_path / f"fit-{rank}").read_text() for rank in range(2)] == ["2 0 0", "2 1 0"]
    assert [(tmp_path / f"run-{rank}").read_text() for rank in range(2)] == ["2 3", "2 3"]
    assert "srun` command is available" not in (tmp_path / "run.out").read_text()


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
