"""Names that another package takes away are told by an import, and not in the middle of a run."""

from importlib import metadata, util

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.utils.data import DataLoader


def other_constructor(trainer):
    """Sets nothing."""


@pytest.mark.parametrize(
    ("module", "owner", "name", "package"),
    [
        ("data_workers", DataLoader, "_get_iterator", "torch"),
        ("stop_requests", _SignalConnector, "register_signal_handlers", "lightning"),
        ("stop_requests", pl.Trainer, "_signal_connector", "lightning"),
    ],
)
def test_a_protected_name_that_is_gone_is_an_import_error_that_names_it(module, owner, name, package, monkeypatch):
    if hasattr(owner, name):
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, "__init__", other_constructor)
    spec = util.find_spec(f"genlight.callbacks.{module}")
    with pytest.raises(ImportError) as raised:
        spec.loader.exec_module(util.module_from_spec(spec))

    found = f"{package} {metadata.version(package)} has no {owner.__name__}.{name}"
    assert str(raised.value).startswith(
        f"{found}, which genlight uses; install a release that it supports: {package}>="
    )
