"""Tensors are copied while training continues, and a checkpoint has the state of its boundary whatever training does.

The test of interleavings tries 100 by default. All 10,000, which take some minutes:

    GENLIGHT_LONG_FAULTS=1 pytest tests/callbacks/checkpoint/test_overlap.py -m slow
"""

import copy
import os
import random
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from genlight.callbacks.checkpoint import Checkpoint, CheckpointStore, list_checkpoints, load
from genlight.callbacks.checkpoint.capture import Overlap
from genlight.callbacks.checkpoint.codec.tensors import entry_of

INTERLEAVINGS = 10_000 if os.environ.get("GENLIGHT_LONG_FAULTS") else 100
WIDTH = 4096
"""Features of the smallest tensors that are copied later: 16 KB."""


class Training:
    """A model of some 3 MB with its optimizers, and everything that may write to its tensors between two boundaries."""

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices
        self.body = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 16))
        self.critic = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8, bias=False))
        self.average = copy.deepcopy(self.body)
        self.average.requires_grad_(False)
        self.table = torch.zeros(WIDTH)
        self.array = self.table.numpy()
        self.queue = torch.zeros(8, WIDTH)
        self.ballast = torch.zeros(256, WIDTH)
        """Is copied first, so that training reaches the others before the copy does."""
        kind = choices.choice(("sgd", "adam", "fused", "single", "own"))
        self.optimizers = [self.optimizer(kind, module) for module in (self.body, self.critic)]

    def optimizer(self, kind: str, module: nn.Module):
        parameters = list(module.parameters())
        if kind == "sgd":
            return torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        if kind == "own":
            return OwnOptimizer(parameters)
        return torch.optim.AdamW(parameters, 1e-3, fused=kind == "fused", foreach=False if kind == "single" else None)

    def state(self):
        """Return the state as a dump has it: other tensors with the memory of the training's."""
        gradients = {name: each.grad for name, each in self.body.named_parameters() if each.grad is not None}
        own = {"table": self.table, "queue": self.queue, "average": self.average.state_dict(), "gradients": gradients}
        weights = {"ballast": self.ballast}
        weights |= {f"{name}.{key}": value for name in ("body", "critic") for key, value in self.weights(name).items()}
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"state_dict": weights, "optimizer_states": states, "genlight": {"state": own}}

    def weights(self, name: str):
        return getattr(self, name).state_dict()

    def backward(self) -> None:
        hidden = self.body[:2](torch.randn(2, 16))
        (self.body[2](hidden).square().mean() + self.critic(hidden).square().mean()).backward()

    def update(self, which: int = 0) -> None:
        self.optimizers[which].step()
        self.optimizers[which].zero_grad(set_to_none=self.choices.random() < 0.5)

    def update_critic(self) -> None:
        self.update(1)

    def forward_only(self) -> None:
        self.body(torch.randn(2, 16))

    @torch.no_grad()
    def clip_by_data(self) -> None:
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    @torch.no_grad()
    def change_in_place(self) -> None:
        self.body[0].weight.add_(0.1)
        self.body[2].weight[self.choices.randrange(16)] = 1.0

    @torch.no_grad()
    def average_weights(self) -> None:
        torch._foreach_lerp_(list(self.average.parameters()), list(self.body.parameters()), 0.1)

    @torch.no_grad()
    def average_by_data(self) -> None:
        torch._foreach_lerp_([p.data for p in self.average.parameters()], [p.data for p in self.body.parameters()], 0.1)

    def change_by_numpy(self) -> None:
        self.array += 1
        self.average[0].bias.numpy()[3] = self.choices.random()

    def enqueue(self) -> None:
        self.queue[self.choices.randrange(8)].copy_(torch.randn(WIDTH))

    def load_weights(self) -> None:
        self.body.load_state_dict(copy.deepcopy(self.average.state_dict()))

    def replace_data(self) -> None:
        self.body[2].weight.data = torch.randn(16, WIDTH)

    def flatten(self) -> None:
        parameters = list(self.body.parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach(), parameters)

    def write_to_storage(self) -> None:
        self.queue.untyped_storage().fill_(1)

    def wait(self) -> None:
        time.sleep(self.choices.random() * 2e-3)

    def act(self) -> None:
        actions = [name for name, each in vars(Training).items() if callable(each) and name not in NO_ACTIONS]
        getattr(self, self.choices.choice(actions))()


NO_ACTIONS = ("__init__", "optimizer", "state", "weights", "act")


