"""Start a job on this machine, and start it again after one of its ranks was killed: ``genlight run --restarts N``.

The supervisor imports torch, Lightning and genlight once and forks every rank of every attempt, so a restart pays for
no import but the user's. To be a good origin of copies it has no thread of its own, no CUDA context and no code of the
user: it reads the job, and a short-lived copy counts the ranks.

Rank zero still reports each attempt. The supervisor tells it through a pipe which rank has died, and kills the other
ranks once rank zero has ended: they may wait forever in a collective.
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
from collections.abc import Mapping

from ...callbacks.checkpoint.memory_tier import retire_memory
from ...callbacks.stop.signals import REASON_OF_SIGNAL, StopSignals
from ...callbacks.stop.sources import process_age_s
from ...reporters.events.event import Failed
from ..cluster.job_context import in_srun_task
from ..contract.exceptions import UsageError
from ..job.config import RunConfig, read_run_config
from ..module.plugin_loading import on_sys_path
from ..plumbing.failures import EXIT_COMPLETED, EXIT_STOPPED
from .attempts import last_attempts
from .deaths import DEATH
from .rank_files import LAUNCH_ID, RESTART
from .ranks import DEATHS, STORE, TIMES
from .report import working_directory
from .run import RunOptions, run_job

log = logging.getLogger(__name__)

FOLLOWS_WITHIN_S = 30.0
"""How long the other ranks may take to end after rank zero has completed or stopped."""
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK")
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

    In each copy of the process that is a rank, it returns the exit code of that rank.

    Args:
        options: The options of the first attempt; later ones continue from its newest checkpoint.
        most: Maximum number of restarts.

    Raises:
        UsageError: Another launcher has started this process, or later attempts could not begin like the first.
    """
    variables = [name for name in _LAUNCHED if name in os.environ]
    if variables or in_srun_task():
        by = f"`{variables[0]}` is set" if variables else "this is a task of srun"
        raise UsageError(
            f"--restarts starts all ranks of a run on one machine, but another launcher has started this one ({by}). "
            "Let that launcher restart them, as `torchrun --max-restarts` and `genlight slurm submit` do"
        )
    if options.spec_path is not None and os.fspath(options.spec_path) == "-":
        raise UsageError("--restarts reads the job once for each attempt: name a file instead of standard input")
    config, errors = read_run_config(spec_path=options.spec_path, overrides=options.overrides, environ=options.environ)
    signals = StopSignals.handling()
    if errors.exception(secrets=config.secrets) is None:
        if config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref:
            raise UsageError(
                "the job names a checkpoint to resume from, and every restart would begin there again; remove it from "
                "the job, or omit --restarts"
            )
        for module in _PRELOADED:
            importlib.import_module(module)
        faulthandler.cancel_dump_traceback_later()  # its thread exists only here; a copy would wait for it at exit
        gc.freeze()
        supervisor = _Supervisor(options, config)
        supervisor.forward_signals()  # from here on, a signal is forwarded, or has been noted
        if signals is not None:
            signals.end_watch()
        if signals is None or signals.reason is None:
            return supervisor.run(most)
        signals.install()
    return run_job(options)  # which reports the mistake, or the stop


class _Supervisor:
    """Forks the ranks of one attempt after the other."""

    def __init__(self, options: RunOptions, config: RunConfig) -> None:
        self._options, self._config = options, config
        self._ranks: dict[int, int] = {}
        """Ranks that live, by process id."""
        self._is_stopping = False

    def forward_signals(self) -> None:
        """Hand stop signals to all ranks, and start no further attempt after one."""
        for number in REASON_OF_SIGNAL:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _: object) -> None:
        self._is_stopping = True
        for process in tuple(self._ranks):
            os.kill(process, number)  # nobody has waited for it, so no other process can have its number

    def run(self, most: int) -> int:
        """Run attempts until one needs no further one, and return its exit code; in a rank, the code of that rank."""
        options, variables, began = self._options, dict[str, str](), time.monotonic() - process_age_s()
        size = self._count_ranks()
        if not size:
            raise UsageError(
                "--restarts starts all ranks of a run on one machine, but `lightning.num_nodes` is larger than 1. "
                "Start the ranks with a launcher that restarts them, such as `torchrun --max-restarts`"
            )
        for restart in range(most + 1):
            attempt = _Attempt(size, restart, variables)
            for rank in range(size):
                if (process := self._fork()) == 0:
                    attempt.become(rank)
                    options = dataclasses.replace(options, is_supervised=True)
                    return run_job(dataclasses.replace(options, age_s=time.monotonic() - began))
                self._ranks[process] = rank
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
            died = attempt.watch(self._ranks)
            code = attempt.codes[0]
            if self._is_stopping or (died is None and not (code == EXIT_STOPPED and self._was_preempted())):
                break
            what = "the run was preempted" if died is None else f"rank {died[0]} was killed by signal {-died[1]}"
            if restart == most:
                log.error("%s, and all %d restarts are used up", what, most)
                break
            log.warning("%s: starting it again (restart %d of %d)", what, restart + 1, most)
            now = time.time()
            variables = {} if died is None else {DEATH: f"{died[0]} {died[1]}"}
            variables |= {TIMES: json.dumps({"died": now if died is None else died[2], "ended": now})}
            resumed = (*self._options.overrides, "resume_from_latest=true")
            options = dataclasses.replace(self._options, overrides=resumed, fresh=False)
        retire_memory(self._config.checkpoints_dir)
        return code if code >= 0 else 128 - code

    def _fork(self) -> int:
        """Fork a process that ends with this one. Signals stay blocked in both until they can be handled."""
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, REASON_OF_SIGNAL)
        process = os.fork()
        if process == 0:
            for number in REASON_OF_SIGNAL:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            StopSignals().install()
            ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
        return process

    def _count_ranks(self) -> int:
        """Return the number of processes that the trainer of the job wants here; 0 if it wants several nodes.

        A copy of this process makes the trainer: that may look for devices, and import classes of the user. If it
        cannot be made, the first attempt says why.
        """
        readable, writable = os.pipe()
        if (process := self._fork()) == 0:
            with contextlib.suppress(BaseException):
                os.write(writable, str(_wanted_ranks(self._config)).encode())
            os._exit(0)
        os.close(writable)
        self._ranks[process] = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
        os.waitpid(process, 0)
        del self._ranks[process]
        with open(readable, "rb") as file:
            text = file.read()
        return int(text) if text else 1

    def _was_preempted(self) -> bool:
        end = last_attempts(self._config.events_path, self._config.run_id)[1].end
        return isinstance(end, Failed) and end.category == "preempted"


