"""The checks of ``genlight check``, in the order in which they are printed.

hooks · discovered · devices · metrics · updates · hyperparams · gradients · changed gradients · evaluate · state ·
state round trip · reproducible · resume · resume on ranks · ranks · rank state · sharded · batch size · bf16-mixed. If
the class cannot be trained at all, "steps" or "devices" has the reason, and the checks after "hooks" are not run. The
check "resume" trains with the loader and the precision of the job; the others use fp32, except for bf16-mixed.
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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...callbacks.checkpoint import list_checkpoints, load, save
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.finite import are_finite
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import UnstorableStateError
from ..contract.types import REQUIRED_HOOKS
from ..discovery.children import below
from ..discovery.discover import Found, walk_both
from ..discovery.rank_local import rank_local_of
from ..gradients.rank_check import find_user_line
from ..module.module import ContractModule
from ..module.plugin_loading import HOOK_ARGUMENTS, misspelled_hooks, optional_hook, signature_faults
from ..plumbing.counted_dict import CountedDict
from ..plumbing.redaction import safe_str
from ..plumbing.text import list_first
from .batches import halves
from .finding import Finding, Level
from .isolation import describe_error, quiet
from .snapshot import Snapshot, compare_snapshots, flatten, live_weights
from .subject import REFUSED, RESUMED, SHARDED, Observer, RanksError, Subject, train_on_ranks

TRAINED = ("optimizer state", "weight")
"""Kinds of values compared between two trainings. Optimizer states show that a gradient was scaled by a factor, and
weights may not: Adam's steps are the same for any multiple of a gradient."""
SAME = 1e-5
"""Largest relative difference of weights that rounding explains."""
ROUNDINGS = 10
"""A value may differ by this many times its distance in `_Case.rounding_distances`."""
NOTHING = 1e-6
"""The distance of a value with a smaller norm is relative to this norm; otherwise, values near zero would seem far
apart."""
CLOSE = 0.2
"""Largest relative difference of weights that bf16 explains over a few steps: a bias that began at zero has moved by
only a few steps of Adam, and rounding changes those by a tenth."""

_REMEDIES = {
    "hooks": "Give the class the hooks of the contract, with their parameters.",
    "devices": 'Use ctx.device in place of a literal such as "cuda:0".',
    "discovered": "Give them to an optimizer, or set requires_grad to False.",
    "metrics": "Look for a division by a count of 0, a logarithm of 0, or a mean over no values.",
    "updates": "Look for an optimizer that never steps or that holds a copy of the weights, a learning rate of 0, or a "
    "loss that does not depend on the weights; if gradients are accumulated over more steps, give --steps.",
    "hyperparams": "Read it from ctx.job.hyperparams, correct its name, or remove it from the job.",
    "gradients": "Call zero_grad between an update and the next backward.",
    "changed gradients": "On several ranks gradients are means over the ranks, so a bound on the gradient of each row "
    "(clip_grad_norm_, as in DP-SGD) would apply to that mean. Use `strategy: ddp`, compute gradients of rows by "
    "torch.autograd.grad, which averages nothing, and write the bounded sum to `.grad`; or use one device. A constant "
    "factor is fine.",
    "evaluate": "It must work with the data of a check, and restore averaged weights and modes: model.train().",
    "state": "Return numbers, strings, tensors, arrays, and dicts and lists of them.",
    "state round trip": "Restore everything that state_dict returns in load_state_dict.",
    "reproducible": "Seed all random numbers in `setup` or `configure`, and keep what changes in the state or on the "
    "trainer object, not on its class or in a global variable. Until then a resume cannot be checked.",
    "resume": "Return it from state_dict, or from rollout_state if it is an environment's, and restore it in "
    "load_state_dict or load_rollout_state. If it is in none of them, look for a generator, an iterator or a global "
    "variable.",
    "resume on ranks": "Keep all that a step needs in the state or on the trainer, and return each rank's own values "
    "from state_dict.",
    "ranks": "Make the same calls on every rank; look for random numbers, and uses of ctx.rank or the rows.",
    "rank state": "Average it over all ranks, broadcast rank 0's value, or name it in `rank_local` if it is intended.",
    "sharded": "Use ddp, or follow the message; look for code that uses weights outside of forward and updates.",
    "batch size": "This is normal with batch statistics or random numbers per row. Otherwise use a mean over the rows "
    "instead of a sum.",
    "bf16-mixed": "Compute losses, norms and logarithms in fp32: `with torch.autocast(device, enabled=False)`.",
}
"""The remedy for a finding, by check."""

