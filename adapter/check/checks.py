"""The checks of ``genlight check``, in the order in which they are printed.

hooks · configure, first step · devices · metrics · updates · hyperparams · gradients · evaluate · storable state ·
state round trip · reproducible · resume · resume on ranks · two ranks · sharded · batch size · bf16-mixed. A check
that a fault makes meaningless is skipped and says so. The resume uses the loader and the precision of the job.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.checkpoint import list_checkpoints, load, save
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import UnstorableStateError
from ..contract.types import REQUIRED_HOOKS
from ..discovery.children import below
from ..discovery.discover import Found, walk_both
from ..discovery.rank_local import rank_local_of
from ..module.module import ContractModule
from ..module.plugin_loading import HOOK_ARGUMENTS, misspelled_hooks, optional_hook, signature_faults
from ..plumbing.counted_dict import CountedDict
from .batches import halves
from .finding import Finding, Level
from .isolation import quiet, where_raised
from .ranks import REFUSED, RESUMED, SHARDED, RanksError, train_on_ranks
from .snapshot import Snapshot, compare_snapshots, flatten, live_weights
from .subject import Subject, Watched

__all__ = ["CHECKS", "run_checks"]

TRAINED = ("optimizer state", "weight")
"""Kinds of values that two trainings are compared by. States show what Adam hides, whose steps are the same for any
multiple of a gradient."""
SAME = 1e-5
"""Relative difference of weights that rounding explains."""
ROUNDINGS = 10
"""Two orders of sums may be apart by so many times what one change of the last bit of the weights makes of it."""
NOTHING = 1e-6
"""Weights of this norm and below are taken for zeros."""
CLOSE = 0.2
"""Relative difference of weights that bf16 explains over a few steps: a bias that began at zero has only moved by some
steps of Adam, and rounding makes a tenth of that."""

_REMEDIES = {
    "hooks": "Give the class the hooks of the contract, with their parameters.",
    "devices": 'Use ctx.device in place of a literal such as "cuda:0".',
    "discovered": "Give them to an optimizer, or set requires_grad to False.",
    "metrics": "Look for a division by a count of 0, a logarithm of 0, or a mean of nothing.",
    "updates": "Look for an optimizer that never steps, or holds a copy of the weights, a learning rate of 0, a loss "
    "without the weights in it; if gradients are accumulated for longer, give --steps.",
    "hyperparams": "Read it from ctx.job.hyperparams, mend its name, or leave it out of the job.",
    "gradients": "Call zero_grad between an update and the next backward.",
    "evaluate": "Have it work with the data of a check, and put back averaged weights and the modes: model.train().",
    "state": "Return numbers, texts, tensors, arrays, dicts and lists of them.",
    "state round trip": "Restore everything that state_dict returns in load_state_dict.",
    "reproducible": "Seed what draws random numbers in `setup` or `configure`; a resume cannot be judged before.",
    "resume": "Return it from state_dict, or from rollout_state if it is an environment's, and restore it in "
    "load_state_dict or load_rollout_state. Elsewhere may be a generator, an iterator, a variable of the module.",
    "resume on ranks": "Keep what a step needs in the state or on the trainer; state_dict returns what a rank has.",
    "ranks": "Make the same calls on every rank; look for random numbers, and what depends on ctx.rank or its rows.",
    "rank state": "Average it over all ranks, broadcast that of rank 0, or name it in `rank_local` if it is meant so.",
    "sharded": "Use ddp, or do what the message says; look for code that uses weights outside of forward and updates.",
    "batch size": "Expected with batch statistics or random numbers per row; else take the mean over rows, not a sum.",
    "bf16-mixed": "Compute losses, norms and logarithms in fp32: `with torch.autocast(device, enabled=False)`.",
}
"""By check, what to do about what it finds."""

_ABOUT_CUDA = re.compile(r"cuda|nvidia|hip\b", re.IGNORECASE)


def _found(check: str, level: Level, detail: str) -> Finding:
    return Finding(check, level, detail, _REMEDIES.get(check, "") if level in ("warn", "fail") else "")


@dataclass(frozen=True)
class _Case:
    """The state that the checks of a training share."""

    subject: Subject
    whole: Watched
    """An uninterrupted run."""
    found_gradients: Mapping[int, bool]
    """By the id of each optimizer that stepped in it, whether it ever found a gradient."""
    folder: Path
    levels: dict[str, Level] = field(default_factory=dict)
    """Levels of the findings so far, by check."""

    @functools.cached_property
    def alone(self) -> Snapshot:
        """Where one process ends that trains as each of several ranks.

        Without dropout, which every rank draws for itself, and in one thread: other numbers of threads round otherwise,
        which Adam can make a step of.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.subject.train(Watched(dropout=False)).reached(*TRAINED)
        finally:
            torch.set_num_threads(threads)

    @functools.cached_property
    def moved_by_rounding(self) -> Mapping[str, float]:
        """How far each value of `alone` moves where the first weights are rounded otherwise.

        A bias of keys in attention, or before batch statistics, has a gradient of nothing but rounding. Adam makes
        whole steps of it, and the running mean follows.
        """
        random = torch.Generator().manual_seed(self.subject.seed)

        def round_otherwise(step: int, module: ContractModule) -> None:
            if step == 0:
                with torch.no_grad():
                    for weight in module.parameters():
                        if weight.is_floating_point():
                            signs = torch.randint(-1, 2, weight.shape, generator=random)
                            weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)

        rounded = self.subject.train(Watched(round_otherwise, dropout=False)).reached(*TRAINED)
        return _distances(rounded, self.alone)

    def furthest(
        self, found: Snapshot, expected: Snapshot, *, limit: float = SAME, kinds: tuple[str, ...] = TRAINED
    ) -> tuple[float, str]:
        """The weight or optimizer state that is furthest from what was expected: its relative distance, and its path.

        Where it is beyond the limit, what rounding alone moves about as far is left out.
        """
        distances = _distances(found, expected, kinds)
        if max(distances.values(), default=0.0) > limit:
            moved = self.moved_by_rounding
            distances = {path: d for path, d in distances.items() if d > ROUNDINGS * moved.get(path, 0.0)}
        return max(((distance, path) for path, distance in distances.items()), default=(0.0, ""))


