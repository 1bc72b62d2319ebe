"""Find the mistakes of a job without training, and show its settings and where each of them comes from.

Exit codes: 0 the job can start, 2 it cannot.
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...contract.exceptions import StartupContractError
from ...job.config import ARTIFACT_FOLDERS, RunConfig, read_run_config
from ...job.errors import ConfigErrors
from ...job.keys import all_keys
from ...job.spec import UPLOAD_URLS
from ...plumbing.finding import Finding, Level
from ...plumbing.redaction import redact, without_secrets
from ..config_files import is_configuration_name
from ..parser import add_overrides
from ..terminal import complain, say
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
LOOPBACK = ("http://127.", "http://localhost:", "http://[::1]:")
MARKS: dict[Level, str] = {"pass": "ok", "warn": "warning", "fail": "fault"}


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
    config, errors = read_run_config(spec_path=args.job, overrides=args.set or ())
    # Without a job file the table would hold defaults alone.
    table = _table(config, defaults=args.all) if config.given.readable else []
    return _report(list(diagnose(config, errors, began + NETWORK_PATIENCE_S)), table, config.secrets)


def _run_on_configuration(args: argparse.Namespace) -> int:
    if args.set:
        return complain("doctor", "--set is for jobs; write settings into the configuration")
    from .fit_checks import diagnose_fit  # loads Lightning

    return _report(list(diagnose_fit(args.job)))


def diagnose(config: RunConfig, errors: ConfigErrors, deadline: float) -> Iterator[Finding]:
    """Every finding about a job, whatever else is wrong with it.

    Args:
        config: What can be told of the run.
        errors: What is known to be wrong with its settings.
        deadline: When to stop waiting for the network, as ``time.monotonic`` counts.
    """
    network, unusable = None, None
    try:
        network = _ask_network(config)
    except StartupContractError as problem:
        unusable = Finding("network", "fail", str(problem))
    sound = not errors.found
    if sound:
        yield Finding("settings", "pass", f"{config.spec_path} and environment are sound")
    for error in errors.found:
        yield Finding("settings", "fail", f"{error.code}: {error.text}")
    yield from (Finding("settings", "warn", warning) for warning in errors.warnings)
    yield from _check_token(config)
    if config.run_id or config.source_of("artifacts_dir") != "default":
        from_ref = config.inputs.resume_checkpoint_ref is not None
        resumes = config.resume_from_latest or config.resume_checkpoint_path is not None or from_ref
        paths = {name: getattr(config, name) for name in (*ARTIFACT_FOLDERS, "events_path")}
        yield from check_artifacts(paths, resumes=resumes, shared=config.shared_artifacts)
        if sound and resumes and not from_ref:
            yield from check_checkpoints(config)
        if sound:
            yield from check_grace(config)
            yield from check_stop(config)
    yield from check_targets(config.uploads.targets)
    if config.dataset is not None:
        yield from check_dataset(config.dataset)
    about_trainer, about_devices = list[Finding](), list[Finding]()
    if config.trainer:
        about_trainer = list(check_trainer(config.trainer, [config.spec_dir, Path.cwd()]))
        yield from about_trainer
    if sound or asks_for_devices(config.lightning):
        about_devices = list(check_devices(config.lightning))
        yield from about_devices
    if sound and not any(finding.level == "fail" for finding in [*about_trainer, *about_devices]):
        yield from check_training(config)
    if unusable is not None:
        yield unusable
    elif network is not None:
        yield from network.findings(deadline)


def _ask_network(config: RunConfig) -> Any:
    from .network_checks import NetworkChecks

    urls = {f"uploads.{name}": getattr(config.uploads, name) for name in UPLOAD_URLS}
    urls["file_store_url"] = config.file_store_url
    return NetworkChecks(
        urls={name: url for name, url in urls.items() if url is not None},
        inputs=config.inputs,
        token=config.token,
        token_origins=config.token_origins,
        file_store_url=config.file_store_url,
        private_hosts=config.private_hosts,
    )


def _check_token(config: RunConfig) -> Iterator[Finding]:
    origins = sorted(config.token_origins)
    if config.token is None:
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


def _table(config: RunConfig, *, defaults: bool) -> list[tuple[str, str]]:
    """One line for each setting that a source gives, or that holds by default if asked for: name, source, value."""
    rows = []
    for name, key in all_keys():
        value = operator.attrgetter(name)(config) if getattr(config, name.partition(".")[0]) is not None else None
        source = config.source_of(name)
        if key.block is None and (defaults or source != "default"):
            rows.append((name, source, _shown(name, value)))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [
        ("dim" if source == "default" else "", f"{name:<{widths[0]}}  {source:<{widths[1]}}  {shown}")
        for name, source, shown in rows
    ]
    hint = "" if defaults else "; --all shows the defaults too"
    return [("", f"settings of {config.spec_path}{hint}"), *lines]


def _shown(name: str, value: Any) -> str:
    """A value for the table, short and without secrets; a path is of use whole, or not at all."""
    if value is None or value in ("", (), frozenset()):
        return "-"
    if isinstance(value, Path):
        return str(value)
    value = without_secrets({name.rpartition(".")[2]: msgspec.to_builtins(value, order="sorted")})
    (value,) = value.values()
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _report(findings: list[Finding], table: Sequence[tuple[str, str]] = (), secrets: Sequence[str] = ()) -> int:
    """Write one line for each finding, the verdict and the table, whose lines have a style; the exit code."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark = MARKS[finding.level]
        say(redact(f"{mark:<7}  {finding.check:<{width}}  {finding.detail}", secrets), style=mark)
    count = sum(finding.level == "fail" for finding in findings)
    say("", f"{count} fault{'s' * (count != 1)}: the run would not start" if count else "the run can start")
    for style, line in [("", ""), *table] if table else ():
        say(redact(line, secrets), style=style)
    return FAULTY if count else SOUND
