"""The imports of the command line leave short names of callbacks to Lightning."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import jsonargparse
from lightning.pytorch.callbacks import Callback
import genlight.adapter.cli.lightning_cli, genlight.adapter.run.training
parser = jsonargparse.ArgumentParser()
parser.add_argument("--callback", type=Callback)
chosen = parser.parse_args(["--callback=EarlyStopping", "--callback.monitor=loss"])
assert chosen.callback.class_path == "lightning.pytorch.callbacks.EarlyStopping", chosen
"""


def test_a_configuration_may_name_lightnings_early_stopping_by_its_short_name():
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, timeout=240)
