"""Replay a run up to a step, bit for bit, and show what happened in that step.

The training starts from the newest checkpoint before the step, or from the beginning, in a scratch folder; the folder
of the run is only read. The witness of the run, the file with digests of its steps, proves that the steps are the same.
If the loss or a gradient is not finite, the rows that cause it are found.

Exit codes: 0 replayed; 1 the steps differ from those of the run, or one failed; 2 usage, or no replay is possible.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.job_context import is_rank_zero
from ..plumbing.text import size_text
from .parser import add_json, add_overrides, at_least, run_folder
from .terminal import align_columns, say, say_json

if TYPE_CHECKING:
    from ..prove.replay import Replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", type=run_folder, help="the folder of a run of `genlight run`")
    parser.add_argument("--step", type=at_least(1), required=True, metavar="N", help="the step to show, from 1")
    parser.add_argument(
        "--pdb", action="store_true", help="open the debugger in `train_step` of the step, and after an exception"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also show the bytes that modules keep for their backward"
    )
    add_overrides(parser, "lightning.devices=1 (the bits then differ)")
    add_json(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if the steps differ from the run or one fails.

    Raises:
        UsageError: The run cannot be replayed.
        StartupContractError: Its job cannot be used.
    """
    from ..prove.replay import replay

    with tempfile.TemporaryDirectory(prefix="genlight-replay-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder).resolve()
        options = {"with_debugger": args.pdb, "counts_memory": args.memory}
        result = replay(args.run.absolute(), args.step, scratch, overrides=args.set, **options)
    if not is_rank_zero():  # rank zero prints the result and has the exit code
        return 0
    if args.json:
        say_json([result.as_json()])
    else:
        _print(result)
    return int(result.is_same is False or bool(result.error))


def _print(result: Replay) -> None:
    say(f"replayed up to step {result.step}, from {result.record or 'the beginning'}")
    mark = {True: "ok", False: "fault", None: "warning"}[result.is_same]
    say(f"{mark}  {result.witness}", style=mark)
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in result.metrics.items())
    lines = [("error", result.error), ("rows", result.rows), ("digest", result.digest), ("metrics", metrics)]
    lines += [("not finite", result.first_nonfinite), ("cause", _cause(result))]
    say(*align_columns([line for line in lines if line[1]]))
    norms = [
        [each["name"], *(f"{each[kind]:.6g}" if kind in each else "-" for kind in ("output", "gradient"))]
        for each in result.modules
        if each.keys() & {"output", "gradient"}
    ]
    say(*align_columns([["module", "norm of output", "norm of gradient"], *norms]))
    kept = sorted(((each["kept_bytes"], each["name"]) for each in result.modules if "kept_bytes" in each), reverse=True)
    if kept:
        rows = [[name or "outside of modules", size_text(size)] for size, name in kept]
        say(*align_columns([["module", "kept for backward"], *rows, ["all", size_text(sum(size for size, _ in kept))]]))


def _cause(result: Replay) -> str:
    search = result.search
    if search is None or search.problem:
        return "" if search is None else search.problem
    rows = ", ".join(f"row {first}" if first == last else f"rows {first} to {last}" for first, last in search.groups)
    ids = f" (id {', '.join(map(str, result.ids))})" if result.ids else ""
    return f"{rows}{ids}{'; without them the step is finite' if search.is_confirmed else ''}"
