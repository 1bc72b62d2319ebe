"""Write the reference pages of the package folders: the parts that are derived from docstrings and types.

    python examples/make_reference.py            # writes them, and the JSON Schema of a job
    python examples/make_reference.py --check    # exit code 1 if one of them is out of date

This program writes the text between two markers of a page, ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. The
rest is written by hand.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser
import msgspec

import genlight.adapter
import genlight.callbacks
import genlight.callbacks.compat
import genlight.reporters
from genlight.adapter.job.sources import VARIABLES
from genlight.adapter.job.spec import JobSpec, SampleRequest, Settings, key_at
from genlight.adapter.job.standard_callbacks import STANDARD_CALLBACKS
from genlight.adapter.plumbing.settings import Key, keys_of

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_FILE = ROOT / "adapter" / "job" / "job.schema.json"


def classes_reference(classes: Iterable[type], *, brief: bool = False) -> str:
    """Return one section for each class: its docstring, only the beginning if `brief`, and a table of its arguments."""
    return "\n".join(line for cls in classes for line in _section(cls, brief))


def _section(cls: Any, brief: bool) -> list[str]:
    parsed = docstring_parser.parse(inspect.getdoc(cls) or "", docstring_parser.DocstringStyle.GOOGLE)
    lines = [f"### `{cls.__name__}`", "", _markdown(parsed.short_description or ""), ""]
    if parsed.long_description:
        text = parsed.long_description
        if brief:  # without a last sentence that announces a list
            text = re.sub(r"(?<=\.)\s+[^.]*:$", "", text.partition("\n\n")[0])
        lines += [_markdown(text), ""]
    described = {argument.arg_name: _one_line(argument.description or "") for argument in parsed.params}
    arguments = {name: p for name, p in inspect.signature(cls).parameters.items() if name in described}
    if arguments:
        lines += ["| argument | default | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {_default(p)} | {described[name]} |" for name, p in arguments.items()]
        lines.append("")
    return lines


def python_reference() -> str:
    """Return the functions and classes of `genlight.adapter` as Markdown, with a table of its exceptions."""
    named = [getattr(genlight.adapter, name) for name in sorted(genlight.adapter.__all__)]
    errors = [each for each in named if inspect.isclass(each) and issubclass(each, Exception)]
    classes = [each for each in named if inspect.isclass(each) and each not in errors]
    lines = ["## Functions", ""]
    for function in filter(inspect.isfunction, named):
        lines += _section(function, brief=True)
    lines += ["## Classes", ""]
    for cls in classes:
        lines += _section(cls, brief=True)
    lines += ["## Exceptions", "", "| exception | base | meaning |", "|---|---|---|"]
    for error in errors:
        summary = docstring_parser.parse(inspect.getdoc(error) or "").short_description or ""
        lines.append(f"| `{error.__name__}` | `{error.__mro__[1].__name__}` | {_one_line(summary)} |")
    return "\n".join([*lines, ""])


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    shown = parameter.default.__name__ if callable(parameter.default) else repr(parameter.default)
    return f"`{shown}`"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _one_line(text: str) -> str:
    return _markdown(" ".join(text.split())).replace("|", "\\|")


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file; other keys are allowed, for newer orchestrators."""
    _, definitions = msgspec.json.schema_components(
        [JobSpec], ref_template="#/$defs/{name}", schema_hook=lambda _: {"type": "string"}
    )
    root = definitions.pop("JobSpec")
    blocks = [key.block for key in keys_of(JobSpec).values() if key.block is not None]
    for block in (JobSpec, *blocks, SampleRequest):
        shape, texts = root if block is JobSpec else definitions[block.__name__], _texts_below(block)
        for name in keys_of(block):
            shape["properties"][name] = {"description": texts[name], **shape["properties"][name]}
        aliases = {key.alias: name for name, key in keys_of(block).items() if key.alias}
        shape["properties"] |= {alias: shape["properties"][name] for alias, name in aliases.items()}
    root["required"] = []  # the environment and `--set` may set them
    items = root["properties"]["sample_prompts"]
    items["items"] = {"anyOf": [{"type": "string"}, items["items"]]}
    root["properties"]["$schema"] = {"type": "string", "description": "This file, for editors."}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "genlight job"}
    return {**head, **{name: value for name, value in root.items() if name != "title"}, "$defs": definitions}


def _texts_below(block: Any) -> dict[str, str]:
    """Return the text below each field of a block."""
    classes = [cls for cls in reversed(block.__mro__) if "__annotations__" in vars(cls)]
    fields = [field for cls in classes for field in docstring_parser.parse_from_object(cls).params]
    return {field.arg_name: " ".join((field.description or "").split()) for field in fields}


