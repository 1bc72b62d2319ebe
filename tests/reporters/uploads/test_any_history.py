"""Uploads in any history of queueing, faults, outages and restarts: each arrives once, complete and in order."""

import itertools

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from genlight.reporters.uploads.queue import read_entries

FAULTS = [
    *("ok", "500", "503", "408", "425", "429", "reset-before", "reset-mid-body", "reset-after", "half-close"),
    *("truncated", "slow-read", "garbage", "duplicate", "stall", "wrong-digest"),
]
"""Faults that pass. A file that meets `wrong-digest` too often counts as refused, so scripts are short."""


class Run(RuleBasedStateMachine):
    def __init__(self, chaos, folder, open_uploader):
        super().__init__()
        self.chaos, self.folder, self.open_uploader = chaos, folder, open_uploader
        folder.mkdir(parents=True)
        chaos.control(directory=str(folder / "server"), script=[], outage=False, stall_s=0.05)
        self.restart()
        self.queued = {"checkpoint": [], "sample": [], "metrics": []}
        self.step = 0

    uploader = None

    @rule(kind=st.sampled_from(["checkpoint", "sample", "metrics"]), size=st.sampled_from([0, 1, 5_000, 300_000]))
    def queue(self, kind, size):
        self.step += 1
        self.queued[kind].append(self.step)
        if kind == "metrics":
            return self.uploader.enqueue_metrics({"size": size}, self.step)
        (self.folder / f"{self.step}.bin").write_bytes(bytes([self.step]) * size)
        return self.queue_file(kind, self.step)

    def queue_file(self, kind, step):
        self.uploader.enqueue(kind, self.folder / f"{step}.bin", step=step)

    @rule(kind=st.sampled_from(["checkpoint", "sample"]))
    def queue_the_newest_again(self, kind):
        if self.queued[kind]:
            self.queue_file(kind, self.queued[kind][-1])

    @rule(script=st.lists(st.sampled_from(FAULTS), max_size=3))
    def disturb(self, script):
        self.chaos.control(script=script)

    @rule(outage=st.booleans())
    def cut_or_mend(self, outage):
        self.chaos.control(outage=outage)

    @rule()
    def restart(self):
        if self.uploader is not None:
            self.uploader.close()
        self.uploader = self.open_uploader(self.chaos, queue_dir=self.folder / "uploads")

    @rule()
    def settle(self):
        self.chaos.control(outage=False, script=[])
        assert self.uploader.settle() is None
        assert self.uploader.queue.entries() == read_entries(self.folder / "uploads") == []
        for kind, steps in self.queued.items():
            assert [message["step"] for message in self.chaos.messages(f"/{kind}")] == steps
        paths = {path.name: path.read_bytes() for path in self.folder.glob("*.bin")}
        received = {name.partition("-")[2].partition("-")[2]: data for name, data in self.chaos.files().items()}
        assert received == paths
        assert len([item for item in self.chaos.state["applied"] if "file" in item]) == len(paths)

    def teardown(self):
        self.settle()
        self.uploader.close()


def test_each_upload_arrives_once_complete_and_in_order(chaos, tmp_path, uploader_for):
    numbers = itertools.count()

    def start():
        folder = tmp_path / str(next(numbers))
        chaos.directory = folder / "server"
        return Run(chaos, folder, uploader_for)

    # To make a failing history shorter would take minutes, because each try waits for retries.
    fast = settings(max_examples=25, stateful_step_count=20, phases=[Phase.generate])
    run_state_machine_as_test(start, settings=fast)
