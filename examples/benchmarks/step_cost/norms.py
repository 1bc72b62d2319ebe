"""A small ResNet on several ranks, whose batch norms have 60 buffers that DDP keeps equal too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from genlight.adapter.gradients import step as router
from genlight.adapter.gradients.ddp.buffers import BufferSync
from genlight.callbacks import LogMetrics, ReplicaGuard

from .alternating import Alternation
from .hosts import Host, hosted_as
from .layers import MeanSquare
from .ranks import Environment

WIDTH, ROWS, PIXELS, CLASSES = 8, 8, 16, 10
IMAGES = torch.randn(ROWS, 3, PIXELS, PIXELS)


class Block(nn.Module):
    """A residual block with two convolutions."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (self.body(images) + self.shortcut(images)).relu()


class ResNet(MeanSquare):
    """The trainer class: a ResNet-18 of few channels, plain SGD; `wrap` wraps the network in DDP."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        self.wrap = wrap

    def configure(self, ctx: Any) -> dict[str, Any]:
        shapes = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
        first = [nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        blocks = [Block(WIDTH * channels, WIDTH * out, stride) for channels, out, stride in shapes]
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * WIDTH, CLASSES)]
        model = self.wrap(nn.Sequential(*first, *blocks, *last))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return IMAGES


class Never(BufferSync):
    """Keep separate buffers on each rank, to measure the rest of the step."""

    def end(self) -> None: ...


def _loop(wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Callable[[], None]:
    trainer = ResNet(wrap)
    state = trainer.configure(None)

    def step() -> None:
        trainer.train_step(IMAGES, state, None)

    return step


def _by_hand(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Alternation, Path], None]:
    def run(batches: Alternation, _: Path) -> None:
        step = _loop(wrap)
        for _, _ in zip(range(batches.steps), batches, strict=False):
            step()

    return run


@contextlib.contextmanager
def _sent_by(sync: type[BufferSync]) -> Iterator[None]:
    router.BufferSync = sync  # type: ignore[misc]
    try:
        yield
    finally:
        router.BufferSync = BufferSync  # type: ignore[misc]


def hosts_with_norms(rank: int, ranks: int) -> dict[str, Host]:
    """Return the hosts; bare DDP sends buffers at each forward and waits for them."""

    def hosted(sync: type[BufferSync]) -> Callable[[Alternation, Path], None]:
        def run(batches: Alternation, folder: Path) -> None:
            ddp = DDPStrategy(cluster_environment=Environment(rank, ranks))
            callbacks = [LogMetrics(0), ReplicaGuard(every_n_steps=0)]
            with _sent_by(sync):
                hosted_as(ResNet(), batches, folder, strategy=ddp, devices=ranks, callbacks=callbacks)

        return run

    unsynced = _by_hand(lambda model: DistributedDataParallel(model, broadcast_buffers=False))
    return {
        "bare DDP loop": Host(_by_hand(DistributedDataParallel), _loop),
        "bare DDP, buffers never sent": Host(unsynced, _loop),
        "genlight": Host(hosted(BufferSync), _loop),
        "genlight, buffers never sent": Host(hosted(Never), _loop),
    }
