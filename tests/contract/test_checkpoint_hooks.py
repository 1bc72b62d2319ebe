"""`state_dict`, `save_checkpoint`, `load_state_dict`, `load_checkpoint`: times, arguments, results and errors."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from genlight.adapter import (
    ContractError,
    ContractModule,
    StepContext,
    TrainingJobSpec,
    run_training_loop,
)
from genlight.adapter.module.trainer_files import check_result
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import DurableCheckpointIO
from genlight.callbacks.checkpoint import verify
from support.messages import refusal
from support.trainer_class import Counts

pytestmark = pytest.mark.promise(name="checkpoint")

# save_checkpoint


def test_save_checkpoint_is_called_inside_each_checkpoint_with_a_folder_that_is_a_text(project: Any) -> None:
    """It is called at the cadence and at the end; the folder exists, and `/` and `+` work on its name."""
    assert project.run(checkpoint_every=2) == 0
    calls = project.calls("save_checkpoint")
    assert [(call["step"], call["final"], call["type"]) for call in calls] == [(2, False, str), (3, True, str)]
    assert all(os.path.isabs(call["output_dir"]) for call in calls)
    assert len(project.calls("state_dict")) == 2


@pytest.mark.parametrize("as_given", ["absolute", "relative", "path"])
def test_the_primary_path_is_reported_wherever_it_was_named(project: Any, as_given: str) -> None:
    """The `checkpoint` event has it, and `completed` as its final checkpoint; it exists inside its checkpoint."""
    returned = {
        "absolute": 'output_dir + "/weights.txt"',
        "relative": '"weights.txt"',
        "path": 'Path(output_dir, "weights.txt")',
    }
    source = project.source().replace('output_dir + "/weights.txt"', returned[as_given])
    assert project.run(source, checkpoint_every=2) == 0
    reported = [event["path"] for event in project.events if event["event"] == "checkpoint"]
    final = project.out / "checkpoints" / "final" / "trainer" / "weights.txt"
    assert reported == [str(project.out / "checkpoints" / "step-00000002" / "trainer" / "weights.txt"), str(final)]
    assert project.events[-1]["final_checkpoint"] == str(final)
    assert final.read_text() == "3"
    record = verify(project.out / "checkpoints" / "final.json")
    assert record.trainer_checkpoint == {"primary_path": "weights.txt", "rank": 4}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, None),
        ({}, {}),
        ({"rank": 4}, {"rank": 4}),
        ({"primary_path": None, "rank": 4}, {"rank": 4}),
        ({"primary_path": ""}, {}),
        ({"primary_path": "a.bin", "other": "{out}/sub/b.bin"}, {"primary_path": "a.bin", "other": "sub/b.bin"}),
        ({"primary_path": "{out}"}, {"primary_path": "."}),
        ({"primary_path": "./sub/../a.bin"}, {"primary_path": "./sub/../a.bin"}),
        ({"elsewhere": "/data/base"}, {"elsewhere": "/data/base"}),
    ],
)
def test_allowed_results_of_save_checkpoint(tmp_path: Path, returned: Any, expected: Any) -> None:
    """A mapping or None; paths below the folder become relative, because it gets another name and may be moved."""
    (tmp_path / "sub").mkdir()
    for name in ("a.bin", "sub/b.bin"):
        (tmp_path / name).touch()
    if returned is not None:
        returned = {
            key: value.replace("{out}", str(tmp_path)) if isinstance(value, str) else value
            for key, value in returned.items()
        }
    assert check_result(returned, tmp_path) == expected


def test_a_path_below_a_folder_that_was_reached_by_a_link_is_below_it(tmp_path: Path) -> None:
    """A hook may resolve the folder that it got."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.bin").touch()
    (tmp_path / "link").symlink_to("real")
    result = check_result({"primary_path": str(tmp_path / "real" / "a.bin")}, tmp_path / "link")
    assert result == {"primary_path": "a.bin"}


@pytest.mark.parametrize(
    "returned",
    [
        ["weights.txt"],
        "weights.txt",
        {"primary_path": 5},
        {"primary_path": "absent.bin"},
        {"primary_path": "../../escaped"},
        {"primary_path": "/etc/hostname"},
    ],
)
def test_a_wrong_result_of_save_checkpoint_is_refused(tmp_path: Path, returned: Any) -> None:
    """It would be reported and uploaded, and is not part of the checkpoint."""
    (tmp_path / "weights.txt").touch()
    with refusal(ContractError):
        check_result(returned, tmp_path)


# load_state_dict, load_checkpoint


