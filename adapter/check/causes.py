"""What a difference between a plain loop and genlight probably comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .snapshot import Snapshot, as_numbers

__all__ = ["Circumstances", "likely_cause"]

ALIKE = 0.02
"""Within this share, a ratio of two norms is taken for the number of ranks."""
PARALLEL = 1e-3
"""Up to this relative rest, one gradient is a multiple of another."""


@dataclass
class Circumstances:
    """How the two loops ran, filled in as they do."""

    world_size: int = 1
    precision: str = "32-true"
    """Lightning's name for that of the hosted loop; the plain one computes in fp32."""
    draws: bool = False
    """Whether steps of the plain loop drew from the global generators of Python, NumPy or torch."""
    batch_statistics: bool = False
    """Whether there are layers that normalise by their batch, in training mode."""
    overflow_steps: int = 0
    """Updates that a gradient scaler has skipped."""

    @property
    def described(self) -> str:
        """Precision and number of ranks in words."""
        return f"{self.precision}, {self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"

    @property
    def is_exact(self) -> bool:
        """Whether both loops compute the same operations in the same order."""
        return self.world_size == 1 and self.precision == "32-true"

    @property
    def is_half(self) -> bool:
        """Whether the hosted loop computes in half precision."""
        return "16" in self.precision

    @property
    def rounding(self) -> str:
        """What to say of a difference that half precision explains."""
        return f"The rounding of {self.precision}, if it is small; judge it with a larger --rtol."


def likely_cause(
    kind: str, name: str, step: int, plain: Snapshot, hosted: Snapshot, before: Snapshot | None, how: Circumstances
) -> str:
    """The most probable reason of a difference, and the way out.

    Args:
        kind: Of the value that differs.
        name: Its name.
        step: After which it does.
        plain: What the plain loop has there.
        hosted: What genlight has.
        before: What the plain loop had one step earlier; None where there was no step.
        how: How the two ran.
    """
    a, b = plain[kind].get(name), hosted[kind].get(name)
    if "weight before" in plain.values:
        return _of_update(kind, step, a, b, how)
    ranks = how.world_size
    if a is None or b is None:
        only = "genlight" if a is None else "the plain loop"
        text = "has it: the class looks at ctx.device, ctx.dtype, ctx.rank or ctx.world_size, or at something outside"
        return f"Only {only} {text} of itself, and does another thing."
    if step == 0 and kind == "weight" and how.is_half and "true" in how.precision:
        return f"Weights are kept in half precision ({how.precision}); judge it with a larger --rtol."
    if step == 0:
        return (
            "`configure` builds another thing the second time, with the same random numbers: it reads a clock or a "
            "variable of its module or class, or depends on ctx.device, ctx.rank or ctx.world_size."
        )
    if kind == "setting":
        return (
            "The class or its scheduler sets it from something that differs, such as ctx.world_size or ctx.dtype, or "
            "steps the scheduler only on some condition."
        )
    if how.overflow_steps:
        return (
            f"The gradient scaler of 16-mixed skipped {how.overflow_steps} updates whose gradients overflowed, which "
            "it does until its scale fits. Compare with --set lightning.precision=bf16-mixed, or more --steps."
        )
    if ranks > 1 and before is not None and _is_share(kind, name, plain, hosted, before, ranks):
        return (
            f"Gradients are 1/{ranks} of those of the plain loop: the loss is a sum over rows. Each of {ranks} ranks "
            "sums over its own rows and the sums are averaged; take the mean over rows."
        )
    if ranks > 1 and how.batch_statistics:
        return "Layers normalise by the rows of one rank. Set lightning.sync_batchnorm, or use another normalisation."
    if ranks > 1 and how.draws:
        return "The step draws random numbers, which each rank draws for itself; compare on one device."
    if how.draws:
        return (
            "The step draws random numbers, and the two loops drew others: a callback or the data draws too, or a "
            "generator lives in a module or class and went on from where the plain loop had left it."
        )
    if how.is_half:
        return how.rounding
    if kind == "metric":
        return (
            "The forward pass gives something else with the same weights and rows: it reads a clock, a file or a "
            "variable of its module or class, which the plain loop changed before."
        )
    where = "state outside of the trainer, such as a variable of its module or class"
    if ranks > 1:
        where = "a loss that is not a mean over the rows, or code that depends on ctx.rank or ctx.world_size"
    return f"The update differs: look for {where}."


def _is_share(kind: str, name: str, plain: Snapshot, hosted: Snapshot, before: Snapshot, world_size: int) -> bool:
    """Whether the update under genlight is one part of `world_size` of the plain one."""
    a, b = as_numbers(plain[kind][name]), as_numbers(hosted[kind][name])
    if kind == "weight":
        start = as_numbers(before[kind][name])
        a, b = a - start, b - start
    elif kind != "optimizer state":
        return False
    power = 2 if name.endswith("_sq") else 1
    whole = float(torch.linalg.vector_norm(a))
    return whole > 0 and math.isclose(
        float(torch.linalg.vector_norm(b)) / whole, world_size**-power, rel_tol=ALIKE * power
    )


def _of_update(kind: str, update: int, a: Any, b: Any, how: Circumstances) -> str:
    """The same for an update of an old training function, which had `a` where the class had `b`."""
    if a is None or b is None:
        only = "genlight" if a is None else "the function"
        text = "has it: the optimizers hold other parameters, or some of them are frozen or unused in one of the two."
        return f"Only {only} {text}"
    if as_numbers(a).shape != as_numbers(b).shape:
        return "The two build another model, or hand its parameters to the optimizer in another order."
    if kind == "weight before" and update > 1:
        return "Something other than an optimizer changed the weights between two updates in one of the two."
    if kind == "weight before":
        return (
            "The weights differ from the start: seed both the same way right before the model is built, and build it "
            "in the same order."
        )
    if kind == "gradient":
        return _about_gradient(a, b, how)
    if kind == "setting":
        return "The optimizer or its schedule has another setting; the name says which."
    if how.is_half:
        return how.rounding
    return "Gradients and settings agree, and the update does not: another optimizer, or another version of its rule."


def _about_gradient(a: torch.Tensor, b: torch.Tensor, how: Circumstances) -> str:
    a, b = as_numbers(a).flatten(), as_numbers(b).flatten()
    factor = float(a @ b / (a @ a)) if float(a @ a) > 0 else math.nan
    if factor > 0 and float((b - factor * a).norm()) <= PARALLEL * float(b.norm()):
        return (
            f"It is {factor:.6g} times that of the function: one of the two sums where the other takes a mean, "
            "clips, or divides by the steps of accumulation."
        )
    if how.draws:
        return (
            "The step draws random numbers, so seed both alike, right before the first step. Where that is done, they "
            "have other rows, another order of rows, or another loss."
        )
    if how.is_half:
        return how.rounding
    return "The weights agree and the gradient does not: other rows, another order of rows, or another loss."
