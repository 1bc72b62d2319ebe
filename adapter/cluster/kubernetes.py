"""A job as Kubernetes objects: a ConfigMap with its spec, and an indexed Job with its Service, or a JobSet.

Each pod is a node: it runs ``genlight run``, which starts the other ranks of its GPUs itself. The ranks of all pods end
together and with one exit code, so that every pod is started again, or none is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plumbing.failures import EXIT_STARTUP, EXIT_STOPPED

__all__ = ["CONTAINER", "JOB_PATH", "KubernetesJob"]

CONTAINER = "genlight"
JOB_PATH = "/etc/genlight/job.json"
"""Where a pod finds the job spec."""
MASTER_PORT = 29500
"""Each pod has ports of its own."""
LARGEST_SPEC_BYTES = 900_000
"""A ConfigMap takes 1 MiB."""
REPLICATED_JOB = "node"
"""The name of the one job in a JobSet."""
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
OWN_VARIABLES = (
    *("HOME", "USER", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    *("TRAINER_STOP_GRACE_SECONDS", "TRAINER_CAPABILITY_TOKEN"),
)

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SECRET_KEY = re.compile(r"[-.\w]+", re.ASCII)
_LABEL_NAME = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-.\w]{0,61}[A-Za-z0-9])?", re.ASCII)
_TAINT = re.compile(
    r"(?P<key>[-./\w]+)(=(?P<value>[-.\w]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)", re.ASCII
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-.\w]{0,61}[A-Za-z0-9])?)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What is asked of a cluster; `documents` are the objects.

    Raises:
        ValueError: A name, number or path cannot be used; every fault is listed.
    """

    name: str
    """Of all objects; a DNS-1123 label that begins with a letter, as a Service's has to."""
    spec: str
    """The job spec, as JSON; its paths are those of a pod, and it holds no secret."""
    image: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str | None = None
    """Of a pod, such as ``16`` or ``500m``."""
    memory: str | None = None
    """Of a pod, such as ``200Gi``; what is written to ``/dev/shm`` counts."""
    claim: str
    """The PersistentVolumeClaim that all pods mount, ``ReadWriteMany`` where they may be on several nodes."""
    mount: str = "/shared"
    """Where they mount it."""
    folder: str
    """Where the job's own folder lies in a pod: its working directory, with the trainer's module and the data."""
    artifacts: str
    """The run's folder, on the volume."""
    grace_s: int = 120
    """How long after SIGTERM a pod is killed."""
    restarts: int = 6
    """How often a pod, or with a JobSet the whole, is started again after a failure."""
    time_limit_s: int | None = None
    """After which the cluster stops the Job, over all its starts; a JobSet has no such limit."""
    token: tuple[str, str] | None = None
    """Name and key of the Secret with the capability token."""
    secrets: Sequence[str] = ()
    """Secrets whose keys become variables of the pods."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the pods, none of them secret."""
    user: int = 1000
    """The user and group of the processes; 0 is root."""
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the Job or JobSet, such as the name of its queue."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[str] = ()
    """Taints of nodes that do not keep the pods away, as ``KEY:EFFECT`` or ``KEY=VALUE:EFFECT``."""
    overrides: Sequence[str] = ()
    """``--set`` of every pod."""
    jobset: bool = False

    def __post_init__(self) -> None:
        faults = [*self._numbers(), *self._names(), *self._texts(), *self._paths()]
        if faults:
            raise ValueError("\n".join(faults))

    def _numbers(self) -> Iterator[str]:
        least = {"nodes": 1, "ranks_per_node": 1, "gpus_per_node": 1, "grace_s": 1, "time_limit_s": 1}
        for name, low in {**least, "restarts": 0, "user": 0}.items():
            number = getattr(self, name)
            if number is not None and number < low:
                yield f"Invalid `{name}`. Expected a number >= {low}, but received {number}."
        if self.jobset and self.time_limit_s is not None:
            yield "`time_limit_s` has no effect on a JobSet. Leave it out, or render a Job."

    def _names(self) -> Iterator[str]:
        pod = self._pod(max(self.nodes, 1) - 1)
        if not _SERVICE.fullmatch(self.name):
            yield (
                f"Invalid `name`. Expected lower-case letters, digits and dashes that begin with a letter and end with "
                f"none of the dashes (DNS-1123), but received {self.name!r}."
            )
        elif len(pod) > self._longest_pod:
            excess = len(pod) - self._longest_pod
            yield f"Invalid `name`. {self.name!r} is too long by {excess}: a pod is named {pod!r}."
        if self.namespace is not None and not (_LABEL.fullmatch(self.namespace) and len(self.namespace) <= 63):
            yield f"Invalid `namespace`. Expected a DNS-1123 label, but received {self.namespace!r}."
        token = [] if self.token is None else [("token", self.token[0])]
        for what, name in [("claim", self.claim), *token, *(("secrets", name) for name in self.secrets)]:
            if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
                yield f"Invalid `{what}`. Expected a DNS-1123 name, but received {name!r}."
        if self.token is not None and not _SECRET_KEY.fullmatch(self.token[1]):
            yield f"Invalid `token`. Expected a key of a Secret, but received {self.token[1]!r}."

    @property
    def _longest_pod(self) -> int:
        return 63 - len("-abcde") if self.jobset else 63

    def _texts(self) -> Iterator[str]:
        if not re.fullmatch(r"[!-~]+", self.image):
            yield f"Invalid `image`. Expected a string without blanks, but received {self.image!r}."
        for what in ("cpus", "memory"):
            quantity = getattr(self, what)
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                yield f"Invalid `{what}`. Expected a quantity such as 16 or 200Gi, but received {quantity!r}."
        for name in self.variables:
            if not _VARIABLE.fullmatch(name):
                yield f"Invalid variable {name!r}. Expected letters, digits and underscores."
            elif name in OWN_VARIABLES:
                yield f"Invalid variable {name!r}. The manifest sets it itself."
        for what, pairs in (("labels", self.labels), ("node_selector", self.node_selector)):
            for name, value in pairs.items():
                if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
                    yield f"Invalid `{what}`. {f'{name}={value}'!r} is not a label."
        for text in self.tolerations:
            if not _TAINT.fullmatch(text):
                yield f"Invalid `tolerations`. Expected KEY[=VALUE]:EFFECT, but received {text!r}."
        if not _LABEL_NAME.fullmatch(self.gpu_resource):
            yield f"Invalid `gpu_resource`. Expected a name such as nvidia.com/gpu, but received {self.gpu_resource!r}."
        if len(self.spec.encode()) > LARGEST_SPEC_BYTES:
            yield (
                f"The job spec has {len(self.spec.encode()):,} bytes, and a ConfigMap takes {LARGEST_SPEC_BYTES:,}. "
                "Put its data into files on the volume."
            )

    def _paths(self) -> Iterator[str]:
        for what in ("mount", "folder", "artifacts"):
            path = getattr(self, what)
            if not path.startswith("/") or posixpath.normpath(path) != path or path == "/" or ":" in path:
                yield f"Invalid `{what}`. Expected an absolute path, but received {path!r}."
        spec_folder = posixpath.dirname(JOB_PATH)
        if f"{spec_folder}/".startswith(f"{self.mount}/") or self.mount.startswith(f"{spec_folder}/"):
            yield f"Invalid `mount`. {self.mount!r} would hide {JOB_PATH!r}."
        if not f"{self.artifacts}/".startswith(f"{self.mount}/"):
            yield (
                f"The run's folder {self.artifacts!r} is not on the volume, which is mounted at {self.mount!r}. All "
                "pods have to see it, and it has to outlive them."
            )

    def _pod(self, index: int) -> str:
        """The name of a pod as its host name and its Service have it."""
        middle = f"{self.name}-{REPLICATED_JOB}-0" if self.jobset else self.name
        return f"{middle}-{index}"

    def documents(self) -> list[dict[str, Any]]:
        """The objects, in the order in which they are to be made."""
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(),
            "data": {posixpath.basename(JOB_PATH): self.spec},
        }
        if self.jobset:
            return [config_map, self._jobset()]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
            },
        }
        spec = {**self._job(self.restarts), "template": self._template()}
        if self.time_limit_s is not None:
            spec = {"activeDeadlineSeconds": self.time_limit_s, **spec}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(self.labels), "spec": spec}
        return [config_map, service, job]

    def _metadata(self, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        own = {"app.kubernetes.io/name": "genlight", "app.kubernetes.io/instance": self.name}
        place = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **place, "labels": {**own, **(labels or {})}}

    def _job(self, restarts: int) -> dict[str, Any]:
        # The limit is for each index: the pods of a start that failed count once together, and each comes back after
        # its own few seconds. One limit for all would count every pod, and double the pause for each of them.
        return {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimitPerIndex": restarts,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": _exits(EXIT_STARTUP)},
                    {"action": "Ignore", "onExitCodes": _exits(EXIT_STOPPED)},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
        }

    def _jobset(self) -> dict[str, Any]:
        job = {**self._job(0), "template": self._template()}
        at_once = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(self.labels),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.restarts, "rules": [{"name": "startup", **at_once}]},
                "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _template(self) -> dict[str, Any]:
        # A JobSet sets the subdomain of its pods itself.
        subdomain = {} if self.jobset else {"subdomain": self.name}
        selector = {"nodeSelector": dict(self.node_selector)} if self.node_selector else {}
        tolerations = {"tolerations": [_toleration(text) for text in self.tolerations]} if self.tolerations else {}
        root = {} if self.user == 0 else {"runAsNonRoot": True}
        who = {"runAsUser": self.user, "runAsGroup": self.user, "fsGroup": self.user}
        return {
            "metadata": {"labels": self._metadata()["labels"]},
            "spec": {
                **subdomain,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": self.grace_s,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                **selector,
                **tolerations,
                "securityContext": {
                    **root,
                    **who,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [self._container()],
                "volumes": [
                    {"name": "job", "configMap": {"name": self.name}},
                    {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}},
                ],
            },
        }

    def _container(self) -> dict[str, Any]:
        resources: dict[str, str] = {}
        for name, value in (("cpu", self.cpus), ("memory", self.memory), (self.gpu_resource, self.gpus_per_node)):
            if value is not None:
                resources[name] = str(value)
        sources = [{"secretRef": {"name": name}} for name in self.secrets]
        return {
            "name": CONTAINER,
            "image": self.image,
            # Not `args`: a script of the image in between might keep SIGTERM to itself.
            "command": self.command(),
            "workingDir": self.folder,
            "env": self._variables(),
            **({"envFrom": sources} if sources else {}),
            # Requests alike, so that the pod is not the first to be evicted.
            **({"resources": {"limits": resources, "requests": dict(resources)}} if resources else {}),
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [
                {"name": "job", "mountPath": posixpath.dirname(JOB_PATH), "readOnly": True},
                {"name": "shared", "mountPath": self.mount},
                {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where data workers hand over their batches
            ],
        }

    def command(self) -> list[str]:
        """What each pod runs; the same on every start."""
        settings = {
            "resume_from_latest": "true",
            "artifacts_dir": self.artifacts,
            "lightning.devices": self.ranks_per_node,
            "lightning.num_nodes": self.nodes,
        }
        texts = [*(f"{name}={value}" for name, value in settings.items()), *self.overrides]
        return ["genlight", "run", JOB_PATH, *(word for text in texts for word in ("--set", _literal(text)))]

    def _variables(self) -> list[dict[str, Any]]:
        values = {
            "MASTER_ADDR": f"{self._pod(0)}.{self.name}",
            "MASTER_PORT": MASTER_PORT,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "WORLD_SIZE": self.nodes * self.ranks_per_node,
            "TRAINER_STOP_GRACE_SECONDS": self.grace_s,
            # The user need not be one that the image knows.
            "HOME": "/tmp",  # noqa: S108
            "USER": CONTAINER,
            **self.variables,
        }
        rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
        variables: list[dict[str, Any]] = [
            rank,
            *({"name": name, "value": _literal(str(value))} for name, value in values.items()),
        ]
        if self.token is not None:
            name, key = self.token
            secret = {"secretKeyRef": {"name": name, "key": key}}
            variables.append({"name": "TRAINER_CAPABILITY_TOKEN", "valueFrom": secret})
        return variables


def _exits(code: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}


def _toleration(text: str) -> dict[str, str]:
    taint = _TAINT.fullmatch(text)
    assert taint is not None  # the constructor has looked
    key, value = {"key": taint["key"]}, taint["value"]
    same = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
    return {**key, **same, "effect": taint["effect"]}


def _literal(text: str) -> str:
    """`text` for a command or a variable, in which Kubernetes replaces ``$(NAME)``."""
    return text.replace("$(", "$$(")