def run_checks(subject: Subject) -> Iterator[Finding]:
    """Every check of `subject`, each as soon as it is done."""
    try:
        trainer = subject.make()
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield _found("hooks", "fail", f"{type(error).__name__}: {error}")
        return
    yield _check_hooks(trainer)
    yield from (Finding("hooks", "warn", misspelled) for misspelled in misspelled_hooks(trainer))
    if not subject.batches and optional_hook(trainer, "rollout") is None:
        remedy = "Give --data FILES or --job JOB.json."
        yield Finding("steps", "skip", "training was not checked: there is no data", remedy)
        return
    with tempfile.TemporaryDirectory(prefix="genlight-check-") as folder:
        yield from _trained(subject, Path(folder))


def _trained(subject: Subject, folder: Path) -> Iterator[Finding]:
    found_gradients: dict[int, bool] = {}

    def at_update(optimizer: Optimizer) -> None:
        found = any(p.grad is not None for p in parameters_of(optimizer))
        found_gradients[id(optimizer)] = found or found_gradients.get(id(optimizer), False)

    try:
        whole = subject.train(Watched(keep=True), at_update=at_update)
    except Exception as error:  # noqa: BLE001  # as above
        yield _found("devices" if _ABOUT_CUDA.search(str(error)) else "steps", "fail", _raised(error))
        return
    case = _Case(subject, whole, found_gradients, folder)
    for name, check in CHECKS.items():
        try:
            for finding in check(case):
                case.levels[finding.check] = finding.level
                yield finding
        except Exception as error:  # noqa: BLE001  # as above
            yield Finding(name, "fail", _raised(error))


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}{where_raised(error)}"


def _check_hooks(trainer: object) -> Finding:
    """Whether every hook that is there can be called as the loop calls it."""
    if faults := signature_faults(trainer):
        return _found("hooks", "fail", "; ".join(faults))
    optional = [name for name in HOOK_ARGUMENTS if name not in REQUIRED_HOOKS and hasattr(trainer, name)]
    return _found("hooks", "pass", f"all {len(REQUIRED_HOOKS)}" + (f", and {', '.join(optional)}" if optional else ""))


