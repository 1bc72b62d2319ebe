"""If another package removes a name, the import fails, rather than a run."""

import tomllib
from importlib import metadata, util
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from packaging.requirements import Requirement
from torch.utils.data import DataLoader

from genlight.callbacks.lightning_internals import SUPPORTED


def other_constructor(trainer):
    """A constructor that sets no attribute."""


@pytest.mark.parametrize(
    ("module", "owner", "name", "package"),
    [
        ("callbacks.stop.data_workers", DataLoader, "_get_iterator", "torch"),
        ("callbacks.lightning_internals", _SignalConnector, "register_signal_handlers", "lightning"),
        ("callbacks.lightning_internals", pl.Trainer, "_signal_connector", "lightning"),
        ("callbacks.lightning_internals", _FitLoop, "on_advance_end", "lightning"),
        ("callbacks.lightning_internals", _TrainingEpochLoop, "update_restart_stage", "lightning"),
    ],
)
def test_a_missing_protected_name_is_an_import_error_that_names_it(module, owner, name, package, monkeypatch):
    if hasattr(owner, name):
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, "__init__", other_constructor)
    spec = util.find_spec(f"genlight.{module}")
    with pytest.raises(ImportError) as raised:
        spec.loader.exec_module(util.module_from_spec(spec))

    found = f"{package} {metadata.version(package)} has no {owner.__name__}.{name}"
    assert str(raised.value).startswith(found)
    assert f", which genlight uses; install a supported release: {package}>=" in str(raised.value)


def test_the_supported_releases_are_those_of_the_installation():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    taken = {required.name: required for required in map(Requirement, project["dependencies"])}
    for package, supported in SUPPORTED.items():
        assert taken[package].specifier == Requirement(supported).specifier


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_malicious_releases_of_lightning_are_excluded(release):
    specifier = Requirement(SUPPORTED["lightning"]).specifier
    assert not specifier.contains(release)
    assert specifier.contains("2.6.1")
    assert specifier.contains("2.6.4")
