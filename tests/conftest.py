"""Parts that all tests share: one thread for torch, a small trainer class, a check for leaks of a test."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.upload_server import chaos as chaos, chaos_servers as chaos_servers, start_chaos as start_chaos

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: more threads only fight over the cores

LIBRARIES_OWN_VARIABLES = (
    "CUDA_",
    "HF_",
    "KMP_",
    "OMP_",
    "PYTEST_",
    "TOKENIZERS_",
    "TORCH",
    "TRITON_",
)
"""Prefixes of variables that importing torch or its dependencies may set permanently."""

WARNINGS_OF_LIBRARIES = (
    # Lightning about its own use of others, and advice that does not fit a trainer of a few steps.
    "ignore:.*smaller than the logging interval.*:UserWarning",
    "ignore:.*ModelCheckpoint with manual optimization.*:UserWarning",
    "ignore:`tensorboardX` has been removed.*:UserWarning",
    "ignore:GPU available but not used.*:UserWarning",
    "ignore:This DataLoader will create .* worker processes in total:UserWarning",
)


# The same examples in each run, however slowly a loaded machine makes them; `--hypothesis-profile fresh` tries others.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fresh", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")

PROMISES = {
    "adapter/cluster": "old names",
    "adapter/feed": "rows",
    "adapter/helpers": "old names",
    "adapter/inputs": "rows",
    "adapter/runner": "old names",
    "callbacks/compat": "old names",
    "callbacks/stop": "stop",
    "device": "ranks",
    "faults/run": "stop",
    "reporters/events": "events",
    "reporters/uploads": "uploads",
    "security": "security",
    "slurm": "old names",
}
"""The promise of a folder's tests; a file that proves another one, or is in another folder, has its mark."""

THREADS_END_WITHIN_S = 60
"""How long a thread may take to end after a request, on a loaded machine."""


def pytest_addoption(parser):
    parser.addoption(
        "--write-messages", action="store_true", help="write tests/messages.json from the errors that appear"
    )


def pytest_configure(config):
    from support.messages import Messages

    pytest.messages = Messages(writing=config.getoption("--write-messages"))
    for line in WARNINGS_OF_LIBRARIES:
        config.addinivalue_line("filterwarnings", line)


def pytest_sessionfinish(session):
    """Hand the messages of this process to the one that started it, or write them."""
    if not pytest.messages.writing:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["messages"] = pytest.messages.seen
    else:
        pytest.messages.write()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Collect the messages of a process of pytest-xdist."""
    pytest.messages.merge(getattr(node, "workeroutput", {}).get("messages", {}))


def pytest_itemcollected(item):
    """Mark a test with the promise of its folder."""
    promise = PROMISES.get(item.path.parent.relative_to(Path(__file__).parent).as_posix())
    if promise and item.get_closest_marker("promise") is None:
        item.add_marker(pytest.mark.promise(name=promise))


def pytest_collection_modifyitems(items):
    """Put files with slow tests first, the zoo before all others.

    Processes take whole files in turn (``--dist loadfile --no-loadscope-reorder``); one that starts a long file last
    works by itself for minutes.
    """
    with_slow_tests = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in with_slow_tests, "zoo" not in item.path.parts))


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    """Fail a test that leaks environment variables, signal handlers, threads that keep the process alive, and such."""
    variables, threads, handlers = dict(os.environ), set(threading.enumerate()), _stop_handlers()
    yield
    leaks = [
        *_changed_variables(variables),
        *_changed_handlers(handlers),
        *_left_threads(threads),
        *_left_process_group(),
    ]
    assert not leaks, "the test leaves behind: " + ", ".join(leaks)


def _changed_variables(before):
    names = {*before, *os.environ}
    changed = [
        name
        for name in sorted(names)
        if before.get(name) != os.environ.get(name) and not name.startswith(LIBRARIES_OWN_VARIABLES)
    ]
    for name in changed:  # so that the next test is not blamed as well
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed]


def _stop_handlers():
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _changed_handlers(before):
    changed = [number for number, handler in _stop_handlers().items() if handler is not before[number]]
    for number in changed:  # in whose place another test's signal would end the process
        signal.signal(number, before[number])
    return [f"a handler of {number.name}" for number in changed]


def _left_threads(before):
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:
        thread.join(THREADS_END_WITHIN_S)
    return [f"thread {thread.name}" for thread in left if thread.is_alive()]


def _left_process_group():
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["a torch process group"]


class CountingTrainer:
    """Uses no torch: its state counts steps and batches, its loss is one over the step; notes every call."""

    def __init__(self):
        self.calls = []

    def setup(self, ctx):
        self.calls.append("setup")

    def configure(self, ctx):
        self.calls.append("configure")
        return {"steps": 0, "seen": [], "lr": 0.5}

    def prepare_batch(self, raw_batch, state, ctx):
        self.calls.append("prepare_batch")
        return raw_batch

    def train_step(self, batch, state, ctx):
        from genlight.adapter import StepResult

        self.calls.append("train_step")
        state["steps"] += 1
        state["seen"].append(batch)
        return StepResult(metrics={"loss": 1 / state["steps"]})

    def state_dict(self, state):
        self.calls.append("state_dict")
        return {"steps": state["steps"], "seen": list(state["seen"])}

    def load_state_dict(self, state, payload, ctx):
        self.calls.append("load_state_dict")
        state.update(payload)


@pytest.fixture
def counting_trainer():
    """The class of a trainer without torch."""
    return CountingTrainer


@pytest.fixture
def genlight_uploads(capsys, monkeypatch):
    """Runs ``genlight uploads``; returns its exit code, its output and its complaints."""
    from genlight.adapter.cli import main

    monkeypatch.delenv("TRAINER_JOB_SPEC_PATH", raising=False)

    def call(*arguments):
        code = main(["uploads", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def open_files():
    """Counts the descriptors that this process has on files of a folder; others come and go with other threads."""

    def count(folder):
        return sum(link.startswith(f"{folder}{os.sep}") for link in _links("/proc/self/fd"))

    return count


def _links(folder):
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(os.path.join(folder, name))


@pytest.fixture
def quiet():
    """Arguments of a small Lightning trainer that writes nothing and shows nothing."""
    from support.trainers import QUIET

    return {**QUIET, "enable_checkpointing": False}


@pytest.fixture
def fit(quiet):
    """Train for some steps of batches 0, 1, 2, … with the given callbacks; returns trainer and module."""

    def run(plugin, callbacks=(), *, steps=4, job=None, batches=None, module=None, ckpt_path=None, **arguments):
        import lightning.pytorch as pl

        from genlight.adapter import ContractModule
        from genlight.adapter.training_loop import BatchStream

        options = {**quiet, "max_steps": steps, "max_epochs": 1, "callbacks": list(callbacks), **arguments}
        trainer = pl.Trainer(**options)
        module = module or ContractModule(plugin, job)
        trainer.fit(module, BatchStream(range(1000) if batches is None else batches), ckpt_path=ckpt_path)
        return trainer, module

    return run
