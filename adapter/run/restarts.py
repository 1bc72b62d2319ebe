"""Start a job, and start it again after one of its ranks was killed: ``genlight run --restarts N``.

The supervisor imports torch, Lightning and genlight once and forks every rank of every attempt, so a restart pays for
no import but the user's. A process with threads or a CUDA context cannot be forked safely, and the user's modules would
keep their state from one attempt to the next. So the supervisor has none of these: it only reads the job, and a
short-lived fork builds the Lightning trainer to count the ranks.

Rank zero still reports each attempt. The supervisor tells it through a pipe which rank has died. Once rank zero has
ended, the supervisor kills the other ranks, because they may wait forever in a collective.

On several nodes each has a supervisor, and they begin and end every attempt together; see `nodes`. The first one
decides. If a node is lost, all supervisors end, and their launcher has to start them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable

from ...callbacks.checkpoint.memory_tier import memory_id, retire_memory
from ...callbacks.stop.signals import REASON_OF_SIGNAL, StopSignals
from ...callbacks.stop.sources import process_age_s
from ...reporters.events.event import Failed
from ..cluster.job_context import NODES
from ..contract.exceptions import UsageError
from ..job.config import RunConfig, read_run_config
from ..module.plugin_loading import on_sys_path
from ..plumbing.failures import EXIT_COMPLETED, EXIT_STOPPED
from .attempts import last_attempts
from .deaths import DEATH
from .folder import artifact_dir_faults
from .nodes import (
    LAUNCHERS,
    WAY_OUT,
    Begin,
    End,
    Exit,
    Link,
    LostNodeError,
    Message,
    Place,
    await_ends,
    launched_place,
    meet,
)
from .rank_files import LAUNCH_ID, RESTART
from .ranks import DEATHS, STORE, TIMES
from .report import working_directory
from .run import RunOptions, run_job

log = logging.getLogger(__name__)

FOLLOWS_WITHIN_S = 30.0
"""Seconds after which remaining ranks are killed once rank zero has completed or stopped, or the first node is lost."""
_CLOSES_WITHIN_S = 10.0
"""How long the other supervisors may take to end after the first one has told them."""
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_PRELOADED = (
    "lightning.pytorch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "genlight.adapter.feed.data_module",
    "genlight.adapter.job.lightning_objects",
    "genlight.adapter.module.module",
    "genlight.adapter.run.fit",
    "genlight.callbacks.upload_artifacts",
)


def run_with_restarts(options: RunOptions, most: int) -> int:
    """Run a job, and start it again after a rank was killed or preempted. Return the exit code of the last attempt.

    The call also returns in each forked rank, with the exit code of that rank.

    Args:
        options: The options of the first attempt; later ones continue from its newest checkpoint.
        most: Maximum number of restarts.

    Raises:
        UsageError: A launcher has started several processes on a node, the nodes or the job's trainer do not fit
            together, or a later attempt could not start: the job comes from standard input, or names a checkpoint to
            resume from.
    """
    place = launched_place()
    if options.spec_path is not None and os.fspath(options.spec_path) == "-":
        raise UsageError("--restarts reads the job once for each attempt: name a file instead of standard input")
    config, errors = read_run_config(spec_path=options.spec_path, overrides=options.overrides, environ=options.environ)
    signals = StopSignals.handling()
    if errors.exception(secrets=config.secrets) is None and not artifact_dir_faults(config, create=False):
        if config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref:
            raise UsageError(
                "the job names a checkpoint to resume from, and every restart would begin there again; remove it from "
                "the job, or omit --restarts"
            )
        for module in _PRELOADED:
            importlib.import_module(module)
        faulthandler.cancel_dump_traceback_later()  # its thread exists only here; a copy would wait for it at exit
        gc.freeze()
        supervisor = _Supervisor(options, config, place)
        supervisor.forward_signals()  # a signal before this is in `signals.reason`
        if signals is not None:
            signals.end_watch()
        if signals is None or signals.reason is None:
            return supervisor.run(most)
        signals.install()
    return run_job(options)  # which reports the mistake, or the stop


class _Supervisor:
    """Forks the ranks of this node for one attempt after the other."""

    def __init__(self, options: RunOptions, config: RunConfig, place: Place) -> None:
        self._options, self._config, self._place = options, config, place
        self._ranks: dict[int, int] = {}
        """Ranks that live, by process id."""
        self._links: dict[int, Link] = {}
        """Connections to the other supervisors, by node."""
        self._listener: socket.socket | None = None
        self._stop_signal = 0

    def forward_signals(self) -> None:
        """Hand stop signals to all ranks, and start no further attempt after one."""
        for number in REASON_OF_SIGNAL:
            signal.signal(number, self._forward)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _end_with(os.getppid())  # an agent of torchrun that is killed leaves its processes behind

    def _forward(self, number: int, _: object) -> None:
        self._stop_signal = number
        for process in tuple(self._ranks):
            os.kill(process, number)  # not waited for yet, so even if it has ended, no other process can have its id

    def run(self, most: int) -> int:
        """Run attempts until no restart follows, and return the last exit code; in a rank, the code of that rank."""
        began = time.monotonic() - process_age_s()
        size, options = self._count_ranks(), self._options
        order: Message
        try:
            self._links = meet(self._place, size, self._config.artifacts_dir, lambda: self._stop_signal != 0)
            order = self._begin(size) if self._place.is_first else self._links[0].get()
            while isinstance(order, Begin):
                attempt = _Attempt(self._place, size, order, self._listener, self._links)
                for local in range(size):
                    if (process := self._fork()) == 0:
                        attempt.become(local)
                        options = dataclasses.replace(options, is_supervised=True)
                        return run_job(dataclasses.replace(options, age_s=time.monotonic() - began))
                    self._ranks[process] = self._place.node * size + local
                signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
                if self._stop_signal:  # a signal that came while there were no ranks
                    self._forward(self._stop_signal, None)
                attempt.watch(self._ranks, lambda: self._stop_signal != 0)
                resumed = (*self._options.overrides, "resume_from_latest=true")
                options = dataclasses.replace(self._options, overrides=resumed, fresh=False)
                order = attempt.order or self._decide(attempt, most)
        except LostNodeError as error:
            order = End(EXIT_STOPPED, f"{error}. Start all nodes again: the run continues from its newest checkpoint")
        assert isinstance(order, End)
        return self._end(order)

    def _begin(self, size: int, restart: int = 0, died: Exit | None = None, died_s: float = 0.0) -> Begin:
        """Begin an attempt on all nodes."""
        # The ranks of every attempt meet at a new port. It is open from here on, so no other process can take it.
        self._listener = self._place.listen() if size * self._place.nodes > 1 else None
        port = 0 if self._listener is None else self._listener.getsockname()[1]
        begin = Begin(restart, secrets.token_hex(8), port, died, died_s, time.time())
        self._tell(begin)
        return begin

    def _tell(self, message: Message) -> None:
        for link in self._links.values():
            link.put(message)

    def _decide(self, attempt: _Attempt, most: int) -> Begin | End:
        """Decide on the first node what follows an attempt.

        Raises:
            LostNodeError: A node is lost, so no further attempt is possible.
        """
        died, code, restart = attempt.died, attempt.codes[0], attempt.begin.restart
        end = End(code if code >= 0 else 128 - code, memory=memory_id())
        is_stopped = self._stop_signal or attempt.is_stopping
        if is_stopped or (died is None and not (code == EXIT_STOPPED and self._was_preempted())):
            return end
        if attempt.lost is not None:
            raise attempt.lost
        what = "the run was preempted" if died is None else str(died)
        if restart == most:
            log.error("%s, and all %d restarts are used up", what, most)
            return end
        log.warning("%s: starting it again (restart %d of %d)", what, restart + 1, most)
        return self._begin(attempt.size, restart + 1, died, attempt.died_s)

    def _end(self, end: End) -> int:
        """End the run on all nodes, and return the exit code."""
        self._tell(end)
        if end.text:
            log.error("%s", end.text)
        elif self._place.is_first:
            await_ends(self._links.values(), _CLOSES_WITHIN_S)
            retire_memory(self._config.checkpoints_dir)
        elif end.memory != memory_id():
            from ...callbacks.checkpoint.peers import forget_copies  # loads torch

            forget_copies(self._config.checkpoints_dir)
        return end.code

    def _fork(self) -> int:
        """Fork a process that ends with this one, and return its id; 0 in the child.

        Stop signals are blocked during the fork. The child unblocks them after it has installed its handlers. The
        caller unblocks them in this process after it has noted the child in `_ranks`, so that none is missed.
        """
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, REASON_OF_SIGNAL)
        process = os.fork()
        if process == 0:
            for number in REASON_OF_SIGNAL:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            StopSignals().install()
            _end_with(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
        return process

    def _count_ranks(self) -> int:
        """Return the number of processes that the trainer of the job wants on this node.

        A fork of this process builds the Lightning trainer, because that may look for devices and import the user's
        classes. If it cannot be built, one rank is started, and its attempt reports why.

        Raises:
            UsageError: `lightning.num_nodes` is not the number of nodes, or there are several nodes and a strategy such
                as ``ddp_spawn``.
        """
        readable, writable = os.pipe()
        if (process := self._fork()) == 0:
            with contextlib.suppress(BaseException):
                os.write(writable, json.dumps(_wanted_ranks(self._config)).encode())
            os._exit(0)
        os.close(writable)
        self._ranks[process] = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
        os.waitpid(process, 0)
        del self._ranks[process]
        with open(readable, "rb") as file:
            counted = file.read()
        ranks, nodes, trains_in_copies = json.loads(counted) if counted else (1, 1, False)
        here = self._place.nodes
        if nodes not in (1, here):
            text = f"`lightning.num_nodes` is {nodes}, but --restarts was started on {here} nodes: omit `num_nodes`. "
            raise UsageError(f"{text}{WAY_OUT}")
        if trains_in_copies and here > 1:
            raise UsageError(
                "--restarts cannot train on several nodes by a strategy that starts copies of a process; use ddp"
            )
        return 1 if trains_in_copies else ranks

    def _was_preempted(self) -> bool:
        end = last_attempts(self._config.events_path, self._config.run_id)[1].end
        return isinstance(end, Failed) and end.category == "preempted"


def _end_with(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when `parent`, its parent process, ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _wanted_ranks(config: RunConfig) -> tuple[int, int, bool]:
    """Return the trainer's ranks on each node, its nodes, and whether its strategy trains in copies of one process."""
    from ...callbacks.lightning_internals import trains_in_copies
    from ..job.lightning_objects import instantiate_alone

    for name in (*LAUNCHERS, "SLURM_STEP_NUM_TASKS"):  # Lightning would take the supervisor for a launched rank
        os.environ.pop(name, None)
    folders = [path for path in (config.spec_dir, working_directory()) if path is not None]
    with on_sys_path(folders):
        trainer = instantiate_alone(config, [])
    return trainer.world_size // trainer.num_nodes, trainer.num_nodes, trains_in_copies(trainer)


