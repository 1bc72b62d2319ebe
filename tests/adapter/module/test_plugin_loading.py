"""Loading a trainer from an import path: each form of path, and one clear error for each fault."""

import sys
import textwrap

import pytest

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import REQUIRED_HOOKS
from genlight.adapter.module.plugin_loading import (
    check_instance,
    load_trainer_plugin,
    missing_hooks,
    on_sys_path,
)
from support.messages import refusal

HOOKS = "\n".join(f"    def {name}(self, *args): return '{name}'" for name in REQUIRED_HOOKS)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module from which a trainer is then loaded; ``{hooks}`` in it stands for the six hooks."""
    before = set(sys.modules)

    def write(source, name="user_trainer"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source).replace("{hooks}", HOOKS))

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "gen_worker")):
            del sys.modules[name]


CLASS = """
class {name}:
    def __init__(self): self.lr = 0.1
{hooks}
"""


def cls(name):
    return CLASS.replace("{name}", name)


ABSTRACT = "import abc\nclass {name}(abc.ABC):\n    @abc.abstractmethod\n    def extra(self): ...\n{hooks}\n"
FOUND = {
    "a class": (cls("Mine"), "user_trainer:Mine", "Mine"),
    "an instance": (cls("Mine") + "mine = Mine()", "user_trainer:mine", "Mine"),
    "a class in a class": (
        "class Outer:\n" + textwrap.indent(cls("Inner").replace("{hooks}", HOOKS), "    "),
        "user_trainer:Outer.Inner",
        "Inner",
    ),
    "a module of a package, with blanks": (cls("Mine"), " user_package.part:Mine ", "Mine"),
    "the first default name": (
        "".join(map(cls, ("TRAINER", "Trainer", "trainer", "Other"))),
        "user_trainer",
        "TRAINER",
    ),
    "the second default name": ("".join(map(cls, ("Trainer", "trainer", "Other"))), "user_trainer", "Trainer"),
    "the third default name": ("".join(map(cls, ("trainer", "Other"))), "user_trainer", "trainer"),
    "the only one that conforms": (cls("Other"), "user_trainer", "Other"),
    "a default name that is an imported module": (
        "from gen_worker import trainer\n" + cls("Mine"),
        "user_trainer",
        "Mine",
    ),
    "two names of one class": (cls("Mine") + "Alias = Mine", "user_trainer", "Mine"),
    "an imported class alone": ("from user_base import Imported", "user_trainer", "Imported"),
    "its own beside an imported one": (
        "from user_base import Imported\nclass Own(Imported): ...",
        "user_trainer",
        "Own",
    ),
    "an implementation beside its abstract base": (
        ABSTRACT.replace("{name}", "Base") + "class Mine(Base):\n    def extra(self): ...",
        "user_trainer",
        "Mine",
    ),
    "one beside the protocol": (
        "from gen_worker.trainer import TrainerPlugin\n" + cls("Mine"),
        "user_trainer",
        "Mine",
    ),
    "arguments with defaults": (
        "class Mine:\n    def __init__(self, lr=3, *rest, **options): ...\n{hooks}",
        "user_trainer:Mine",
        "Mine",
    ),
}


@pytest.mark.parametrize(("source", "path", "name"), FOUND.values(), ids=FOUND)
def test_a_trainer_is_found_by_class_instance_or_module(module, source, path, name):
    module(cls("Imported"), "user_base")
    module("", "user_package/__init__")
    module(source, "user_package/part" if "package" in path else "user_trainer")

    trainer = load_trainer_plugin(path)

    assert type(trainer).__name__ == name
    if path == "user_trainer:mine":
        assert trainer is sys.modules["user_trainer"].mine


REFUSED = {
    "a class with a dot": (cls("Mine"), "user_trainer.Mine"),
    "a default name that is a function": ("def Trainer(): ...\n" + cls("Mine"), "user_trainer"),
    "several": (cls("First") + cls("Second") + cls("_Hidden"), "user_trainer"),
    "none": ("x = 1", "user_trainer"),
    "a function": ("def make(): ...", "user_trainer:make"),
    "arguments": ("class Mine:\n    def __init__(self, lr, *, depth=2): ...\n{hooks}", "user_trainer:Mine"),
    "abstract": (ABSTRACT.replace("{name}", "Mine"), "user_trainer:Mine"),
    "coroutines, which nobody awaits": (
        cls("Mine") + "    async def prepare_batch(self, *args): ...\n    async def rollout(self, *args): yield 1\n",
        "user_trainer:Mine",
    ),
    "a hook under Lightning's name": (
        f"class Ported:\n{HOOKS.replace('def train_step', 'def training_step')}",
        "user_trainer:Ported",
    ),
}


@pytest.mark.parametrize(("source", "path"), REFUSED.values(), ids=REFUSED)
def test_a_path_without_a_trainer_is_refused_with_the_way_out(module, source, path):
    module(source)
    with refusal(ContractError):
        load_trainer_plugin(path)


@pytest.mark.parametrize("made", ["", "mine = Mine()"])
def test_all_missing_hooks_are_named_in_one_error(module, made):
    module(f"class Mine:\n    def setup(self, ctx): ...\n    train_step = None\n{made}")

    with pytest.raises(ContractError) as caught:
        load_trainer_plugin("user_trainer:mine" if made else "user_trainer:Mine")

    assert str(caught.value).endswith(
        "Mine lacks the hooks configure, prepare_batch, train_step, state_dict, load_state_dict"
    )


def test_a_hook_counts_only_if_it_can_be_called(counting_trainer):
    assert missing_hooks(counting_trainer) == []
    assert missing_hooks(type("Broken", (counting_trainer,), {"configure": 3, "setup": None})) == ["setup", "configure"]


def test_the_folders_of_the_search_are_named_once_each(tmp_path, monkeypatch):
    """``sys.path`` of a console script begins with the working directory, an archive of the standard library, etc."""
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "python311.zip"), *sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError) as caught:
        load_trainer_plugin("user_absent:Trainer")
    assert str(caught.value).endswith(f"searched {str(tmp_path)!r} and the installed packages")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("user_absent:Trainer", "there is no module 'user_absent'; searched "),
        ("user_package.absent:Trainer", "there is no module 'user_package.absent'"),
        ("user_absent.part:Trainer", "there is no module 'user_absent'"),
        (":Trainer", "names no module; write it as 'module:Class'"),
        ("", "names no module"),
        (".user_trainer:Trainer", "names no module"),
        ("user_trainer:Absent", "has no 'Absent'; trainers in it: Mine"),
        ("user_package:Absent", "has no 'Absent'; trainers in it: none"),
        ("user_trainer.py:Mine", "names a file; write it as 'module:Class', such as 'user_trainer:Class'"),
        ("folder/user_trainer.py:Mine", "names a file"),
        ("folder/user_trainer:Mine", "names a file"),
    ],
)
def test_a_path_that_names_nothing_is_an_error_with_the_candidates(module, path, message):
    module(cls("Mine"))
    module("", "user_package/__init__")

    with pytest.raises(ContractError) as caught:
        load_trainer_plugin(path)

    assert message in str(caught.value)


def test_an_import_that_fails_inside_the_module_is_reported_as_it_is(module):
    module("import user_dependency_that_is_not_there")

    with refusal(ModuleNotFoundError) as caught:
        load_trainer_plugin("user_trainer:Mine")

    assert not isinstance(caught.value, ContractError)


@pytest.mark.parametrize("error", ["ValueError('bad')", "TypeError('missing 1 required positional argument')"])
def test_an_exception_of_the_constructor_is_not_reported_as_a_wrong_signature(module, error):
    module(f"class Mine:\n    def __init__(self): raise {error}\n{{hooks}}")

    with pytest.raises((ValueError, TypeError)) as caught:
        load_trainer_plugin("user_trainer:Mine")

    assert repr(caught.value) == error
    assert not isinstance(caught.value, ContractError)


def test_folders_of_the_search_path_come_first_in_their_order_and_only_while_loading(tmp_path, module):
    module(cls("Elsewhere"))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in ((first, "InFirst"), (second, "InSecond")):
        folder.mkdir()
        (folder / "user_trainer.py").write_text(cls(name).replace("{hooks}", HOOKS))
    before = list(sys.path)

    trainer = load_trainer_plugin("user_trainer", search_path=[first, second])

    assert type(trainer).__name__ == "InFirst"
    assert sys.path == before


def test_the_search_path_is_restored_also_when_the_module_fails_or_took_its_folder_away(tmp_path):
    before = list(sys.path)

    with pytest.raises(KeyError), on_sys_path([tmp_path]):
        raise KeyError(sys.path[0])
    with on_sys_path([tmp_path]):
        sys.path.remove(str(tmp_path))

    assert sys.path == before


class Whole:
    setup = configure = prepare_batch = train_step = state_dict = load_state_dict = lambda *_: None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Whole, r"a trainer must be an instance; pass Whole\(\) instead of Whole"),
        (object(), "object object lacks the hooks setup, configure"),
        (print, "is a function"),
    ],
)
def test_an_object_that_is_no_trainer_is_refused(given, said):
    assert check_instance(whole := Whole()) is whole
    with pytest.raises(ContractError, match=said):
        check_instance(given)
