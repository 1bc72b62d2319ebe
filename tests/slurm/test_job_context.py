"""The variables that a real Slurm gives its tasks are read correctly."""

import json
import sys

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.cluster.job_context import expand_hostlist
from support.messages import refusal

pytestmark = pytest.mark.slurm

PROGRAM = """
import dataclasses, json, os
from genlight.adapter import current_job_context
from genlight.adapter.cluster.job_context import in_srun_task
context = current_job_context()
fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
array = [context.environment.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK")]
fields |= {"array": [array[0], array[1] and int(array[1])], "env": context.torch_distributed_env()}
fields |= {"is_task": in_srun_task(), "environment": None}
print(json.dumps(fields, default=str))
"""


@pytest.fixture(scope="module")
def reported(slurm, tmp_path_factory):
    """The output of each process of a job with these options, in its batch script or under srun."""
    folder = tmp_path_factory.mktemp("contexts")
    (folder / "report.py").write_text(PROGRAM)

    def submit(*options, srun="srun "):
        command = f"{srun}{sys.executable} report.py"
        job = slurm.submit(*options, "--output=%A-%a.out", f"--wrap={command}", cwd=folder)
        assert slurm.wait(job) == ("COMPLETED", 0)
        lines = [line for path in folder.glob(f"{job}-*.out") for line in path.read_text().splitlines()]
        contexts = [json.loads(line) for line in lines if line.startswith("{")]
        return job, sorted(contexts, key=lambda context: (context["array"][1] or 0, context["rank"]))

    return submit


def test_each_rank_of_a_two_node_step_with_uneven_tasks_gets_its_own_place(reported):
    job, contexts = reported("--nodes=2", "--ntasks=3")

    places = [(context["rank"], context["local_rank"], context["node_rank"]) for context in contexts]
    assert places == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    assert [context["local_world_size"] for context in contexts] == [2, 2, 1]
    for context in contexts:
        assert (context["job_id"], context["step_id"]) == (job, "0")
        assert (context["world_size"], context["num_nodes"]) == (3, 2)
        assert context["hostnames"] == ["n9", "n10"]
        assert context["is_task"]
    assert len({(context["master_addr"], context["master_port"]) for context in contexts}) == 1


def test_the_batch_script_itself_is_no_task(reported):
    _, (context,) = reported("--nodes=2", "--ntasks=3", srun="")

    assert (context["rank"], context["world_size"], context["is_task"]) == (0, 3, False)
    assert context["step_id"] is None or int(context["step_id"]) > 4_000_000_000


def test_the_tasks_of_an_array_are_jobs_of_their_own(reported):
    job, contexts = reported("--array=3,5", "--ntasks=1")

    assert [context["array"] for context in contexts] == [[job, 3], [job, 5]]
    assert len({context["job_id"] for context in contexts}) == 2
    assert len({context["master_port"] for context in contexts}) == 2
    assert [context["is_task"] for context in contexts] == [False, False]  # one task each


def test_an_interactive_srun_with_the_name_of_a_shell_is_seen(slurm, tmp_path):
    (tmp_path / "report.py").write_text(PROGRAM)
    said = slurm.call("srun", "--job-name=bash", "--nodes=2", "--ntasks=2", sys.executable, "report.py", cwd=tmp_path)

    contexts = [json.loads(line) for line in said.splitlines()]
    assert {context["rank"] for context in contexts} == {0, 1}
    assert all(context["is_task"] for context in contexts)


EXAMPLES = 150

NUMBERS = st.integers(0, 120).flatmap(
    lambda number: st.sampled_from([0, 2, 3]).map(lambda width: str(number).zfill(width))
)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 4), st.sampled_from([0, 2, 3]), st.sampled_from([0, 2, 4])).map(
    lambda drawn: f"{str(drawn[0]).zfill(drawn[2])}-{str(drawn[0] + drawn[1]).zfill(drawn[3])}"
)
BRACKETS = st.lists(st.one_of(NUMBERS, RANGES), min_size=1, max_size=3).map(lambda entries: f"[{','.join(entries)}]")
PREFIXES = st.sampled_from(["n", "a-", "r1n", "", "x.y"])
WORDS = st.tuples(PREFIXES, st.lists(st.tuples(BRACKETS, st.sampled_from(["", "n", "x-", "7"])), max_size=3)).map(
    lambda drawn: drawn[0] + "".join(bracket + text for bracket, text in drawn[1])
)


@settings(max_examples=EXAMPLES)
@given(st.lists(WORDS, min_size=1, max_size=3).map(",".join))
def test_hostlists_expand_to_the_same_hosts_as_with_scontrol_in_the_same_order(scontrol, text):
    hosts = scontrol("hostnames", text)
    if hosts:  # 22.05 refuses a suffix after the last bracket
        assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[3-1]", "n[]", "n[1,,2]", "n[-1]", "n[a-b]", "n[1-2-3]", "n[1-65537]", "n[1-2];n3"])
def test_hostlists_that_scontrol_refuses_are_refused(scontrol, text):
    assert scontrol("hostnames", text) is None
    with refusal(ValueError):
        expand_hostlist(text)