_ABOUT_CUDA = re.compile(r"cuda|nvidia|hip\b", re.IGNORECASE)


def _finding(check: str, level: Level, detail: str) -> Finding:
    return Finding(check, level, detail, _REMEDIES.get(check, "") if level in ("warn", "fail") else "")


@dataclass(frozen=True)
class _Case:
    """The trainings and findings that several checks share."""

    subject: Subject
    full_run: Observer
    """The uninterrupted run."""
    had_gradients: Mapping[int, bool]
    """Whether any parameter of an optimizer had a gradient at one of its steps, by id of the optimizer."""
    folder: Path
    levels: dict[str, Level] = field(default_factory=dict)
    """Levels of the findings so far, by check."""

    @functools.cached_property
    def one_process(self) -> Snapshot:
        """The final values of a training in one process, under the conditions of a rank.

        Dropout is off, because each rank draws other random numbers for it. There is one thread, because the rounding
        depends on the number of threads, and Adam may turn a rounding error into a complete step.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.subject.train(Observer(dropout=False)).take_snapshot(*TRAINED)
        finally:
            torch.set_num_threads(threads)

    @functools.cached_property
    def rounding_distances(self) -> Mapping[str, float]:
        """How far each value of `one_process` moves if the initial weights are rounded differently.

        Some gradients are zero except for rounding, such as the gradient of a bias of attention keys, or of a bias
        before a batch norm. Adam still makes complete steps from them, and the running mean of the batch norm follows.
        """
        random = torch.Generator().manual_seed(self.subject.seed)

        def round_otherwise(step: int, module: ContractModule) -> None:
            if step == 0:
                with torch.no_grad():
                    for weight in module.parameters():
                        if weight.is_floating_point():
                            signs = torch.randint(-1, 2, weight.shape, generator=random)
                            weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)

        rounded = self.subject.train(Observer(round_otherwise, dropout=False)).take_snapshot(*TRAINED)
        return _distances(rounded, self.one_process)

    def furthest(
        self, actual: Snapshot, expected: Snapshot, *, limit: float = SAME, kinds: tuple[str, ...] = TRAINED
    ) -> tuple[float, str]:
        """Return the relative distance and the path of the value that is furthest from its expected value.

        If the distance exceeds the limit, values that rounding moves about as far do not count.
        """
        distances = _distances(actual, expected, kinds)
        if max(distances.values(), default=0.0) > limit:
            rounding = self.rounding_distances
            distances = {path: d for path, d in distances.items() if d > ROUNDINGS * rounding.get(path, 0.0)}
        return max(((distance, path) for path, distance in distances.items()), default=(0.0, ""))


def run_checks(subject: Subject) -> Iterator[Finding]:
    """Run every check of `subject`; yield each finding as soon as it exists."""
    try:
        trainer = subject.make()
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield _finding("hooks", "fail", describe_error(error))
        return
    yield _check_hooks(trainer)
    yield from (Finding("hooks", "warn", misspelled) for misspelled in misspelled_hooks(trainer))
    if not subject.batches and optional_hook(trainer, "rollout") is None:
        remedy = "Give --data FILE, or a JOB.json with data in place of the class."
        yield Finding("steps", "skip", "training was not checked: there is no data", remedy)
        return
    with tempfile.TemporaryDirectory(prefix="genlight-check-") as folder:
        yield from _check_training(subject, Path(folder))


def _check_training(subject: Subject, folder: Path) -> Iterator[Finding]:
    """Train the class once, and yield the findings of all checks on that training."""
    had_gradients: dict[int, bool] = {}

    def at_update(optimizer: Optimizer) -> None:
        has_gradient = any(p.grad is not None for p in parameters_of(optimizer))
        had_gradients[id(optimizer)] = has_gradient or had_gradients.get(id(optimizer), False)

    try:
        full_run = subject.train(Observer(keep=True), at_update=at_update)
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield _finding("devices" if _ABOUT_CUDA.search(safe_str(error)) else "steps", "fail", describe_error(error))
        return
    case = _Case(subject, full_run, had_gradients, folder)
    for name, check in CHECKS.items():
        try:
            for finding in check(case):
                case.levels[finding.check] = finding.level
                yield finding
        except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
            yield Finding(name, "fail", describe_error(error))


def _check_hooks(trainer: object) -> Finding:
    """Check that the loop can call every hook of the class."""
    if faults := signature_faults(trainer):
        return _finding("hooks", "fail", "; ".join(faults))
    optional = [name for name in HOOK_ARGUMENTS if name not in REQUIRED_HOOKS and hasattr(trainer, name)]
    return _finding(
        "hooks", "pass", f"all {len(REQUIRED_HOOKS)}" + (f", and {', '.join(optional)}" if optional else "")
    )


def check_discovered(case: _Case) -> Iterator[Finding]:
    """Report the modules and optimizers that were found, and trained parameters that no optimizer updates."""
    discovered = case.full_run.discovered
    parts = [
        f"{found.path} ({sum(p.numel() for p in found.value.parameters()):,} parameters, {how})"
        for how, modules in (("trained", discovered.trained), ("not trained", discovered.untrained))
        for found in modules
    ]
    others: list[Found[Any]] = [*discovered.optimizers, *discovered.schedulers]
    parts += [f"{found.path} ({type(found.value).__name__})" for found in others]
    parts += [f"{found.path} (tensor)" for found in discovered.parameters]
    text = "; ".join(parts) or "neither modules nor optimizers; nothing is synchronized between ranks"
    optimized = {id(p) for p in discovered.optimized()}
    unused = [
        f"{found.path}.{name}"
        for found in discovered.trained
        for name, p in found.value.named_parameters()
        if p.requires_grad and p.grad is not None and id(p) not in optimized
    ]
    if unused:
        yield _finding("discovered", "warn", f"{text}. {', '.join(unused)} collect gradients that no optimizer uses")
    else:
        yield _finding("discovered", "pass", text)
    yield _finding("devices", "pass", "a run without any CUDA device works")


def check_metrics(case: _Case) -> Iterator[Finding]:
    """Report metrics that are nan after every step."""
    steps = case.full_run.metrics
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    nan = [name for name in names if all(math.isnan(metrics.get(name, math.nan)) for metrics in steps)]
    if nan:
        text = f"{', '.join(nan)} is nan after each of {len(steps)} steps"
        yield _finding("metrics", "fail" if "train/loss" in nan else "warn", text)
    elif names:
        yield _finding("metrics", "pass", ", ".join(names))


def check_updates(case: _Case) -> Iterator[Finding]:
    """Check that some weight changes. An optimizer that never had a gradient may hold copies of the weights."""
    run, discovered, steps = case.full_run, case.full_run.discovered, max(case.full_run.snapshots)
    parameters = {
        *(f"{found.path}.{name}" for found in discovered.modules for name, _ in found.value.named_parameters()),
        *(found.path for found in discovered.parameters),
    }
    changed = parameters & set(run.snapshots[0].differences(run.snapshots[steps]))
    idle = [found.path for found in discovered.optimizers if case.had_gradients.get(id(found.value)) is False]
    text = f"{len(changed) or 'no'} of {len(parameters)} parameters changed in {steps} steps"
    if not changed:
        text = f"no weight changed in {steps} steps"
    if idle:
        text += f": {', '.join(idle)} never had a gradient; it may hold a copy of the weights"
    if parameters:
        level: Level = "warn" if idle else "pass"
        yield _finding("updates", level if changed else "fail" if case.had_gradients else "warn", text)


def check_hyperparams(case: _Case) -> Iterator[Finding]:
    """Check that the class read each hyperparameter of the job."""
    hyperparams = case.full_run.module.ctx.job.hyperparams
    if isinstance(hyperparams, CountedDict) and hyperparams:
        if unread := hyperparams.unread:
            yield _finding("hyperparams", "warn", f"the class did not read {', '.join(unread)}")
        else:
            yield _finding("hyperparams", "pass", "the class read all of them")


class _StaleGradientError(Exception):
    """Ends a run that has shown a stale gradient."""


def check_gradients(case: _Case) -> Iterator[Finding]:
    """Report gradients that a ``zero_grad`` should have cleared, and gradients that change between backward calls.

    A change counts only if it happens between two backward calls of one update. To find a gradient that is not cleared,
    the check sets it to nan after the step, if the last update used it and nothing has changed it since. That has no
    effect on a class that clears its gradients. In another class, the nan is found at a later update.
    """
    used: dict[int, tuple[Tensor, Tensor, int]] = {}  # parameter, gradient and its version at the last update, by id
    spoiled: set[int] = set()  # ids of parameters whose gradient was set to nan
    stale: set[int] = set()  # ids of parameters that had this nan at a later update
    names: dict[int, str] = {}
    accumulated: dict[int, tuple[Tensor, int]] = {}  # gradient and its version after the last backward call, by id
    changed_before: list[str] = []  # lines of backward calls before which a gradient was changed

    def before_accumulation(parameter: Tensor) -> None:
        before, version = accumulated.get(id(parameter), (None, 0))
        now = parameter.grad
        was_zeroed = before is not None and before._version == version + 1 and not before.any()
        was_replaced = now is not None and now is not before and bool(now.any())
        if before is not None and (was_replaced or (before._version != version and not was_zeroed)):
            changed_before.append(find_user_line())

    def after_accumulation(parameter: Tensor) -> None:
        if parameter.grad is not None:
            accumulated[id(parameter)] = (parameter.grad, parameter.grad._version)

    def after_update(optimizer: Optimizer) -> None:
        accumulated.clear()
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if id(parameter) in spoiled and bool(gradient.isnan().any()):
                stale.add(id(parameter))
            used[id(parameter)] = (parameter, gradient, gradient._version)
        if stale:
            raise _StaleGradientError

    def at_step(step: int, module: ContractModule) -> None:
        assert module.discovered is not None
        for tensor in module.discovered.optimized() if step == 0 else ():
            if tensor.requires_grad and not is_lazy(tensor):
                tensor.register_hook(lambda _, tensor=tensor: before_accumulation(tensor))  # type: ignore[no-untyped-call]
                tensor.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
        names.update({id(tensor): name for name, tensor in live_weights(module.discovered).items()})
        for key, (parameter, gradient, version) in used.items():
            if parameter.grad is gradient and gradient._version == version:
                gradient.detach().fill_(math.nan)
                spoiled.add(key)
        used.clear()

    # The nan may cause an error in the class. Errors with other causes appear in the other runs.
    with contextlib.suppress(Exception):
        case.subject.train(Observer(at_step), at_update=after_update)
    if stale:
        named = list_first([name for key, name in names.items() if key in stale] or ["its parameters"], 3)
        yield _finding("gradients", "warn", f"gradients of one update are still part of the next one, of {named}")
    if changed_before:
        text = f"gradients are changed between two backward calls of one update, before {changed_before[0]}"
        yield _finding("changed gradients", "warn", text)


def check_evaluate(case: _Case) -> Iterator[Finding]:
    """Check that ``evaluate`` changes no weights, no optimizer states and no modes (train or eval) of modules."""
    if optional_hook(case.subject.make(), "evaluate") is None:
        return
    trained = case.subject.train(Observer(stop_after=1))
    module: Any = trained.module
    parts = {
        f"{found.path}.{name}".removesuffix("."): part
        for found in trained.discovered.modules
        for name, part in found.value.named_modules()
    }
    before, modes = trained.take_snapshot(*TRAINED), {path: part.training for path, part in parts.items()}
    try:
        with quiet():
            module.plugin.evaluate(module.contract_state, module.ctx)
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield _finding("evaluate", "warn", describe_error(error))
        return
    changed = before.differences(trained.take_snapshot(*TRAINED))
    left = [path for path, part in parts.items() if part.training != modes[path]]
    if changed:
        yield _finding("evaluate", "fail", f"{changed[0]} differs after `evaluate` ({len(changed)} values)")
    elif left:
        mode = "train" if parts[left[0]].training else "eval"
        yield _finding("evaluate", "fail", f"{left[0]} is in {mode} mode after `evaluate` and was not before")
    else:
        yield _finding("evaluate", "pass", "does not change weights and modes")


def check_state(case: _Case) -> Iterator[Finding]:
    """Check that ``state_dict`` can be stored, and is equal after a checkpoint is loaded into a new trainer."""
    module, path = case.full_run.module, case.folder / "state"
    payload = module.hosted_trainer.state.payload()
    try:
        save(path, {CONTRACT_KEY: {"state": payload}})
    except UnstorableStateError as error:
        yield _finding("state", "fail", str(error))
        return
    stored = flatten(payload, "payload")
    count = len(stored["value"])
    yield _finding("state", "pass", f"can be stored, without pickle ({count} values)")
    trainer = case.subject.make()
    trainer.setup(module.ctx)
    state = trainer.configure(module.ctx)
    trainer.load_state_dict(state, load(path)[CONTRACT_KEY]["state"], module.ctx)
    if lost := stored.differences(flatten(trainer.state_dict(state), "payload")):
        text = f"{lost[0]} differs after load_state_dict ({len(lost)} of {count} values)"
        yield _finding("state round trip", "fail", text)
    else:
        yield _finding("state round trip", "pass", f"{count} values are bit-equal after loading")


def check_resume(case: _Case) -> Iterator[Finding]:
    """Check that an interrupted and resumed run ends with the same bits.

    All values are compared: even if the weights are equal, the resume may have lost an average, a best value, a counter
    or statistics. Values that differ between two uninterrupted runs, such as a clock, do not count.
    """
    subject, folder = case.subject, case.folder / "checkpoints"
    as_in_job = subject.make_data is not None or subject.precision != "32-true"

    def train(observer: Observer, **checkpoints: Any) -> Observer:
        return subject.train(observer, as_in_job=as_in_job, **checkpoints)

    full = train(Observer(keep=True)) if as_in_job else case.full_run
    again = train(Observer(keep=True))
    broken = [path for path, value in full.take_snapshot("weight")["weight"].items() if not are_finite([value])]
    if broken:
        yield _finding("resume", "fail", f"{broken[0]} is not finite after {2 * subject.steps} steps")
        return
    if unequal := full.take_snapshot("weight").differences(again.take_snapshot("weight")):
        yield _finding("reproducible", "warn", f"two runs from the same seed end with a different {unequal[0]}")
        yield _finding("resume", "skip", "two uninterrupted runs already differ")
        return
    yield _finding("reproducible", "pass", "two runs from the same seed are bit-equal")
    train(Observer(stop_after=subject.steps), save_to=folder)
    (saved,) = (entry.path for entry in list_checkpoints(folder))
    resumed = train(Observer(keep=True), save_to=folder, resume_from=saved)
    level, text = _judge_resume(subject, full, again, resumed)
    middle, end = subject.steps, max(full.snapshots)
    yield _finding("resume", level, f"{end} steps against {middle} + resume + {middle}: {text}")


def _judge_resume(subject: Subject, full: Observer, again: Observer, resumed: Observer) -> tuple[Level, str]:
    """Compare a resumed run with an uninterrupted one; `again` is a second uninterrupted run."""

    def differences(other: Observer, step: int) -> list[str]:
        return full.snapshots[step].differences(other.snapshots[step])

    middle, end = subject.steps, max(full.snapshots)
    unequal = full.take_snapshot("weight").differences(resumed.take_snapshot("weight"))
    lost = differences(resumed, middle)
    if unequal and lost:
        return "fail", f"the first difference is {unequal[0]}; {lost[0]} was not restored ({len(lost)} values)"
    if unequal:
        return "fail", f"the first difference is {unequal[0]}, although everything in state and trainer was restored"
    # If the class collects its own batches, only weights are compared: environments keep values that no later rollout
    # depends on, such as whether a wrapper has warned, and these may differ.
    if not subject.batches and resumed.rollouts:
        return "pass", f"bit-equal, with {resumed.rollouts} rollouts after the resume"
    if not subject.batches:
        return "warn", "bit-equal, but all steps train on one rollout: give more --steps than a phase has"
    unstable = {path for step in (middle, end) for path in differences(again, step)}
    if at_end := [path for path in differences(resumed, end) if path not in unstable]:
        return "fail", f"the weights are bit-equal, but {at_end[0]} differs at the end ({len(at_end)} values)"
    # Values of modules do not count, because the first call of a lazy layer sets its sizes.
    modules = tuple(f"{found.path}." for found in full.discovered.modules)
    in_both = (full.snapshots[middle].digests.keys() & resumed.snapshots[middle].digests.keys()) - unstable
    if rewritten := [path for path in lost if path in in_both and not path.startswith(modules)]:
        return "warn", (
            f"bit-equal, but {rewritten[0]} was not restored ({len(rewritten)} values) and is equal at the end "
            "because a later step wrote it: save it if it is more than the last step's value, such as the best loss"
        )
    return "pass", "bit-equal"


def check_ranks(case: _Case) -> Iterator[Finding]:
    """Check that two gloo processes end with the weights of one process, under DDP and FSDP 2."""
    subject, expected = case.subject, case.one_process
    if not subject.batches:
        reason = "the class collects its own batches, which differ between ranks and precisions"
        yield Finding("ranks", "skip", f"not compared, and neither is bf16-mixed: {reason}")
        return
    pairs = [pair for batch in subject.batches if (pair := halves(batch)) is not None]
    jobs = {"same": [list(subject.batches)] * 2}
    if expected["weight"] and len(pairs) == len(subject.batches):
        jobs["halves"] = [[pair[i] for pair in pairs] for i in range(2)]
    if expected["weight"]:
        # Last, because an error in this job leaves the ranks at different points.
        jobs[SHARDED] = jobs.get("halves", jobs["same"])
    try:
        results = train_on_ranks(subject, jobs, case.folder)
    except RanksError as error:
        yield _finding("ranks", "fail", str(error))
        return
    if not expected["weight"]:
        yield _finding("ranks", "pass", "two processes finish; there are no weights that must be equal")
        return
    resumed = {name: by_rank for name in [*results] if name.endswith(RESUMED) for by_rank in [results.pop(name)]}
    yield from _check_resume_on_ranks(case, results, resumed)
    (sharded, _), local = results.pop(SHARDED), rank_local_of(case.full_run.module.plugin)

    def differences(kind: str, by_rank: list[Snapshot]) -> list[str]:
        first, second = (Snapshot({kind: each[kind]}) for each in by_rank)
        return [path for path in first.differences(second) if path not in local]

    for name, by_rank in results.items():
        if drifted := differences("weight", by_rank):
            yield _finding("ranks", "fail", f"replicas drift apart ({name} rows): {drifted[0]}")
            return
    distances = _distances(results["same"][0], expected)
    distance, path = max(((size, path) for path, size in distances.items()), default=(0.0, ""))
    halved, halved_path = case.furthest(results["halves"][0], expected) if "halves" in results else (math.inf, "")
    # It is enough if one of the two agrees: a class that sums over ranks counts the same rows twice, but is right with
    # halved rows.
    if distance > SAME and halved > SAME:
        yield _finding(
            "ranks", "fail", f"two processes with the same rows end {distance:.1e} away from one process, at {path}"
        )
        return
    text = f"two processes agree with one process to {min(distance, halved):.1e}, and are bit-equal to each other"
    yield _finding("ranks", "pass", text)
    if "halves" in results:
        yield from _check_rank_state(case, differences("value", results["halves"]))
    yield _check_sharded(case, sharded, results["halves" if "halves" in results else "same"][0])
    if "halves" not in results:
        yield _finding("batch size", "skip", "the raw batches cannot be cut in half")
    elif halved <= SAME:
        yield _finding("batch size", "pass", f"two halves of a batch train like the full batch, to {halved:.1e}")
    else:
        yield _finding(
            "batch size", "warn", f"two halves of a batch end {halved:.1e} away from the full batch, at {halved_path}"
        )


def _check_resume_on_ranks(
    case: _Case, results: Mapping[str, list[Snapshot]], resumed: Mapping[str, list[Snapshot]]
) -> Iterator[Finding]:
    """Check that interrupted and resumed ranks end with the same bits, each with its own rows or shards."""
    if case.levels.get("resume") != "pass":  # that check reports the reason
        return
    for name, by_rank in resumed.items():
        full, strategy = results[name.removesuffix(RESUMED)], "FSDP 2" if name == f"{SHARDED}{RESUMED}" else "DDP"
        if full[0][REFUSED]:
            continue
        reasons = [snapshot[REFUSED][REFUSED] for snapshot in by_rank if snapshot[REFUSED]]
        differing = [path for one, other in zip(full, by_rank, strict=True) for path in one.differences(other)]
        if reasons:
            yield _finding("resume on ranks", "fail", f"two processes under {strategy} cannot be resumed: {reasons[0]}")
        elif differing:
            text = f"two resumed processes under {strategy} end differently; the first difference is {differing[0]}"
            yield _finding("resume on ranks", "fail", text)
        else:
            yield _finding("resume on ranks", "pass", f"two processes under {strategy} are bit-equal after a resume")


def _check_sharded(case: _Case, sharded: Snapshot, of_ddp: Snapshot) -> Finding:
    """Compare training under FSDP 2 with training under DDP on the same rows."""
    if refusal := sharded[REFUSED]:
        return _finding("sharded", "warn", f"FSDP 2 over two processes: {refusal[REFUSED]}")
    distance, path = case.furthest(sharded, of_ddp)
    if distance > SAME:
        text = f"sharded over two processes, training ends {distance:.1e} away from DDP on the same rows, at {path}"
        return _finding("sharded", "fail", text)
    return _finding("sharded", "pass", f"FSDP 2 over two processes agrees with DDP to {distance:.1e}")


def _check_rank_state(case: _Case, differing: Collection[str]) -> Iterator[Finding]:
    """Report training that depends on values which differ between ranks, such as a first loss used as a scale.

    To find out, one more run changes the values at the `differing` paths half-way.
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

    weights = case.full_run.take_snapshot("weight")
    if not differing or weights.differences(case.subject.train(Observer()).take_snapshot("weight")):
        return
    if weights.differences(case.subject.train(Observer(change)).take_snapshot("weight")):
        text = f"{list_first(sorted(differing), 3)} differs between ranks, and training depends on it"
        yield _finding("rank state", "warn", f"{text}: each rank uses its own value there")


