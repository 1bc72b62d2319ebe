"""Compare a job's training with a plain Python loop of its class: the same batches, step by step.

Exit codes: 0 equal within --rtol; 1 different, or the class failed; 2 wrong usage, or nothing to compare.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.exceptions import ContractError, GenlightError, InputError, StartupContractError
from .parser import add_json, add_overrides, at_least
from .terminal import align_columns, print_error, say

if TYPE_CHECKING:
    from ..check.compare import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "job",
        metavar="JOB.json",
        help="the job; genlight trains it in the precision of its `lightning` block, and the plain loop always in fp32",
    )
    parser.add_argument("--steps", type=at_least(1), default=5, help="number of steps, or of updates with --against")
    parser.add_argument(
        "--rtol",
        type=at_least(0, float),
        help="relative difference that counts as equal: by default 1e-5, or 0.05 in half precision; 0 requires equal "
        "bits",
    )
    parser.add_argument(
        "--against",
        metavar="MODULE:FUNCTION",
        help="compare with an old training function, at each optimizer.step, instead of with the class in a plain loop",
    )
    add_overrides(parser, "lightning.precision=bf16-mixed or seed=1")
    add_json(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if the trainings differ or the class failed.

    Raises:
        GenlightError: The trainings cannot be compared.
    """
    try:
        comparison = _compare(args)
    except (StartupContractError, ContractError, InputError, OSError):
        raise
    except Exception as error:  # noqa: BLE001  # an error of the class is a result of the comparison
        from ..check.isolation import describe_error

        text = str(error) if isinstance(error, GenlightError) else describe_error(error)
        return print_error("compare", f"training failed: {text}", 1)
    if args.json:
        say(comparison.as_json())
    else:
        _print_table(comparison)
    return 0 if comparison.first is None else 1


def _compare(args: argparse.Namespace) -> Comparison:
    from ..job.config import resolve_run_config
    from ..module.plugin_loading import find_trainer, on_sys_path
    from ..run.training import check_plugin

    config = resolve_run_config(spec_path=args.job, overrides=args.set)
    with on_sys_path([config.spec_dir, Path.cwd()]):
        check_plugin(config, find_trainer(config.trainer))
    from ..check.compare import compare_job

    return compare_job(config, steps=args.steps, against=args.against, rtol=args.rtol, seed=config.seed or 0)


def _print_table(comparison: Comparison) -> None:
    rows = [["step", *comparison.kinds, ""]]
    for step, largest in comparison.steps.items():
        cells = [_cell(largest.get(kind)) for kind in comparison.kinds]
        differs = any(size > comparison.rtol for _, size in largest.values())
        rows.append([str(step), *cells, "differs" if differs else ""])
    say(*comparison.notes, *align_columns(rows))
    first = comparison.first
    if first is None:
        say(f"equal: no relative difference beyond {comparison.rtol:g}")
        return
    say(
        f"the first difference is after step {first.step}: {first.kind} {first.name}, {first.distance:.1e} "
        f"(beyond {comparison.rtol:g})",
        f"  plain     {first.plain}",
        f"  genlight  {first.hosted}",
        f"  → {first.cause}",
    )


def _cell(worst: tuple[str, float] | None) -> str:
    if worst is None:
        return "-"
    return "equal" if worst[1] == 0 else f"{worst[1]:.1e}"
