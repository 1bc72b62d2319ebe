"""From an import path to a trainer: what each form means, and one clear error for each way it can be wrong."""

from __future__ import annotations

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

HOOKS = "\n".join(f"    def {name}(self, *args): return '{name}'" for name in REQUIRED_HOOKS)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module, on whose path a trainer is then loaded; ``{hooks}`` in it stands for the six hooks."""
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


def test_a_class_is_made_with_no_arguments(module):
    module(cls("Mine"))

    trainer = load_trainer_plugin("user_trainer:Mine")

    assert type(trainer).__name__ == "Mine"
    assert trainer.lr == 0.1


def test_an_instance_is_taken_as_it_is(module):
    module(cls("Mine") + "mine = Mine()\nmine.lr = 7")

    trainer = load_trainer_plugin("user_trainer:mine")

    assert trainer is sys.modules["user_trainer"].mine
    assert trainer.lr == 7


def test_a_class_within_a_class_is_found_by_its_dotted_name(module):
    module("class Outer:\n" + textwrap.indent(cls("Inner").replace("{hooks}", HOOKS), "    "))

    assert type(load_trainer_plugin("user_trainer:Outer.Inner")).__name__ == "Inner"


def test_a_class_that_is_written_with_a_dot_is_told_of_the_colon(module):
    module(cls("Mine"))

    with pytest.raises(ContractError, match=r"has no submodule 'Mine'; write a class of it as 'user_trainer:Mine'"):
        load_trainer_plugin("user_trainer.Mine")


def test_a_module_of_a_package_is_found(module):
    module("", "user_package/__init__")
    module(cls("Mine"), "user_package/part")

    assert type(load_trainer_plugin(" user_package.part:Mine ")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("TRAINER", "Trainer", "trainer", "Other"), "TRAINER"),
        (("Trainer", "trainer", "Other"), "Trainer"),
        (("trainer", "Other"), "trainer"),
        (("Other",), "Other"),
    ],
)
def test_a_module_alone_offers_its_default_names_in_order_else_the_only_one_that_conforms(module, names, chosen):
    module("".join(cls(name) for name in names))

    assert type(load_trainer_plugin("user_trainer")).__name__ == chosen


def test_a_default_name_that_is_a_function_is_refused_rather_than_passed_over(module):
    module("def Trainer(): ...\n" + cls("Mine"))

    with pytest.raises(ContractError, match="'user_trainer' is a function"):
        load_trainer_plugin("user_trainer")


def test_a_default_name_bound_to_an_imported_module_is_passed_over(module):
    module("from gen_worker import trainer\n" + cls("Mine"))

    assert type(load_trainer_plugin("user_trainer")).__name__ == "Mine"


def test_several_that_conform_are_an_error_that_names_them(module):
    module(cls("First") + cls("Second") + cls("_Hidden"))

    with pytest.raises(ContractError, match=r"several trainers; name one of user_trainer:First, user_trainer:Second$"):
        load_trainer_plugin("user_trainer")


def test_two_names_of_one_class_are_one_candidate(module):
    module(cls("Mine") + "Alias = Mine")

    assert type(load_trainer_plugin("user_trainer")).__name__ == "Mine"


def test_a_class_that_a_module_imports_counts_only_where_it_has_none_of_its_own(module):
    module(cls("Imported"), "user_base")
    module("from user_base import Imported")
    assert type(load_trainer_plugin("user_trainer")).__name__ == "Imported"

    module("from user_base import Imported\nclass Own(Imported): ...", "user_second")
    assert type(load_trainer_plugin("user_second")).__name__ == "Own"


def test_an_abstract_base_beside_its_only_implementation_is_no_second_candidate(module):
    module("import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n    def extra(self): ...\n{hooks}\n"
           "class Mine(Base):\n    def extra(self): ...")  # fmt: skip

    assert type(load_trainer_plugin("user_trainer")).__name__ == "Mine"


def test_the_imported_protocol_is_no_candidate(module):
    module("from gen_worker.trainer import TrainerPlugin\n" + cls("Mine"))

    assert type(load_trainer_plugin("user_trainer")).__name__ == "Mine"


def test_a_module_without_a_trainer_says_what_it_looked_for(module):
    module("x = 1")

    with pytest.raises(ContractError, match="contains no trainer: no TRAINER, Trainer, trainer, and no public object"):
        load_trainer_plugin("user_trainer")


def test_a_function_is_refused(module):
    module("def make(): ...")

    with pytest.raises(ContractError, match=r"'user_trainer:make' is a function; the contract requires a class"):
        load_trainer_plugin("user_trainer:make")


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


def test_the_places_where_a_module_was_looked_for_are_folders_each_named_once(tmp_path, monkeypatch):
    """A console script has the working directory, an archive of the standard library and the like there."""
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "python311.zip"), *sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError) as caught:
        load_trainer_plugin("user_absent:Trainer")
    assert str(caught.value).endswith(f"looked in {str(tmp_path)!r} and the installed packages")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("user_absent:Trainer", "there is no module 'user_absent'; looked in "),
        ("user_package.absent:Trainer", "there is no module 'user_package.absent'"),
        ("user_absent.part:Trainer", "there is no module 'user_absent'"),
        (":Trainer", "names no module; write it as 'module:Class'"),
        ("", "names no module"),
        (".user_trainer:Trainer", "names no module"),
        ("user_trainer:Absent", "has no 'Absent'; trainers found there: Mine"),
        ("user_package:Absent", "has no 'Absent'; trainers found there: none"),
    ],
)
def test_a_path_that_names_nothing_is_an_error_that_says_what_there_is(module, path, message):
    module(cls("Mine"))
    module("", "user_package/__init__")

    with pytest.raises(ContractError) as caught:
        load_trainer_plugin(path)

    assert message in str(caught.value)


def test_an_import_that_fails_inside_the_module_is_reported_as_it_is(module):
    module("import user_dependency_that_is_not_there")

    with pytest.raises(ModuleNotFoundError, match="user_dependency_that_is_not_there") as caught:
        load_trainer_plugin("user_trainer:Mine")

    assert not isinstance(caught.value, ContractError)


@pytest.mark.parametrize("error", ["ValueError('bad')", "TypeError('missing 1 required positional argument')"])
def test_an_exception_of_the_constructor_is_that_exception_never_a_wrong_signature(module, error):
    module(f"class Mine:\n    def __init__(self): raise {error}\n{{hooks}}")

    with pytest.raises((ValueError, TypeError)) as caught:
        load_trainer_plugin("user_trainer:Mine")

    assert repr(caught.value) == error
    assert not isinstance(caught.value, ContractError)


def test_a_class_that_wants_arguments_is_refused_with_its_signature(module):
    module("class Mine:\n    def __init__(self, lr, *, depth=2): ...\n{hooks}")

    with pytest.raises(ContractError, match=r"class Mine\(lr, \*, depth=2\) requires arguments"):
        load_trainer_plugin("user_trainer:Mine")


def test_a_class_whose_arguments_have_defaults_is_made(module):
    module("class Mine:\n    def __init__(self, lr=3, *rest, **options): self.lr = lr\n{hooks}")

    assert load_trainer_plugin("user_trainer:Mine").lr == 3


def test_an_abstract_class_is_refused_with_the_names_it_lacks(module):
    module("import abc\nclass Mine(abc.ABC):\n    @abc.abstractmethod\n    def extra(self): ...\n{hooks}")

    with pytest.raises(ContractError, match="class Mine is abstract; it does not implement extra"):
        load_trainer_plugin("user_trainer:Mine")


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


def test_hooks_that_are_coroutines_are_refused_by_name_because_nobody_awaits_them(module):
    module(cls("Mine") + "    async def prepare_batch(self, *args): ...\n    async def rollout(self, *args): yield 1\n")

    with pytest.raises(ContractError, match=r"class Mine has hooks that are `async def`: prepare_batch, rollout"):
        load_trainer_plugin("user_trainer:Mine")


class Whole:
    setup = configure = prepare_batch = train_step = state_dict = load_state_dict = lambda *_: None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Whole, r"a trainer is an instance; give Whole\(\) instead of Whole"),
        (object(), "object object lacks the hooks setup, configure"),
        (print, "is a function"),
    ],
)
def test_an_object_that_is_no_trainer_is_refused(given, said):
    assert check_instance(whole := Whole()) is whole
    with pytest.raises(ContractError, match=said):
        check_instance(given)


@pytest.mark.parametrize("path", ["user_trainer.py:Mine", "folder/user_trainer.py:Mine", "folder/user_trainer:Mine"])
def test_a_file_in_place_of_a_module_is_refused_with_the_form_that_is_meant(path):
    with pytest.raises(ContractError, match=r"names a file; write it as 'module:Class', such as 'user_trainer:Class'"):
        load_trainer_plugin(path)


def test_a_hook_under_lightnings_name_is_told_what_it_is_called_here(module):
    hooks = HOOKS.replace("def train_step", "def training_step")
    module(f"class Ported:\n{hooks}")

    with pytest.raises(ContractError, match="lacks the hooks train_step; rename `training_step` to `train_step`"):
        load_trainer_plugin("user_trainer:Ported")
