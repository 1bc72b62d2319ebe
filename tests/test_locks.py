"""Locks that a signal handler's exception, such as a KeyboardInterrupt, cannot leave held."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp
SERVER = ROOT / "adapter" / "view"
"""Its locks are taken in threads of a server, where no signal handler runs."""
FILES = (path for name in ("adapter", "callbacks", "reporters") for path in (ROOT / name).rglob("*.py"))
SOURCES = sorted(path for path in FILES if not path.is_relative_to(SERVER) and "with " in path.read_text())


def is_lock(item):
    return ast.unparse(item.context_expr).endswith(("lock", "changed"))


def in_same_frame(nodes):
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.GeneratorExp):
            yield node
            yield from in_same_frame(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_loop_runs_while_a_lock_is_held(path):
    """In Python 3.13.0 the end of a loop is not part of its block: an exception there skips the release."""
    held = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.With)]
    blocks = [node for node in held if any(map(is_lock, node.items))]
    loops = [each.lineno for block in blocks for each in in_same_frame(block.body) if isinstance(each, LOOPS)]
    assert loops == []
