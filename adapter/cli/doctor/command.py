"""Find the mistakes of a job without training, and show its settings and where each of them comes from.

Exit codes: 0 the job can start, 2 it cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ...contract.exceptions import StartupContractError
from ...contract.types import TrainingJobSpec
from ...job.config import (
    DEFAULT_UPLOAD_DEADLINE_S,
    dataset_of,
    inputs_of,
    private_hosts_of,
    run_config_of,
    token_origins_of,
)
from ...job.errors import ConfigErrors
from ...job.overrides import COMMAND_LINE_SETTINGS
from ...job.sources import Settings, artifact_paths, artifacts_template, read_settings, require_settings
from ...job.spec import UPLOAD_URLS, DatasetSpec
from ...job.spec_keys import inner_keys, spec_keys
from ...plumbing.finding import Finding, Level
from ...plumbing.redaction import HIDDEN, redact
from ...plumbing.urls import hide_urls
from ...run.startup_failure import UNKNOWN_RUN_ID
from ..config_files import is_configuration_name
from ..parser import add_overrides
from .grace_check import check_grace
from .local_checks import (
    asks_for_devices,
    check_artifacts,
    check_checkpoints,
    check_dataset,
    check_devices,
    check_stop,
    check_targets,
    check_trainer,
    check_training,
)

__all__ = ["add_arguments", "diagnose", "run"]

SOUND, FAULTY = 0, 2
NETWORK_PATIENCE_S = 4.0
LONGEST_VALUE = 100
SECRET_KEY = re.compile(r"token|secret|passw|credential|api_?key|authorization", re.IGNORECASE)
PATHS = frozenset(
    {"artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir", "events_path"}
    | {"resume_checkpoint_path", "cancel_file_path"}
)
LOOPBACK = ("http://127.", "http://localhost:", "http://[::1]:")
MARKS: dict[Level, str] = {"pass": "ok", "warn": "warning", "fail": "fault"}
STYLES = {"ok": "\x1b[32m", "warning": "\x1b[33m", "fault": "\x1b[31m", "dim": "\x1b[2m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="job spec (JSON), or a configuration of `genlight fit` (YAML); else `TRAINER_JOB_SPEC_PATH`",
    )
    add_overrides(parser, "set a field, as for `genlight run`")
    parser.add_argument("--all", action="store_true", help="show the settings that hold by default too")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return the exit code: 0 when the job could start, 2 when it could not."""
    if is_configuration_name(args.job):
        return _run_on_configuration(args)
    began = time.monotonic()
    faults = ConfigErrors()
    settings = read_settings(args.job, args.set or (), os.environ, faults)
    require_settings(settings, faults)
    template = artifacts_template(args.job, None)
    findings = list(diagnose(settings, faults, template, began + NETWORK_PATIENCE_S))
    # Without a spec the table would hold defaults alone.
    table = ["", *_table(settings, template, defaults=args.all)] if settings.readable else []
    shown = redact("\n".join([*_report(findings), *table]), settings.secrets)
    sys.stdout.write(shown + "\n")
    return FAULTY if any(finding.level == "fail" for finding in findings) else SOUND


def _run_on_configuration(args: argparse.Namespace) -> int:
    if args.set:
        sys.stderr.write("genlight doctor: --set is for jobs; write settings into the configuration\n")
        return FAULTY
    from .fit_checks import diagnose_fit  # loads Lightning

    findings = list(diagnose_fit(args.job))
    sys.stdout.write(redact("\n".join(_report(findings)), ()) + "\n")
    return FAULTY if any(finding.level == "fail" for finding in findings) else SOUND


def diagnose(settings: Settings, faults: ConfigErrors, template: str, deadline: float) -> Iterator[Finding]:
    """Every finding about a job, whatever else is wrong with it.

    Args:
        settings: What the sources say.
        faults: What is known to be wrong with them.
        template: Where artifacts go by default.
        deadline: When to stop waiting for the network, as ``time.monotonic`` counts.
    """
    network, unusable = None, None
    try:
        network = _ask_network(settings)
    except StartupContractError as problem:
        unusable = Finding("network", "fail", str(problem))
    error = faults.exception(secrets=settings.secrets)
    config = run_config_of(settings, template, faults) if error is None else None
    if error is None:
        yield Finding("settings", "pass", f"{settings.spec_path} and environment are sound")
    for fault in faults.found:
        yield Finding("settings", "fail", f"{fault.code}: {fault.text}")
    yield from (Finding("settings", "warn", warning) for warning in faults.warnings)
    yield from _check_token(settings)
    if settings.spec.run_id is not None or settings.pick("artifacts_dir") is not None:
        resumes = bool(settings.pick("resume_from_latest") or settings.pick("resume_checkpoint_path"))
        resumes = resumes or settings.spec.inputs.resume_checkpoint_ref is not None
        yield from check_artifacts(
            _paths(settings, template), resumes=resumes, shared=bool(settings.pick("shared_artifacts"))
        )
        if config is not None and resumes and config.inputs.resume_checkpoint_ref is None:
            yield from check_checkpoints(config)
        if config is not None:
            yield from check_grace(config)
            yield from check_stop(config)
    yield from check_targets(settings.pick("uploads.targets", ()))
    dataset = dataset_of(settings)
    if dataset is not None:
        yield from check_dataset(dataset)
    about_trainer, about_devices = list[Finding](), list[Finding]()
    trainer = settings.pick("trainer")
    if trainer is not None:
        about_trainer = list(check_trainer(trainer, [settings.spec_dir, Path.cwd()]))
        yield from about_trainer
    if error is None or asks_for_devices(settings.spec.lightning):
        about_devices = list(check_devices(settings.spec.lightning))
        yield from about_devices
    if config is not None and not any(finding.level == "fail" for finding in [*about_trainer, *about_devices]):
        yield from check_training(config)
    if unusable is not None:
        yield unusable
    elif network is not None:
        yield from network.findings(deadline)


