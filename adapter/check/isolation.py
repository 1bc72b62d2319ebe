"""Train for a check without log lines and without an effect on random numbers, and find the line of a failure."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..plumbing.devices import isolated_random_numbers
from ..plumbing.failures import frame_of_user
from ..plumbing.redaction import safe_str


def turn_off_dropout(modules: Iterable[nn.Module]) -> None:
    """Turn off dropout layers, and dropout inside other layers."""
    for module in modules:
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log lines and warnings that every training produces; a check reports its findings instead."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "genlight")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers for the block; restore the caller's afterwards."""
    with isolated_random_numbers():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error, and the innermost line of the user's code if there is one."""
    frame = frame_of_user(error)
    place = "" if frame is None else f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return f"{type(error).__name__}: {safe_str(error)}{place}"
