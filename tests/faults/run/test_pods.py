"""The pods of `examples/kubernetes/job.yaml` as processes, and the actions of its policy for their exit codes."""

import functools
import signal
from pathlib import Path

import pytest
import yaml

from support.ports import free_port

pytestmark = pytest.mark.slow

MANIFEST = Path(__file__).parents[3] / "examples" / "kubernetes" / "job.yaml"


@pytest.fixture
def pods(job):
    """Start each pod of the manifest as a process; return the processes and the rules for their exit codes."""

    def started():
        (manifest,) = (each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "Job")
        config_map = {"data": {"job.json": job.spec.read_text()}}
        spec = mount(config_map["data"], job.folder / "etc")
        pod = manifest["spec"]["template"]["spec"]["containers"][0]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(manifest["spec"]["completions"])}
        environ = {variable["name"]: variable.get("value") for variable in pod["env"]} | place
        environ.pop("TRAINER_CAPABILITY_TOKEN")
        arguments = [str(spec) if word == "/etc/genlight/job.json" else word for word in pod["command"][1:]]
        changes = {"devices=8": "devices=1", "/shared/digits/runs/digits": str(job.out)}
        arguments = [functools.reduce(lambda text, old: text.replace(old, changes[old]), changes, w) for w in arguments]
        processes = []
        for index in range(manifest["spec"]["completions"]):
            own = environ | {"NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}
            processes.append(job.fork(*arguments, **own))
        return processes, manifest["spec"]["podFailurePolicy"]["rules"]

    job.out = job.folder / "runs" / "faulty"
    return started


def mount(data, folder):
    """Write the job spec as the kubelet mounts a ConfigMap: its files are symbolic links."""
    versions = folder / "..2026"
    versions.mkdir(parents=True, exist_ok=True)
    (versions / "job.json").write_text(data["job.json"])
    for link, target in ((folder / "..data", "..2026"), (folder / "job.json", "..data/job.json")):
        if not link.is_symlink():
            link.symlink_to(target)
    return folder / "job.json"


def write(job, plan=None, **fields):
    fields = {"max_steps": 400, "mock_batches": list(range(800)), "checkpoint_every": 100, **fields}
    trainer = {"accelerator": "cpu", "strategy": "ddp"}
    job.write(plan={"accumulates": 2, **(plan or {})}, lightning=trainer, **fields)
    job.environ = {"TRAINER_ARTIFACTS_DIR": ""}


def actions(processes, rules):
    """Return the action of the Job's controller for each pod, by the first rule that matches."""
    codes = [process.wait(120) for process in processes]

    def action(code):
        matching = [rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", [])]
        return [*matching, "Count"][0] if code else "Succeeded"

    return [action(code) for code in codes]


def final_weights(job):
    return (job.out / "checkpoints/final/model.safetensors").read_bytes()


def test_a_terminated_pod_restarts_all_pods_without_counting_and_the_run_resumes_exactly(job, pods, tmp_path):
    write(job)
    assert actions(*pods()) == ["Succeeded", "Succeeded"]
    expected = final_weights(job)
    job.out.rename(tmp_path / "uninterrupted")

    write(job, {"at": "train_step:150", "rank": 1, "holds": 60.0})
    processes, rules = pods()
    job.wait_until(lambda: job.reached(1), processes[1])
    processes[1].send_signal(signal.SIGTERM)
    job.go()
    assert actions(processes, rules) == ["Ignore", "Ignore"]
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("preempted", True)
    assert (job.out / f"checkpoints/step-{failed['step']:08d}.json").exists()

    assert actions(*pods()) == ["Succeeded", "Succeeded"]
    assert [event["step"] for event in job.events() if event["event"] == "completed"] == [400]
    assert final_weights(job) == expected


def test_a_job_that_cannot_be_run_fails_at_once(job, pods):
    write(job, trainer="no_such_module:Trainer")

    assert actions(*pods()) == ["FailJob", "FailJob"]
    assert job.terminal_event()["category"] == "startup"
