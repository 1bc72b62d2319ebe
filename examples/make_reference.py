"""Writes the references in the README of each package folder: the parts that are made from docstrings and types.

    python examples/make_reference.py            # writes them anew, and the JSON Schema of a job
    python examples/make_reference.py --check    # exit code 1 where one is not what it should be

What stands between two markers of a page, ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``, is made here; the rest
is written by hand.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import docstring_parser

import genlight.callbacks
import genlight.callbacks.compat
import genlight.reporters
from genlight.adapter.job.reference import (
    SCHEMA_FILE,
    callbacks_reference,
    job_reference,
    schema_text,
    variables_reference,
)

ROOT = Path(__file__).resolve().parents[1]


def classes_reference(classes: Iterable[type], *, brief: bool = False) -> str:
    """One section for each class: its docstring, if `brief` only the beginning, and a table of its arguments."""
    return "\n".join(line for cls in classes for line in _section(cls, brief))


def _section(cls: type, brief: bool) -> list[str]:
    parsed = docstring_parser.parse(inspect.getdoc(cls) or "", docstring_parser.DocstringStyle.GOOGLE)
    lines = [f"### `{cls.__name__}`", "", _markdown(parsed.short_description or ""), ""]
    if parsed.long_description:
        text = parsed.long_description
        lines += [_markdown(text.partition("\n\n")[0] if brief else text), ""]
    described = {argument.arg_name: _one_line(argument.description or "") for argument in parsed.params}
    arguments = {name: p for name, p in inspect.signature(cls).parameters.items() if name in described}
    if arguments:
        lines += ["| argument | default | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {_default(p)} | {described[name]} |" for name, p in arguments.items()]
        lines.append("")
    return lines


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    shown = parameter.default.__name__ if callable(parameter.default) else repr(parameter.default)
    return f"`{shown}`"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _one_line(text: str) -> str:
    return _markdown(" ".join(text.split())).replace("|", "\\|")


def events_reference() -> str:
    """Every event with the fields of its own, from the JSON Schema."""
    schema = genlight.reporters.event_schema()
    events = [each["$ref"].rpartition("/")[2] for each in schema["oneOf"]]
    of_every_line = {"schema_version", "event", "run_id", "seq", "timestamp_ms"}
    lines = ["| event | field | type | meaning |", "|---|---|---|---|"]
    for event in events:
        for name, kind in schema["$defs"][event]["properties"].items():
            if name not in of_every_line:
                lines.append(
                    f"| `{event.lower()}` | `{name}` | {_type(kind)} | {_one_line(kind.get('description', ''))} |"
                )
    return "\n".join([*lines, ""])


def _type(shape: dict[str, object]) -> str:
    kind = shape.get("type")
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    choices = shape.get("anyOf") or shape.get("oneOf")
    if isinstance(choices, list):
        return " or ".join(_type(choice) for choice in choices)
    return f"`{json.dumps(shape.get('const', shape.get('enum', '')))}`"


def classes_of(package: object) -> list[type]:
    """The public classes of a package that are configured by arguments, in the order of their names."""
    named = [getattr(package, name) for name in sorted(package.__all__)]  # type: ignore[attr-defined]
    return [cls for cls in named if inspect.isclass(cls) and "Args:" in (inspect.getdoc(cls) or "")]


PARTS: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "adapter/jobs.md": [
        ("job keys", job_reference),
        ("standard callbacks", callbacks_reference),
        ("variables", variables_reference),
    ],
    "callbacks/README.md": [
        ("standard callbacks", callbacks_reference),
        ("callbacks", lambda: classes_reference(classes_of(genlight.callbacks), brief=True)),
        ("six hooks", lambda: classes_reference(classes_of(genlight.callbacks.compat), brief=True)),
    ],
    "reporters/README.md": [
        ("reporters", lambda: classes_reference(classes_of(genlight.reporters))),
        ("events", events_reference),
    ],
}


def page_with_parts(page: str, parts: Iterable[tuple[str, Callable[[], str]]]) -> str:
    """`page` with every part made anew.

    Raises:
        ValueError: The page lacks the markers of a part.
    """
    for name, make in parts:
        marked = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not marked.search(page):
            raise ValueError(f"the page has no markers for {name!r}")
        made = make()
        page = marked.sub(lambda found, made=made: f"{found[1]}\n{made}\n{found[2]}", page)
    return page


def main(arguments: list[str]) -> int:
    wanted = {SCHEMA_FILE: schema_text()}
    for name, parts in PARTS.items():
        path = ROOT / name
        wanted[path] = page_with_parts(path.read_text(encoding="utf-8"), parts)
    stale = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        sys.stdout.writelines(f"{path.relative_to(ROOT)} is not what its sources say\n" for path in stale)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
