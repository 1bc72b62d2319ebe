"""Refusals of ``--restarts``, and what the notes of killed attempts say. `tests/faults/run` kills real processes."""

import contextlib

import pytest

from genlight.adapter.cli import main
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.plumbing.failures import EXIT_STARTUP
from genlight.adapter.run.deaths import (
    FOLDER,
    Death,
    StepNote,
    begin_attempt,
    describe_deaths,
    note_deaths,
    note_end,
    repeated_deaths,
)
from support.jobs import write_job

pytestmark = pytest.mark.promise(name="resume")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "NODE_RANK"])
def test_ranks_of_another_launcher_are_not_restarted(variable, tmp_path, monkeypatch, capsys):
    job = write_job(tmp_path)
    monkeypatch.setenv(variable, "0")
    assert main(["run", str(job), "--restarts", "1"]) == EXIT_STARTUP
    assert variable in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_tasks_of_srun_are_not_restarted(tmp_path, monkeypatch, capsys):
    job = write_job(tmp_path)
    for name, value in {"STEP_ID": "1", "PROCID": "0", "STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["run", str(job), "--restarts", "1"]) == EXIT_STARTUP
    assert "srun" in capsys.readouterr().err


def test_a_job_that_can_be_read_only_once_is_refused(capsys):
    assert main(["run", "-", "--restarts", "1"]) == EXIT_STARTUP
    assert "standard input" in capsys.readouterr().err


def test_a_job_that_names_its_checkpoint_is_refused(tmp_path, capsys):
    job = write_job(tmp_path, resume_checkpoint_path="earlier.json")
    assert main(["run", str(job), "--restarts", "1"]) == EXIT_STARTUP
    assert "--restarts" in capsys.readouterr().err


def test_a_negative_number_is_refused(tmp_path):
    with pytest.raises(SystemExit) as refused:
        main(["run", str(write_job(tmp_path)), "--restarts", "-1"])
    assert refused.value.code == EXIT_STARTUP


@pytest.fixture
def config(tmp_path):
    return resolve_run_config(spec_path=write_job(tmp_path))


def note(config, rank=0, step=8, batch=7, record=6, went_back=False):
    written = StepNote(config.artifacts_dir, rank, job=config.spec_digest, record=record, went_back=went_back)
    written.begin(step, 0, batch)


def deaths_of(config):
    return repeated_deaths(config.artifacts_dir, config.spec_digest)


def begin(config, deaths, held):
    job = config.spec_digest
    begin_attempt(config.artifacts_dir, 6, deaths, job=job, went_back=False, held=held)


def test_a_killed_attempt_is_read_from_its_note(config):
    note(config)
    (death,) = deaths_of(config)
    assert (death.where, death.record, death.rank) == ((8, 0, 7), 6, 0)


def test_the_rank_of_the_terminal_event_is_the_one_that_died(config):
    for rank, step in enumerate((9, 8, 9)):
        note(config, rank, step=step)
    note_end(config.artifacts_dir, "train-step:RankFailedError: rank 1 was killed by signal 9")
    (death,) = deaths_of(config)
    assert (death.rank, death.step, death.how) == (1, 8, "rank 1 was killed by signal 9")


@pytest.mark.parametrize("end", ["preempted", "canceled", "train-step:ValueError: a mistake (rank 1)"])
def test_an_attempt_that_ended_by_itself_is_not_a_death(end, config):
    note(config)
    note_end(config.artifacts_dir, end)
    assert deaths_of(config) == []


def test_the_end_of_an_earlier_attempt_says_nothing_about_a_later_one(config):
    note(config)
    note_end(config.artifacts_dir, "train-step:RankFailedError: rank 1 was killed by signal 9")
    with contextlib.ExitStack() as held:
        begin(config, deaths_of(config), held)
    note(config)
    assert [(death.rank, death.how) for death in deaths_of(config)] == [(0, "")]


def test_deaths_in_the_same_step_add_up_until_another_one(config):
    for _ in range(3):
        note(config)
        note_deaths(config.artifacts_dir, deaths_of(config))
    assert len(deaths_of(config)) == 4
    note(config, step=9, batch=8)
    assert len(deaths_of(config)) == 1


def test_an_attempt_that_never_began_a_step_is_not_a_death(config):
    StepNote(config.artifacts_dir, 0, job=config.spec_digest, record=6, went_back=False)
    assert deaths_of(config) == []


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, bytes(range(256)) * 16, b"{" * 100])
def test_a_note_that_is_no_note_is_ignored(content, config):
    note(config)
    (config.artifacts_dir / FOLDER / "rank-0").write_bytes(content)
    (config.artifacts_dir / FOLDER / "deaths.json").write_bytes(content)
    (config.artifacts_dir / FOLDER / "begun.json").write_bytes(content)
    assert deaths_of(config) == []


@pytest.mark.parametrize("variable", ["GENLIGHT_LAUNCH_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", None])
def test_deaths_before_the_first_step_add_up_and_all_ranks_read_the_same(variable, config, monkeypatch):
    for attempt in range(4):
        if variable is not None:
            monkeypatch.setenv(variable, str(attempt))
        early = deaths_of(config)
        with contextlib.ExitStack() as held:
            begin(config, early, held)
            with monkeypatch.context() as child:
                if variable is None:  # a rank that Lightning starts finds its store as under torchrun
                    child.setenv("TORCHELASTIC_RESTART_COUNT", "0")
                late = deaths_of(config)  # a rank that reads after rank zero has begun
        assert early == late
        assert [(death.step, death.record) for death in late] == [(0, 6)] * attempt
    written = StepNote(config.artifacts_dir, 0, job=config.spec_digest, record=6, went_back=False)
    written.begin(8, 0, 7)
    assert [death.step for death in deaths_of(config)] == [8]
    with contextlib.ExitStack() as held:
        begin(config, deaths_of(config), held)
    monkeypatch.setenv("SLURM_JOB_ID", "next")
    assert [death.step for death in deaths_of(config)] == [0]


def test_the_batch_of_a_repeated_death_is_named(config):
    written = StepNote(config.artifacts_dir, 0, job=config.spec_digest, record=6, went_back=False)
    written.name_rows("RecordBatch of 32 rows: text string " + 1000 * "x")
    written.begin(8, 0, 7)
    (death,) = deaths_of(config)
    assert "RecordBatch of 32 rows: text string" in describe_deaths([death, death])


def test_deaths_of_another_job_do_not_count(config, tmp_path):
    note(config)
    changed = resolve_run_config(spec_path=write_job(tmp_path, hyperparams={"lr": 2.0}))
    assert deaths_of(changed) == []


def test_the_description_has_what_deaths_have_in_common():
    death = Death(8, 0, 7, 6, False, "", "node1", 1, "signal 9")
    text = describe_deaths([death, death])
    assert all(part in text for part in ("2 attempts", "step 8", "batch 7", "rank 1 on node1", "signal 9"))
    other = Death(8, 0, 7, 4, False, "", "node2", 0, "signal 11")
    text = describe_deaths([death, other])
    assert "rank 1" not in text
    assert "node1" not in text
