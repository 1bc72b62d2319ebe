"""A module compiled by inductor trains under every strategy as it does uncompiled with plain torch."""

import shutil

import pytest
import torch

from zoo import runs
from zoo.small import Accumulating

TOLERANCE = 1e-5
"""Compiled kernels add up in another order."""

pytestmark = [
    pytest.mark.promise(name="equal"),
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler: install g++"
    ),
]


class Compiled(Accumulating):
    """Two backward calls and clipping for each update of a module that is compiled to C++ on the host."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "model": torch.compile(state["model"])}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Keep compiled kernels for the tests of this file only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks(tmp_path, strategy):
    job = {"key": strategy, "name": "zoo.test_inductor:Compiled", "strategy": strategy}
    for rank in runs.on_two_ranks(tmp_path, [job], timeout_s=380):
        runs.assert_close(rank[strategy], runs.plain_run("Accumulating"), TOLERANCE)
