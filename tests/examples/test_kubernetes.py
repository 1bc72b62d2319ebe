"""The manifests of `examples/kubernetes` are valid objects, and agree with genlight's behavior in a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from genlight.adapter.job.config import resolve_run_config

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
KINDS = {"job.yaml": "Job", "jobset.yaml": "JobSet"}


def objects_of(name):
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


def inner_job(objects):
    return (objects.get("Job") or objects["JobSet"]["spec"]["replicatedJobs"][0]["template"])["spec"]


@pytest.mark.parametrize("name", KINDS)
def test_every_object_is_one_of_the_published_schemas(name):
    """Its models drop unknown fields, and refuse one of a wrong type."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a development requirement; see pyproject.toml")
    checked = {
        "ConfigMap": (models.IoK8sApiCoreV1ConfigMap, lambda each: each),
        "Service": (models.IoK8sApiCoreV1Service, lambda each: each),
        "Job": (models.IoK8sApiBatchV1JobSpec, lambda each: each["spec"]),
        "JobSet": (models.JobsetV1alpha2JobSet, lambda each: each),
    }
    objects = objects_of(name)
    assert KINDS[name] in objects
    for kind, each in objects.items():
        model, part = checked[kind]
        assert model.from_dict(part(each)).to_dict() == part(each)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_and_names_that_belong_together_agree(name, tmp_path):
    objects = objects_of(name)
    job, pod = inner_job(objects), inner_job(objects)["template"]["spec"]
    (container,) = pod["containers"]
    environ = {variable["name"]: variable.get("value") for variable in container["env"]}
    (tmp_path / "job.json").write_text(objects["ConfigMap"]["data"]["job.json"])
    overrides = [word for word in container["command"][3:] if word != "--set"]
    config = resolve_run_config(spec_path=tmp_path / "job.json", overrides=overrides, environ={})

    assert container["command"][:3] == ["genlight", "run", "/etc/genlight/job.json"]
    assert config.warnings == ()
    assert config.resume_from_latest is True
    assert config.lightning["num_nodes"] == job["completions"] == job["parallelism"]
    assert (
        str(config.lightning["devices"])
        == environ["LOCAL_WORLD_SIZE"]
        == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert int(environ["WORLD_SIZE"]) == job["completions"] * int(environ["LOCAL_WORLD_SIZE"])
    assert environ["TRAINER_STOP_GRACE_SECONDS"] == str(pod["terminationGracePeriodSeconds"])
    (shared,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared")
    assert config.artifacts_dir.is_relative_to(shared)
    first = "digits-0" if name == "job.yaml" else "digits-node-0-0"
    assert environ["MASTER_ADDR"] == f"{first}.digits"
    actions = {
        str(rule.get("onExitCodes", {}).get("values")): rule["action"] for rule in job["podFailurePolicy"]["rules"]
    }
    assert (actions["[2]"], actions["[75]"]) == ("FailJob", "Ignore")
    assert "capability_token" not in json.loads((tmp_path / "job.json").read_text())
    (token,) = (each for each in container["env"] if each["name"] == "TRAINER_CAPABILITY_TOKEN")
    assert "secretKeyRef" in token["valueFrom"]
