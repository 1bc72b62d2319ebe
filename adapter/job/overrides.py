"""``--set key.sub=value``: settings from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plumbing.text import nearest
from .environment import BY_SETTING, parse_setting
from .errors import ConfigErrors
from .spec_keys import ALIASES, Key, inner_keys, spec_keys

__all__ = ["COMMAND_LINE_SETTINGS", "Overrides", "apply_overrides", "parse_overrides"]

COMMAND_LINE_SETTINGS = (
    "artifacts_dir",
    "checkpoints_dir",
    "samples_dir",
    "metrics_dir",
    "events_path",
    "file_store_url",
    "stop_grace_seconds",
    "upload_deadline_seconds",
    "token_origins",
    "canceled",
)
"""Settings that have an environment variable and no key in the job spec; ``--set`` takes them too."""

LONGEST_NAME = 60


@dataclass(frozen=True)
class Overrides:
    """What the command line sets."""

    spec: Mapping[tuple[str, ...], Any] = field(default_factory=dict, repr=False)
    """Fields of the job spec by their path."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the job spec does not have, by name."""

    def covers(self, name: str) -> bool:
        """Whether the setting, dotted, was set here, wholly or in part."""
        path = tuple(name.split("."))
        return name in self.settings or any(path[: len(key)] == key or key[: len(path)] == path for key in self.spec)


def parse_overrides(texts: Sequence[str], errors: ConfigErrors) -> Overrides:
    """Read every ``key.sub=value``. The value is JSON, else the text itself; later ones win."""
    spec: dict[tuple[str, ...], Any] = {}
    settings: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        path = tuple(part.strip() for part in name.strip().split("."))
        if not separator or not all(path):
            # Not what stands behind the sign: it may be a token.
            shown = f" {name.strip()[:LONGEST_NAME]}{separator}…" if separator else f" {text[:LONGEST_NAME]}"
            errors.add(f"Invalid `--set{shown}`. Expected key=value or key.sub=value.")
        elif name.strip() in COMMAND_LINE_SETTINGS:
            settings[name.strip()] = parse_setting(f"--set {name.strip()}", BY_SETTING[name.strip()], value, errors)
        else:
            spec[_canonical(path)] = _decode(path, value)
    return Overrides(spec, {name: value for name, value in settings.items() if value is not None})


def _canonical(path: tuple[str, ...]) -> tuple[str, ...]:
    return (ALIASES[""].get(path[0], path[0]),) if len(path) == 1 else path


def _decode(path: tuple[str, ...], text: str) -> Any:
    """The value of `text`. A field that is a text keeps what was typed, so that ``run_id=17`` needs no quotes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    key = _key(path)
    return text if key is not None and key.is_text and not isinstance(value, str | None) else value


def _key(path: tuple[str, ...]) -> Key | None:
    if len(path) == 1:
        return spec_keys().get(_canonical(path)[0])
    if len(path) > 2:
        return None
    return inner_keys(path[0]).get(ALIASES.get(path[0], {}).get(path[1], path[1]))


def apply_overrides(raw: Mapping[str, Any], overrides: Overrides, errors: ConfigErrors) -> dict[str, Any]:
    """The decoded job spec with the command line's values in place; `raw` stays as it is."""
    merged = dict(raw)
    for path, value in overrides.spec.items():
        if path[0] == "run_id":
            merged.pop("request_id", None)
        if path[0] not in spec_keys():
            offered = nearest(path[0], [*spec_keys(), *COMMAND_LINE_SETTINGS])
            errors.add(f"Unknown key `{path[0]}` in `--set`.{offered}")
            continue
        inner = {*inner_keys(path[0]), *ALIASES.get(path[0], {})}
        if inner and len(path) > 1 and path[1] not in inner:
            errors.add(f"Unknown key `{path[0]}.{path[1]}` in `--set`.{nearest(path[1], inner)}")
            continue
        _put(merged, path, value, errors)
    return merged


def _put(target: dict[str, Any], path: tuple[str, ...], value: Any, errors: ConfigErrors) -> None:
    """Put `value` at `path`, copying the objects on the way."""
    for depth, name in enumerate(path[:-1], start=1):
        inner = target.get(name)
        if inner is not None and not isinstance(inner, dict):
            errors.add(f"`--set {'.'.join(path)}` cannot be applied: `{'.'.join(path[:depth])}` is not an object.")
            return
        target[name] = dict(inner or {})
        target = target[name]
    target[path[-1]] = value
