"""The place of a process, as Slurm's variables tell it."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from genlight.adapter import JobContext, build_job_context, current_job_context
from genlight.adapter.cluster.job_context import in_srun_task
from support.messages import refusal

TASK = {
    "SLURM_JOB_ID": "1042",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[9-11]",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_SRUN_COMM_PORT": "42245",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_JWT": "secret",
    "HOME": "/home/me",
    "JOB_DIR": "/scratch/job",
}
"""One task of a step on two of a job's three nodes."""


def test_a_task_of_a_step_knows_its_place():
    context = build_job_context(TASK)

    assert (context.job_id, context.step_id) == ("1042", "0")
    assert (context.rank, context.local_rank, context.node_rank) == (4, 0, 1)
    assert (context.world_size, context.num_nodes, context.local_world_size) == (7, 2, 3)
    assert context.hostnames == ("n9", "n10")
    assert (context.master_addr, context.gpus_per_node) == ("n9", 8)
    assert context.output_dir == Path("/scratch/job")
    assert context.torch_distributed_env() == {
        "MASTER_ADDR": "n9",
        "MASTER_PORT": str(context.master_port),
        "WORLD_SIZE": "7",
        "RANK": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "1",
    }


def test_its_environment_has_only_variables_of_slurm_without_the_token():
    environment = build_job_context(TASK).environment
    assert environment["SLURM_PROCID"] == "4"
    assert not {"SLURM_JWT", "HOME"} & set(environment)


def test_outside_of_a_job_nothing_is_known_and_nothing_is_made_up():
    context = build_job_context({"HOME": "/home/me"})
    assert context == JobContext()
    assert context.torch_distributed_env() == {}


