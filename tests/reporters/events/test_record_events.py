"""The events of a run reach the event log that the run has opened."""

import re
from pathlib import Path

import pytest

from genlight.callbacks import Checkpoint, LogMetrics, WriteSamples
from genlight.callbacks.hook.hook import Hook
from genlight.reporters import EventLog, EventLogger, RecordEvents, read_events


@pytest.fixture
def log(tmp_path):
    with EventLog(tmp_path / "events.jsonl", run_id="r") as event_log:
        yield event_log


def told(log):
    return [
        (event["event"], event.get("name") or event.get("path"), event.get("step")) for event in read_events(log.path)
    ]


def test_a_run_has_started_and_its_samples_and_checkpoints_follow(log, fit, counting_trainer, tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=3)
    fit(counting_trainer(), [RecordEvents(log), WriteSamples(tmp_path, 2), checkpoint], enable_checkpointing=True)

    events = told(log)
    assert events[:2] == [("started", None, None), ("sample", str(tmp_path / "step-00000002.txt"), 2)]
    assert sorted(events[2:]) == [
        ("checkpoint", str(tmp_path / "c" / "final.json"), 4),
        ("checkpoint", str(tmp_path / "c" / "step-00000003.json"), 3),
        ("sample", str(tmp_path / "step-00000004.txt"), 4),
    ]


def test_a_checkpoint_is_told_by_the_path_that_the_trainers_own_hook_named(log, fit, counting_trainer, tmp_path):
    class Saving(counting_trainer):
        def save_checkpoint(self, *, state, step, output_dir, final, ctx):
            Path(output_dir, "lora.bin").write_bytes(b"weights")
            return {"primary_path": "lora.bin"}

    callbacks = [RecordEvents(log), Checkpoint(tmp_path / "c", every_n_steps=4)]
    fit(Saving(), callbacks, enable_checkpointing=True)

    paths = {path for kind, path, _ in told(log) if kind == "checkpoint"}
    assert str(tmp_path / "c" / "step-00000004" / "trainer" / "lora.bin") in paths


def test_what_another_callback_reports_at_the_start_comes_after_started(log, fit, counting_trainer):
    class Early(Hook):
        def on_train_start(self, trainer, pl_module):
            log.metric(name="early", value=1.0, step=0)

    fit(counting_trainer(), [RecordEvents(log), Early()], steps=1)

    assert [name for name, *_ in told(log)] == ["started", "metric"]


def test_the_metrics_up_to_a_checkpoint_are_in_the_log_before_it_is_saved(tmp_path, fit, counting_trainer):
    """If the process is killed during the save, a resumed run would not report them again."""
    seen = []

    class Looking(Hook):
        critical = True

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen.append([event["step"] for event in read_events(log.path) if event["event"] == "metric"])

    with EventLog(tmp_path / "events.jsonl", run_id="r") as log:
        callbacks = [RecordEvents(log), LogMetrics(1), Checkpoint(tmp_path / "c", every_n_steps=4), Looking()]
        logger = EventLogger()
        logger.attach(log)
        fit(counting_trainer(), callbacks, steps=6, logger=logger, enable_checkpointing=True)

    assert [max(steps) for steps in seen] == [4, 6]


ROOT = Path(__file__).parents[3]


def test_each_metric_that_genlight_adds_is_on_the_page_about_events():
    page = (ROOT / "reporters/README.md").read_text()
    sources = [path for folder in ("adapter", "callbacks", "reporters") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in sources for name in re.findall(r'"((?:trainer|data)/[a-z_]+)"', path.read_text())}
    assert "data/wait_fraction" in names
    assert sorted(name for name in names if f"`{name}`" not in page) == []