class _Attempt:
    """The ranks of one attempt on this node, their meeting place, and the pipe to rank zero.

    Args:
        place: The place of this node.
        size: Number of ranks on each node.
        begin: The order to begin it.
        listener: On the first node, the port at which the ranks meet; None for a single rank.
        links: Connections to the other supervisors, by node; a lost one is removed.
    """

    def __init__(
        self, place: Place, size: int, begin: Begin, listener: socket.socket | None, links: dict[int, Link]
    ) -> None:
        self.size, self.begin = size, begin
        self.codes: dict[int, int] = {}
        """Exit codes by rank; negative for a signal."""
        self.died: Exit | None = None
        """The first rank that a signal killed, or that was lost with its node, if rank zero had not ended before."""
        self.died_s = 0.0
        """When `died` ended, in seconds since 1970."""
        self.is_stopping = False
        """Whether a supervisor of another node has received a stop signal."""
        self.lost: LostNodeError | None = None
        """The loss of another node."""
        self.order: Message | None = None
        """What the first supervisor orders after this attempt; None on the first node."""
        self._place, self._listener, self._links = place, listener, links
        self._deaths = None if listener is None else os.pipe()
        self._kill_at: float | None = None

    def become(self, local: int) -> None:
        """Make this copy of the supervisor a rank; `local` is its number on this node."""
        place, begin = self._place, self.begin
        for link in self._links.values():
            link.close()
        variables: dict[str, object] = {LAUNCH_ID: begin.launch}
        if begin.restart:
            died_s = begin.ended_s if begin.died is None else begin.died_s
            variables |= {TIMES: json.dumps({"died": died_s, "ended": begin.ended_s, "forked": time.time()})}
        if begin.died is not None:
            variables |= {DEATH: f"{begin.died.rank} {begin.died.code}"}
        if begin.port:
            variables |= {"RANK": place.node * self.size + local, "WORLD_SIZE": place.nodes * self.size}
            variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.size, "NODE_RANK": place.node}
            variables |= {NODES: place.nodes, "MASTER_ADDR": place.address, "MASTER_PORT": begin.port}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, RESTART: begin.restart}
        if self._listener is not None and self._deaths is not None:
            os.close(self._deaths[1])
            if local == 0:
                variables |= {STORE: self._listener.detach(), DEATHS: self._deaths[0]}
            else:
                self._listener.close()
                os.close(self._deaths[0])
        os.environ.update({name: str(value) for name, value in variables.items()})

    def watch(self, ranks: dict[int, int], is_stopping: Callable[[], bool]) -> None:
        """Wait until all ranks of this node have ended; on the first node, those of all nodes.

        On another node, wait also for the next order of the first supervisor.

        Args:
            ranks: The ranks of this node by process id; those that have ended are removed.
            is_stopping: Returns whether this supervisor has received a stop signal.

        Raises:
            LostNodeError: The first node is lost.
        """
        if self._listener is not None:
            self._listener.close()
        handles = {os.pidfd_open(process): process for process in ranks}
        while handles or self._waits_for_others():
            left_s = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            watched: list[int | Link] = [*handles, *self._links.values()]
            ready = select.select(watched, [], [], left_s)[0]
            if not ready and self._kill_at is not None:
                for process in ranks:
                    os.kill(process, signal.SIGKILL)
                self._kill_at = None
            for each in ready:
                if isinstance(each, Link):
                    self._receive(each, ranks)
                    continue
                process = handles.pop(each)
                os.close(each)
                rank = ranks.pop(process)  # before the wait: after it, the id may belong to another process
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                ended = Exit(rank, code, is_stopping())
                self._note(ended)
                for link in self._links.values() if rank == 0 or not self._place.is_first else ():
                    link.put(ended)
        for descriptor in self._deaths or ():
            os.close(descriptor)
        if self.lost is not None and not self._place.is_first:
            raise self.lost

    def _waits_for_others(self) -> bool:
        if self._place.is_first:
            return len(self.codes) < self._place.nodes * self.size
        return self.order is None and self.lost is None

    def _receive(self, link: Link, ranks: Iterable[int]) -> None:
        """Take a message of another supervisor, or note that the supervisor is lost."""
        try:
            message = link.get()
        except LostNodeError as error:
            self.lost = error
            del self._links[link.node]
            link.close()
            if self._place.is_first:
                for rank in range(link.node * self.size, (link.node + 1) * self.size):
                    if rank not in self.codes:
                        self._note(Exit(rank, -signal.SIGKILL, is_lost=True))
            else:  # if the first node lives without its supervisor, its ranks get SIGTERM as well, and all can save
                for process in ranks:
                    os.kill(process, signal.SIGTERM)
                self._kill_at = time.monotonic() + FOLLOWS_WITHIN_S
        else:
            if isinstance(message, Exit):
                self._note(message)
            else:
                self.order = message

    def _note(self, ended: Exit) -> None:
        """Note the end of a rank of any node, and tell rank zero."""
        if ended.code < 0 and self.died is None and 0 not in self.codes:
            self.died, self.died_s = ended, time.time()
        self.codes[ended.rank] = ended.code
        self.is_stopping |= ended.is_stopping
        if ended.rank == 0:
            follows_s = FOLLOWS_WITHIN_S if ended.code in (EXIT_COMPLETED, EXIT_STOPPED) else 0.0
            self._kill_at = time.monotonic() + follows_s
        elif ended.code and self._deaths is not None:
            os.write(self._deaths[1], f"{ended}\n".encode())
