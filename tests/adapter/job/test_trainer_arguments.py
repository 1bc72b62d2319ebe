"""Names of Trainer arguments, told without importing Lightning."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.job.trainer_arguments import trainer_arguments


def test_the_names_are_those_of_the_real_constructor():
    from lightning.pytorch import Trainer

    assert set(trainer_arguments()) == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


def test_telling_them_imports_no_lightning():
    code = (
        "import sys; from genlight.adapter.job.trainer_arguments import trainer_arguments; trainer_arguments();"
        "print('lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_misspelled_argument_is_a_fault_of_the_spec_with_the_nearest_name(tmp_path):
    job = {"run_id": "r", "trainer": "t:T", "max_steps": 1, "lightning": {"acelerator": "cpu", "devices": 1}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    with pytest.raises(StartupContractError, match=r"Invalid `lightning.acelerator`.*Did you mean `accelerator`"):
        resolve_run_config(spec_path=tmp_path / "job.json", environ={})
