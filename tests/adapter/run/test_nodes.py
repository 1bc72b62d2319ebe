"""The supervisors of several nodes: their places, their way to each other, and messages that nobody else can send."""

import contextlib
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genlight.adapter.contract.exceptions import UsageError
from genlight.adapter.plumbing.failures import EXIT_STARTUP
from genlight.adapter.run.nodes import (
    FILE,
    Begin,
    End,
    Exit,
    Hello,
    Link,
    LostNodeError,
    Place,
    await_ends,
    launched_place,
    meet,
)
from support.messages import refusal
from support.ports import free_port

pytestmark = pytest.mark.promise(name="resume")


def set_variables(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


TORCHRUN = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": 1}
SRUN = {"SLURM_STEP_ID": 0, "SLURM_JOB_ID": 7, "SLURM_NODEID": 1, "SLURM_STEP_NUM_NODES": 2}
SRUN |= {"SLURM_STEP_NODELIST": "node[1-2]"}


@pytest.mark.parametrize(
    "variables",
    [
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "node1"},
        {**SRUN, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    ],
)
def test_the_launcher_places_a_supervisor(variables, monkeypatch):
    set_variables(monkeypatch, **variables)
    assert launched_place() == Place(1, 2, "node1")


def test_without_a_launcher_there_is_one_node():
    assert launched_place() == Place(0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    "variables",
    [
        {**TORCHRUN, "LOCAL_WORLD_SIZE": 2},
        {**SRUN, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        {"RANK": 1, "WORLD_SIZE": 2},
        {"RANK": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "node1"},
        {"RANK": 1, "MASTER_ADDR": "node1"},
        {"NODE_RANK": 1, "MASTER_ADDR": "node1"},
        {**SRUN, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
    ],
)
def test_other_starts_are_refused_with_the_command_that_is_right(variables, monkeypatch):
    set_variables(monkeypatch, **variables)
    with refusal(UsageError):
        launched_place()


@contextlib.contextmanager
def linked(token="secret", other_token="secret"):
    """The two ends of a connection, of the first supervisor and of another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        connection = socket.create_connection(listener.getsockname())
        other = pool.submit(Link, connection, other_token, is_first=False)
        first = Link(listener.accept()[0], token, is_first=True)
        ends = first, other.result()
    yield ends
    for link in ends:
        link.close()


def test_messages_arrive_in_order_and_in_both_directions():
    with linked() as (first, other):
        other.put(Hello(1, 2))
        other.put(Exit(3, -9, is_stopping=True))
        assert [first.get(), first.get()] == [Hello(1, 2), Exit(3, -9, is_stopping=True)]
        begin = Begin(1, "a", 5, Exit(3, -9), 1.0, 2.0)
        first.put(begin)
        first.put(End(75, "gone"))
        assert [other.get(), other.get()] == [begin, End(75, "gone")]


def test_whoever_does_not_know_the_token_is_no_supervisor():
    with pytest.raises(LostNodeError, match="token"), linked(other_token="guessed"):
        pass


@pytest.mark.parametrize(
    "data", [b"{}", b"\xff", json.dumps({"type": "Command", "words": ["rm"]}).encode(), b"x" * 99_999]
)
def test_messages_of_other_types_end_the_connection(data):
    with linked() as (first, other):
        other._connection.send_bytes(data)
        with pytest.raises(LostNodeError, match="node 0"):
            first.get()


def test_a_supervisor_that_ends_is_lost_to_the_others():
    with linked() as (first, other):
        other.close()
        with pytest.raises(LostNodeError, match="ended"):
            first.get()
        first.put(End(0))  # no error: whoever reads notices


def test_the_first_supervisor_waits_for_the_others_to_end():
    with linked() as (first, other):
        other.put(Exit(1, 0))
        closing = threading.Timer(0.1, other.close)
        closing.start()
        await_ends([first], 60)
        closing.join()


@pytest.fixture
def start(monkeypatch):
    set_variables(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())


def meet_all(folder, ranks, *, stranger=None, within_s=60, missing=()):
    """Let one supervisor for each number of `ranks` meet; return what it returned or raised.

    Each of the others gets a message from the first one, which would otherwise begin an attempt.
    """

    def run(node):
        links = meet(Place(node, len(ranks)), ranks[node], folder, lambda: False, within_s=within_s)
        for link in links.values() if node == 0 else ():
            link.put(End(0))
        return links

    with ThreadPoolExecutor(len(ranks) + 1) as pool:
        futures = [pool.submit(run, node) for node in range(len(ranks)) if node not in missing]
        if stranger is not None:
            pool.submit(stranger, folder / FILE).result()
        return [future.exception() or future.result() for future in futures]


def close_all(met):
    for links in met:
        for link in links.values():
            link.close()


def test_supervisors_meet_and_leave_no_file(start, tmp_path):
    met = meet_all(tmp_path, [2, 2, 2])
    assert [sorted(links) for links in met] == [[1, 2], [0], [0]]
    assert {node: link.node for node, link in met[0].items()} == {1: 1, 2: 2}
    met[0][2].put(End(3))
    assert [met[2][0].get(), met[2][0].get()] == [End(0), End(3)]
    assert not (tmp_path / FILE).exists()
    close_all(met)


def test_nodes_with_different_numbers_of_ranks_are_refused_on_all_nodes(start, tmp_path):
    error, *others = meet_all(tmp_path, [2, 2, 1])
    with refusal(UsageError):
        raise error
    assert [links[0].get() for links in others] == [End(EXIT_STARTUP, str(error))] * 2
    close_all(others)


def test_a_node_that_does_not_arrive_is_named(start, tmp_path):
    first, other = meet_all(tmp_path, [1, 1, 1], within_s=0.5, missing=[2])
    assert isinstance(first, LostNodeError)
    assert "node 2" in str(first)
    assert isinstance(other, LostNodeError)


def test_a_stop_ends_the_wait(start, tmp_path):
    with pytest.raises(LostNodeError, match="stopped"):
        meet(Place(1, 2), 1, tmp_path, lambda: True)


def test_strangers_do_not_keep_supervisors_from_meeting(start, tmp_path):
    def connect(path):
        while not path.exists():
            pass
        with contextlib.suppress(OSError, ValueError):  # they may have met already
            port = json.loads(path.read_bytes())["port"]
            for words in (b"", b"\0" * 4, b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 9):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(words)

    met = meet_all(tmp_path, [1, 1], stranger=connect)
    assert [sorted(links) for links in met] == [[1], [0]]
    close_all(met)


@pytest.mark.parametrize("launch", ["an earlier start", None])
def test_the_file_of_an_earlier_start_is_not_used(launch, start, tmp_path):
    names = ("GENLIGHT_LAUNCH_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    own = " ".join(os.environ.get(name, "") for name in (*names, "TORCHELASTIC_RESTART_COUNT"))
    own += f" {os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
    old = {"port": free_port(), "token": "old", "launch": own if launch is None else launch}
    (tmp_path / FILE).write_text(json.dumps(old))
    met = meet_all(tmp_path, [1, 1])
    assert [sorted(links) for links in met] == [[1], [0]]
    close_all(met)
