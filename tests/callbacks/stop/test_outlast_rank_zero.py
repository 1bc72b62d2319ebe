"""After a stop the other ranks stay until the process of rank zero has ended, killed or not."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RANK = """
import sys
import torch.distributed as dist
from genlight.callbacks.stop.rank_agreement import Agreement
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
agreement = Agreement()
assert agreement.now(1) == 1
print("agreed", flush=True)
if rank == 0:
    sys.stdin.read()
else:
    agreement.outlast_rank_zero()
"""


def test_another_rank_ends_after_rank_zero(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout.readline() == "agreed\n"
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(1)
        ranks[0].kill()
        assert ranks[1].wait(60) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
