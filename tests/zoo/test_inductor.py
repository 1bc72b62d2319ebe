"""A module compiled by inductor trains under every strategy as it does uncompiled with plain torch."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from zoo import runs

COMPILED = "zoo.inductor:Compiled"
TOLERANCE = 1e-5
"""Compiled kernels add up in another order."""

pytestmark = [
    pytest.mark.promise(name="equal"),
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler: install g++"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Keep compiled kernels for the tests of this file only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


ALONE = """
import sys, torch
from zoo import runs
module, _ = runs.hosted_run(sys.argv[1])
torch.save(runs.weights(module.contract_state, module.plugin), sys.argv[2])
"""


def test_on_one_device(tmp_path):
    """Run in a separate process, because inductor leaves threads and variables behind."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", ALONE, COMPILED, str(tmp_path / "weights.pt")]
    subprocess.run(command, env=environ, check=True, timeout=240)

    actual = torch.load(tmp_path / "weights.pt", weights_only=True)
    runs.assert_close(actual, runs.plain_run("Accumulating"), TOLERANCE)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks(tmp_path, strategy):
    for rank in runs.on_two_ranks(tmp_path, [{"key": strategy, "name": COMPILED, "strategy": strategy}], timeout_s=380):
        runs.assert_close(rank[strategy], runs.plain_run("Accumulating"), TOLERANCE)
