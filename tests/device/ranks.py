"""Training on two devices, a rank each."""

import pytest
import torch.distributed as dist

from device.runs import CountWaits, Penalised, Regression, fit, standard_callbacks
from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepResult
from genlight.callbacks.checkpoint import Checkpoint, list_checkpoints
from genlight.callbacks.replica_guard import ReplicaGuard

DIVERGES_IN = 5


def _no_step_waits(kind, folder):
    counted = CountWaits(9, 22)  # replicas are compared after step 16
    fit(Penalised(), kind, steps=24, callbacks=[counted, *standard_callbacks(folder)])
    assert not counted.found, "\n".join(map(str, counted.found))


def check_no_step_of_ddp_waits_for_the_device(folder):
    _no_step_waits("ddp", folder)


def check_no_step_of_one_bucket_waits_for_the_device(folder):
    _no_step_waits("ddp of one bucket", folder)


def check_no_step_of_fsdp_waits_for_the_device(folder):
    _no_step_waits("fsdp", folder)


class Diverges(Regression):
    """One rank skips an update."""

    steps = 0

    def train_step(self, batch, state, ctx):
        self.steps += 1
        loss = self.loss(batch, state)
        state["optimizer"].zero_grad()
        loss.backward()
        if (self.steps, ctx.rank) != (DIVERGES_IN, 1):
            state["optimizer"].step()
        return StepResult({})


def _no_checkpoint_follows(kind, folder):
    saves = Checkpoint(folder, every_n_steps=1, save_final=False, keep_last=None)
    # The guard is off, because weights differ as well.
    with pytest.raises(ContractError, match=f"in step {DIVERGES_IN}"):
        fit(Diverges(), kind, steps=40, callbacks=[saves, ReplicaGuard(0)])
    dist.barrier()
    steps = [listed.record.step for listed in list_checkpoints(folder) if listed.record]
    assert steps == [1, 2, 3, 4]


def check_ranks_that_diverge_under_ddp_commit_no_later_checkpoint(folder):
    _no_checkpoint_follows("ddp of one bucket", folder)


def check_ranks_that_diverge_under_fsdp_commit_no_later_checkpoint(folder):
    _no_checkpoint_follows("fsdp", folder)
