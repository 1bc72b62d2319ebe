"""The parser of `GenlightCLI`: LightningCLI's, which reads YAML more strictly and gives shorter errors.

Importing this module changes jsonargparse for the process: it has no settings for a single parser.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import yaml
from jsonargparse import get_loader, set_loader, set_parsing_settings
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from ..job.parser_errors import shortened
from .parser import refuse, suggest_name

# The fields of a feed's options have their docstrings below them.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


_load_yaml = get_loader("yaml")


def _load_configuration(text: str) -> Any:
    """Load a YAML text.

    Raises:
        yaml.YAMLError: It has a key twice, is nested too deeply, or is a job, whose ``trainer`` is the name of a class.
    """
    try:
        value = _load_yaml(text)
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    if isinstance(value, dict) and "run_id" in value and isinstance(value.get("trainer"), str):
        raise yaml.YAMLError("it is a job; run it with `genlight run JOB.json`")
    return value


def _refuse_repeated_keys(tree: yaml.Node | None) -> None:
    """Refuse a mapping with one key twice, of which YAML would silently take the last value."""
    waiting, seen = [tree], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias is the node of its anchor
            continue
        seen.add(id(node))
        names = set[str]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in names and key.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark)
            names.add(str(key.value))
        waiting += itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value


set_loader("yaml", _load_configuration, exceptions=(yaml.YAMLError,))


class GenlightParser(LightningArgumentParser):
    """LightningCLI's parser with shorter errors, which suggest the nearest name for a misspelled one."""

    @override
    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"The configuration {str(cfg_path)!r} is not text: {error}")

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and end the process with 2, as argparse does."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser, message = getattr(ex, "subcommand_parser", None) or self, shortened(message)
        names_file = message.startswith("unrecognized arguments: ") and message.endswith((".json", ".yaml", ".yml"))
        refuse(parser, message, ". Name a configuration by --config" if names_file else suggest_name(parser, message))


def _as_text(dumper: yaml.SafeDumper, interval: Interval) -> yaml.ScalarNode:
    return dumper.represent_str(interval.value)


# The default of an argument of Lightning's `Timer`. Without this, LightningCLI cannot save the configuration.
yaml.SafeDumper.add_representer(Interval, _as_text)
