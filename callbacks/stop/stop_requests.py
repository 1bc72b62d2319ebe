"""Stop a run on request: at the same step on every rank, after a checkpoint.

`Agreement` has all ranks stop after the same step; `SpotNotice` asks a cloud whether it is taking the machine back.
"""

from __future__ import annotations

import http.client
import inspect
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from ...adapter.contract.exceptions import StopReason, TrainingCanceled
from ...adapter.plumbing.devices import host_group
from ...adapter.plumbing.text import require
from ...adapter.plumbing.threads import started
from ..checkpoint.policy import savers_of
from ..hook.cadence import Pace, steps_within
from ..hook.events import hosted_by, is_own_loop, run_state_of
from ..hook.hook import Hook, RunContext, skippable
from ..lightning_internals import PrefetchDataFetcher, TrainingEpochLoop, signal_connector
from .data_workers import protected_workers
from .launcher import launcher_grace_s
from .signals import StopSignals
from .sources import StopSources

log = logging.getLogger(__name__)

ROUND_S = 0.05
"""Target time between rounds of `Agreement`. A round takes about 0.3 ms, as long as a step of a small model, so a round
in every step would be too expensive."""
GRACE = (
    "torchrun kills every rank %s s after a stop signal: the current step, its checkpoint and the remaining uploads "
    "have to fit into that. Set another time with its `--shutdown-timeout`, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
)
WAIT_PATIENCE_S = 15.0
"""Seconds that a wait for a batch may last after a stop request, if no checkpoint can be saved during the wait."""
MOST_STEPS = 32
"""Maximum steps between rounds, so that the next round is not far away if steps suddenly become slow."""


class Agreement:
    """Maximum over all ranks of a number, exchanged every N steps.

    A round is an asynchronous all-reduce. It begins at the end of one step and is read at the end of the next; by then
    the other ranks have usually begun it too. Together with its number, each rank sends how many steps it would wait
    until the next round, by its own clock. The smallest value counts, so all ranks begin the next round after the same
    step, whatever their clocks and speeds. The first round comes after the first step. The number of steps between
    rounds at most doubles from one round to the next.

    Args:
        group: Process group for the rounds; None makes a new group of all ranks, which is collective.
        clock: Returns seconds since any fixed moment.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        # A separate gloo group: the numbers stay in host memory, and no rank waits for a device.
        self._group = host_group() if group is None else group
        self._clock = clock
        self._numbers = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._work: dist.Work | None = None
        self._is_over = False
        self._distance = 1
        self.due_step = 0
        """Step at whose end a round begins or is read."""
        self._began_at = clock()

    def now(self, number: int) -> int:
        """Exchange numbers at once and return the result; waits for all ranks."""
        self._begin(number, trains=True)
        agreed = self._read()
        self._distance = 1  # the time before this round contained no step, so it says nothing about the speed of steps
        return agreed

    def after_step(self, step: int, read_number: Callable[[], int]) -> int:
        """Return the result of a round if one is read at the end of `step`, otherwise 0; the same on all ranks.

        Nothing happens before `due_step`, so callers may skip the call until then.

        Args:
            step: The completed steps.
            read_number: Returns the number of this rank; called when a round begins. After a result other than 0, no
                further round begins.
        """
        if step < self.due_step:
            return 0
        agreed = 0
        if self._work is not None:
            agreed = self._read()
            self.due_step = step + self._distance - 1
        if step >= self.due_step and not self._is_over:
            self._begin(read_number(), trains=True)
            self.due_step = step + 1
        return agreed

    def rewind(self, step: int) -> None:
        """Continue from `step`, to which the run was put back. All ranks must call this."""
        self.due_step = min(self.due_step, step + 1)

    def leave(self) -> None:
        """Take part in rounds until one has a result other than 0, or no rank trains any longer.

        Without this rank, the others would wait forever in their next round.
        """
        while not self._is_over:
            if self._work is None:
                self._begin(0, trains=False)
            self._read()

    def _begin(self, number: int, *, trains: bool) -> None:
        before, self._began_at = self._began_at, self._clock()
        # The number of steps that fit between two rounds, at the speed since the last one.
        distance = steps_within(ROUND_S, steps=self._distance, took_s=self._began_at - before, most=MOST_STEPS)
        self._numbers = torch.tensor([number, -distance, trains], device="cpu")
        self._work = self._group.allreduce([self._numbers], dist.ReduceOp.MAX)

    def _read(self) -> int:
        """Return the result of the pending round."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        agreed, negative_distance, someone_trains = self._numbers.tolist()
        self._distance = -negative_distance
        self._is_over = agreed != 0 or not someone_trains
        return int(agreed)