class OwnOptimizer:
    """Not of torch, so that no hook announces its updates."""

    def __init__(self, parameters) -> None:
        self.parameters = parameters
        self.moments = [torch.zeros_like(each) for each in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            if parameter.grad is not None:
                moment.lerp_(parameter.grad, 0.1)
                parameter.data.sub_(moment, alpha=1e-3)

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.zero_()

    def state_dict(self):
        return {"moments": self.moments}


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture
def store():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = CheckpointStore()
    made.copies_later = True
    yield made
    torch.set_num_threads(threads)
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_interleaving_of_copy_and_training_tears_a_checkpoint(store, tmp_path):
    written = 0
    for seed in range(INTERLEAVINGS):
        if seed % 10 == 0:
            torch.manual_seed(seed)
            training = Training(random.Random(seed))
        for _ in range(training.choices.randrange(6)):
            training.act()
        state = training.state()
        at_boundary = copy.deepcopy(state)
        store.overlap.written.clear()  # such tensors would be copied at once
        saved = store.save(tmp_path / "save", state, asynchronous=True)
        del state
        for _ in range(training.choices.randrange(8)):
            training.act()
        saved.result()
        store.overlap.end()
        written += bool(store.overlap.written)
        loaded = load(tmp_path / "save")
        for name, expected in at_boundary.items():
            found = loaded[name] if name != "genlight" else {"state": loaded[name]["state"]}
            assert equal(found, expected), f"interleaving {seed}: {name}"
    print(f"{INTERLEAVINGS} checkpoints, none torn and none refused; {written} were written to during the copy")
    assert written > INTERLEAVINGS / 20


LARGE = 1 << 20


def start_copy(*sources: torch.Tensor, written=()):
    """Return a copy that has started, its targets, and whether it took each of `sources`."""
    overlap, targets = Overlap(written), [torch.zeros_like(source) for source in sources]
    taken = [
        overlap.take(entry_of("file", str(number), source), target, source)
        for number, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    overlap.start()
    return overlap, targets, taken


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_an_update_waits_for_the_copy_and_writes_to_the_same_memory(options):
    parameters = [nn.Parameter(torch.ones(LARGE)) for _ in range(8)]
    optimizer = torch.optim.Adam(parameters, 0.5, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(LARGE)
    addresses = [parameter.data_ptr() for parameter in parameters]

    overlap, targets, _ = start_copy(*(parameter.detach() for parameter in parameters))
    optimizer.step()
    overlap.end()

    assert [parameter.data_ptr() for parameter in parameters] == addresses
    assert not overlap.written
    assert all(torch.all(target == 1) for target in targets)
    assert all(torch.all(parameter < 1) for parameter in parameters)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.add_(1),
        lambda weight: torch._foreach_lerp_([weight.data], [torch.zeros(LARGE)], 0.5),
        lambda weight: weight.detach().numpy().fill(3),
        lambda weight: weight.detach().view(2, -1)[1].zero_(),
        lambda weight: weight.untyped_storage().fill_(0),
    ],
)
def test_a_write_during_the_copy_does_not_change_it_and_the_next_copy_is_made_at_once(write):
    weight = nn.Parameter(torch.ones(LARGE))

    overlap, targets, taken = start_copy(weight.detach())
    write(weight)
    overlap.end()

    assert taken == [True]
    assert torch.all(targets[0] == 1)
    assert not torch.all(weight == 1)
    assert start_copy(weight.detach(), written=overlap.written)[2] == [False]


def test_memory_that_others_may_write_to_by_its_address_is_not_copied_later(tmp_path):
    viewed = torch.zeros(LARGE)
    viewed.numpy()
    torch.save(viewed, tmp_path / "file")
    of_file = torch.load(tmp_path / "file", mmap=True)
    tensors = [viewed, torch.from_numpy(viewed.numpy().copy()), viewed.clone().share_memory_(), of_file]

    overlap, _, taken = start_copy(*tensors, viewed.clone())
    overlap.end()

    assert taken == [False, False, False, False, True]


def test_nothing_is_copied_later_while_another_thread_of_the_program_runs():
    begun, end = threading.Event(), threading.Event()

    def act():
        begun.set()
        end.wait()

    actor = threading.Thread(target=act)
    actor.start()
    begun.wait()

    beside = start_copy(torch.zeros(LARGE))[2]
    end.set()
    actor.join()
    overlap, _, alone = start_copy(torch.zeros(LARGE))
    overlap.end()

    assert (beside, alone) == ([False], [True])


def test_data_workers_and_their_threads_let_tensors_be_copied_later():
    loader = DataLoader(torch.zeros(8, 1), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    overlap, _, taken = start_copy(torch.zeros(LARGE))
    overlap.end()

    assert taken == [True]


def test_the_hook_of_updates_and_the_clones_end_with_the_store(tmp_path):
    weight, store, before = torch.zeros(LARGE), CheckpointStore(), len(_global_optimizer_pre_hooks)
    store.copies_later = True

    store.save(tmp_path / "save", {"state_dict": {"weight": weight}}, asynchronous=True)
    assert len(_global_optimizer_pre_hooks) == before + 1
    store.close()

    assert len(_global_optimizer_pre_hooks) == before
    assert not torch._C._is_cow_tensor(weight)


class Wide(pl.LightningModule):
    """Has statistics of batches, an average by `.data`, and weights that are clipped in the forward pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
        self.average = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.body[2].weight.data.clamp_(-0.01, 0.01)
        return self.body(batch).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        torch._foreach_lerp_([each.data for each in self.average.parameters()], list(self.body.parameters()), 0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.body.parameters(), lr=0.01)


@pytest.mark.parametrize("window", [1, 3])
def test_checkpoints_of_a_training_are_the_same_with_and_without_overlap(window, tmp_path, train_net):
    contents = []
    for overlaps in (False, True):
        torch.manual_seed(0)
        saves = Checkpoint(
            tmp_path / str(overlaps),
            every_n_steps=1,
            keep_last=None,
            asynchronous=overlaps,
            copy_while_training=overlaps,
        )
        train_net(saves, net=Wide(), accumulate_grad_batches=window)
        records = [listed.record for listed in list_checkpoints(saves.directory)]
        contents.append([{record.file_name(file): file.xxh3_128 for file in record.files} for record in records])

    tensors = [[{name: file[name] for name in file if "safetensors" in name} for file in each] for each in contents]
    assert len(tensors[0]) > 3
    assert tensors[0] == tensors[1]
