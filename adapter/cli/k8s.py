"""Run a job on a Kubernetes cluster: render prints its objects, for kubectl apply.

The output is a ConfigMap with the job spec, and an indexed Job with its Service, or a JobSet. A pod is a node. The
job's own folder, with its trainer and its data, has to be in the pods: on the shared volume, or in the image. Exit
codes: 0 rendered, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import math
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint.selection import list_checkpoints
from ...callbacks.stop.sources import SAVE_MARGIN
from ..cluster.kubernetes import KubernetesJob
from ..cluster.manifest import yaml_of
from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig, resolve_run_config
from ..job.refs import looks_like_path
from ..job.sources import folder_name
from ..plumbing.durable import write_bytes_durably
from ..plumbing.failures import EXIT_COMPLETED, EXIT_STARTUP
from ..plumbing.redaction import is_secret_name, secrets_in
from ..plumbing.text import nearest
from ..plumbing.urls import has_scheme
from .parser import add_overrides

__all__ = ["add_arguments", "run"]

ACTIONS = ("render",)
TOKEN_KEY = "token"  # noqa: S105 - the name of a key
TOKEN_VARIABLE = "TRAINER_CAPABILITY_TOKEN"  # noqa: S105
DEFAULT_GRACE_S = 120
"""A step of half a minute, a save of some gigabytes, and a minute for its uploads."""
SLOWEST_SAVE_BYTES_S = 100e6
"""What a shared volume should at least write in a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", metavar=f"{{{','.join(ACTIONS)}}}")
    parser.add_argument("path", metavar="JOB.json", help="the job spec")
    add_overrides(parser, "override a setting of the job, as in genlight run")
    parser.add_argument("--image", required=True, metavar="IMAGE", help="with genlight and what the trainer needs")
    parser.add_argument(
        "--volume", required=True, metavar="CLAIM[:PATH]", help="volume that all pods share, mounted at /shared"
    )
    parser.add_argument("--folder", metavar="PATH", help="the job's own folder in the pods; default: the volume")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="pods")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each pod, one rank for each")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: one for each GPU, else 1")
    parser.add_argument("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="default: nvidia.com/gpu")
    parser.add_argument("--cpus", metavar="QUANTITY", help="of each pod")
    parser.add_argument("--memory", metavar="QUANTITY", help="of each pod, such as 200Gi; /dev/shm counts")
    parser.add_argument("--name", metavar="NAME", help="of all objects; default: made from the run id")
    parser.add_argument("--namespace", metavar="NAME")
    parser.add_argument("--jobset", action="store_true", help="a JobSet, which restarts all pods together")
    parser.add_argument(
        "--restarts", type=int, default=6, metavar="N", help="starts after failures (6); preemptions do not count"
    )
    parser.add_argument("--time", type=int, metavar="SECONDS", help="limit of the Job, over all its starts")
    parser.add_argument(
        "--grace",
        type=int,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL; default: 120, or what the run's largest checkpoint takes at 100 MB/s",
    )
    parser.add_argument("--token-secret", metavar="SECRET[:KEY]", help="Secret of the capability token; KEY: token")
    parser.add_argument(
        "--env-secret", action="append", default=[], metavar="SECRET", help="Secret whose keys become variables"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the pods")
    parser.add_argument("--user", type=int, default=1000, metavar="UID", help="user and group (1000); 0 is root")
    parser.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="of the Job, such as its queue's"
    )
    parser.add_argument(
        "--node-selector", action="append", default=[], metavar="NAME=VALUE", help="label that nodes must have"
    )
    parser.add_argument(
        "--toleration",
        action="append",
        default=[],
        metavar="KEY[=VALUE]:EFFECT",
        help="taint of nodes that may be used",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="default: standard output")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, or 2 for what cannot be used."""
    if args.action not in ACTIONS:
        offered = nearest(args.action, ACTIONS, alike=0.6)
        return _complain(f"there is no action {args.action!r}; choose from {', '.join(ACTIONS)}.{offered}")
    try:
        job = kubernetes_job(args)
    except (StartupContractError, ValueError) as error:
        return _complain(str(error))
    text = yaml_of(job.documents(), comment=_comment(job))
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_bytes_durably(Path(args.output), text.encode())
    return EXIT_COMPLETED


def kubernetes_job(args: argparse.Namespace) -> KubernetesJob:
    """What the arguments of ``render`` ask for; nothing of this machine's environment goes into it.

    Raises:
        StartupContractError: The job cannot be used.
        ValueError: An argument, or something in the job, cannot be used on a cluster; every fault is listed.
    """
    token = _token(args.token_secret)
    environ = {} if token is None else {TOKEN_VARIABLE: "known to the pods"}
    config = resolve_run_config(spec_path=args.path, overrides=args.set, environ=environ)
    spec = json.loads(Path(args.path).read_bytes())
    faults = list(_faults_of_job(config, spec, args.set))
    variables, labels, selector = (
        _pairs(name, texts, faults)
        for name, texts in (("env", args.env), ("label", args.label), ("node-selector", args.node_selector))
    )
    faults += [
        f"The value of {name} would be shown. Put it into a Secret, and name that by --env-secret."
        for name, value in variables.items()
        if is_secret_name(name) or secrets_in(value)
    ]
    claim, _, mount = args.volume.partition(":")
    mount = mount or "/shared"
    folder = args.folder or mount
    try:
        job = KubernetesJob(
            name=args.name or _name_of(config.run_id),
            spec=json.dumps(_in_pods(spec, config.spec_dir, folder), indent=2, ensure_ascii=False) + "\n",
            image=args.image,
            nodes=args.nodes,
            ranks_per_node=(args.gpus_per_node or 1) if args.ranks_per_node is None else args.ranks_per_node,
            gpus_per_node=args.gpus_per_node,
            gpu_resource=args.gpu_resource,
            cpus=args.cpus,
            memory=args.memory,
            claim=claim,
            mount=mount,
            folder=folder,
            artifacts=_artifacts(args.set, folder, config.run_id),
            grace_s=_grace_s(config) if args.grace is None else args.grace,
            restarts=args.restarts,
            time_limit_s=args.time,
            token=token,
            secrets=args.env_secret,
            variables=variables,
            user=args.user,
            namespace=args.namespace,
            labels=labels,
            node_selector=selector,
            tolerations=args.toleration,
            overrides=[text for text in args.set if not text.startswith("artifacts_dir=")],
            jobset=args.jobset,
        )
    except ValueError as error:
        faults += str(error).splitlines()
    if faults:
        raise ValueError("\n  - ".join(["this job cannot be rendered:", *faults]))
    return job


def _faults_of_job(config: RunConfig, spec: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    shown = [*secrets_in(spec), *([] if config.source_of("capability_token") != "--set" else ["the token"])]
    if shown or secrets_in(_settings(overrides)):
        yield (
            "The job holds a token or other credentials, which the manifest would show. Put the token into a Secret, "
            "name that by --token-secret, and leave it out of the job; others become variables by --env-secret."
        )
    if config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref:
        yield (
            "The job names a checkpoint to resume from, and every start of a pod would begin there anew. Leave it out; "
            "pods go on from the newest one in the run's folder."
        )
    for name, value in (("max_runtime_seconds", config.max_runtime_s), ("cancel_file_path", config.cancel_file)):
        if value is not None:
            yield (
                f"The job has `{name}`, which ends a pod with exit code 75, and that has it started again. Leave it "
                "out; --time limits the Job, and `kubectl delete` or `suspend: true` stops it with a checkpoint."
            )


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    return dict(text.partition("=")[::2] for text in overrides)


def _token(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, _, key = text.partition(":")
    return name, key or TOKEN_KEY


def _pairs(option: str, texts: Sequence[str], faults: list[str]) -> dict[str, str]:
    faults += [
        f"Invalid `--{option}`. Expected NAME=VALUE, but received {text!r}." for text in texts if "=" not in text
    ]
    return _settings([text for text in texts if "=" in text])


def _name_of(run_id: str) -> str:
    """The run id as a name that Kubernetes takes, as far as it has letters."""
    name = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _artifacts(overrides: Sequence[str], folder: str, run_id: str) -> str:
    given = _settings(overrides).get("artifacts_dir", f"runs/{folder_name(run_id)}")
    return posixpath.normpath(posixpath.join(folder, given))


def _grace_s(config: RunConfig) -> int:
    """From the largest checkpoint of the run, where it has some here; the uploads of a stop come on top."""
    sizes = [found.record.size_bytes for found in list_checkpoints(config.checkpoints_dir) if found.record is not None]
    save_s = SAVE_MARGIN * max(sizes, default=0) / SLOWEST_SAVE_BYTES_S
    return max(DEFAULT_GRACE_S, math.ceil(save_s + config.upload_deadline_s))


def _in_pods(spec: Mapping[str, Any], spec_dir: Path, folder: str) -> dict[str, Any]:
    """The job spec with the paths that begin in its folder as they are in a pod, where the spec lies elsewhere."""

    def path(text: Any) -> Any:
        is_relative = isinstance(text, str) and not has_scheme(text) and not text.startswith(("/", "~"))
        return posixpath.normpath(posixpath.join(folder, text)) if is_relative else text

    def reference(text: Any) -> Any:
        is_path = isinstance(text, str) and (looks_like_path(text) or (spec_dir / text).exists())
        return path(text) if is_path else text

    def each(change: Any, value: Any) -> Any:
        return [change(text) for text in value] if isinstance(value, list) else change(value)

    placed = dict(spec)
    dataset, inputs, samples = (spec.get(name) for name in ("dataset", "inputs", "sample_prompts"))
    if isinstance(dataset, dict) and "parquet_paths" in dataset:
        placed["dataset"] = {**dataset, "parquet_paths": each(path, dataset["parquet_paths"])}
    if isinstance(inputs, dict):
        placed["inputs"] = {name: each(reference, value) for name, value in inputs.items()}
    if isinstance(samples, list):
        placed["sample_prompts"] = [
            {**sample, "source_image": reference(sample["source_image"])}
            if isinstance(sample, dict) and "source_image" in sample
            else sample
            for sample in samples
        ]
    return placed


def _comment(job: KubernetesJob) -> list[str]:
    kind = "JobSet" if job.jobset else "Job"
    counted = "all pods are started again, which counts" if job.jobset else "its pods are started again, which counts"
    return [
        "Made by `genlight k8s render`.",
        f"Pods: {job.nodes}; ranks in each: {job.ranks_per_node}. Every pod exits with the code of the run:",
        "  0   completed",
        "  75  stopped after a save (drained, preempted, suspended): the pods come back, which does not count",
        f"  2   the job cannot be run: the {kind} fails at once",
        f"  1 and others: {counted}",
        f"Every start goes on from the newest whole checkpoint in {job.artifacts}.",
    ]


def _complain(text: str) -> int:
    sys.stderr.write(f"genlight k8s: {text}\n")
    return EXIT_STARTUP
