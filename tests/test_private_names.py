"""adapter/private_names.md lists every name of other packages that is replaced or private, and its users."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "adapter" / "private_names.md"
INTERNALS = ("callbacks/lightning_internals.py", "adapter/gradients/torch_internals.py")
"""Every private name that stands in a text of these modules is one of another package."""
LOOKUPS = {"protected", "require_names", "getattr", "hasattr", "setattr", "attrgetter"}


class Row(NamedTuple):
    """Names that some modules use, the reason, and the tests that fail if one is gone."""

    names: list[str]
    modules: list[str]
    why: str
    tests: list[str]


def rows() -> list[Row]:
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    quoted = [[re.findall("`([^`]+)`", cell) for cell in row] for row in cells]
    return [Row(q[0], q[1], row[2], q[3]) for row, q in zip(cells, quoted, strict=True)]


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name != "_"


def parts_of_texts(node: ast.AST) -> list[str]:
    texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return [part for text in texts for name in text.split() for part in name.split(".")]


def is_own_instance(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_of_our_own(trees: dict[str, ast.Module]) -> set[str]:
    own = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_instance(node):
            own.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own |= set(parts_of_texts(node))
    return own


@functools.cache
def private_names_in_use() -> dict[str, set[str]]:
    """The modules in which each private name of another package stands."""
    files = [p for top in ("adapter", "callbacks", "reporters") for p in (ROOT / top).rglob("*.py")]
    trees = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in files if "stubs" not in p.parts}
    own = names_of_our_own(trees)
    declared = {name for module in INTERNALS for name in parts_of_texts(trees[module]) if is_private(name)}
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                is_foreign = node.attr in declared and not is_own_instance(node)
                names = [node.attr] if is_foreign or node.attr not in own else []
            elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                texts = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                names = [part for text in texts for part in text.split(".")]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in LOOKUPS:
                names = [part for part in parts_of_texts(node) if part not in own or part in declared]
            elif module in INTERNALS:
                names = parts_of_texts(node) if isinstance(node, ast.Constant) else []
            for name in filter(is_private, names):
                found[name].add(module)
    return found


def test_every_private_name_in_use_is_listed_and_no_other():
    listed: dict[str, set[str]] = defaultdict(set)
    for row in rows():
        for name in row.names:
            listed[name.rpartition(".")[2]] |= set(row.modules)
    found = private_names_in_use()

    new = [f"{name} in {module}" for name, modules in found.items() for module in sorted(modules - listed[name])]
    assert not new, f"give them a row in {PAGE.name}, or do without them"
    private = {name for name in listed if is_private(name)}
    assert not [name for name in private if name not in found], "no longer used: take them out"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.names[0])
def test_a_row_names_existing_modules_and_tests_and_a_reason(row):
    used = private_names_in_use()
    names = {name.rpartition(".")[2] for name in row.names}
    replaced = not any(map(is_private, names))
    for module in row.modules:
        assert (ROOT / module).is_file()
        assert replaced or any(module in used[name] for name in names), f"{module} uses none of them"
    assert row.tests
    for test in row.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).is_file()
        assert not function or f"def {function}(" in (ROOT / path).read_text()
    assert len(row.why) > 20
