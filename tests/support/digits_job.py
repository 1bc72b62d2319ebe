"""The job of the digits example, small enough to be killed repeatedly, and its results."""

import hashlib
import json
from pathlib import Path
from typing import Any

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def write_digits_job(folder: Path, *, steps: int, cadence: int, batch_size: int, lightning: dict[str, Any]) -> Path:
    """Write the job and its trainer into `folder`; return the job's path."""
    job = json.loads((DIGITS / "job.json").read_text())
    job |= {"max_steps": steps, "checkpoint_every": cadence, "metric_every": 1, "sample_every": 0}
    job |= {"resume_from_latest": True, "lightning": {"accelerator": "cpu", **lightning}}
    job["hyperparams"] |= {"width": 32, "depth": 2, "warmup_steps": 5}
    job["dataset"] |= {"parquet_paths": [str(DIGITS / "digits.parquet")], "batch_size": batch_size}
    del job["sample_prompts"]
    (folder / "trainer.py").write_bytes((DIGITS / "trainer.py").read_bytes())
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def digests_of_final(artifacts: Path) -> list[str]:
    """Digests of the model's and the trainer's files."""
    final = artifacts / "checkpoints" / "final"
    files = [final / "model.safetensors", final / "trainer" / "digits.safetensors"]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