def check_discovered(case: _Case) -> Iterator[Finding]:
    """Report the modules and optimizers that were found, and parameters that nobody updates."""
    discovered = case.whole.discovered
    parts = [
        f"{found.path} ({sum(p.numel() for p in found.value.parameters()):,} parameters, {how})"
        for how, modules in (("trained", discovered.trained), ("not trained", discovered.untrained))
        for found in modules
    ]
    others: list[Found[Any]] = [*discovered.optimizers, *discovered.schedulers]
    parts += [f"{found.path} ({type(found.value).__name__})" for found in others]
    parts += [f"{found.path} (tensor)" for found in discovered.parameters]
    text = "; ".join(parts) or "neither modules nor optimizers; nothing is synchronised between ranks"
    optimized = {id(p) for p in discovered.optimized()}
    forgotten = [
        f"{found.path}.{name}"
        for found in discovered.trained
        for name, p in found.value.named_parameters()
        if p.requires_grad and p.grad is not None and id(p) not in optimized
    ]
    if forgotten:
        yield _found("discovered", "warn", f"{text}. {', '.join(forgotten)} collect gradients that no optimizer uses")
    else:
        yield _found("discovered", "pass", text)
    yield _found("devices", "pass", "a run without any CUDA device works")


def check_metrics(case: _Case) -> Iterator[Finding]:
    """Whether a metric is nan after every step."""
    steps = case.whole.metrics
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    nan = [name for name in names if all(math.isnan(metrics.get(name, math.nan)) for metrics in steps)]
    if nan:
        text = f"{', '.join(nan)} is nan after each of {len(steps)} steps"
        yield _found("metrics", "fail" if "train/loss" in nan else "warn", text)
    elif names:
        yield _found("metrics", "pass", ", ".join(names))


def check_updates(case: _Case) -> Iterator[Finding]:
    """Whether weights change, by optimizers that hold them."""
    whole, discovered, steps = case.whole, case.whole.discovered, max(case.whole.snapshots)
    parameters = {
        *(f"{found.path}.{name}" for found in discovered.modules for name, _ in found.value.named_parameters()),
        *(found.path for found in discovered.parameters),
    }
    changed = parameters & set(whole.snapshots[0].differences(whole.snapshots[steps]))
    blind = [found.path for found in discovered.optimizers if case.found_gradients.get(id(found.value)) is False]
    text = f"{len(changed) or 'no'} of {len(parameters)} parameters changed in {steps} steps"
    if not changed:
        text = f"no weight changed in {steps} steps"
    if blind:
        text += f": {', '.join(blind)} never found a gradient at what it holds, which may be a copy of the weights"
    if parameters:
        level: Level = "warn" if blind else "pass"
        yield _found("updates", level if changed else "fail" if case.found_gradients else "warn", text)


def check_hyperparams(case: _Case) -> Iterator[Finding]:
    """Whether somebody read each hyperparameter of the job."""
    hyperparams = case.whole.module.ctx.job.hyperparams
    if isinstance(hyperparams, CountedDict) and hyperparams:
        if unread := hyperparams.unread:
            yield _found("hyperparams", "warn", f"nobody read {', '.join(unread)}")
        else:
            yield _found("hyperparams", "pass", "all were read")


class _FoundError(Exception):
    """Ends a run that has shown what it was made for."""