FIRST_SOUND = [
    ({"SLURM_STEP_NODELIST": "(null)", "SLURM_JOB_NODELIST": "n1"}, "hostnames", ("n1",)),
    ({"SLURM_NODELIST": "n1", "SLURM_JOB_NODELIST": ""}, "hostnames", ("n1",)),
    ({"SLURM_NTASKS": "8", "WORLD_SIZE": "2"}, "world_size", 8),
    ({"SLURM_NTASKS": "abc", "WORLD_SIZE": "2"}, "world_size", 2),
    ({"SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "5"}, "num_nodes", 3),
    ({"SLURM_NODELIST": "n[1-4]"}, "num_nodes", 4),
    ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, "local_world_size", 3),
    ({"SLURM_TASKS_PER_NODE": "4(x2)"}, "local_world_size", 4),
    ({"SLURM_TASKS_PER_NODE": "4,3"}, "local_world_size", None),
    ({"SLURM_NTASKS_PER_NODE": "2"}, "local_world_size", 2),
    ({"SLURM_GPUS_PER_NODE": "h100:8"}, "gpus_per_node", 8),
    ({"SLURM_GPUS_PER_NODE": "a100:2,h100:6"}, "gpus_per_node", 8),
    ({"SLURM_GPUS_PER_NODE": "gpu:h100:4(S:0-1)"}, "gpus_per_node", 4),
    ({"SLURM_GPUS_ON_NODE": "0", "SLURM_GPUS_PER_NODE": "8"}, "gpus_per_node", 0),
    ({"MASTER_ADDR": "10.1.2.3", "SLURM_NODELIST": "n1"}, "master_addr", "10.1.2.3"),
    ({"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, "master_addr", "10.0.0.1"),
    ({"MASTER_PORT": "29500", "SLURM_JOB_ID": "1"}, "master_port", 29500),
    ({"SLURM_PROCID": "0"}, "rank", 0),
    ({"SLURM_JOBID": "12"}, "job_id", "12"),
]


@pytest.mark.parametrize(("env", "name", "value"), FIRST_SOUND)
def test_each_field_takes_the_first_variable_that_is_set_and_sound(env, name, value):
    assert getattr(build_job_context(env), name) == value


FAULTS = {
    "rank_out_of_range": {"SLURM_PROCID": "7"},
    "local_rank_out_of_range": {"SLURM_LOCALID": "3"},
    "node_rank_out_of_range": {"SLURM_NODEID": "2"},
    "negative": {"SLURM_PROCID": "-1"},
    "hosts": {"SLURM_STEP_NODELIST": "n[9-11]"},
    "bad_hosts": {"SLURM_STEP_NODELIST": "n[3-1]", "SLURM_JOB_NODELIST": "(null)"},
    "too_few_tasks": {"SLURM_STEP_TASKS_PER_NODE": "4,2"},
    "too_many_tasks": {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    "tasks_of_nodes": {"SLURM_STEP_TASKS_PER_NODE": "4,2,1"},
    "bad_tasks": {"SLURM_STEP_TASKS_PER_NODE": "4(x0)"},
    "many_nodes": {"SLURM_STEP_TASKS_PER_NODE": "4(x999999999)"},
    "bad_gpus": {"SLURM_GPUS_ON_NODE": "many"},
    "bad_port": {"MASTER_PORT": "70000"},
    "bad_address": {"MASTER_ADDR": "n1 n2"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_variables_that_contradict_each_other_or_are_malformed_are_refused(fault):
    with refusal(ValueError):
        build_job_context(TASK | FAULTS[fault])


def test_every_fault_is_listed():
    with refusal(ValueError):
        build_job_context(TASK | {"SLURM_PROCID": "9", "SLURM_LOCALID": "x"})


def test_where_the_host_of_rank_0_is_not_known_it_is_not_taken_for_this_one():
    with refusal(ValueError):
        build_job_context({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"})


def test_ports_of_neighbouring_jobs_and_steps_differ_and_are_not_sruns_own():
    places = [(job, step) for job in range(1042, 1342) for step in (None, *range(4))]
    ports = [
        build_job_context(
            {"SLURM_JOB_ID": str(job), "SLURM_SRUN_COMM_PORT": "42245"}
            | ({} if step is None else {"SLURM_STEP_ID": str(step)})
        ).master_port
        for job, step in places
    ]
    assert set(ports) <= set(range(15_000, 30_000))
    distinct = {port for place, port in zip(places, ports, strict=True) if place[1] is not None}
    assert len(distinct) == 4 * 300


def test_a_given_port_wins_and_must_be_one():
    context = build_job_context(TASK)
    assert context.torch_distributed_env(master_port=4000)["MASTER_PORT"] == "4000"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6).flatmap(
        lambda tasks: st.tuples(st.just(tasks), st.integers(0, sum(tasks) - 1))
    )
)
def test_any_task_of_any_distribution_is_accepted(drawn):
    tasks, rank = drawn
    node = next(node for node in range(len(tasks)) if rank < sum(tasks[: node + 1]))
    env = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - sum(tasks[:node])),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": f"n[1-{len(tasks)}]",
        "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    assert build_job_context(env).local_world_size == tasks[node]


LOGIN = {"SLURM_CONF": "/etc/slurm/slurm.conf"}
SALLOC = {"SLURM_JOB_ID": "11", "SLURM_NTASKS": "3", "SLURM_NODELIST": "n[9-10]", "SLURM_TASKS_PER_NODE": "2,1"}
BATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("env", "is_task"),
    [
        (LOGIN, False),
        (SALLOC, False),
        (BATCH, False),
        (BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "3"}, False),
        (BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        (TASK, True),
        (TASK | {"SLURM_JOB_NAME": "bash"}, True),
    ],
    ids=["login", "salloc", "batch", "newer_batch", "one_task", "task", "interactive_srun"],
)
def test_only_one_of_several_tasks_of_srun_is_taken_for_one(env, is_task, monkeypatch):
    build_job_context(env)
    monkeypatch.setattr("os.environ", env)
    assert in_srun_task() is is_task


def test_the_place_of_this_process_is_read_once_until_a_variable_changes(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    first = current_job_context()
    assert (current_job_context(), first.job_id) == (first, None)
    assert current_job_context() is first
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert current_job_context().job_id == "77"
