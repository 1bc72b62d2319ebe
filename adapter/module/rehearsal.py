"""Steps before the training that leave nothing behind: what a search for a learning rate or a batch size trains with.

The trainer class is configured and stepped as in training, by the same precision and over the same ranks, but without
callbacks and loggers. Afterwards its instance is what it was before ``setup``, random numbers and the data begin where
they began, and ``setup`` and ``configure`` are called once more, with the hyperparameters that were found. So the run
that follows has the same bits as one that was given them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.memory import garbage_collection_cuda

from ...callbacks.checkpoint.rank_state import capture_rng, restore_rng
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.lightning_internals import forget_training_loader, training_loader, training_source
from ...callbacks.stop.stop_requests import StopRequests
from ..contract.exceptions import InputError, StartupContractError
from .late_setup import defer_setups

if TYPE_CHECKING:
    from .module import ContractModule

__all__ = ["Rehearsal", "value_of"]


class Rehearsal:
    """What is put back after steps before the training, and how.

    To be made before the trainer is set up.

    Args:
        module: Hosts the trainer.

    Raises:
        StartupContractError: The trainer instance cannot be copied.
    """

    def __init__(self, module: ContractModule) -> None:
        self._module = module
        self._plugin = _copied(module.plugin)
        self._hyperparams = copy.deepcopy(dict(module.given_job.hyperparams))
        self._rng = capture_rng()
        self.found: dict[str, dict[str, Any]] = {"hyperparams": {}, "data": {}}
        """What a run trains with instead of what it was given: hyperparameters, attributes of the data module."""
        self.resumes = module._to_restore is not None
        """Whether the run goes on from a checkpoint."""
        self.is_over = False
        """Whether the training began."""

    def take_up(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Train with what the attempt that saved a checkpoint found, before Lightning sets the strategy up."""
        self.resumes = True
        if any(found.values()):
            self.found = {name: dict(values) for name, values in found.items()}
            self.apply()
            self.rebuild()

    def apply(self, **trial: Mapping[str, Any]) -> None:
        """Give the module and the data module what was found so far, and the values of a trial.

        Args:
            trial: As `found`.
        """
        module = self._module
        hyperparams = copy.deepcopy(self._hyperparams)
        for name, value in {**self.found["hyperparams"], **trial.get("hyperparams", {})}.items():
            owner, last = _owner_of(hyperparams, name)
            owner[last] = value
        changed = dataclasses.replace(module.given_job, hyperparams=hyperparams)
        module.ctx = dataclasses.replace(module.ctx, job=changed)
        if module.job is not None:
            module.job = changed
        for name, value in {**self.found["data"], **trial.get("data", {})}.items():
            _set_on_data(module.trainer, name, value)

    def rebuild(self, *, sets_up_strategy: bool = False) -> None:
        """Configure the trainer as if for the first time, with the hyperparameters that the module has now.

        Args:
            sets_up_strategy: Whether Lightning has set the strategy up already, and would not do so again.
        """
        module, trainer = self._module, self._module.trainer
        rng = capture_rng()
        _forget_trainer(module)
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = [], []
        garbage_collection_cuda()
        _put_back(module.plugin, self._plugin)
        restore_rng(self._rng)
        defer_setups(trainer)
        module.set_up_trainer("fit")
        if sets_up_strategy:
            trainer.strategy.setup(trainer)
        restore_rng(rng)

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """The time of a search, after which the trainer is configured again with what was `found`."""
        module, trainer = self._module, self._module.trainer
        rng = capture_rng()
        generators = list(_generators(training_source(trainer)))
        positions = [copy.deepcopy(_state_of(generator)) for generator in generators]
        data, data_state = trainer.datamodule, None  # type: ignore[attr-defined]
        if data is not None:
            data_state = copy.deepcopy(data.state_dict())
        run_state = copy.deepcopy(run_state_of(trainer).state_dict())
        scaler = copy.deepcopy(trainer.precision_plugin.state_dict())
        yield
        for generator, state in zip(generators, positions, strict=True):
            _set_state_of(generator, state)
        self.apply()
        if data_state:
            data.load_state_dict(data_state)
        run_state_of(trainer).load_state_dict(run_state)
        trainer.precision_plugin.load_state_dict(scaler)
        module.step_result = None
        forget_training_loader(trainer)
        self.rebuild(sets_up_strategy=True)
        restore_rng(rng)

    @contextlib.contextmanager
    def steps(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Steps of the trainer without end, over the data from where the run begins, as their metrics.

        Nobody hears of them: neither callbacks nor loggers.
        """
        module, trainer = self._module, self._module.trainer
        callbacks, loggers, limit = callbacks_of(trainer), trainer.loggers, trainer.limit_val_batches
        # Those stay that say whether a stop was asked for; none of their hooks is called here.
        trainer.callbacks = [each for each in callbacks if isinstance(each, StopRequests)]  # type: ignore[attr-defined]
        trainer.logger = DummyLogger() if loggers else None
        trainer.limit_val_batches = 0  # or an interval longer than an epoch at a larger batch size is an error
        endless = _endless_steps(module, trainer)
        try:
            module.open_router()
            yield endless
        finally:
            endless.close()
            module.close_router()
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
            trainer.limit_val_batches = limit


def _forget_trainer(module: ContractModule) -> None:
    """Let go of everything that ``configure`` built."""
    assert module.discovered is not None
    for found in module.discovered.modules:
        delattr(module, found.name)
    if module.discovered.parameters:
        del module.loose
    module.contract_state = module.discovered = module.step_result = None
    module._found_optimizers, module._frozen, module._kept_by_wrappers = [], [], []
    module.configured = False
    if module._rollouts is not None:
        module._rollouts.begin_epoch(0)


def _endless_steps(module: ContractModule, trainer: pl.Trainer) -> Generator[dict[str, Any]]:
    loader = training_loader(trainer)
    with _position_kept(loader.flattened):
        while True:
            trained = False
            for batch, _, _ in loader:
                trained = True
                module.train_raw_batch(batch)
                yield module.metrics()
            if not trained:
                raise InputError("the source of batches is empty: there is nothing to search with; check `dataset`")


@contextlib.contextmanager
def _position_kept(loaders: list[Any]) -> Iterator[None]:
    """Have loaders begin where they are now, afterwards.

    Raises:
        StartupContractError: One can be passed through only once.
    """
    for loader in loaders:
        if iter(loader) is loader:
            raise StartupContractError(
                "startup.invalid_job_spec",
                f"The batches come from a {type(loader).__name__} that can be read only once: a search would use them "
                "up. Train on an object whose `__iter__` begins anew.",
            )
    kept = [loader for loader in loaders if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]
    states = [copy.deepcopy(loader.state_dict()) for loader in kept]
    try:
        yield
    finally:
        for loader, state in zip(kept, states, strict=True):
            loader.load_state_dict(state)


def _generators(source: Any) -> Iterator[Any]:
    """Generators of random numbers that a loader, or a data module, keeps."""
    samplers = [getattr(source, name, None) for name in ("sampler", "batch_sampler")]
    inner = [getattr(sampler, "sampler", None) for sampler in samplers]
    seen: set[int] = set()
    for owner in (source, *samplers, *inner):
        for value in getattr(owner, "__dict__", {}).values():
            if id(value) not in seen and _state_of(value) is not None:
                seen.add(id(value))
                yield value


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return getattr(getattr(value, "bit_generator", None), "state", None)  # numpy's


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def value_of(hyperparams: Mapping[str, Any], name: str) -> Any:
    """The hyperparameter of a name, which may stand in a group: ``optimizer.lr``.

    Raises:
        KeyError: There is none; or TypeError, where what should be a group is none.
    """
    owner, last = _owner_of(hyperparams, name)
    return owner[last]


def _owner_of(hyperparams: Mapping[str, Any], name: str) -> tuple[Any, str]:
    if name in hyperparams:
        return hyperparams, name
    *path, last = name.split(".")
    return functools.reduce(lambda owner, part: owner[part], path, hyperparams), last


def _set_on_data(trainer: pl.Trainer, name: str, value: Any) -> None:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if hasattr(data, name):
        setattr(data, name, value)
    if name in data.hparams:
        data.hparams[name] = value


def _copied(plugin: Any) -> Any:
    try:
        return copy.deepcopy(plugin)
    except Exception as error:
        raise StartupContractError(
            "startup.invalid_trainer",
            f"{type(plugin).__name__} cannot be copied before `setup` ({error}), so that nothing could be searched "
            "without changing the run. Make in `setup` or `configure` what cannot be copied, or leave the finder out.",
        ) from error


def _put_back(plugin: Any, before: Any) -> None:
    """Give `plugin` the attributes of a copy of `before`."""
    fresh = copy.deepcopy(before)
    for name in _slots(plugin):
        if hasattr(plugin, name):
            delattr(plugin, name)
        if hasattr(fresh, name):
            setattr(plugin, name, getattr(fresh, name))
    if hasattr(plugin, "__dict__"):
        vars(plugin).clear()
        vars(plugin).update(vars(fresh))


def _slots(plugin: Any) -> Iterator[str]:
    for owner in type(plugin).__mro__:
        slots = vars(owner).get("__slots__", ())
        named = (slots,) if isinstance(slots, str) else tuple(slots)
        for name in named:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{owner.__name__.lstrip('_')}{name}" if is_private else name
