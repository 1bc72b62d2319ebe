"""``genlight doctor --step``: one real step of a job's class on the first batch of its data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from ..contract.exceptions import InputError
from ..job.config import RunConfig
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from ..plumbing.devices import isolated_random_numbers
from ..plumbing.redaction import safe_str
from .batches import job_batches
from .finding import Finding, Level
from .isolation import quiet, where_raised
from .plain_loop import PlainLoop, plain_context
from .snapshot import live_weights

MOST_SHOWN = 12
"""Maximum number of columns or metrics in a finding."""


def one_step(config: RunConfig) -> Iterator[Finding]:
    """Yield the findings of a job's first step: its batch, errors and their places, gradients, metrics.

    Writes nothing, and restores the random numbers.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        stack.enter_context(isolated_random_numbers())
        try:
            yield from _findings(config, stack)
        except Exception as error:  # noqa: BLE001  # whatever the class or its data raises is the finding
            yield Finding("step", "fail", f"{type(error).__name__}: {safe_str(error)}{where_raised(error)}")


def _findings(config: RunConfig, stack: contextlib.ExitStack) -> Iterator[Finding]:
    plugin = make_trainer(find_trainer(config.trainer))
    ctx, batches = job_batches(config, plugin, plain_context(config), stack)
    loop = PlainLoop(plugin, ctx)
    raw = next(loop.begin(batches), None)
    if raw is None:
        raise InputError("the source of batches is empty; check `dataset`")
    yield Finding("batch", "pass", describe(raw))
    yield from _check_columns(raw)
    optimized = {id(tensor) for tensor in loop.discovered.optimized() if tensor.requires_grad}
    trained = {name: value for name, value in live_weights(loop.discovered).items() if id(value) in optimized}
    before = {name: value.detach().clone() for name, value in trained.items()}
    metrics = loop.step(raw)
    untouched = [name for name, value in trained.items() if value.grad is None and torch.equal(value, before[name])]
    if not trained:
        yield Finding("gradients", "warn", "neither the state of `configure` nor the trainer has an optimizer")
    elif untouched:
        hint = ": does `train_step` call `backward()` on the loss?" if len(untouched) == len(trained) else ""
        text = f"{len(untouched)} of {len(trained)} weights have no gradient and no change: {_list_first(untouched)}"
        yield Finding("gradients", "warn", text + hint)
    else:
        yield Finding("gradients", "pass", f"{len(trained)} weights have gradients or have changed")
    shown = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:MOST_SHOWN])
    level: Level = "pass" if all(map(math.isfinite, metrics.values())) else "warn"
    yield Finding("step", level, f"took one step on {ctx.device}: {shown or 'it returns no metrics'}")


def describe(batch: Any) -> str:
    """Return the type and the shape of a raw batch, column by column if it has columns."""
    name = type(batch).__name__
    if isinstance(batch, pa.RecordBatch | pa.Table):
        columns = [f"{field.name} {field.type}" for field in batch.schema]
        return f"{name} of {batch.num_rows} rows: {_list_first(columns)}"
    if hasattr(batch, "dtype") and hasattr(batch, "shape"):
        return f"{name} {tuple(batch.shape)} {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"{name}: {_list_first([f'{key} {describe(value)}' for key, value in batch.items()])}"
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], int | float | str):
        return f"{name} of {len(batch)}: {_list_first([describe(value) for value in batch[:3]])}"
    return f"{name}{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}"


def _check_columns(batch: Any) -> Iterator[Finding]:
    """Report columns that cannot become tensors untouched a conversion."""
    if not isinstance(batch, pa.RecordBatch | pa.Table):
        return
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    counts = {name: column.null_count for name, column in columns.items() if column.null_count}
    nulls = [f"{name!r} ({count} of {batch.num_rows})" for name, count in counts.items()]
    texts = [repr(name) for name, column in columns.items() if pa.types.is_string(column.type)]
    if nulls:
        remedy = "fill them, or remove these rows from the files"
        yield Finding("batch", "warn", f"nulls in column {_list_first(nulls)}: {remedy}")
    if texts:
        yield Finding("batch", "pass", f"text in column {_list_first(texts)}: `prepare_batch` must convert it")


def _list_first(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" if names[MOST_SHOWN:] else "")
