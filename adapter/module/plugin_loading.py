"""Load a trainer from an import path, and check that it conforms to the contract and that its hooks can be called."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any, cast

from ..contract.exceptions import ContractError, TrainerPathError
from ..contract.types import OPTIONAL_HOOKS, REQUIRED_HOOKS, StepContext, TrainerPlugin
from ..plumbing.text import closest

_DEFAULT_NAMES = ("TRAINER", "Trainer", "trainer")
_STUB_MODULES = tuple(f"{__package__.rpartition('.')[0]}.{name}" for name in ("contract.types", "compat.old_names"))
"""Modules of protocols. Hooks that a class inherits from these do nothing, so they do not count as its own."""


HOOK_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "setup": (("ctx",), ()),
    "configure": (("ctx",), ()),
    "prepare_batch": (("raw_batch", "state", "ctx"), ()),
    "train_step": (("batch", "state", "ctx"), ()),
    "state_dict": (("state",), ()),
    "load_state_dict": (("state", "payload", "ctx"), ()),
    "save_checkpoint": ((), ("state", "step", "output_dir", "final", "ctx")),
    "load_checkpoint": ((), ("state", "checkpoint_dir", "payload", "ctx")),
    "rollout": (("state", "ctx"), ()),
    "rollout_state": (("state",), ()),
    "load_rollout_state": (("state", "payload", "ctx"), ()),
    "evaluate": (("state", "ctx"), ()),
    "trainer_hooks": (("state", "ctx"), ()),
    "train_loader": (("ctx",), ()),
}
"""Positional and keyword arguments with which each hook is called."""

OPTIONAL_NAMES = (*OPTIONAL_HOOKS, "generate_sample", "rank_local")
ALIKE = 0.85
"""Similarity (0 to 1) from which a name counts as a misspelled hook; `evaluate_loss` is below it."""


def load_trainer_plugin(
    import_path: str, *, search_path: Sequence[str | os.PathLike[str]] | None = None
) -> TrainerPlugin:
    """Load the trainer that `import_path` names.

    Args:
        import_path: ``module:Class`` (created without arguments), ``module:instance``, or only ``module``. The last
            form means the first of ``TRAINER``, ``Trainer`` and ``trainer`` that exists, or else the only public object
            that conforms.
        search_path: Folders that come first on ``sys.path`` while the trainer is loaded. None leaves it as it is.

    Raises:
        TrainerPathError: There is no such module or name, or there are several candidates.
        ContractError: The object does not conform; the message names every missing hook.
        Exception: Any exception of the module or of the class's own constructor, unchanged.
    """
    with on_sys_path(search_path or ()):
        return make_trainer(find_trainer(import_path))


def find_trainer(import_path: str) -> Any:
    """Return the class or instance that `import_path` names, checked; a class is not instantiated yet.

    Raises:
        TrainerPathError: As for `load_trainer_plugin`.
        ContractError: As for `load_trainer_plugin`.
        Exception: Any exception that the import of the module raises.
    """
    module_name, _, attribute = import_path.strip().partition(":")
    module = _import(module_name, import_path)
    target = _attribute(module, attribute) if attribute else _default_trainer(module)
    _check_conforms(target, import_path)
    return target


def make_trainer(target: Any) -> TrainerPlugin:
    """Return an instance of `target`, or `target` itself if it is one; constructor exceptions pass unchanged."""
    trainer: Any = target() if inspect.isclass(target) else target
    return cast("TrainerPlugin", trainer)


@contextlib.contextmanager
def on_sys_path(folders: Sequence[str | os.PathLike[str]]) -> Iterator[None]:
    """Put `folders` first on ``sys.path``, in that order, for the length of the block."""
    added = [os.fspath(folder) for folder in folders]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):  # the imported module may have removed it
                sys.path.remove(folder)


def _import(module_name: str, import_path: str) -> ModuleType:
    """Import the module of an import path."""
    if not module_name or module_name.startswith("."):
        raise TrainerPathError(f"trainer {import_path!r} names no module; write it as 'module:Class'")
    if "/" in module_name or module_name.endswith(".py"):
        raise TrainerPathError(
            f"trainer {import_path!r} names a file; write it as 'module:Class', such as "
            f"'{PurePath(module_name).stem}:Class', with the file in the working directory or in the folder of the job "
            "spec"
        )
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If the module itself does not exist, the path is wrong. If an import in the module fails, raise that error.
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(missing + "."):
            raise
        module, _, name = import_path.strip().rpartition(".")
        if ":" not in import_path and missing == module_name and module in sys.modules:  # the parent package exists
            raise TrainerPathError(
                f"trainer {import_path!r}: {module!r} has no submodule {name!r}; if {name} is a class, write "
                f"'{module}:{name}'"
            ) from None
        raise TrainerPathError(
            f"trainer {import_path!r}: there is no module {missing!r}; searched {_search_path_text()}"
        ) from None


def _search_path_text() -> str:
    folders = dict.fromkeys(os.path.abspath(folder) for folder in sys.path[:3])
    shown = ", ".join(repr(folder) for folder in folders if os.path.isdir(folder))
    return f"{shown} and the installed packages" if shown else "the installed packages"


def _attribute(module: ModuleType, attribute: str) -> Any:
    target: Any = module
    for name in attribute.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            candidates = ", ".join(sorted(_conforming(module))) or "none"
            raise TrainerPathError(
                f"module {module.__name__!r} has no {attribute!r}; trainers in it: {candidates}"
            ) from None
    return target


def _default_trainer(module: ModuleType) -> Any:
    """Return the trainer of a module for an import path without a name."""
    for name in _DEFAULT_NAMES:
        if hasattr(module, name) and not _is_plain_module(getattr(module, name)):
            return getattr(module, name)
    candidates = _conforming(module)
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if not candidates:
        raise TrainerPathError(
            f"module {module.__name__!r} contains no trainer: it has no {', '.join(_DEFAULT_NAMES)}, and no public "
            f"object with the hooks {', '.join(REQUIRED_HOOKS)}"
        )
    names = ", ".join(f"{module.__name__}:{name}" for name in sorted(candidates))
    raise TrainerPathError(f"module {module.__name__!r} contains several trainers; name one of {names}")


def _is_plain_module(value: Any) -> bool:
    """Whether `value` is a module that is no trainer, as after ``from gen_worker import trainer`` in a user's file."""
    return isinstance(value, ModuleType) and bool(missing_hooks(value))