def _ask_network(settings: Settings) -> Any:
    from .network_checks import NetworkChecks

    names = [f"uploads.{name}" for name in UPLOAD_URLS] + ["file_store_url"]
    return NetworkChecks(
        urls={name: url for name in names if (url := settings.pick(name)) is not None},
        inputs=inputs_of(settings),
        token=settings.pick("capability_token"),
        token_origins=token_origins_of(settings),
        file_store_url=settings.pick("file_store_url"),
        private_hosts=private_hosts_of(settings),
    )


def _check_token(settings: Settings) -> Iterator[Finding]:
    origins = sorted(token_origins_of(settings))
    if settings.pick("capability_token") is None:
        if origins:
            yield Finding("token", "warn", f"none is set; {', '.join(origins)} will be asked without one")
        return
    if not origins:
        yield Finding("token", "warn", "is set, but there is no origin that it would be sent to")
        return
    yield Finding("token", "pass", f"is sent to {', '.join(origins)} and nowhere else")
    for origin in origins:
        if origin.startswith("http://") and not origin.startswith(LOOPBACK):
            yield Finding("token", "warn", f"travels to {origin} without encryption; use https://")


def _paths(settings: Settings, template: str) -> dict[str, Path]:
    return artifact_paths(settings, template, settings.spec.run_id or UNKNOWN_RUN_ID)


def _table(settings: Settings, template: str, *, defaults: bool) -> list[str]:
    """One line for each setting that a source gives, or that holds by default if asked for: name, source, value."""
    by_default = _defaults(settings, template)
    rows = []
    for name in [*_names(), *COMMAND_LINE_SETTINGS]:
        value = settings.pick(name)
        if value is None or name in PATHS:
            value = by_default.get(name)
        shown = _shown(name, value)
        if defaults or settings.sources[name] != "default":
            rows.append((name, settings.sources[name], shown))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = []
    for name, source, shown in rows:
        line = f"{name:<{widths[0]}}  {source:<{widths[1]}}  {shown}"
        lines.append(_styled("dim", line) if source == "default" else line)
    hint = "" if defaults else "; --all shows the defaults too"
    return [f"settings of {settings.spec_path or 'the environment'}{hint}", *lines]


def _names() -> Iterator[str]:
    """Settings of the job spec, dotted, as they are resolved."""
    for name in spec_keys():
        inner = inner_keys(name) if name != "validate" else {}
        yield from (f"{name}.{key}" for key in inner) if inner else (name,)


def _defaults(settings: Settings, template: str) -> dict[str, Any]:
    """What holds where no source says anything; and paths, which are shown absolute wherever they come from."""
    job = {f.name: f.default for f in dataclasses.fields(TrainingJobSpec) if f.default is not dataclasses.MISSING}
    dataset = {f"dataset.{f.name}": f.default for f in dataclasses.fields(DatasetSpec)} if settings.spec.dataset else {}
    flags = {"resume_from_latest": False, "orchestrated": False, "canceled": False}
    others = {name: settings.path(name) for name in ("resume_checkpoint_path", "cancel_file_path")}
    paths = {name: path and str(path) for name, path in {**_paths(settings, template), **others}.items()}
    return {**job, **dataset, **flags, **paths, "upload_deadline_seconds": DEFAULT_UPLOAD_DEADLINE_S}


def _shown(name: str, value: Any) -> str:
    if value is None or value == "" or value == ():
        return "-"
    if SECRET_KEY.search(name) and name != "token_origins":
        return HIDDEN
    text = value if isinstance(value, str) else json.dumps(_masked(value), default=_plain)
    text = hide_urls(text)
    is_short = name in PATHS or len(text) <= LONGEST_VALUE  # a path is of use whole, or not at all
    return text if is_short else f"{text[: LONGEST_VALUE - 1]}…"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: v for f in dataclasses.fields(value) if (v := getattr(value, f.name)) not in (None, "")}
    return str(value)


def _masked(value: Any) -> Any:
    """`value` without what its key says is a secret."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if SECRET_KEY.search(str(key)) else _masked(inner) for key, inner in value.items()}
    return [_masked(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _report(findings: list[Finding]) -> list[str]:
    """One line for each finding, then the verdict."""
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{_styled(MARKS[finding.level], f'{MARKS[finding.level]:<7}')}  {finding.check:<{width}}  {finding.detail}"
        for finding in findings
    ]
    count = sum(finding.level == "fail" for finding in findings)
    verdict = f"{count} fault{'s' * (count != 1)}: the run would not start" if count else "the run can start"
    return [*lines, "", verdict]


def _styled(style: str | Literal["dim"], text: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"{STYLES[style]}{text}\x1b[0m"