def _wanted_ranks(config: RunConfig) -> int:
    from ...callbacks.lightning_internals import trains_in_copies
    from ..job.lightning_objects import instantiate_alone

    folders = [path for path in (config.spec_dir, working_directory()) if path is not None]
    with on_sys_path(folders):
        trainer = instantiate_alone(config, [])
    ranks = 1 if trains_in_copies(trainer) else trainer.world_size
    return 0 if trainer.num_nodes > 1 else ranks


class _Attempt:
    """The ranks of one attempt, their meeting place, and the pipe to rank zero.

    Args:
        size: Number of ranks.
        restart: Number of attempts before this one.
        variables: Further variables of their environment.
    """

    def __init__(self, size: int, restart: int, variables: Mapping[str, str]) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes by rank; negative for a signal."""
        self._size = size
        self._variables = {**variables, LAUNCH_ID: secrets.token_hex(8)}
        self._listener: socket.socket | None = None
        self._deaths: tuple[int, int] | None = None
        if size > 1:
            # Every attempt meets at a new port, which no other machine can reach and no other process can take.
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._deaths = os.pipe()
            self._variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._listener.getsockname()[1])}
            self._variables |= {"TORCHELASTIC_USE_AGENT_STORE": str(True), RESTART: str(restart)}

    def become(self, rank: int) -> None:
        """Make this copy of the supervisor a rank."""
        os.environ.update(self._variables)
        if TIMES in self._variables:
            os.environ[TIMES] = json.dumps({**json.loads(self._variables[TIMES]), "forked": time.time()})
        if self._listener is None or self._deaths is None:
            return
        os.environ["LOCAL_RANK"] = str(rank)
        os.close(self._deaths[1])
        if rank == 0:
            os.environ |= {STORE: str(self._listener.detach()), DEATHS: str(self._deaths[0])}
        else:
            self._listener.close()
            os.close(self._deaths[0])

    def watch(self, ranks: dict[int, int]) -> tuple[int, int, float] | None:
        """Wait until all ranks have ended.

        Args:
            ranks: The ranks by process id; those that have ended are removed.

        Returns:
            The first rank that a signal ended, its exit code, and the time; None if all ended by themselves.
        """
        if self._listener is not None:
            self._listener.close()
        handles = {os.pidfd_open(process): process for process in ranks}
        died: tuple[int, int, float] | None = None
        kill_at: float | None = None
        while handles:
            left_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            ended = select.select(list(handles), [], [], left_s)[0]
            if not ended and kill_at is not None:
                for process in ranks:
                    os.kill(process, signal.SIGKILL)
                kill_at = None
            for handle in ended:
                process = handles.pop(handle)
                os.close(handle)
                rank = ranks.pop(process)  # first, since afterwards the number may be another process's
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                if code < 0 and died is None and 0 not in self.codes:
                    died = rank, code, time.time()
                self.codes[rank] = code
                if rank == 0:
                    kill_at = time.monotonic() + (FOLLOWS_WITHIN_S if code in (EXIT_COMPLETED, EXIT_STOPPED) else 0.0)
                elif code and self._deaths is not None:
                    os.write(self._deaths[1], f"{rank} {code}\n".encode())
        for descriptor in self._deaths or ():
            os.close(descriptor)
        return died
