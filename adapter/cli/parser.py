"""An argument parser whose errors say what was probably meant, in the words of the command's own usage."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from typing_extensions import override

from ..job.parser_errors import shortened
from ..plumbing.text import nearest

__all__ = ["CommandParser", "add_overrides"]

LONGEST_USAGE = 10
"""Lines; Lightning's usage has forty, and would scroll the error's own beginning away."""

_UNKNOWN = re.compile(r"unrecognized arguments: (?:.* )?(?P<given>--?\w[\w-]*)")
_UNKNOWN_KEY = re.compile(r"Subcommand '(?P<command>[^']*)' does not accept option '(?P<given>[^']*)'")
_UNKNOWN_ARGUMENT = re.compile(
    r"class_path '(?P<module>[\w.]+)\.(?P<name>\w+)': Option '(?P<given>[^']*)' is not accepted"
)
_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)")
_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")


_BASES = {"LightningModule": "model", "LightningDataModule": "data"}
"""What a block without a class path stands for: a program of one's own may bind its class, `genlight fit` does not."""
_NO_DEFAULT = re.compile(r"(?:, )?default: %\(default\)s")


class _HelpFormatter(DefaultHelpFormatter):
    """Says a default where there is one, and keeps the lines of a text that has some of its own."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        if action.default is None or action.default is False or action.default == []:
            text = _NO_DEFAULT.sub("", text).removesuffix(" ()")
        return text

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n  " in text else super()._fill_text(text, width, indent)


class CommandParser(ArgumentParser):
    """Offers the nearest name for a misspelled one, and tells missing arguments by their names in the usage."""

    def __init__(
        self, *args: Any, formatter_class: type[argparse.HelpFormatter] = _HelpFormatter, **kwargs: Any
    ) -> None:
        super().__init__(*args, formatter_class=formatter_class, **kwargs)

    below_options: Callable[[], str] | None = None
    """Makes the text below the options, where the help is asked for."""
    see_also: str = ""
    """A line below the help, which is not wrapped: a path in it can be copied."""

    @override
    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """The help, with `see_also` below it."""
        if self.below_options is not None:
            self.epilog = self.below_options()
        text: str = super().format_help(formatter)
        return f"{text}\n{self.see_also}\n" if self.see_also else text

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        # Until Python 3.13 an argument that may be left out counted as left out where an option stood before it.
        counts: list[int] = super()._match_arguments_partial(actions, arg_strings_pattern)
        if arg_strings_pattern[sum(counts) :].startswith("O"):
            while counts and not counts[-1]:
                del counts[-1]
        return counts

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and end the process with 2, as argparse does."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        message = shortened(message)
        missing = _MISSING.search(message)
        if missing is not None:
            # jsonargparse tells them by its own keys, `events.file`, and shows the usage of the whole program.
            parser, names = _lacking(self, missing["names"].split(", "))
            message = f"the following arguments are required: {', '.join(names)}"
        usage = parser.format_usage()
        program = parser.prog.replace(" [options]", "")
        sys.stderr.write(usage if usage.count("\n") <= LONGEST_USAGE else "")
        sys.stderr.write(f"tip: For details of accepted options run: {program} --help\n")
        sys.stderr.write(f"error: {message}{_offer(parser, message)}\n")
        sys.exit(2)


def _offer(parser: ArgumentParser, message: str) -> str:
    """A sentence that offers the known name nearest to a misspelled one."""
    choice, unknown, key = _CHOICE.search(message), _UNKNOWN.search(message), _UNKNOWN_KEY.search(message)
    argument = _UNKNOWN_ARGUMENT.search(message)
    if choice is not None and "--print_completion" in message and "shtab" not in choice["choices"]:
        return ". For shells install the extra, `pip install 'genlight[completion]'`, and choose shtab-bash"
    if choice is not None:
        offered = nearest(choice["given"], re.findall(r"'([^']+)'", choice["choices"]), alike=0.6)
    elif unknown is not None:
        offered = nearest(unknown["given"], _options(parser))
    elif key is not None:
        known = [option.removeprefix("--") for option in _options(_command(parser, key["command"]))]
        offered = nearest(key["given"], known)
    elif argument is not None and argument["name"] in _BASES:
        block = _BASES[argument["name"]]
        return f". Name your class: `{block}: {{class_path: module.Class, init_args: {{…}}}}`"
    elif argument is not None:
        offered = nearest(argument["given"], _parameters(argument["module"], argument["name"]))
    else:
        return ""
    return f".{offered}" if offered else ""


def _parameters(module: str, name: str) -> Iterable[str]:
    """What a class that was imported already takes, where it tells."""
    try:
        return inspect.signature(getattr(sys.modules[module], name)).parameters
    except (KeyError, AttributeError, TypeError, ValueError):
        return ()


def _options(parser: ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _command(parser: ArgumentParser, name: str) -> ArgumentParser:
    """The parser of the subcommand `name`; `parser` itself, where that is it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and name in action.choices:
            subparser: ArgumentParser = action.choices[name]
            return subparser
    return parser


def _lacking(parser: ArgumentParser, keys: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of the subcommand that lacks arguments, and what its usage calls them."""
    name, _, _ = keys[0].partition(".")
    command = _command(parser, name)
    if command is parser:
        return parser, keys
    return command, [_usage_name(command, key.removeprefix(f"{name}.")) for key in keys]


def _usage_name(parser: ArgumentParser, key: str) -> str:
    action = next((action for action in parser._actions if action.dest == key), None)
    if action is None or action.option_strings:
        return action.option_strings[0] if action else key
    return str(action.metavar or f"{{{','.join(map(str, action.choices or (key,)))}}}")


def add_overrides(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Declare ``--set``, which overrides settings of the job."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_text)
