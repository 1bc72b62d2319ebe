"""Slurm under Lightning: the environment that a trainer gets, and the refusal of a mismatch before training."""

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from genlight.adapter import SlurmEnvironment
from genlight.adapter.cluster.job_context import this_rank
from genlight.adapter.cluster.placement import launcher_arguments, placement_fault
from support.messages import refusal

BATCH = {
    "SLURM_JOB_ID": "1042",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NODELIST": "n[9-10]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
TASK = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NAME": "bash",
}


@pytest.fixture
def within(monkeypatch):
    """Sets the variables of a process."""

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def trainer(**arguments):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", **quiet, **arguments)


def test_a_task_of_srun_is_the_rank_that_srun_says_and_has_as_many_devices_as_tasks(within):
    within(TASK)
    placed = launcher_arguments({"devices": "auto", "num_nodes": 1, "plugins": None})
    (environment,) = placed["plugins"]

    assert (placed["devices"], placed["num_nodes"]) == (1, 2)
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (2, 0, 1)
    assert (environment.world_size(), environment.main_address) == (3, "n9")
    environment.set_world_size(7)
    environment.set_global_rank(7)
    made = trainer(**placed)
    assert (made.world_size, made.global_rank) == (3, 2)
    assert isinstance(made.strategy, DDPStrategy)
    assert placement_fault(made) is None
    assert this_rank() == 2


def test_plain_trainers_take_it_as_a_plugin(within):
    within(TASK)
    made = trainer(plugins=[SlurmEnvironment()], devices=1, num_nodes=2)
    assert (made.world_size, made.global_rank, made.local_rank, made.node_rank) == (3, 2, 0, 1)


@pytest.mark.parametrize(
    "variables", [BATCH, TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1,1"}], ids=["batch", "one"]
)
def test_a_batch_script_and_a_step_of_one_task_start_their_ranks_themselves(within, variables):
    within(variables)
    placed = launcher_arguments({})

    assert list(placed) == ["plugins"]
    assert isinstance(placed["plugins"][0], LightningEnvironment)
    made = trainer(devices=2, strategy="ddp", **placed)
    assert made.world_size == 2
    assert not made.strategy.cluster_environment.creates_processes_externally


def test_a_rank_that_a_batch_script_started_is_not_the_rank_of_the_script(within):
    within(BATCH | {"LOCAL_RANK": "1"})
    assert this_rank() == 1


def test_a_login_node_with_the_variables_of_its_commands_is_no_job(within):
    within({"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTER_NAME": "main", "SBATCH_PARTITION": "gpu"})
    assert launcher_arguments({"devices": 2}) == {}
    assert placement_fault(trainer(devices=2, strategy="ddp")) is None
    assert not SlurmEnvironment.detect()
    assert this_rank() == 0


def test_outside_of_a_job_and_under_torchrun_nothing_changes(within):
    assert launcher_arguments({"devices": 2}) == {}
    within(TASK | {"TORCHELASTIC_RUN_ID": "x", "RANK": "5"})
    assert launcher_arguments({"devices": 2}) == {}
    assert this_rank() == 5


@pytest.mark.parametrize(("local", "rank"), [({}, 4), ({"LOCAL_RANK": "1"}, 5)])
def test_the_ranks_of_a_pod_are_counted_over_the_pods_before_it(within, local, rank):
    within({"NODE_RANK": "2", "LOCAL_WORLD_SIZE": "2", **local})
    assert this_rank() == rank


def test_an_environment_of_the_callers_own_stays(within):
    within(TASK)
    own = LightningEnvironment()
    assert launcher_arguments({"plugins": own}) == {}
    assert launcher_arguments({"strategy": DDPStrategy(cluster_environment=own)}) == {}


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 2), (1, 1), (1, 3)])
def test_devices_and_nodes_that_do_not_match_the_tasks_are_refused(within, devices, num_nodes):
    within(TASK)
    placed = launcher_arguments({"devices": devices, "num_nodes": num_nodes})
    fault = placement_fault(trainer(**{"devices": devices, "num_nodes": num_nodes, **placed}))
    if (devices, num_nodes) == (1, 1):  # Lightning's own default, for which the number of nodes is taken from Slurm
        assert fault is None
    else:
        assert "srun started 3 tasks on 2 nodes, 1 of them on n10, but the trainer has" in fault
        assert f"`srun --nodes={num_nodes} --ntasks-per-node={devices}`" in fault


def test_several_nodes_without_srun_are_refused(within):
    within(BATCH)
    made = trainer(devices=1, num_nodes=2, **launcher_arguments({}))
    assert "is not a task of srun" in placement_fault(made)


def test_it_is_refused_where_srun_did_not_start_the_process():
    with refusal(ValueError):
        SlurmEnvironment()