def test_a_resume_calls_load_state_dict_and_then_load_checkpoint_with_its_folder(project: Any) -> None:
    """It is called after `configure`, before the first batch; the folder is a text and has the files of that step."""
    assert project.run(max_steps=2) == 0
    assert project.run(max_steps=3, resume_from_latest=True) == 0
    names = [name for name, _ in project.notes]
    assert names[:6] == ["setup", "configure", "load_state_dict", "load_checkpoint", "prepare_batch", "train_step"]
    (loaded,) = project.calls("load_state_dict")
    assert (loaded["state"], loaded["payload"]) == ({"steps": 0, "lr": 0.5}, {"steps": 2})
    (files,) = project.calls("load_checkpoint")
    assert type(files["checkpoint_dir"]) is str
    assert (files["read"], files["payload"], files["state"]["steps"]) == ("2", {"steps": 2}, 2)


# as the older runtime wrote it


def older_run(folder: Path, *, final: bool = False, primary: str | None = "absent", files: bool = True) -> Path:
    """Checkpoints as the older runtime left them, at step 2 and perhaps at the end."""
    folder.mkdir(parents=True)
    for name, facts in [("step-00000002", {"step": 2}), *([("final", {"final": True})] if final else [])]:
        record: dict[str, Any] = {**facts, "run_id": "r", "state": {"steps": 2}}
        if primary != "absent":
            record["trainer_checkpoint"] = {} if primary is None else {"primary_path": primary.format(name=name)}
        if files:
            (folder / name).mkdir()
            (folder / name / "weights.txt").write_text("2")
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


PRIMARY_PATHS = {
    "no trainer_checkpoint": "absent",
    "no primary_path": None,
    "relative": "weights.txt",
    "absolute, moved since": "/data/run-1/checkpoints/{name}/weights.txt",
    "absolute, elsewhere": "/data/weights.txt",
}


@pytest.mark.parametrize("primary", PRIMARY_PATHS.values(), ids=PRIMARY_PATHS)
def test_a_resume_from_an_older_record_calls_load_checkpoint_with_the_folder_beside_it(
    project: Any, primary: str | None
) -> None:
    """Whatever the record says of paths: they were true on another machine."""
    folder = older_run(project.out / "checkpoints", primary=primary)
    assert project.run(max_steps=4, resume_from_latest=True) == 0
    (loaded,) = project.calls("load_state_dict")
    assert loaded["payload"] == {"steps": 2}
    (files,) = project.calls("load_checkpoint")
    assert files["checkpoint_dir"] == str(folder / "step-00000002")
    assert (files["read"], files["payload"]) == ("2", {"steps": 2})
    assert len(project.calls("train_step")) == 2
    assert (project.events[-1]["event"], project.events[-1]["step"]) == ("completed", 4)


def test_a_resume_that_finds_no_folder_for_files_that_were_written_is_refused(project: Any) -> None:
    """It would train on from fresh weights."""
    older_run(project.out / "checkpoints", primary="weights.txt", files=False)
    assert project.run(max_steps=4, resume_from_latest=True) == 1
    failed = project.events[-1]
    assert "checkpoint step-00000002 cannot be resumed from: save_checkpoint wrote files for it" in failed["error"]
    assert project.calls("train_step") == []


def test_a_resume_of_a_class_that_cannot_read_the_files_of_an_older_record_is_refused(project: Any) -> None:
    older_run(project.out / "checkpoints")
    assert project.run(project.source(checkpoints=False), max_steps=4, resume_from_latest=True) == 1
    assert "Trainer has no load_checkpoint to read them" in project.events[-1]["error"]
    assert project.calls("train_step") == []


def test_an_older_record_without_files_needs_no_load_checkpoint(project: Any) -> None:
    older_run(project.out / "checkpoints", files=False)
    assert project.run(project.source(checkpoints=False), max_steps=4, resume_from_latest=True) == 0
    assert len(project.calls("train_step")) == 2


@pytest.mark.parametrize(
    ("primary", "reported"),
    [
        ("weights.txt", "final/weights.txt"),
        ("/old/final/weights.txt", "final/weights.txt"),
        ("gone.txt", "final.json"),
        ("absent", "final.json"),
    ],
)
def test_an_older_final_record_is_the_end_of_its_run_whatever_the_job_asks_for(
    project: Any, primary: str, reported: str
) -> None:
    """It tells no step, and must not be trained on top of: `started`, `completed` at the step of the job, exit 0."""
    folder = older_run(project.out / "checkpoints", final=True, primary=primary)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert project.run(max_steps=9, resume_from_latest=True) == 0
    assert [event["event"] for event in project.events] == ["started", "completed"]
    assert (project.events[-1]["step"], project.events[-1]["final_checkpoint"]) == (9, str(folder / reported))
    assert project.notes == []
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_older_final_record_that_names_missing_files_is_still_uploaded(project: Any) -> None:
    older_run(project.out / "checkpoints", final=True, primary="gone.txt")
    target = (project.folder / "store").as_uri()
    assert project.run(max_steps=9, resume_from_latest=True, uploads={"targets": [target]}) == 0
    assert [path.name for path in (project.folder / "store").rglob("*.json")] == ["final.json"]


