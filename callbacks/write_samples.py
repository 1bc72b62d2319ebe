"""Write samples of a hosted trainer at a cadence, each complete or absent."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from typing_extensions import override

from ..adapter.contract.exceptions import ContractError
from ..adapter.plumbing.devices import isolated_random_numbers
from ..adapter.plumbing.durable import (
    TEMPORARY_PREFIX,
    fsync_directory,
    fsync_file,
    make_directory,
    temporary_name,
    write_bytes_durably,
)
from .checkpoint.capture import CONTRACT_KEY
from .evaluation.evaluate import keep_modes
from .hook.cadence import Boundaries, step_cadence, suppressed
from .hook.events import fire, get_entry, run_state_of, timed
from .hook.hook import Hook, skippable

log = logging.getLogger(__name__)

_SAMPLES_DUE = "samples_due"
"""Entry in genlight's part of a checkpoint: the samples of its step are made only after the save."""
_REQUEST_FIELDS = ("prompt", "negative_prompt", "instruction", "source_image", "task")


class SampleRequest(dict[str, Any]):
    """A request for one sample, for ``generate_sample``: a mapping whose entries are also attributes.

    By default the task is ``t2i``, the name ``sample-00`` and so on, both prompts are empty, and other fields None.

    Args:
        fields: Any of name, task, prompt, negative_prompt, instruction, source_image and seed, and your own entries.
        index: Index of the request.
    """

    def __init__(self, fields: Mapping[str, Any], index: int = 0) -> None:
        super().__init__(name=f"sample-{index:02d}", task="t2i", prompt="", negative_prompt="")
        self.update(instruction=None, source_image=None, seed=None)
        self.update({name: value for name, value in fields.items() if value is not None})

    @property
    def mode(self) -> Any:
        """The task, under its name in some releases of the older runtime."""
        return self["task"]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a sample request has no {name!r}") from None