Cloud = Literal["aws", "gcp", "azure"]
ADDRESSES: dict[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
POLL_S = 5.0
"""Seconds between two requests. AWS gives 120 s of notice, GCP and Azure 30 s."""
_TIMEOUT_S = 2.0
_LARGEST = 1 << 16
_OPENER = build_opener(ProxyHandler({}))  # no proxy: only this machine itself reaches the address


class SpotNotice:
    """Asks whether the cloud has announced that it takes back this spot machine.

    Args:
        cloud: The cloud whose metadata address is read.
        address: Another address to read, without a path; for tests.

    Raises:
        ValueError: `cloud` is not ``aws``, ``gcp`` or ``azure``.
    """

    def __init__(self, cloud: Cloud, address: str | None = None) -> None:
        require((cloud in ADDRESSES, "spot", f"one of {', '.join(map(repr, ADDRESSES))}", cloud))
        self.cloud = cloud
        self.address = ADDRESSES[cloud] if address is None else address
        self._is_noticed = self._has_warned = False

    def reason(self) -> StopReason | None:
        """Return ``preempted`` once there was a notice. Makes no request."""
        return "preempted" if self._is_noticed else None

    @contextmanager
    def polling(self, every_s: float | None = None) -> Iterator[None]:
        """Ask every `every_s` seconds (None: `POLL_S`), in a thread, until the block ends or there is a notice."""
        end = threading.Event()

        def poll() -> None:
            while not self._is_noticed and not end.is_set():
                self._ask()
                end.wait(POLL_S if every_s is None else every_s)

        started(threading.Thread(target=poll, name="genlight-spot", daemon=True))
        try:
            yield
        finally:
            end.set()

    def _ask(self) -> None:
        """Ask once whether there is a notice; warn at the first failure."""
        try:
            self._is_noticed = self._has_notice()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("no notice of %s can be read from %s (%s); still trying", self.cloud, self.address, error)
        if self._is_noticed:
            log.warning("%s takes back this machine: the run saves a checkpoint and stops", self.cloud)

    def _has_notice(self) -> bool:
        """Return whether the cloud's metadata address has a notice now."""
        if self.cloud == "aws":  # answers 404 until there is a notice
            token = self._read("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
            headers = {"X-aws-ec2-metadata-token": token}
            try:
                action = json.loads(self._read("/latest/meta-data/spot/instance-action", headers))["action"]
            except HTTPError as error:
                if error.code == http.client.NOT_FOUND:
                    return False
                raise
            return action in ("terminate", "stop", "hibernate")
        if self.cloud == "gcp":
            return self._read("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
        events = json.loads(self._read("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
        return any(event.get("EventType") in ("Preempt", "Terminate") for event in events.get("Events", ()))

    def _read(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = Request(self.address + path, headers=headers, method=method)  # noqa: S310 - a constant http address
        with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read(_LARGEST)
        return text.decode().strip()


STOP_REASONS_BY_CODE: tuple[StopReason | None, ...] = (None, "canceled", "timeout", "preempted")
"""Reasons, indexed by their code. If ranks have different reasons, the largest code wins."""


class StopRequests(Hook):
    """Watches for stop requests and sets ``stop_reason`` of the run state when all ranks agree.

    A stop can come from a flag, a cancel file, a time limit, a signal (SIGTERM, SIGUSR1, SIGINT), or a callable added
    by other code. All ranks stop after the same step, even if only one received the request: about every 50 ms they
    exchange requests in an asynchronous all-reduce. `TrainingCanceled` is raised once all callbacks have seen the step.

    A request stops one fit; the next fit of the same process is not affected, unless a cancel file still exists.

    From ``setup`` on, worker processes of torch data loaders ignore these signals. Otherwise a signal to the whole
    process group would kill the workers while the training process still needs their batches to finish its step.

    If a run with one rank waits between two steps for a batch that its data workers do not deliver, a stop saves the
    last completed step and ends the wait. A wait in validation, inside a step, or in a run with several ranks ends once
    it has lasted 15 s since the request, without another checkpoint. A dataset that blocks in the training process
    itself cannot be interrupted safely: `WatchHangs` or a second signal ends such a run.

    Args:
        cancel_file: A file that requests a stop once it exists, whatever its content, except for a word that means no
            (0, false, f, no, n, off). A file that cannot be read also counts as a request.
        max_runtime_s: Time limit in seconds since the process started; None means no limit. Slurm's end time is a limit
            too. The run stops early enough to save, judging by the longest save so far.
        canceled: Whether the run is canceled before it starts.
        signals: Signal handlers that the caller has already installed; None installs them while training.
        spot: ``aws``, ``gcp`` or ``azure``: also stop when this cloud announces that it takes back the machine. While
            training, the first rank of each machine asks the cloud's metadata address every 5 s. None asks nothing.

    Raises:
        ValueError: `max_runtime_s` is negative, or `spot` is another cloud.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"
    writes = ("stop_reason",)
    _of_this_process = frozenset({"_agreement", "_undo"})
    _agreement: Agreement | None = None
    _undo = ExitStack()
    """What `teardown` undoes. `setup` gives each object its own stack."""
    poll_s = 0.05
    """Seconds between checks of files; these cost more than all other checks of a step."""

    def __init__(
        self,
        cancel_file: str | os.PathLike[str] | None = None,
        *,
        max_runtime_s: float | None = None,
        canceled: bool = False,
        signals: StopSignals | None = None,
        spot: Cloud | SpotNotice | None = None,
    ) -> None:
        require((max_runtime_s is None or max_runtime_s >= 0, "max_runtime_s", "a number >= 0", max_runtime_s))
        self.sources = StopSources(cancel_file, max_runtime_s=max_runtime_s, canceled=canceled, signals=signals)
        self._spot = SpotNotice(spot) if isinstance(spot, str) else spot
        if self._spot is not None:
            self.sources.add_check(self._spot.reason)
        self._requested: StopReason | None = None
        self._next_poll = 0.0
        self._noticed_s: float | None = None
        """Time at which a wait for a batch noticed the request, on the clock of ``time.monotonic``."""
        self._has_fitted = self._has_warned = False

    @override
    def join_run(self, run: RunContext) -> None:
        """Use the sources of `run` from now on, after adding the sources of this callback to them."""
        run.stop.include(self.sources)
        self.sources = run.stop

    def add_check(self, check: Callable[[], str | None]) -> None:
        """Also stop when `check`, called at most every 50 ms, returns a reason."""
        self.sources.add_check(check)

    def requested(self) -> StopReason | None:
        """Return the reason of a stop request to this rank, or None. Checks files at most every 50 ms."""
        if self._requested is None:
            self._requested = self.sources.requested
        if self._requested is None:
            now = time.monotonic()
            if now >= self._next_poll:
                self._next_poll = now + self.poll_s
                self.sources.deadline.note_check(now)
                self._requested = self.sources.reason()
        if self._requested is not None:
            self._wake()
        return self._requested

    def _stops(self) -> bool:  # unlike a lambda, it can be copied and pickled with its hosted trainer
        return self.requested() is not None

    def _wake(self) -> None:
        """Make the loop call this hook after the current step."""
        self.next_due_step = 0

    def _code(self) -> int:
        """Return the code of this rank's stop reason."""
        return STOP_REASONS_BY_CODE.index(self.requested())

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo = ExitStack()
        if stage == "fit":
            if self._has_fitted:  # a stop request applies to one fit, unless its source still requests it
                self._requested, self._noticed_s, self.sources.canceled = None, None, False
                if not self.sources.signals.are_handled:
                    self.sources.signals.forget()
            self._has_fitted = True
            self._take_signals(trainer)
            end_wait = partial(self._end_wait, trainer, pl_module, threading.get_ident())
            self._undo.enter_context(protected_workers(end_wait))
            if self._spot is not None and trainer.local_rank == 0:
                self._undo.enter_context(self._spot.polling())
        hosted = hosted_by(pl_module)
        if hosted is not None:
            self._undo.callback(hosted.add_cancel_check(self._stops))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sources.signals.on_stop = self._wake
        self.sources.deadline.begin_training(saves=bool(savers_of(trainer)))
        if (grace_s := launcher_grace_s()) is not None and trainer.is_global_zero:
            log.info(GRACE, f"{grace_s:g}")
        if not is_own_loop(trainer):
            self.on_train_batch_start = _raise_if_stopped  # type: ignore[method-assign, assignment]
        self._pace = Pace(self.poll_s)
        code = self._code()
        if trainer.world_size > 1:
            self._agreement = Agreement()
            code = self._agreement.now(code)
        run_state_of(trainer).stop_reason = STOP_REASONS_BY_CODE[code]

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._agreement is not None:
            reason: str | None = STOP_REASONS_BY_CODE[self._agreement.after_step(step, self._code)]
            self.next_due_step = self._agreement.due_step
        else:
            self.next_due_step = self._pace.next_look(step)  # set before the check, so that `_wake` can overwrite it
            reason = self.requested()
        if reason is not None:
            run_state_of(trainer).stop_reason = reason

    def _end_wait(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, training_thread: int, waited_s: float
    ) -> None:
        """End a wait for a batch of data workers if the run was asked to stop.

        If there is one rank, and it waits for its next training batch, it saves the last step and stops. Any other wait
        ends only after `WAIT_PATIENCE_S`, because ending it loses the steps since the last checkpoint: other ranks may
        be inside the step, and nothing can be saved during a validation or inside a step.

        Raises:
            TrainingCanceled: The run stops here.
        """
        reason = self.requested() if threading.get_ident() == training_thread else None
        if reason is None:
            return
        if trainer.world_size == 1 and _is_between_steps(trainer):
            run_state_of(trainer).stop_reason = reason
            for saver in savers_of(trainer):
                saver.save_between_steps(trainer, pl_module)
            raise TrainingCanceled(reason)
        now = time.monotonic()
        self._noticed_s = now if self._noticed_s is None else self._noticed_s
        if min(waited_s, now - self._noticed_s) >= WAIT_PATIENCE_S:
            log.warning(
                "A stop was requested, but the data workers have delivered no batch for another %.0f s. The run ends "
                "without saving the steps since its last checkpoint.",
                WAIT_PATIENCE_S,
            )
            raise TrainingCanceled(reason)

    @override
    def on_checkpoint_timed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, seconds: float) -> None:
        deadline = self.sources.deadline
        deadline.save_s = max(seconds, deadline.save_s or 0.0)
        grace_s = launcher_grace_s()
        if grace_s is not None and deadline.stop_s >= grace_s and not self._has_warned and trainer.is_global_zero:
            self._has_warned = True
            log.warning("A step and a checkpoint take %.0f s, and " + GRACE, deadline.stop_s, f"{grace_s:g}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._agreement is not None:
            self._agreement.leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._undo.close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo.close()

    def _take_signals(self, trainer: pl.Trainer) -> None:
        """Handle signals from now on, or use the `StopSignals` of the program that already handles them.

        Lightning's handlers are not installed: they communicate with other ranks inside the signal handler, and hang
        if the other ranks are doing something else.
        """
        connector = signal_connector(trainer)
        connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        self._undo.callback(vars(connector).pop, "register_signal_handlers", None)
        if (handling := StopSignals.handling()) is not None:
            self.sources.signals = handling
        else:
            self._undo.enter_context(self.sources.signals.installed())


def _is_between_steps(trainer: pl.Trainer) -> bool:
    """Whether the training thread waits for a batch and has trained all batches before it.

    False if Lightning fetches batches ahead, because the thread then waits for the batch after the one to train next.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = loop.batch_progress.current
    fetches_ahead = isinstance(fetcher, PrefetchDataFetcher) and fetcher.length is None and fetcher.prefetch_batches
    if batches.ready != batches.completed or fetches_ahead:
        return False
    if is_own_loop(trainer):
        return bool(loop.step_in_progress == loop.global_step + 1)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not TrainingEpochLoop.advance.__code__:
        frame = frame.f_back
    return frame is not None


def _raise_if_stopped(trainer: pl.Trainer, *_: Any) -> None:
    reason = run_state_of(trainer).stop_reason
    if reason is not None:
        raise TrainingCanceled(reason)
