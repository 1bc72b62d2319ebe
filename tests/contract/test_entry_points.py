"""`run_training_runtime_from_env`: under the older import path it raises what ended the run, ours returns the code."""

import sys
from typing import Any

import pytest

import genlight.adapter
from genlight.adapter import StartupContractError, TrainingCanceled, compat, read_events

pytestmark = pytest.mark.promise(name="old names")

ENDINGS: dict[str, tuple[dict[str, Any], int, type[BaseException] | None, str]] = {
    "completed": ({}, 0, None, "completed"),
    "the trainer's own exception": ({"hyperparams": {"fails_in": ["train_step"]}}, 1, RuntimeError, "train_step broke"),
    "an invalid job": ({"max_steps": -1}, 2, StartupContractError, "startup.invalid_job_spec"),
    "an invalid trainer": ({"trainer": "absent_module_of_ours"}, 2, StartupContractError, "startup.invalid_trainer"),
    "a stop": ({"cancel_file_path": "cancel"}, 75, TrainingCanceled, "canceled"),
}


@pytest.fixture
def from_env(project: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the job and the environment that names it."""

    def prepare(**job: Any) -> None:
        (project.folder / "cancel").touch()
        monkeypatch.setenv("TRAINER_JOB_SPEC_PATH", str(project.write(**job)))
        monkeypatch.setenv("TRAINER_ARTIFACTS_DIR", str(project.out))

    yield prepare
    for name in [name for name in sys.modules if name.partition(".")[0] == "gen_worker"]:
        del sys.modules[name]


def last_event(project: Any) -> dict[str, Any]:
    """The terminal event."""
    return dict(list(read_events(project.out / "metrics" / "events.jsonl"))[-1])


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_function_of_genlight_returns_the_exit_code(project: Any, from_env: Any, ending: str) -> None:
    job, code, _, text = ENDINGS[ending]
    from_env(**job)
    assert genlight.adapter.run_training_runtime_from_env() == code
    assert text in str(last_event(project))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("module", ["gen_worker.trainer", "gen_worker.trainer.runtime"])
def test_the_function_of_the_older_path_raises_the_root_cause_once_everything_is_reported(
    project: Any, from_env: Any, ending: str, module: str
) -> None:
    """The very exception, with the terminal event written before it is raised."""
    job, _, error, text = ENDINGS[ending]
    compat.install()
    from_env(**job)
    run = __import__(module, fromlist=["run_training_runtime_from_env"]).run_training_runtime_from_env
    if error is None:
        assert run() == 0
    else:
        with pytest.raises(error, match=text):
            run()
    assert text in str(last_event(project))