def check_gradients(case: _Case) -> Iterator[Finding]:
    """Whether gradients of one update are still there in the next one, which a ``zero_grad`` that is missing leaves.

    What an update has left when its step ends, and nothing has added to, becomes nan: whoever clears it never notices.
    """
    left: dict[int, tuple[Tensor, Tensor, int]] = {}
    spoilt: set[int] = set()
    stale: set[int] = set()
    names: dict[int, str] = {}

    def after(optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if id(parameter) in spoilt and bool(gradient.isnan().any()):
                stale.add(id(parameter))
            left[id(parameter)] = (parameter, gradient, gradient._version)
        if stale:
            raise _FoundError

    def at_step(_: int, module: ContractModule) -> None:
        assert module.discovered is not None
        names.update({id(tensor): name for name, tensor in live_weights(module.discovered).items()})
        for key, (parameter, gradient, version) in left.items():
            if parameter.grad is gradient and gradient._version == version:
                gradient.detach().fill_(math.nan)
                spoilt.add(key)
        left.clear()

    # An error of the class may come of the nan, and other runs show those that do not.
    with contextlib.suppress(Exception):
        case.subject.train(Watched(at_step), at_update=after)
    if stale:
        named = _first([name for key, name in names.items() if key in stale] or ["its parameters"])
        yield _found("gradients", "warn", f"gradients of the update before are still in the next one, of {named}")


def check_evaluate(case: _Case) -> Iterator[Finding]:
    """Whether ``evaluate`` leaves weights, optimizer states and the modes of modules as it found them."""
    if optional_hook(case.subject.make(), "evaluate") is None:
        return
    trained = case.subject.train(Watched(stop_after=1))
    module: Any = trained.module
    parts = {
        f"{found.path}.{name}".removesuffix("."): part
        for found in trained.discovered.modules
        for name, part in found.value.named_modules()
    }
    before, modes = trained.reached(*TRAINED), {path: part.training for path, part in parts.items()}
    try:
        with quiet():
            module.plugin.evaluate(module.contract_state, module.ctx)
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield _found("evaluate", "warn", f"{type(error).__name__}: {error}")
        return
    changed = before.differences(trained.reached(*TRAINED))
    left = [path for path, part in parts.items() if part.training != modes[path]]
    if changed:
        yield _found("evaluate", "fail", f"{changed[0]} is another after it ({len(changed)} values)")
    elif left:
        mode = "train" if parts[left[0]].training else "eval"
        yield _found("evaluate", "fail", f"{left[0]} is in {mode} mode after it and was not before")
    else:
        yield _found("evaluate", "pass", "leaves weights and modes as they were")


def check_state(case: _Case) -> Iterator[Finding]:
    """Whether ``state_dict`` can be stored, and comes back the same through a checkpoint and a new trainer."""
    module, path = case.whole.module, case.folder / "state"
    payload = module.state_payload()
    try:
        save(path, {CONTRACT_KEY: {"state": payload}})
    except UnstorableStateError as error:
        yield _found("state", "fail", str(error))
        return
    stored = flatten(payload, "payload")
    count = len(stored["value"])
    yield _found("state", "pass", f"can be stored, without pickle ({count} values)")
    trainer = case.subject.make()
    trainer.setup(module.ctx)
    state = trainer.configure(module.ctx)
    trainer.load_state_dict(state, load(path)[CONTRACT_KEY]["state"], module.ctx)
    if lost := stored.differences(flatten(trainer.state_dict(state), "payload")):
        text = f"{lost[0]} differs after load_state_dict ({len(lost)} of {count} values)"
        yield _found("state round trip", "fail", text)
    else:
        yield _found("state round trip", "pass", f"{count} values come back bit-equal")


def check_resume(case: _Case) -> Iterator[Finding]:
    """Whether a run that was interrupted and resumed ends with the same bits.

    With equal weights it may still have lost an average, a best value, a counter, statistics. What differs between two
    uninterrupted runs, such as a clock, is no fault of the class.
    """
    subject, folder = case.subject, case.folder / "checkpoints"
    as_in_job = subject.make_data is not None or subject.precision != "32-true"

    def train(watched: Watched, **checkpoints: Any) -> Watched:
        return subject.train(watched, as_in_job=as_in_job, **checkpoints)

    whole = train(Watched(keep=True)) if as_in_job else case.whole
    again = train(Watched(keep=True))
    broken = [path for path, value in whole.reached("weight")["weight"].items() if not _is_finite(value)]
    if broken:
        yield _found("resume", "fail", f"{broken[0]} is not finite after {2 * subject.steps} steps")
        return
    unequal = whole.reached("weight").differences(again.reached("weight"))
    if unequal:
        yield _found("reproducible", "warn", f"two runs from the same seed end with a different {unequal[0]}")
        yield _found("resume", "skip", "two uninterrupted runs differ already")
        return
    yield _found("reproducible", "pass", "two runs from the same seed are bit-equal")
    train(Watched(stop_after=subject.steps), save_to=folder)
    (saved,) = (entry.path for entry in list_checkpoints(folder))
    resumed = train(Watched(keep=True), save_to=folder, resume_from=saved)

    def differences(other: Watched, step: int) -> list[str]:
        return whole.snapshots[step].differences(other.snapshots[step])

    middle, end = subject.steps, max(whole.snapshots)
    unequal = whole.reached("weight").differences(resumed.reached("weight"))
    lost = differences(resumed, middle)
    unstable = {path for step in (middle, end) for path in differences(again, step)}
    at_end = [path for path in differences(resumed, end) if path not in unstable]
    # A first call may set the sizes of a lazy layer.
    modules = tuple(f"{found.path}." for found in whole.discovered.modules)
    in_both = (whole.snapshots[middle].digests.keys() & resumed.snapshots[middle].digests.keys()) - unstable
    anew = [path for path in lost if path in in_both and not path.startswith(modules)]
    level: Level = "fail"
    if unequal and lost:
        text = f"the first difference is {unequal[0]}; {lost[0]} was not restored ({len(lost)} values)"
    elif unequal:
        text = f"the first difference is {unequal[0]}, though everything in state and trainer was restored"
    # Environments have values of their own, such as whether a wrapper has warned, that no later rollout depends on.
    elif not subject.batches and resumed.rollouts:
        level, text = "pass", f"bit-equal, with {resumed.rollouts} rollouts after the resume"
    elif not subject.batches:
        level, text = "warn", "bit-equal, but all of them train one rollout: give more --steps than a phase has"
    elif at_end:
        text = f"the weights are bit-equal, but {at_end[0]} differs at the end ({len(at_end)} values)"
    elif anew:
        level = "warn"
        text = (
            f"bit-equal, but {anew[0]} was not restored ({len(anew)} values) and came out the same because a later "
            "step wrote it: save it if it is more than the last step's value, such as the best loss so far"
        )
    else:
        level, text = "pass", "bit-equal"
    yield _found("resume", level, f"{end} steps against {middle} + resume + {middle}: {text}")


def check_ranks(case: _Case) -> Iterator[Finding]:
    """Whether two gloo processes end with the weights of one, under DDP and FSDP 2."""
    subject, expected = case.subject, case.alone
    if not subject.batches:
        reason = "the class collects its own batches, of which each rank and each precision has others"
        yield Finding("ranks", "skip", f"not compared, nor bf16-mixed: {reason}")
        return
    pairs = [pair for batch in subject.batches if (pair := halves(batch)) is not None]
    jobs = {"same": [list(subject.batches)] * 2}
    if expected["weight"] and len(pairs) == len(subject.batches):
        jobs["halves"] = [[pair[i] for pair in pairs] for i in range(2)]
    if expected["weight"]:
        jobs[SHARDED] = jobs.get("halves", jobs["same"])  # last, because an error there leaves the ranks out of step
    try:
        results = train_on_ranks(subject, jobs, case.folder)
    except RanksError as error:
        yield _found("ranks", "fail", str(error))
        return
    if not expected["weight"]:
        yield _found("ranks", "pass", "two processes come to an end; no weights were found that have to be kept equal")
        return
    resumed = {name: of_ranks for name in [*results] if name.endswith(RESUMED) for of_ranks in [results.pop(name)]}
    yield from _resumed_on_ranks(case, results, resumed)
    (sharded, _), local = results.pop(SHARDED), rank_local_of(case.whole.module.plugin)

    def apart(kind: str, of_ranks: list[Snapshot]) -> list[str]:
        first, second = (Snapshot({kind: reached[kind]}) for reached in of_ranks)
        return [path for path in first.differences(second) if path not in local]

    for name, of_ranks in results.items():
        if drifted := apart("weight", of_ranks):
            yield _found("ranks", "fail", f"replicas drift apart ({name} rows): {drifted[0]}")
            return
    of_same = _distances(results["same"][0], expected)
    distance, path = max(((size, path) for path, size in of_same.items()), default=(0.0, ""))
    halved, halved_path = case.furthest(results["halves"][0], expected) if "halves" in results else (math.inf, "")
    # A sum over ranks counts the same rows twice, and is right where each rank has rows of its own.
    if distance > SAME and halved > SAME:
        yield _found("ranks", "fail", f"two processes with the same rows end {distance:.1e} away from one, at {path}")
        return
    text = f"two processes agree with one to {min(distance, halved):.1e}, and with each other bit for bit"
    yield _found("ranks", "pass", text)
    if "halves" in results:
        yield from _check_rank_state(case, apart("value", results["halves"]))
    yield _sharded(case, sharded, results["halves" if "halves" in results else "same"][0])
    if "halves" not in results:
        yield _found("batch size", "skip", "the raw batches cannot be cut in half")
    elif halved <= SAME:
        yield _found("batch size", "pass", f"two halves of a batch train like the whole, to {halved:.1e}")
    else:
        yield _found(
            "batch size", "warn", f"two halves of a batch end {halved:.1e} away from the whole, at {halved_path}"
        )


def _resumed_on_ranks(
    case: _Case, results: Mapping[str, list[Snapshot]], resumed: Mapping[str, list[Snapshot]]
) -> Iterator[Finding]:
    """Whether ranks that were interrupted and resumed end with the same bits; windows and shards are theirs."""
    if case.levels.get("resume") != "pass":  # the reason is known
        return
    for name, of_ranks in resumed.items():
        whole, how = results[name.removesuffix(RESUMED)], "FSDP 2" if name == f"{SHARDED}{RESUMED}" else "DDP"
        if whole[0][REFUSED]:
            continue
        reasons = [snapshot[REFUSED][REFUSED] for snapshot in of_ranks if snapshot[REFUSED]]
        differing = [path for one, other in zip(whole, of_ranks, strict=True) for path in one.differences(other)]
        if reasons:
            yield _found("resume on ranks", "fail", f"two processes under {how} cannot be resumed: {reasons[0]}")
        elif differing:
            text = f"two processes under {how} that are resumed end otherwise, first in {differing[0]}"
            yield _found("resume on ranks", "fail", text)
        else:
            yield _found("resume on ranks", "pass", f"two processes under {how} are bit-equal after a resume")


def _sharded(case: _Case, sharded: Snapshot, of_ddp: Snapshot) -> Finding:
    if refusal := sharded[REFUSED]:
        return _found("sharded", "warn", f"FSDP 2 over two processes: {refusal[REFUSED]}")
    distance, path = case.furthest(sharded, of_ddp)
    if distance > SAME:
        text = f"sharded over two processes it ends {distance:.1e} away from DDP on the same rows, at {path}"
        return _found("sharded", "fail", text)
    return _found("sharded", "pass", f"FSDP 2 over two processes agrees with DDP to {distance:.1e}")


def _check_rank_state(case: _Case, differing: Collection[str]) -> Iterator[Finding]:
    """Whether training depends on values that each rank has from its own rows, such as first losses to scale by.

    The values at these paths are changed half-way of another run.
    """

    @torch.no_grad()
    def change(step: int, module: ContractModule) -> None:
        if step != case.subject.steps:
            return
        for path, node in list(walk_both(module.contract_state, module.plugin)):
            if isinstance(node, Tensor):
                if path in differing and node.is_floating_point():
                    node.mul_(1.5)
                continue
            for where, value, put, _ in list(below(path, node)):
                if isinstance(value, float) and where in differing and put is not None:
                    put(1.5 * value)

    reached = case.whole.reached("weight")
    if not differing or reached.differences(case.subject.train(Watched()).reached("weight")):
        return
    if reached.differences(case.subject.train(Watched(change)).reached("weight")):
        text = f"{_first(sorted(differing))} differs between ranks, and training depends on it"
        yield _found("rank state", "warn", f"{text}: each rank trains by its own rows there")


def check_bf16(case: _Case) -> Iterator[Finding]:
    """Whether bf16-mixed stays finite and near fp32."""
    if not case.subject.batches:
        return
    precision = MixedPrecision("bf16-mixed", "cpu")
    half = case.subject.train(Watched(dropout=False), plugins=[precision]).reached("weight")
    distance, path = case.furthest(half, case.alone, limit=CLOSE, kinds=("weight",))
    broken = [path for path, tensor in half["weight"].items() if not _is_finite(tensor)]
    if broken:
        yield _found("bf16-mixed", "fail", f"{broken[0]} is not finite")
    elif distance > CLOSE:
        text = f"{distance:.1e} away from fp32 after {2 * case.subject.steps} steps, at {path}"
        yield _found("bf16-mixed", "warn", text)
    else:
        yield _found("bf16-mixed", "pass", f"finite, and {distance:.1e} away from fp32")


CHECKS: dict[str, Callable[[_Case], Iterator[Finding]]] = {
    "discovered": check_discovered,
    "metrics": check_metrics,
    "updates": check_updates,
    "hyperparams": check_hyperparams,
    "gradients": check_gradients,
    "evaluate": check_evaluate,
    "state": check_state,
    "resume": check_resume,
    "ranks": check_ranks,
    "bf16-mixed": check_bf16,
}


def _distances(found: Snapshot, expected: Snapshot, kinds: tuple[str, ...] = TRAINED) -> dict[str, float]:
    """How far what can be measured is from what was expected, by path; not counts, of which half a batch has others."""
    apart = compare_snapshots(expected, found, kinds=kinds, exact=False, floor=NOTHING)
    return {
        path: size
        for kind in kinds
        for path, size in apart[kind].items()
        if all(v is None or _is_measure(v) for v in (expected[kind].get(path), found[kind].get(path)))
    }


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _is_measure(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