def check_bf16(case: _Case) -> Iterator[Finding]:
    """Check that bf16-mixed stays finite and near fp32."""
    if not case.subject.batches:
        return
    precision = MixedPrecision("bf16-mixed", "cpu")
    half = case.subject.train(Observer(dropout=False), plugins=[precision]).take_snapshot("weight")
    distance, path = case.furthest(half, case.one_process, limit=CLOSE, kinds=("weight",))
    broken = [path for path, tensor in half["weight"].items() if not are_finite([tensor])]
    if broken:
        yield _finding("bf16-mixed", "fail", f"{broken[0]} is not finite")
    elif distance > CLOSE:
        text = f"{distance:.1e} away from fp32 after {2 * case.subject.steps} steps, at {path}"
        yield _finding("bf16-mixed", "warn", text)
    else:
        yield _finding("bf16-mixed", "pass", f"finite, and {distance:.1e} away from fp32")


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


def _distances(actual: Snapshot, expected: Snapshot, kinds: tuple[str, ...] = TRAINED) -> dict[str, float]:
    """Return the relative distance of each floating-point value, by path; integers may differ and are skipped."""
    apart = compare_snapshots(expected, actual, kinds=kinds, exact=False, floor=NOTHING)
    return {
        path: size
        for kind in kinds
        for path, size in apart[kind].items()
        if all(v is None or _is_measure(v) for v in (expected[kind].get(path), actual[kind].get(path)))
    }


def _is_measure(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
