"""Ranks of sharded and other runs that save checkpoints together; started once by ``test_sharded_checkpoints.py``.

Reads phases from its first argument (a JSON file): each forks its ranks. They meet through a file, do a list of
jobs in order, and store each result in ``<folder>/<phase>-rank<rank>.pt``. A forked rank has imported everything.
The outcome of each phase is a line of ``<folder>/ended.jsonl``.
"""

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from rank import Rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainer_class import TrainsAndCounts

from genlight.adapter.contract.types import TrainingJobSpec
from genlight.adapter.module.module import ContractModule
from genlight.callbacks.checkpoint import Checkpoint, capture as host_buffer, newest_valid
from genlight.callbacks.checkpoint.loading import StoredSlices
from genlight.callbacks.checkpoint.memory_tier import is_in_memory

WIDTH = 300


def network():
    """Odd sizes, one row, tied weights, a buffer: shapes that are awkward to cut."""
    first, second = torch.nn.Linear(8, WIDTH + 1), torch.nn.Linear(WIDTH + 1, 1)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(WIDTH + 1), torch.nn.Dropout(0.5), second)


class Toy(TrainsAndCounts):
    """A trainer class that knows nothing of sharding; draws its data and its dropout from each rank's own generator."""

    def setup(self, ctx):
        self.rank = ctx.rank
        super().setup(ctx)

    def model(self):
        return network()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def configure(self, ctx):
        state = {**super().configure(ctx), "ema": network().requires_grad_(False)}
        torch.manual_seed(1 + self.rank)
        return state

    def prepare_batch(self, raw, state, ctx):
        return torch.randn(6, 8)

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        with torch.no_grad():
            for mine, theirs in zip(state["ema"].parameters(), state["model"].parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return result

    def state_dict(self, state):
        weights = state["model"].state_dict()
        return {
            "model": weights,
            "half": {name: value.detach().cpu().half() for name, value in weights.items()},
            "ema": state["ema"].state_dict(),
            "optimizer": state["optimizer"].state_dict(),
            "total": float(weights["3.weight"].sum()),
            "step": state["step"],
        }

    def load_state_dict(self, state, payload, ctx):
        super().load_state_dict(state, payload, ctx)
        for part in ("model", "ema", "optimizer"):
            state[part].load_state_dict(payload[part])
        assert abs(float(payload["model"]["3.weight"].sum()) - payload["total"]) < 1e-6
        assert torch.equal(payload["half"]["0.weight"] + 0, payload["model"]["0.weight"].half())

    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        weight = state["model"].state_dict()["0.weight"]
        Path(output_dir, "weight.json").write_text(json.dumps(weight.tolist()))
        return {"primary_path": Path(output_dir, "weight.json")}

    def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx):
        assert json.loads(Path(checkpoint_dir, "weight.json").read_text()) == payload["model"]["0.weight"].tolist()