def _conforming(module: ModuleType) -> dict[str, Any]:
    """Return the public objects of `module` that have every required hook, each under one name.

    Abstract classes do not count, because they cannot be instantiated. Imported objects count only if no object that
    the module itself defines conforms.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    conforming = {
        name: value for name, value in public.items() if not missing_hooks(value) and not inspect.isabstract(value)
    }
    own = {name: value for name, value in conforming.items() if _home(value) == module.__name__}
    unique: dict[int, str] = {}
    for name, value in (own or conforming).items():
        unique.setdefault(id(value), name)
    return {name: public[name] for name in unique.values()}


def _home(value: Any) -> str | None:
    owner = value if inspect.isclass(value) else type(value)
    return getattr(owner, "__module__", None)


def missing_hooks(target: Any) -> list[str]:
    """Return the required hooks that are missing in `target`, a class or an instance."""
    return [name for name in REQUIRED_HOOKS if optional_hook(target, name) is None]


def optional_hook(trainer: Any, name: str) -> Callable[..., Any] | None:
    """Return the hook `name` of a trainer, a class or an instance; None if it does not define one."""
    hook = getattr(trainer, name, None)
    return hook if callable(hook) and getattr(hook, "__module__", None) not in _STUB_MODULES else None


def loader_of_class(trainer: Any, ctx: StepContext) -> Any:
    """Return the data of a trainer's ``train_loader`` as batches of the rank of `ctx`; see `feed_of`."""
    from ..feed.user_data import feed_of  # loads Arrow and torch's data loaders

    return feed_of(trainer.train_loader, ctx, {})


def own_hooks(plugin: Any, state: Any, ctx: StepContext) -> list[Any]:
    """Return the result of ``trainer_hooks`` of a trainer class; empty if it has none.

    Raises:
        ContractError: It returned something that is not an iterable of objects.
    """
    hooks = optional_hook(plugin, "trainer_hooks")
    if hooks is None:
        return []
    returned = hooks(state, ctx)
    if isinstance(returned, Mapping | str) or not isinstance(returned, Iterable):
        kind = type(returned).__qualname__
        raise ContractError(f"trainer_hooks returned a {kind}; it must be a list of objects with events")
    return list(returned)


def async_hooks(target: Any) -> list[str]:
    """Return the hooks of `target`, a class or an instance, that are coroutine functions, including optional hooks."""
    hooks = {name: getattr(target, name, None) for name in (*REQUIRED_HOOKS, *OPTIONAL_HOOKS)}
    return [n for n, hook in hooks.items() if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook)]


