"""All ranks take the same rungs, also if only one of them met the fault; a kill changes nothing."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from genlight.adapter import RecoveryError
from genlight.callbacks import Recover, ReplicaGuard
from support import SUPPORT
from support.rank import Rank
from support.rank_processes import on_ranks
from support.recovered import Batches, Fragile, digest_of, fit_fragile, rungs_in

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]


STEPS = 24


class Sharded(Fragile):
    def configure(self, ctx):
        state = super().configure(ctx)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {**state, "model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 7)}


def outcome(
    rank: Rank,
    name: str,
    faults: object,
    *,
    recover: Recover | None = None,
    steps: int = STEPS,
    shards: bool = False,
    **settings,
) -> dict:
    """Return this rank's results of a training, with FSDP 2 if it `shards`."""
    recover = recover or Recover(good_steps=4, lower_lr_steps=3)
    batches = Batches(faults if rank.number == 1 else (), seed=rank.number)
    trainer, error, digest = Sharded() if shards else Fragile(), "", ""
    strategy = rank.strategy("sharded", save_distributed_checkpoint=False) if shards else rank.strategy()
    settings |= {"steps": steps, "devices": rank.world_size, "strategy": strategy}
    with rank.group(f"store {name} {steps}"):
        try:
            guards = [] if shards else [ReplicaGuard(1)]
            module = fit_fragile(rank.folder / name, recover, batches, trainer=trainer, callbacks=guards, **settings)
            digest = "" if shards else digest_of(module)
        except RecoveryError as raised:
            error = str(raised)
    return {
        "ladder": recover.state_dict(),
        "next": batches.next,
        "calls": trainer.calls,
        "error": error,
        "digest": digest,
    }


def recover_on_rank(rank: Rank) -> dict[str, dict]:
    skips, rolls_back = (Recover(rungs, ["nonfinite", "loss_spike"]) for rungs in (["skip", "lower_lr"], ["roll_back"]))
    spikes = Recover(faults=["loss_spike"], good_steps=4, lower_lr_steps=3)
    return {
        "nan": outcome(rank, "nan", (12, 13, 15)),
        "nan, cut": outcome(rank, "cut", (12, 13, 15), steps=14),
        "nan, resumed": outcome(rank, "cut", (12, 13, 15), resumes=True),
        "spike": outcome(rank, "spike", {40: 1e3}, steps=46, recover=spikes),
        "sharded": outcome(rank, "sharded", {5}, steps=8, shards=True, recover=skips),
        "sharded, refused": outcome(rank, "refused", {5}, steps=8, shards=True, recover=rolls_back),
        "used up": outcome(rank, "used up", range(11, 80)),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recover")
    return folder, on_ranks(recover_on_rank, folder)[0]


def test_every_rank_takes_the_same_rungs_at_the_same_steps(outcomes):
    folder, (first, second) = outcomes
    for name in first:
        assert first[name]["ladder"] == second[name]["ladder"], name
        assert first[name]["next"] == second[name]["next"], name
        assert first[name]["calls"] == second[name]["calls"], name
        assert first[name]["error"] == second[name]["error"], name
    assert rungs_in(folder / "nan")[:3] == [(13, "skip"), (14, "lower_lr"), (16, "roll_back")]


def test_a_resumed_run_of_several_ranks_ends_like_an_uninterrupted_one(outcomes):
    for rank in outcomes[1]:
        assert rank["nan"]["digest"] == rank["nan, resumed"]["digest"]


def test_a_high_loss_on_one_rank_skips_the_update_on_all(outcomes):
    folder, (first, second) = outcomes
    assert first["spike"]["ladder"]["taken"] == {"skip": 1}
    assert rungs_in(folder / "spike")[0] == (41, "skip")
    assert second["spike"]["error"] == ""


def test_a_sharded_model_can_skip_updates_and_a_roll_back_is_refused_at_the_start(outcomes):
    _, (first, second) = outcomes
    assert second["sharded"]["ladder"]["taken"] == {"skip": 1}
    assert first["sharded"]["error"] == ""
    assert "'roll_back' does not support sharded parameters" in first["sharded, refused"]["error"]


def test_a_ladder_that_is_used_up_ends_all_ranks(outcomes):
    _, (first, second) = outcomes
    assert "after 5 attempts since step 12" in first["used up"]["error"]
    assert second["used up"]["digest"] == ""


def test_a_run_killed_during_or_after_its_recovery_ends_like_an_uninterrupted_one(tmp_path):
    program = [sys.executable, "-m", "support.recover_kills", tmp_path]
    subprocess.run(program, cwd=SUPPORT.parent, check=True, timeout=900)
    ends = {place.name: (place / "end").read_text().split()[0] for place in tmp_path.iterdir()}
    assert len(ends) >= 13  # GENLIGHT_LONG_FAULTS=1 kills at every moment
    assert {name for name, digest in ends.items() if digest != ends["peace"]} == set()
    rungs = ["skip", "lower_lr", "roll_back", "roll_back"]
    assert [what for _, what in rungs_in(tmp_path / "peace")] == [*rungs, "rate_restored", "recovered"]