class Net(pl.LightningModule):
    """A LightningModule that shards itself, as Lightning's documents show."""

    def __init__(self, layout="sharded"):
        super().__init__()
        torch.manual_seed(0)
        self.layout = layout
        self.body = (
            network()
            if layout != "parallel"
            else torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        )

    def configure_model(self):
        torch.manual_seed(1 + self.global_rank)
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        if self.layout == "parallel":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.body, self.device_mesh["tensor_parallel"], plan)
        is_replicated = self.layout == "replicated" and self.device_mesh.size() > 1
        fully_shard(self.body, mesh=self.device_mesh if is_replicated else self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        if self.layout == "parallel":
            torch.manual_seed(self.global_step)  # Ranks that share a model in tensor parallel need the same rows.
        return self.body(torch.randn(6, 8)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Interrupted(Exception):
    pass


class Act(pl.Callback):
    """Does to a run what its job says, after a step."""

    def __init__(self, job, checkpoint):
        self.job, self.checkpoint = job, checkpoint

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step == self.job.get("save_at") or batch_idx == self.job.get("save_after_batch"):
            self.checkpoint.save(trainer, pl_module, wait=True)
            raise Interrupted
        if step == self.job.get("leave_at"):  # As a kill does: what is in memory stays there.
            self.checkpoint._memory.store.background.finish()
            self.checkpoint._keeps_memory = True
            raise Interrupted
        if step in (self.job.get("kill_at"), self.job.get("fail_at")):
            self.checkpoint.wait(trainer)  # For the one before, so that the next one is hit.
        if step == self.job.get("kill_at") and trainer.global_rank == self.job["kill_rank"]:
            kill_in_the_middle_of_a_part()
        if step == self.job.get("fail_at") and trainer.global_rank == self.job["fail_rank"]:
            find_the_disk_full_once()


def kill_in_the_middle_of_a_part():
    """Die by SIGKILL in the thread that writes, with half of the bytes of a slice in the file."""
    write = os.write

    def half(descriptor, data):
        is_slice = ".safetensors" in os.readlink(f"/proc/self/fd/{descriptor}")
        written = write(descriptor, data[: len(data) // 2] if is_slice else data)
        if is_slice:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    os.write = half


def find_the_disk_full_once():
    write = os.write

    def full(descriptor, data):
        if ".safetensors" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return write(descriptor, data)
        os.write = write
        raise OSError(errno.ENOSPC, "No space left on device")

    os.write = full


class Counters:
    """Bytes that this rank gathered, copied and read since the last look."""

    def __init__(self):
        self.gathered = self.copied = self.read = 0
        gather, read, copy = DTensor.full_tensor, StoredSlices._slice, host_buffer.HostBuffer.copy

        def full_tensor(tensor, **options):
            self.gathered += tensor.numel() * tensor.element_size()
            return gather(tensor, **options)

        def part(slices, stored):
            values = read(slices, stored)
            self.read += values.nbytes
            return values

        def counted_copy(buffer, entries, sources, overlap):
            self.copied += sum(entry.nbytes for entry in entries)
            return copy(buffer, entries, sources, overlap)

        DTensor.full_tensor = full_tensor
        StoredSlices._slice = part
        host_buffer.HostBuffer.copy = counted_copy

    def take(self):
        taken = {"gathered": self.gathered, "copied": self.copied, "read": self.read}
        self.gathered = self.copied = self.read = 0
        return taken


class EqualBatches(list):
    """Data for which the start of a resumed run makes no difference."""

    begins_anew = True


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def strategy_of(name, rank):
    if name == "single":
        return SingleDeviceStrategy("cpu")
    if name == "ddp":
        return rank.strategy()
    return rank.strategy("sharded", tensor_parallel=2 if name == "fsdp in pairs" else 1)


def run(job, rank, counters):
    messages = Messages()
    logging.getLogger("genlight").addHandler(messages)
    checkpoint = Checkpoint(
        job["directory"],
        every_n_steps=job.get("every", 0),
        memory_every_n_steps=job.get("memory_every", 0),
        save_final=False,
        asynchronous=job.get("asynchronous", True),
        on_error=job.get("on_error", "stop"),
    )
    trainer = rank.trainer(
        *(Act(job, checkpoint), checkpoint),
        strategy=strategy_of(job["strategy"], rank),
        devices=1 if job["strategy"] == "single" else rank.world_size,
        max_steps=job["steps"],
        accumulate_grad_batches=job.get("accumulate", 1),
    )
    if job["kind"] == "contract":
        module = ContractModule(Toy(), TrainingJobSpec(run_id="sharded", max_steps=job["steps"], metric_every=0))
    else:
        module = Net(job["kind"])
    resume_from = newest_valid(job["directory"])[0].path if job.get("resume") else None
    counters.take()
    result = {"problem": "", "steps": 0, "is_from_memory": resume_from is not None and is_in_memory(resume_from)}
    try:
        with contextlib.suppress(Interrupted):
            trainer.fit(module, EqualBatches([0] * 20), ckpt_path=resume_from)
    except Exception as error:
        result["problem"] = f"{type(error).__name__}: {error}"
        if job.get("trace"):
            traceback.print_exc()
    result |= {"steps": trainer.global_step, "messages": messages.texts, **counters.take()}
    logging.getLogger("genlight").removeHandler(messages)
    if not result["problem"]:
        result["weights"] = weights_of(module)
        if rank.number and job["kind"] != "contract":
            # Rank zero saves everything that is not sharded, and nobody makes these statistics equal.
            result["weights"] = {name: t for name, t in result["weights"].items() if "running" not in name}
        result["moments"] = moments_of(trainer.optimizers[0])
        result["held"] = held_by(module, trainer.optimizers[0])
    return result


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: whole(tensor) for name, tensor in named}


def moments_of(optimizer):
    entries = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return {f"{i}.{name}": whole(value) for i, entry in enumerate(entries) for name, value in sorted(entry.items())}


def held_by(module, optimizer):
    """Bytes of this rank's slices of weights and moments."""
    tensors = [*module.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    return sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))


def rank_main(number, phase, folder):
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rank, counters = Rank(number, phase["world_size"], folder), Counters()
    with rank.group(f"{phase['name']}-store"):
        results = {job["key"]: run(job, rank, counters) for job in phase["jobs"]}
        torch.save(results, folder / f"{phase['name']}-rank{number}.pt")


def fork(rank, phase, folder):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rank_main(rank, phase, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(file):
    folder = file.parent
    for phase in json.loads(file.read_text()):
        ranks = [fork(rank, phase, folder) for rank in range(phase["world_size"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        left = {job["key"]: sorted(os.listdir(job["directory"])) for job in phase["jobs"] if "kill_at" in job}
        with (folder / "ended.jsonl").open("a") as ended:
            ended.write(json.dumps({"phase": phase["name"], "codes": codes, "left": left}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