def schema_text() -> str:
    """Return `job_schema` as the text of its file."""
    return json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"


def job_reference() -> str:
    """Return every key of a job as Markdown: type, default, meaning and example, one table for each block."""
    tables: list[tuple[str, Any]] = [("Top level", JobSpec)]
    tables += [(f"`{key.name}`", key.block) for key in keys_of(JobSpec).values() if key.block is not None]
    tables.append(("Each of `sample_prompts`", SampleRequest))
    return "\n".join(line for title, block in tables for line in _table(title, block))


def _table(title: str, block: Any) -> Iterator[str]:
    texts = _texts_below(block)
    yield from (f"### {title}", "", "| key | what | default | meaning | example |", "|---|---|---|---|---|")
    for key in keys_of(block).values():
        example = f"`{json.dumps(key.examples[0], ensure_ascii=False)}`" if key.examples else ""
        alias = f" Also `{key.alias}`." if key.alias else ""
        yield f"| `{key.name}` | {_what(key)} | {_default_of(key)} | {texts[key.name]}{alias} | {example} |"
    yield ""


def _what(key: Key) -> str:
    if key.block is not None:
        return "an object, below"
    if key.item is not None:
        return f"a list; each {'an object, below, or a string' if key.item.block else key.item.rule.expected}"
    return key.rule.expected.replace("|", "\\|")


def _default_of(key: Key) -> str:
    if key.is_required:
        return "required"
    return "" if key.block is not None or key.default in (None, (), {}, "") else f"`{json.dumps(key.default)}`"


def variables_reference() -> str:
    """Return every environment variable as Markdown, with its setting."""
    lines = ["| variable | setting | meaning |", "|---|---|---|"]
    for variable, setting in VARIABLES.items():
        in_file = "" if setting.partition(".")[0] in keys_of(JobSpec) else ", not in a job file"
        path, _, name = setting.rpartition(".")
        block = key_at((path,)) if path else None
        text = _texts_below(Settings if block is None else block.block)[name]
        lines.append(f"| `{variable}` | `{setting}`{in_file} | {text} |")
    return "\n".join([*lines, ""])


def callbacks_reference() -> str:
    """Return the callbacks that run by default, as Markdown."""
    lines = ["| callback | what it does | in a job | in a fit |", "|---|---|---|---|"]
    for name, callback in STANDARD_CALLBACKS.items():
        in_job = "always" if callback.required else "yes" if callback.arguments else "add it"
        lines.append(f"| `{name}` | {callback.purpose} | {in_job} | {'yes' if callback.in_fit else 'add it'} |")
    return "\n".join([*lines, ""])


def events_reference() -> str:
    """Return every event with its own fields, from the JSON Schema."""
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
    kind = shape.get("type", "object" if "$ref" in shape else None)
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    choices = shape.get("anyOf") or shape.get("oneOf")
    if isinstance(choices, list):
        return " or ".join(_type(choice) for choice in choices)
    return f"`{json.dumps(shape.get('const', shape.get('enum', '')))}`"


def classes_of(package: object) -> list[type]:
    """Return the public classes of a package that have arguments, sorted by name."""
    named = [getattr(package, name) for name in sorted(package.__all__)]  # type: ignore[attr-defined]
    return [cls for cls in named if inspect.isclass(cls) and "Args:" in (inspect.getdoc(cls) or "")]


def _callbacks(*, trainer_hooks: bool) -> list[type]:
    """Return the callbacks of the page on other styles, or all others."""
    named = classes_of(genlight.callbacks)
    return [cls for cls in named if cls.__module__.endswith(".trainer_hooks") == trainer_hooks]


PARTS: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "adapter/job_reference.md": [("job keys", job_reference), ("variables", variables_reference)],
    "adapter/python_reference.md": [("python", python_reference)],
    "callbacks/README.md": [("standard callbacks", callbacks_reference)],
    "callbacks/reference.md": [
        ("callbacks", lambda: classes_reference(_callbacks(trainer_hooks=False), brief=True)),
    ],
    "callbacks/other_styles.md": [
        ("trainer hooks", lambda: classes_reference(_callbacks(trainer_hooks=True), brief=True)),
        ("six hooks", lambda: classes_reference(classes_of(genlight.callbacks.compat), brief=True)),
    ],
    "reporters/README.md": [
        ("reporters", lambda: classes_reference(classes_of(genlight.reporters))),
        ("events", events_reference),
    ],
}


def page_with_parts(page: str, parts: Iterable[tuple[str, Callable[[], str]]]) -> str:
    """Return `page` with every part made again.

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
