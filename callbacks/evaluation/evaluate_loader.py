"""Scores of a function over the batches of a validation loader, at a cadence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from typing_extensions import override

from ...adapter.plumbing.devices import isolated_random_numbers
from .evaluate import Evaluate, as_scores

__all__ = ["EvaluateLoader"]


class EvaluateLoader(Evaluate):
    """Calls ``function(pl_module, batches)`` at a cadence and fires ``on_scores`` with the scores it returns.

    Works with any LightningModule. `batches` iterates over the whole loader, on the module's device and in its
    precision, without gradients and in evaluation mode; modes and random state are restored afterwards. On several
    ranks each uses its own loader, which may have a ``DistributedSampler``; scores are combined as by `Evaluate`.

    Args:
        dataloader: A ``DataLoader`` or another iterable, which is read anew for each evaluation.
        function: Returns a mapping of names to numbers.
        every_n_steps: Cadence in steps; 0 turns it off.
        critical: Whether a failing evaluation ends the run.
        average: Whether scores are averaged over the ranks; otherwise they are those of rank 0.

    Raises:
        ValueError: `every_n_steps` is negative.
        TypeError: `function` is not callable, or `dataloader` cannot be read several times.
        ContractError: At an evaluation: the function returned no mapping of numbers.
        EvaluationError: The evaluation failed on another rank, or its scores cannot be averaged.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        function: Callable[[pl.LightningModule, Iterator[Any]], Any],
        every_n_steps: int,
        *,
        critical: bool = False,
        average: bool = False,
    ) -> None:
        super().__init__(every_n_steps, critical=critical, average=average)
        if not callable(function):
            raise TypeError(f"Invalid `function`. Expected a callable, but received {function!r}.")
        if not hasattr(dataloader, "__iter__") or isinstance(dataloader, Iterator):
            kind = type(dataloader).__qualname__
            raise TypeError(
                f"Invalid `dataloader`. Expected one that can be read several times, but received a {kind}."
            )
        self.dataloader = dataloader
        self.function = function

    @override
    def _check(self, pl_module: pl.LightningModule) -> None: ...

    @override
    def _evaluate(self, pl_module: pl.LightningModule) -> dict[str, float]:
        modes = [(part, part.training) for part in pl_module.modules()]
        try:
            pl_module.eval()
            with isolated_random_numbers(), torch.no_grad(), pl_module.trainer.precision_plugin.val_step_context():
                return as_scores(self.function(pl_module, self._batches(pl_module)), "the function of EvaluateLoader")
        finally:
            for part, is_training in modes:
                part.training = is_training

    def _batches(self, pl_module: pl.LightningModule) -> Iterator[Any]:
        convert = pl_module.trainer.precision_plugin.convert_input
        for batch in self.dataloader:
            yield convert(move_data_to_device(batch, pl_module.device))