class WriteSamples(Hook):
    """Calls the trainer's ``generate_sample`` once for each request and stores the results.

    A sample is a file ``step-00000200-00.json`` (request, seed, return value, names of its files) and a folder
    ``step-00000200-00/`` with the files that the generator wrote to its ``output_dir``. The folder has a temporary name
    until its files are on disk, and the JSON is written last: a sample without it does not count, and leftovers of a
    killed run are removed at the next start. If the trainer has no generator, the JSON holds only the request. Without
    requests, the generator, if there is one, is called once with the default request, and a text file
    ``step-00000200.txt`` is written as well. Random numbers drawn by sampling do not affect training. If a checkpoint
    was saved before the samples of its step, a kill may have prevented them; a run that resumes from it makes them
    first.

    Args:
        directory: Folder for samples.
        every_n_steps: Cadence in steps; 0 turns it off.
        requests: One mapping for each sample, with any of name, task, prompt, negative_prompt, instruction,
            source_image, seed.
        seed: Seed of requests that have none.
        critical: Whether a failing generator ends the run.

    Raises:
        ValueError: `every_n_steps` is negative.
    """

    optional_reads = ("loss_stats", "latest_checkpoint_uri")
    writes = ("latest_sample_uris",)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_n_steps: int = 0,
        *,
        requests: Sequence[Mapping[str, str | int | None]] = (),
        seed: int | None = None,
        critical: bool = True,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self.requests = [dict(request) for request in requests]
        self.seed = seed
        self.critical = critical
        self._boundaries = Boundaries(self)
        self._is_behind = False
        """Whether the run resumes from a checkpoint that was saved before the samples of its step."""

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._boundaries.will_cross(trainer.global_step) and not suppressed(pl_module):
            checkpoint.setdefault(CONTRACT_KEY, {})[_SAMPLES_DUE] = True

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._is_behind = bool(checkpoint.get(CONTRACT_KEY, {}).get(_SAMPLES_DUE))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._boundaries = Boundaries(self, trainer.global_step)
        if self.every_n_steps:
            _sweep(self.directory)
            plugin = getattr(pl_module, "plugin", None)
            if plugin is not None and find_generator(getattr(pl_module, "contract_state", None)) is None:
                log.warning(
                    "Samples every %d steps will hold only their requests: the state of %s has no `generate_sample`. "
                    "Put a function of that name into the state, or set `sample_every` to 0.",
                    self.every_n_steps,
                    type(plugin).__name__,
                )
            if self._is_behind:
                self._write_timed(trainer, pl_module)
        self._is_behind = False

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._boundaries.crosses(trainer.global_step) and not suppressed(pl_module):
            self._write_timed(trainer, pl_module)

    def _write_timed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with timed(trainer, "samples"):
            self.write(trainer, pl_module, trainer.global_step)

    def write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> dict[Path, list[Path]]:
        """Make and write the samples of `step`; return the files of each sample by its record."""
        make_directory(self.directory, shared=None)
        ctx = getattr(pl_module, "ctx", None)
        facts = {"run_id": str(getattr(getattr(ctx, "job", None), "run_id", "")), "step": step}
        generate = find_generator(getattr(pl_module, "contract_state", None))
        written: dict[Path, list[Path]] = {}
        if not self.requests:
            text = self.directory / f"step-{step:08d}.txt"
            write_bytes_durably(text, f"{facts['run_id']} step {step}\n".encode())
            written[text] = []
        with keep_modes(pl_module, "generate_sample"), isolated_random_numbers():
            for name, request in self._samples_of(pl_module, step):
                record, files = self._write_sample(generate, name, request, facts, ctx)
                written[record] = files
        uris = [str(path) for record, files in written.items() for path in (record, *files)]
        run_state_of(trainer).latest_sample_uris = uris
        fire(trainer, "on_samples_written", written, step)
        return written

    def _samples_of(self, pl_module: pl.LightningModule, step: int) -> list[tuple[str, SampleRequest]]:
        """Return name and request of each sample."""
        name = f"step-{step:08d}"
        if self.requests:
            return [(f"{name}-{at:02d}", SampleRequest(fields, at)) for at, fields in enumerate(self.requests)]
        return [(name, SampleRequest({}))] if find_generator(getattr(pl_module, "contract_state", None)) else []

    def _write_sample(
        self, generate: Callable[..., Any] | None, name: str, request: SampleRequest, facts: dict[str, Any], ctx: Any
    ) -> tuple[Path, list[Path]]:
        """Make one sample, complete or absent; return its record and files."""
        temporary, folder = self.directory / temporary_name(name), self.directory / name
        record = self.directory / f"{name}.json"
        seed = request.seed if request.seed is not None else self.seed
        offered = {field: request[field] for field in _REQUEST_FIELDS}
        offered |= {"step": facts["step"], "ctx": ctx, "request": request, "seed": seed}
        offered |= {"mode": request.mode, "output_dir": str(temporary)}
        make_directory(temporary, shared=None)
        try:
            returned = {} if generate is None else call_with_accepted(generate, offered)
            if not isinstance(returned, Mapping | None):
                kind = type(returned).__qualname__
                raise ContractError(f"generate_sample returned a {kind}; it must be a mapping or None")
            files = [folder / file.relative_to(temporary) for file in _durable_files(temporary, name)]
            named = [str(file.relative_to(self.directory)) for file in files]
            encoded = _encode_record({**request, "seed": seed, **facts, **(returned or {}), "files": named}, name)
            # Remove the sample of an earlier attempt at this step; its record first, because it names the files.
            record.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            if files:
                temporary.rename(folder)
            fsync_directory(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        # The generator may have returned paths within its temporary folder.
        write_bytes_durably(record, encoded.replace(temporary.name.encode(), name.encode()))
        return record, files


def find_generator(state: Any) -> Callable[..., Any] | None:
    """Return the ``generate_sample`` of a trainer's state, an attribute or a key, or None."""
    generate = get_entry(state, "generate_sample")
    return generate if callable(generate) else None


def call_with_accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call `function` with the `offered` arguments that its signature accepts.

    Arguments that are None are omitted if the parameter has a default; ``mode`` is passed only if the signature names
    it.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {name: value for name, value in offered.items() if name in named or (takes_all and name != "mode")}
    required = inspect.Parameter.empty
    arguments = {n: value for n, value in accepted.items() if value is not None or named.get(n, required) is required}
    return function(**arguments)


def _durable_files(directory: Path, sample: str) -> Iterator[Path]:
    """Make every file below `directory` durable; yield each path.

    Raises:
        ContractError: The folder holds something that is not a regular file.
    """
    for folder, _, names in sorted(os.walk(directory)):
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file():  # opening a pipe would block, and a link may be broken
                raise ContractError(f"generate_sample of {sample} created {name!r}, which is not a file")
            fsync_file(path)
            yield path
        fsync_directory(folder)


def _sweep(directory: Path) -> None:
    """Remove incomplete samples of a killed run; only the run that writes to the directory may do this."""
    for entry in sorted(directory.glob(f"{TEMPORARY_PREFIX}*")):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _encode_record(record: Mapping[str, Any], name: str) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(record, enc_hook=_to_plain, order="sorted")) + b"\n"
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ContractError(f"generate_sample of {name} returned a value that is not JSON: {error}") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # tensors and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__qualname__} cannot be written as JSON")
