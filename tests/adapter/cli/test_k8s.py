"""``genlight k8s render``: what it prints, which no cluster is needed for."""

import json
import math
import os
import subprocess
import sys

import pytest
import yaml

from genlight.adapter.cli import main
from genlight.adapter.cluster.manifest import yaml_of
from genlight.callbacks.checkpoint import newest_valid
from support.saving_trainer import SAVING_TRAINER

USUAL = ("--image", "registry.example/train:1", "--volume", "training")


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.json"
    write(path)
    return path


def write(path, **fields):
    dataset = {"parquet_paths": ["rows/*.parquet", "/data/more.parquet", "https://example.com/x.parquet"]}
    spec = {"run_id": "A run", "trainer": "m:T", "max_steps": 3, "dataset": dataset, **fields}
    path.write_text(json.dumps({name: value for name, value in spec.items() if value is not ...}))


def rendered(capsys, *words, usual=USUAL):
    code = main(["k8s", "render", "job.json", *usual, *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def documents(capsys, *words):
    code, text, errors = rendered(capsys, *words)
    assert (code, errors) == (0, "")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pod_of(objects):
    return objects["Job"]["spec"]["template"]["spec"]


def test_each_node_is_a_pod_that_starts_its_own_ranks_and_finds_the_first_by_the_service(job, capsys):
    objects = documents(capsys, "--nodes", "4", "--gpus-per-node", "8", "--memory", "200Gi")
    spec, service = objects["Job"]["spec"], objects["Service"]
    container = pod_of(objects)["containers"][0]

    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert container["command"][:3] == ["genlight", "run", "/etc/genlight/job.json"]
    for setting in ("resume_from_latest=true", "lightning.devices=8", "lightning.num_nodes=4"):
        assert setting in container["command"]
    environ = {variable["name"]: variable for variable in container["env"]}
    assert environ["MASTER_ADDR"]["value"] == "a-run-0.a-run"
    assert environ["WORLD_SIZE"]["value"] == "32"
    index = environ["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert service["metadata"]["name"] == pod_of(objects)["subdomain"] == "a-run"
    assert service["spec"]["clusterIP"] == "None"
    assert container["resources"]["limits"] == {"memory": "200Gi", "nvidia.com/gpu": "8"}


def test_the_policy_knows_the_exit_codes(job, capsys):
    spec = documents(capsys, "--restarts", "2")["Job"]["spec"]

    failed, stopped, disrupted = spec["podFailurePolicy"]["rules"]
    assert (failed["action"], failed["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (2, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_a_jobset_fails_at_once_where_its_job_does_and_counts_the_restarts_of_the_whole(job, capsys):
    spec = documents(capsys, "--jobset", "--nodes", "2", "--restarts", "5")["JobSet"]["spec"]

    assert spec["failurePolicy"]["maxRestarts"] == 5
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    inner = spec["replicatedJobs"][0]["template"]["spec"]
    assert (inner["backoffLimitPerIndex"], inner["completions"]) == (0, 2)
    environ = inner["template"]["spec"]["containers"][0]["env"]
    assert {"name": "MASTER_ADDR", "value": "a-run-node-0-0.a-run"} in environ


def test_paths_that_begin_in_the_jobs_folder_are_those_of_the_pods(job, capsys):
    place = ("--volume", "training:/mnt", "--folder", "/mnt/demo")
    objects = documents(capsys, *place, "--set", "max_steps=5")
    spec = json.loads(objects["ConfigMap"]["data"]["job.json"])

    places = ["/mnt/demo/rows/*.parquet", "/data/more.parquet", "https://example.com/x.parquet"]
    assert spec["dataset"]["parquet_paths"] == places
    container = pod_of(objects)["containers"][0]
    assert container["workingDir"] == "/mnt/demo"
    assert "artifacts_dir=/mnt/demo/runs/A%20run" in container["command"]
    assert container["command"][-2:] == ["--set", "max_steps=5"]

    (job.parent / "owner").mkdir()
    (job.parent / "owner/model").touch()
    inputs = {"base_model_ref": "owner/model", "dataset_parquet_refs": ["owner/name", "./x.parquet"]}
    write(job, dataset={"batch_size": 2}, inputs=inputs)
    spec = json.loads(documents(capsys, *place)["ConfigMap"]["data"]["job.json"])
    assert spec["inputs"]["base_model_ref"] == "/mnt/demo/owner/model"
    assert spec["inputs"]["dataset_parquet_refs"] == ["owner/name", "/mnt/demo/x.parquet"]


def test_the_token_comes_from_a_secret_and_never_into_the_manifest(job, capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", "s3cret-of-this-shell")
    write(job, orchestrated=True)
    _, text, _ = rendered(capsys, "--token-secret", "hub:key", "--env-secret", "hf")

    assert "s3cret" not in text
    container = list(yaml.safe_load_all(text))[-1]["spec"]["template"]["spec"]["containers"][0]
    token = {"secretKeyRef": {"name": "hub", "key": "key"}}
    assert {"name": "TRAINER_CAPABILITY_TOKEN", "valueFrom": token} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "hf"}}]


def test_the_output_depends_on_the_arguments_alone_and_loads_no_torch(job, capsys, tmp_path):
    program = "import sys; from genlight.adapter.cli import main; code = main(); "
    program += "print('heavy', [n for n in ('torch', 'lightning', 'numpy') if n in sys.modules], file=sys.stderr)"
    outputs = []
    for folder, seed in ((tmp_path, "1"), (tmp_path.parent, "2")):
        done = subprocess.run(
            [sys.executable, "-c", program, "k8s", "render", str(job), *USUAL, "--nodes", "3"],
            cwd=folder, env={**os.environ, "PYTHONHASHSEED": seed, "TRAINER_ARTIFACTS_DIR": str(folder)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "heavy []" in done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]

    main(["k8s", "render", "job.json", *USUAL, "--nodes", "3", "-o", "job.yaml"])
    assert (tmp_path / "job.yaml").read_text() == outputs[0]


def test_a_pod_gets_the_time_of_a_save_of_the_runs_largest_checkpoint(job, capsys, monkeypatch):
    assert pod_of(documents(capsys))["terminationGracePeriodSeconds"] == 120

    (job.parent / "saving_trainer.py").write_text(SAVING_TRAINER)
    write(job, trainer="saving_trainer:Counts", dataset=..., mock_batches=[1, 2, 3], lightning={"accelerator": "cpu"})
    assert main(["run", "job.json"]) == 0
    capsys.readouterr()
    record = newest_valid(job.parent / "runs/A%20run/checkpoints")[0]
    monkeypatch.setattr("genlight.adapter.cli.k8s.SLOWEST_SAVE_BYTES_S", 1.0)
    expected = math.ceil(1.5 * record.size_bytes + 60)  # a margin, and a minute for the uploads
    pod = pod_of(documents(capsys))
    assert pod["terminationGracePeriodSeconds"] == expected
    assert {"name": "TRAINER_STOP_GRACE_SECONDS", "value": str(expected)} in pod["containers"][0]["env"]
    assert pod_of(documents(capsys, "--grace", "300"))["terminationGracePeriodSeconds"] == 300


FAULTS = [
    (["--name", "9lives"], "Invalid `name`. Expected lower-case letters"),
    (["--name", "a" * 61, "--nodes", "11"], "is too long by 1: a pod is named"),
    (["--name", "a" * 49, "--jobset"], "is too long by 1: a pod is named"),
    (["--namespace", "Mine"], "Invalid `namespace`"),
    (["--nodes", "0"], "Invalid `nodes`. Expected a number >= 1, but received 0."),
    (["--memory", "lots"], "Invalid `memory`. Expected a quantity such as 16 or 200Gi, but received 'lots'."),
    (["--volume", "training:/etc/genlight"], "would hide '/etc/genlight/job.json'"),
    (["--set", "artifacts_dir=/elsewhere"], "The run's folder '/elsewhere' is not on the volume"),
    (["--env", "MASTER_ADDR=x"], "Invalid variable 'MASTER_ADDR'. The manifest sets it itself."),
    (["--env", "WANDB_API_KEY=0123456789"], "The value of WANDB_API_KEY would be shown"),
    (["--label", "queue"], "Invalid `--label`. Expected NAME=VALUE, but received 'queue'."),
    (["--toleration", "gpu"], "Invalid `tolerations`. Expected KEY[=VALUE]:EFFECT, but received 'gpu'."),
    (["--jobset", "--time", "60"], "no effect on a JobSet"),
    (["--set", "capability_token=s3cret-token"], "The job holds a token or other credentials"),
    (["--set", "max_runtime_seconds=60"], "The job has `max_runtime_seconds`"),
    (["--set", "cancel_file_path=cancel"], "The job has `cancel_file_path`"),
    (["--set", "resume_checkpoint_path=x.json"], "every start of a pod would begin there anew"),
    (["--set", "max_steps=no"], "startup.invalid_job_spec"),
    (["--token-secret", "hub:not a key"], "Invalid `token`"),
]


@pytest.mark.parametrize(("words", "text"), FAULTS, ids=[" ".join(words)[:40] for words, _ in FAULTS])
def test_what_cannot_be_used_is_told_and_nothing_is_printed(job, capsys, words, text):
    code, shown, errors = rendered(capsys, *words)

    assert (code, shown) == (2, "")
    assert text in errors
    assert "s3cret" not in errors


def test_all_faults_come_at_once(job, capsys):
    _, _, errors = rendered(capsys, "--name", "A", "--nodes", "0", "--cpus", "x", "--env", "x", "--user", "-1")
    assert errors.count("\n  - ") == 5


def test_another_action_is_offered_the_right_one(job, capsys):
    assert main(["k8s", "rendr", "job.json", *USUAL]) == 2
    assert "Did you mean `render`?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e3", "y", "No", "0o7", "1_0", "null", "~", "a: b", " a", "$(HOME)", "08", "é", "-"])
def test_texts_stay_texts_for_parsers_of_every_version(text):
    shown = yaml_of([{"value": text}])
    assert shown == f'value: "{text}"\n' or not text.isascii()
    assert yaml.safe_load(shown) == {"value": text}


def test_what_looks_like_a_variable_of_kubernetes_is_taken_as_it_is(job, capsys):
    container = pod_of(documents(capsys, "--env", "A=$(B)"))["containers"][0]
    assert {"name": "A", "value": "$$(B)"} in container["env"]


def test_pods_may_go_to_nodes_that_are_kept_for_them(job, capsys):
    pod = pod_of(documents(capsys, "--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=a:NoExecute"))
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
    ]


OPTIONS = [
    (),
    ("--nodes", "4", "--gpus-per-node", "8", "--cpus", "16", "--memory", "200Gi", "--time", "3600", "--user", "0"),
    ("--token-secret", "hub", "--env-secret", "hf", "--env", "A=1e3", "--label", "kueue.x-k8s.io/queue-name=q"),
    ("--jobset", "--nodes", "2", "--namespace", "training", "--node-selector", "gpu=h100"),
    ("--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=vision:NoExecute"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options[:3]))
def test_every_object_is_one_of_the_published_schemas(job, capsys, options):
    """Whose models drop a field that they do not know, and refuse one of a wrong type."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a development requirement; see pyproject.toml")
    objects = documents(capsys, *options)
    checked = {
        "ConfigMap": (models.IoK8sApiCoreV1ConfigMap, objects["ConfigMap"]),
        "Service": (models.IoK8sApiCoreV1Service, objects.get("Service")),
        "Job": (models.IoK8sApiBatchV1JobSpec, objects.get("Job", {}).get("spec")),
        "JobSet": (models.JobsetV1alpha2JobSet, objects.get("JobSet")),
    }
    for kind in objects:
        model, wanted = checked[kind]
        assert model.from_dict(wanted).to_dict() == wanted
