"""Train for a check without log lines and without an effect on random numbers, and find the line of a failure."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..plumbing.devices import isolated_random_numbers


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


def where_raised(error: BaseException) -> str:
    """Return the innermost line of the user's own code, with its place; an empty text if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not re.search(r"site-packages|/genlight/|importlib|lib/python", f.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line})" if own else ""
