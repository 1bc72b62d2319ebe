"""The checks of ``genlight check``, in the order in which they are printed.

hooks · configure, first step · devices · metrics · updates · hyperparams · gradients · evaluate · storable state ·
state round trip · reproducible · resume · two ranks · sharded · batch size · bf16-mixed. What a fault makes meaningless
is skipped and says so.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.checkpoint import list_checkpoints, load, save
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError, UnstorableStateError
from ..contract.types import REQUIRED_HOOKS
from ..discovery.discover import Found, check_unchanged
from ..discovery.rank_local import rank_local_of
from ..module.module import ContractModule
from ..module.plugin_loading import HOOK_ARGUMENTS, misspelled_hooks, optional_hook, signature_faults
from ..plumbing.finding import Finding
from .batches import halves
from .isolation import drops, where_raised
from .mistakes import (
    check_evaluate,
    check_gradients,
    check_hyperparams,
    check_metrics,
    check_rank_state,
    check_updates,
)
from .ranks import REFUSED, SHARDED, RanksError, train_on_ranks
from .snapshot import Snapshot, compare_snapshots, flatten
from .subject import Subject, Trained

__all__ = ["run_checks"]

TRAINED = ("optimizer state", "weight")
"""Kinds of values that two trainings are compared by."""
SAME = 1e-5
"""Relative difference of weights that rounding explains."""
ROUNDINGS = 10
"""Two orders of sums may be apart by so many times what one change of the last bit of the weights makes of it."""
NOTHING = 1e-6
"""Weights of this norm and below are taken for zeros."""
CLOSE = 0.2
"""Relative difference of weights that bf16 explains over a few steps: a bias that began at zero has only moved by some
steps of Adam, and rounding makes a tenth of that."""


_ABOUT_CUDA = re.compile(r"cuda|nvidia|hip\b", re.IGNORECASE)


def run_checks(subject: Subject) -> Iterator[Finding]:
    """Every check of `subject`, each as soon as it is done."""
    try:
        trainer = subject.make()
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield Finding("hooks", "fail", f"{type(error).__name__}: {error}", "Make the class importable and conforming.")
        return
    yield check_hooks(trainer)
    yield from (Finding("hooks", "warn", misspelled) for misspelled in misspelled_hooks(trainer))
    if not subject.batches and optional_hook(trainer, "rollout") is None:
        yield Finding(
            "steps", "skip", "training was not checked: there is no data", "Give --data FILES or --job JOB.json."
        )
        return
    with tempfile.TemporaryDirectory(prefix="genlight-check-") as folder:
        yield from _dynamic(subject, Path(folder))


def _dynamic(subject: Subject, folder: Path) -> Iterator[Finding]:
    found_gradients: dict[int, bool] = {}

    def at_update(optimizer: Optimizer) -> None:
        found = any(p.grad is not None for p in parameters_of(optimizer))
        found_gradients[id(optimizer)] = found or found_gradients.get(id(optimizer), False)

    try:
        whole = subject.train(keep=True, at_update=at_update)
    except Exception as error:  # noqa: BLE001  # as above
        about_cuda = 'Use ctx.device in place of a literal such as "cuda:0".' if _ABOUT_CUDA.search(str(error)) else ""
        yield Finding("devices" if about_cuda else "steps", "fail", _raised(error), about_cuda)
        return
    yield check_discovered(whole)
    yield Finding("devices", "pass", "a run without any CUDA device works")
    yield from check_metrics(whole)
    yield from check_updates(whole, found_gradients)
    yield from check_hyperparams(whole)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "gradients": lambda: check_gradients(subject),
        "evaluate": lambda: check_evaluate(subject),
        "state": lambda: check_state(subject, whole, folder),
        "resume": lambda: check_resume(subject, whole, folder),
    }
    if subject.batches:
        checks |= {
            "ranks": lambda: check_ranks(subject, whole, folder),
            "bf16-mixed": lambda: check_bf16(subject, whole),
        }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001  # as above
            yield Finding(name, "fail", _raised(error))
    if not subject.batches:
        reason = "the class collects its own batches, of which each rank and each precision has others"
        yield Finding("ranks", "skip", f"not compared, nor bf16-mixed: {reason}")


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}{where_raised(error)}"


def check_hooks(trainer: object) -> Finding:
    """Whether every hook that is there can be called as the loop calls it."""
    faults = signature_faults(trainer)
    if faults:
        return Finding("hooks", "fail", "; ".join(faults), "Give the hooks the parameters of the contract.")
    optional = [name for name in HOOK_ARGUMENTS if name not in REQUIRED_HOOKS and hasattr(trainer, name)]
    return Finding("hooks", "pass", f"all {len(REQUIRED_HOOKS)}" + (f", and {', '.join(optional)}" if optional else ""))


def check_discovered(trained: Trained) -> Finding:
    """What of modules and optimizers was found, and whether something trains without anybody to update it."""
    discovered = trained.discovered
    if not discovered.modules and not discovered.optimizers:
        return Finding("discovered", "pass", "neither modules nor optimizers; nothing is synchronised between ranks")
    trains = {found.path: found in discovered.trained for found in discovered.modules}
    parts = [
        f"{found.path} ({_size(found.value)}, {'trained' if trains[found.path] else 'not trained'})"
        for found in sorted(discovered.modules, key=lambda found: not trains[found.path])
    ]
    others: list[Found[Any]] = [*discovered.optimizers, *discovered.schedulers]
    parts += [f"{found.path} ({type(found.value).__name__})" for found in others]
    parts += [f"{found.path} (tensor)" for found in discovered.parameters]
    text = "; ".join(parts)
    optimized = {id(p) for p in discovered.optimized()}
    forgotten = [
        f"{found.path}.{name}"
        for found in discovered.trained
        for name, p in found.value.named_parameters()
        if p.requires_grad and p.grad is not None and id(p) not in optimized
    ]
    if forgotten:
        text += f". {', '.join(forgotten)} collect gradients that no optimizer uses"
        return Finding("discovered", "warn", text, "Give them to an optimizer, or set requires_grad to False.")
    try:
        check_unchanged(discovered, trained.module.contract_state, trained.module.plugin)
    except ContractError as error:
        return Finding("discovered", "fail", str(error))
    return Finding("discovered", "pass", text)


def check_state(subject: Subject, trained: Trained, folder: Path) -> Iterator[Finding]:
    """Whether ``state_dict`` can be stored, and comes back the same through a checkpoint and a new trainer."""
    module = trained.module
    payload = module.state_payload()
    try:
        save(folder / "state", {CONTRACT_KEY: {"state": payload}})
    except UnstorableStateError as error:
        yield Finding("state", "fail", str(error), "Return numbers, texts, tensors, arrays, dicts and lists of them.")
        return
    stored = flatten(payload, "payload")
    count = len(stored["value"])
    yield Finding("state", "pass", f"can be stored, without pickle ({count} values)")
    trainer = subject.make()
    trainer.setup(module.ctx)
    state = trainer.configure(module.ctx)
    trainer.load_state_dict(state, load(folder / "state")[CONTRACT_KEY]["state"], module.ctx)
    lost = stored.differences(flatten(trainer.state_dict(state), "payload"))
    if lost:
        text = f"{lost[0]} differs after load_state_dict ({len(lost)} of {count} values)"
        remedy = "Restore everything that state_dict returns in load_state_dict."
        yield Finding("state round trip", "fail", text, remedy)
    else:
        yield Finding("state round trip", "pass", f"{count} values come back bit-equal")


def check_resume(subject: Subject, whole: Trained, folder: Path) -> Iterator[Finding]:
    """Whether a run that was interrupted and resumed ends with the same bits."""
    again = subject.train(keep=True)
    unequal = whole.reached("weight").differences(again.reached("weight"))
    if unequal:
        text = f"two runs from the same seed end with a different {unequal[0]}"
        remedy = "Seed what draws random numbers in `setup` or `configure`; a resume cannot be judged before."
        yield Finding("reproducible", "warn", text, remedy)
        yield Finding("resume", "skip", "two uninterrupted runs differ already")
        return
    yield Finding("reproducible", "pass", "two runs from the same seed are bit-equal")
    folder /= "checkpoints"
    subject.train(stop_after=subject.steps, save_to=folder)
    (saved,) = (entry.path for entry in list_checkpoints(folder))
    resumed = subject.train(resume_from=saved, save_to=folder, keep=True)
    steps = f"{2 * subject.steps} steps against {subject.steps} + resume + {subject.steps}"
    unequal = whole.reached("weight").differences(resumed.reached("weight"))
    lost = whole.snapshots[subject.steps].differences(resumed.snapshots[subject.steps])
    if unequal and lost:
        text = f"the first difference is {unequal[0]}; {lost[0]} was not restored ({len(lost)} values)"
        kept = ("state_dict", "load_state_dict")
        if not subject.batches:
            kept = (
                "state_dict, or from rollout_state if that is an environment's,",
                f"{kept[1]} or load_rollout_state",
            )
        yield Finding(
            "resume", "fail", f"{steps}: {text}", f"Return {lost[0]} from {kept[0]} and restore it in {kept[1]}."
        )
    elif unequal:
        text = f"the first difference is {unequal[0]}, though everything in state and trainer was restored"
        remedy = "Look for state elsewhere: a random generator, an iterator, a closure or a variable of the module."
        yield Finding("resume", "fail", f"{steps}: {text}", remedy)
    elif subject.batches:
        yield _forgotten_values(whole, again, resumed, at=subject.steps, said=steps)
    # Environments have values of their own, such as whether a wrapper has warned, that no later rollout depends on.
    elif resumed.rollouts:
        yield Finding("resume", "pass", f"{steps}: bit-equal, with {resumed.rollouts} rollouts after the resume")
    else:
        text = "bit-equal, but all of them train one rollout: nothing shows whether the next is the same"
        remedy = "Give --steps a number above that of the minibatches of a phase."
        yield Finding("resume", "warn", f"{steps}: {text}", remedy)


def _forgotten_values(whole: Trained, again: Trained, resumed: Trained, *, at: int, said: str) -> Finding:
    """What to say of a resume with equal weights: it may have lost an average, a best value, a counter, statistics.

    Args:
        whole: An uninterrupted run.
        again: A second one; what differs between the two, such as a clock, is no fault of the class.
        resumed: A run from the checkpoint of step `at`.
        at: The step of the interruption.
        said: What was run, in words.
    """
    end = max(whole.snapshots)
    unstable = {path for step in (at, end) for path in whole.snapshots[step].differences(again.snapshots[step])}
    lost = [path for path in whole.snapshots[end].differences(resumed.snapshots[end]) if path not in unstable]
    if lost:
        text = f"the weights are bit-equal, but {lost[0]} differs at the end ({len(lost)} values)"
        why = "it matters to later steps, or to what uses it"
        remedy = f"Return {lost[0]} from state_dict and restore it in load_state_dict."
        return Finding("resume", "fail", f"{said}: {text}: {why}", remedy)
    before, after = whole.snapshots[at], resumed.snapshots[at]
    in_both = (before.digests.keys() & after.digests.keys()) - unstable
    modules = tuple(f"{found.path}." for found in whole.discovered.modules)  # a first call may set a lazy layer's sizes
    anew = [path for path in before.differences(after) if path in in_both and not path.startswith(modules)]
    if anew:
        text = (
            f"bit-equal, but {anew[0]} was not restored ({len(anew)} values) and came out the same because a later "
            "step wrote it"
        )
        remedy = "Save it if it is more than the last step's value, such as the best loss so far."
        return Finding("resume", "warn", f"{said}: {text}", remedy)
    return Finding("resume", "pass", f"{said}: bit-equal")


def check_ranks(subject: Subject, whole: Trained, folder: Path) -> Iterator[Finding]:
    """Whether two gloo processes end with the weights of one, dropout aside, which draws as each rank is seeded."""
    expected = _as_on_ranks(subject, whole).reached(*TRAINED)
    pairs = [pair for batch in subject.batches if (pair := halves(batch)) is not None]
    jobs = {"same": [list(subject.batches)] * 2}
    if expected["weight"] and len(pairs) == len(subject.batches):
        jobs["halves"] = [[pair[i] for pair in pairs] for i in range(2)]
    if expected["weight"]:
        jobs[SHARDED] = jobs.get("halves", jobs["same"])  # last, because an error there leaves the ranks out of step
    try:
        results = train_on_ranks(subject, jobs, folder)
    except RanksError as error:
        # An error of genlight's own says what to do.
        says_what_to_do = any(name in str(error) for name in ("ContractError", "ReplicaDriftError"))
        remedy = "" if says_what_to_do else "Make the same calls on every rank, whatever its rows are."
        yield Finding("ranks", "fail", str(error), remedy)
        return
    if not expected["weight"]:
        yield Finding("ranks", "pass", "two processes come to an end; no weights were found that have to be kept equal")
        return
    sharded, local = results.pop(SHARDED), rank_local_of(whole.module.plugin)

    def apart(kind: str, of_ranks: list[Snapshot]) -> list[str]:
        first, second = (Snapshot({kind: reached[kind]}) for reached in of_ranks)
        return [path for path in first.differences(second) if path not in local]

    for name, of_ranks in results.items():
        if drifted := apart("weight", of_ranks):
            remedy = "Look for random numbers or rank-dependent code that changes weights outside of an optimizer."
            yield Finding("ranks", "fail", f"replicas drift apart ({name} rows): {drifted[0]}", remedy)
            return
    distance, path = _furthest(results["same"][0], expected)
    rounded = functools.cache(functools.partial(_rounded_otherwise, subject, dropout=False))
    halved = _beyond_rounding(results["halves"][0], expected, expected, rounded) if "halves" in results else None
    # A sum over ranks counts the same rows twice, and is right where each rank has rows of its own.
    if distance > SAME and (halved is None or halved[0] > SAME):
        text = f"two processes with the same rows end {distance:.1e} away from one, at {path}"
        yield Finding("ranks", "fail", text, "Look for code that depends on ctx.rank or ctx.world_size.")
        return
    distance = min(distance, distance if halved is None else halved[0])
    yield Finding("ranks", "pass", f"two processes agree with one to {distance:.1e}, and with each other bit for bit")
    yield from check_rank_state(subject, whole, apart("value", results["halves"]) if halved is not None else [])
    yield _sharded_finding(sharded[0], results["same" if halved is None else "halves"][0], expected, rounded)
    if halved is None:
        yield Finding("batch size", "skip", "the raw batches cannot be cut in half")
    elif halved[0] <= SAME:
        yield Finding("batch size", "pass", f"two halves of a batch train like the whole, to {halved[0]:.1e}")
    else:
        text = f"two halves of a batch end {halved[0]:.1e} away from the whole, at {halved[1]}"
        remedy = "Expected with batch statistics, or random numbers per row; else take the mean over rows, not the sum."
        yield Finding("batch size", "warn", text, remedy)


def _sharded_finding(
    sharded: Snapshot, of_ddp: Snapshot, expected: Snapshot, rounded: Callable[[], Snapshot]
) -> Finding:
    if refusal := sharded[REFUSED]:
        text = f"FSDP 2 over two processes: {refusal[REFUSED]}"
        return Finding("sharded", "warn", text, "Use ddp, or do what the message says.")
    distance, path = _beyond_rounding(sharded, expected, of_ddp, rounded)
    if distance > SAME:
        text = f"sharded over two processes it ends {distance:.1e} away from DDP on the same rows, at {path}"
        remedy = "Use ddp; look for code that reads or changes weights outside of forward, backward and updates."
        return Finding("sharded", "fail", text, remedy)
    return Finding("sharded", "pass", f"FSDP 2 over two processes agrees with DDP to {distance:.1e}")


def _as_on_ranks(subject: Subject, whole: Trained) -> Trained:
    """One process as the ranks train: other numbers of threads round otherwise, which Adam can make a step of."""
    threads = torch.get_num_threads()
    if threads == 1 and not drops(whole.module.modules()):
        return whole
    torch.set_num_threads(1)
    try:
        return subject.train(dropout=False)
    finally:
        torch.set_num_threads(threads)


def check_bf16(subject: Subject, whole: Trained) -> Iterator[Finding]:
    """Whether bf16-mixed stays finite and near fp32."""
    half, expected = subject.train(bf16=True).reached("weight"), whole.reached(*TRAINED)
    distance, path = _furthest(half, expected, kinds=("weight",))
    if distance > CLOSE:
        rounding = _distances(_rounded_otherwise(subject, dropout=True), expected, TRAINED)
        by_rounding_alone = {path: math.inf for path, size in rounding if size > SAME}
        distance, path = _furthest(half, expected, kinds=("weight",), noise=by_rounding_alone)
    broken = [path for path, tensor in half["weight"].items() if not torch.isfinite(tensor).all()]
    if broken:
        remedy = "Compute losses, norms and logarithms in fp32."
        yield Finding("bf16-mixed", "fail", f"{broken[0]} is not finite", remedy)
    elif distance > CLOSE:
        text = f"{distance:.1e} away from fp32 after {2 * subject.steps} steps, at {path}"
        remedy = "Compute sensitive parts in fp32: `with torch.autocast(device, enabled=False)`."
        yield Finding("bf16-mixed", "warn", text, remedy)
    else:
        yield Finding("bf16-mixed", "pass", f"finite, and {distance:.1e} away from fp32")


def _rounded_otherwise(subject: Subject, *, dropout: bool) -> Snapshot:
    """Where one process ends whose first weights are rounded otherwise.

    A bias of keys in attention, or before batch statistics, has a gradient of nothing but rounding. Adam makes whole
    steps of it, and the running mean follows.
    """
    random = torch.Generator().manual_seed(subject.seed)

    def round_otherwise(step: int, module: ContractModule) -> None:
        if step == 0:
            with torch.no_grad():
                for weight in module.parameters():
                    if weight.is_floating_point():
                        signs = torch.randint(-1, 2, weight.shape, generator=random)
                        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)

    return subject.train(dropout=dropout, at_step=round_otherwise).reached(*TRAINED)


def _beyond_rounding(
    found: Snapshot, expected: Snapshot, of_one: Snapshot, rounded: Callable[[], Snapshot]
) -> tuple[float, str]:
    """As `_furthest`; where that is beyond `SAME`, without what rounding makes of `of_one`: `rounded` trains for it."""
    furthest = _furthest(found, expected)
    if furthest[0] > SAME:
        furthest = _furthest(found, expected, noise=dict(_distances(rounded(), of_one, TRAINED)))
    return furthest


def _furthest(
    found: Snapshot,
    expected: Snapshot,
    *,
    kinds: tuple[str, ...] = TRAINED,
    noise: Mapping[str, float] | None = None,
) -> tuple[float, str]:
    """The weight or optimizer state that is furthest from what was expected: its relative distance, and its path.

    States show what Adam hides, whose steps are the same for any multiple of a gradient. What is no further than some
    times its `noise` is left out.
    """
    sizes = [
        (size, path)
        for path, size in _distances(found, expected, kinds)
        if noise is None or size > ROUNDINGS * noise.get(path, 0.0)
    ]
    return max(sizes, default=(0.0, ""))


def _distances(found: Snapshot, expected: Snapshot, kinds: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """How far what can be measured is from what was expected, by path; not counts, such as of rows."""
    apart = compare_snapshots(0, expected, found, kinds=kinds, exact=False, floor=NOTHING).distances
    for kind in kinds:
        for path, size in apart[kind].items():
            if _is_measure(expected[kind].get(path), found[kind].get(path)):
                yield path, size


def _is_measure(*values: Any) -> bool:
    """Whether values are no counts, of which half a batch has other ones."""
    return all(v is None or (isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())) for v in values)


def _size(module: torch.nn.Module) -> str:
    count = sum(p.numel() for p in module.parameters())
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit} parameters"
    return f"{count} parameters"
