"""A LightningCLI configuration, read for what it would train: for ``genlight doctor`` and ``genlight check``."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ...callbacks.stop.signals import StopSignals
from .config_files import config_file_fault
from .lightning_cli import GenlightCLI, UnusableConfigurationError, fit_session

__all__ = ["ConfiguredFit", "parse_configuration"]

_MODEL = "genlight.adapter.ContractModule"
_ARROW_DATA = "genlight.adapter.ArrowDataModule"
_MOCK_DATA = "genlight.adapter.MockDataModule"


class ConfiguredFit(GenlightCLI):
    """A fit whose configuration was read, and that does not begin; `build` makes its objects."""

    @override
    def instantiate_classes(self) -> None:
        """Nothing: a model may take long to build."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is trained."""

    def build(self) -> None:
        """Make model, data and trainer, as a fit does.

        Raises:
            UnusableConfigurationError: One of them cannot be made so.
        """
        super().instantiate_classes()

    @property
    def plugin(self) -> str | None:
        """The trainer class that is named; None for a model of another kind."""
        return str(self._init_args("model", _MODEL)["plugin"]) if self._init_args("model", _MODEL) else None

    @property
    def hyperparams(self) -> dict[str, Any]:
        """What the trainer class gets of the job."""
        job = self._init_args("model", _MODEL).get("job")
        return dict(job.get("hyperparams") or {}) if isinstance(job, Mapping) else {}

    @property
    def dataset(self) -> dict[str, Any]:
        """Arguments of the data module that reads files; empty for data of another kind."""
        arguments = self._init_args("data", _ARROW_DATA)
        paths = arguments.get("parquet_paths")
        return arguments | {"parquet_paths": [paths] if isinstance(paths, str) else paths} if arguments else {}

    @property
    def mock_batches(self) -> list[Any] | None:
        """Batches that stand in the configuration itself."""
        return self._init_args("data", _MOCK_DATA).get("batches")

    def _init_args(self, name: str, class_path: str) -> dict[str, Any]:
        described = self.config[str(self.subcommand)].get(name)
        described = {} if described is None else described.as_dict()
        is_meant = described.get("class_path", "").rpartition(".")[2] == class_path.rpartition(".")[2]
        return described.get("init_args", {}) if is_meant else {}


def parse_configuration(path: str) -> ConfiguredFit:
    """Read the configuration of a fit; nothing is built.

    Raises:
        UnusableConfigurationError: It cannot be read, or is not one.
    """
    words = ["fit", "--config", path]
    fault = config_file_fault(words)
    if fault is not None:
        raise UnusableConfigurationError(fault)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run")
            return ConfiguredFit(words, fit_session(StopSignals()))
    except SystemExit as error:  # argparse's way to refuse
        told = said.getvalue().rpartition("error: ")[2].strip()
        raise UnusableConfigurationError(told) from error