def check_instance(trainer: Any) -> TrainerPlugin:
    """Return `trainer` itself if it is an object that can train.

    Raises:
        ContractError: It is a class or a function, lacks hooks, or has hooks that are coroutine functions.
    """
    if inspect.isclass(trainer):
        raise ContractError(f"a trainer must be an instance; pass {trainer.__name__}() instead of {trainer.__name__}")
    _check_conforms(trainer, type(trainer).__qualname__)
    return cast("TrainerPlugin", trainer)


def _check_conforms(target: Any, import_path: str) -> None:
    """Raise `ContractError` if `target` cannot be used as a trainer class or instance."""
    if inspect.isroutine(target):
        raise ContractError(
            f"trainer {import_path!r} is a function; the contract requires a class or an instance with the hooks "
            f"{', '.join(REQUIRED_HOOKS)}"
        )
    kind = "class" if inspect.isclass(target) else "object"
    named = f"trainer {import_path!r}: {kind} {getattr(target, '__name__', type(target).__name__)}"
    missing = missing_hooks(target)
    if missing:
        own = [name for name in dir(target) if not name.startswith("_") and name not in REQUIRED_HOOKS]
        offers = [(like, hook) for hook in missing if (like := closest(hook, own)) is not None]
        renamed = "".join(f"; rename `{like}` to `{hook}`" for like, hook in offers)
        raise ContractError(f"{named} lacks the hooks {', '.join(missing)}{renamed}")
    coroutines = async_hooks(target)
    if coroutines:
        raise ContractError(
            f"{named} has hooks that are `async def`: {', '.join(coroutines)}; nothing would await them. Make them "
            "plain functions, and call asyncio.run inside if they have to wait"
        )
    if inspect.isclass(target):
        _check_constructor(target, import_path)


def _check_constructor(cls: type, import_path: str) -> None:
    """Refuse a class that is abstract or that requires arguments, by its signature.

    The constructor is not called for that, so that a `TypeError` inside it is not mistaken for missing arguments.
    """
    if inspect.isabstract(cls):
        names = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ContractError(f"trainer {import_path!r}: class {cls.__name__} is abstract; it does not implement {names}")
    try:
        signature = inspect.signature(cls)
    except ValueError:  # classes written in C may have no signature
        return
    try:
        signature.bind()
    except TypeError:
        raise ContractError(
            f"trainer {import_path!r}: class {cls.__name__}{signature} requires arguments, but it is created without "
            "any. Give them defaults, or name a module-level instance"
        ) from None


def check_arguments_of_loading(class_name: str, arguments: Mapping[str, Any], hparams_file: Any) -> None:
    """Check the arguments that build a trainer class for a checkpoint.

    Raises:
        TypeError: `plugin` is missing, or `hparams_file` was passed.
    """
    if "plugin" not in arguments:
        raise TypeError(
            f"{class_name}.load_from_checkpoint needs `plugin`, the trainer class of the checkpoint "
            "(module:Class, or an instance): a checkpoint does not name code to run."
        )
    if hparams_file is not None:
        raise TypeError(f"{class_name} takes no `hparams_file`; pass `job`, a TrainingJobSpec with hyperparams.")


def misspelled_hooks(target: Any) -> list[str]:
    """Return a sentence for each attribute of `target` whose name is almost the name of an optional hook.

    Nothing else would report such a name, because optional hooks may be absent.
    """
    sentences = []
    for name in dir(target):
        meant = None if name.startswith("_") else closest(name, OPTIONAL_NAMES, alike=ALIKE)
        if meant is not None and name not in OPTIONAL_NAMES and not hasattr(target, meant):
            sentences.append(f"`{name}` is not a hook and is never called; did you mean `{meant}`?")
    return sentences


def signature_faults(target: Any) -> list[str]:
    """Return a sentence for each hook of `target`, a class or an instance, that does not accept its arguments."""
    faults = []
    for name, (positional, keywords) in HOOK_ARGUMENTS.items():
        hook = optional_hook(target, name)
        if hook is None:
            continue
        # In a class, a plain function still takes `self`.
        is_unbound = inspect.isclass(target) and inspect.isfunction(inspect.getattr_static(target, name))
        expected = ["self", *positional] if is_unbound else positional
        try:
            signature = inspect.signature(hook)
        except (TypeError, ValueError):  # written in C, without a signature
            continue
        try:
            signature.bind(*expected, **dict.fromkeys(keywords))
        except TypeError as error:
            arguments = ", ".join([*positional, *(f"{keyword}=…" for keyword in keywords)])
            faults.append(f"{name}{signature} cannot be called as {name}({arguments}): {error}")
    return faults
