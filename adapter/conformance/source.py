"""What the source of a trainer class shows that no run on one CPU can: devices by name, and stops by the clock."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from ..plumbing.finding import Finding

__all__ = ["check_source"]

_CLOCKS = frozenset(
    {"time.time", "time.monotonic", "time.perf_counter", "time.process_time", "datetime.now", "datetime.datetime.now"}
)
_MAKES_A_DEVICE = frozenset({"to", "device", "torch.device", "set_device"})


def check_source(trainer: object) -> Iterator[Finding]:
    """Findings about the module that defines the class of `trainer`; none where its source is not there."""
    module = sys.modules.get(type(trainer).__module__)
    try:
        tree = ast.parse(inspect.getsource(module or type(trainer)))
        file = Path(inspect.getfile(type(trainer))).name
    except (OSError, TypeError, SyntaxError):  # built in, or made at run time
        return
    classes = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__ == type(trainer).__module__]
    nodes = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in classes]
    devices = sorted({line for node in nodes for line in _device_lines(node)})
    if devices:
        yield Finding(
            "devices",
            "warn",
            f"a CUDA device is named in {_places(file, devices)}, in code that no run without one reaches",
            "Use ctx.device: on several devices, each rank has its own.",
        )
    clocks = sorted({line for node in nodes for line in _clock_lines(node)})
    if clocks:
        yield Finding(
            "clock",
            "warn",
            f"a decision by the clock in {_places(file, clocks)}: each rank has its own, and one may stop or skip "
            "while the others wait for it",
            "Set max_runtime_seconds, which all ranks agree on, or decide on rank 0 and broadcast it.",
        )


def _places(file: str, lines: list[int]) -> str:
    return ", ".join(f"{file}:{line}" for line in lines[:4]) + (" …" if len(lines) > 4 else "")


def _device_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name.rpartition(".")[2] == "cuda" and name != "torch.cuda":
                yield node.lineno
            positional = node.args if name in _MAKES_A_DEVICE or name.rpartition(".")[2] == "to" else []
            named = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
            if any(_names_cuda(value) for value in [*positional, *named]):
                yield node.lineno
        elif isinstance(node, ast.Assign) and _names_cuda(node.value) and _names_a_device(node.targets):
            yield node.lineno


def _names_a_device(targets: list[ast.expr]) -> bool:
    return any("device" in _dotted(target).lower() for target in targets)


def _names_cuda(node: ast.AST) -> bool:
    """Whether a value is a CUDA device by name, as a whole or in one branch of a condition."""
    if isinstance(node, ast.IfExp):
        return _names_cuda(node.body) or _names_cuda(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return bool(node.values) and _names_cuda(node.values[0])
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda"


def _clock_lines(tree: ast.AST) -> Iterator[int]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        timed = {
            _dotted(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _reads_a_clock(node.value)
            for target in node.targets
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and (
                _reads_a_clock(node) or any(_dotted(name) in timed for name in ast.walk(node) if _dotted(name))
            ):
                yield node.lineno


def _reads_a_clock(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and _dotted(node.func) in _CLOCKS for node in ast.walk(tree))


def _dotted(node: ast.AST) -> str:
    """``self.device`` or ``torch.device``; of a call in between, what follows it; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return ""