def test_an_older_final_record_posts_nothing_again(project: Any, chaos: Any) -> None:
    """The older runtime told its receivers of the end itself."""
    older_run(project.out / "checkpoints", final=True)
    uploads = {f"{kind}_url": f"{chaos.url}/{kind}" for kind in ("checkpoint", "terminal")}
    assert project.run(max_steps=9, resume_from_latest=True, uploads=uploads) == 0
    assert [event["event"] for event in project.events] == ["started", "completed"]
    assert chaos.requests() == []


# with the caller's own reporter and writer


class Calls:
    """A reporter, writer and uploader that writes down how it was called."""

    def __init__(self) -> None:
        self.names: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def called(**facts: Any) -> Any:
            self.names.append((name, facts.get("local_path") or facts.get("path") or facts.get("final_checkpoint")))
            return {"write_checkpoint": "step", "finalize": "final", "write_samples": [], "is_canceled": False}.get(
                name
            )

        return called


class Loads(Counts):
    """Keeps the dataset and the files that it gets."""

    def setup(self, ctx: StepContext) -> None:
        self.dataset = ctx.dataset

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: StepContext) -> None:
        self.loaded = (checkpoint_dir, payload)


@pytest.mark.parametrize("through", ["ckpt_path", "load_from_checkpoint"])
def test_lightnings_own_ways_to_resume_take_an_older_record(quiet: Any, tmp_path: Path, through: str) -> None:
    """The payload and the step come from the record, the weights from the files of the trainer."""
    folder = older_run(tmp_path / "moved")
    record, trainer_class, job = folder / "step-00000002.json", Loads(), TrainingJobSpec("r", max_steps=4)
    if through == "ckpt_path":
        trainer = pl.Trainer(**quiet, max_steps=4, max_epochs=1, plugins=[DurableCheckpointIO()])
        trainer.fit(ContractModule(trainer_class, job), BatchStream(range(9)), ckpt_path=record)
        assert trainer.global_step == 4
    else:
        ContractModule.load_from_checkpoint(record, plugin=trainer_class, job=job)
    assert trainer_class.loaded == (str(folder / "step-00000002"), {"steps": 2})


def loop(trainer: Any, **options: Any) -> Calls:
    """One run of two steps, with a checkpoint after the first."""
    calls = Calls()
    job = TrainingJobSpec("r", max_steps=2, metric_every=0, checkpoint_every=1)
    ctx = options.pop("ctx", StepContext(job=job))
    arguments = {"batches": [1, 2], "reporter": calls, "artifact_writer": calls, "uploader": calls, **options}
    run_training_loop(job=job, ctx=ctx, trainer=trainer, **arguments)
    return calls


def test_the_final_artifact_is_left_to_the_caller_who_uploads_it_once() -> None:
    """The older runtime did the same after its loop had returned."""
    calls = loop(Loads())
    uploaded = [path for name, path in calls.names if name == "upload_checkpoint"]
    assert uploaded == ["step", "step"]
    assert calls.names[-1] == ("completed", "final")


def test_the_dataset_of_the_context_is_the_callers_own_else_the_batches() -> None:
    trainer, batches = Loads(), [1, 2]
    loop(trainer, batches=batches)
    assert trainer.dataset is batches
    own = StepContext(job=TrainingJobSpec("r", max_steps=2), dataset="own")
    loop(trainer, ctx=own)
    assert trainer.dataset == "own"


@pytest.mark.parametrize(
    ("folders", "given", "expected"),
    [
        (["c/step-2/trainer"], "c/step-2.json", "c/step-2/trainer"),
        (["c/step-2"], "c/step-2.json", "c/step-2"),
        (["c"], "c/step-2.json", "c"),
        (["c/step-2"], "c/step-2", "c/step-2"),
    ],
    ids=["a record of ours", "an older record", "a file alone", "a folder"],
)
def test_load_checkpoint_gets_the_folder_that_belongs_to_the_path(
    tmp_path: Path, folders: list[str], given: str, expected: str
) -> None:
    """A text; and never None as payload."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    if given.endswith(".json"):
        (tmp_path / given).write_text("{}")
    trainer = Loads()
    loop(trainer, resume_checkpoint_path=str(tmp_path / given))
    assert trainer.loaded == (str(tmp_path / expected), {})
