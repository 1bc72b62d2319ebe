"""The live terminal view of runs; needs the extra ``watch``: textual draws the screen, plotext the curves.

Texts from a run go through `printable` and `Text`, so that they can neither control the terminal nor change styles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import plotext
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static
from typing_extensions import override

from ..plumbing.text import printable, size_text
from ..run.folder import request_stop
from .history import Budget, History, history_of
from .log_search import Searches
from .summary import figures_of, is_run

READ_EVERY_S = 1.0
NEWEST = 4
"""Number of checkpoints, steps with samples and findings to show."""
SMOOTHING = (0.0, 0.6, 0.9, 0.97, 0.99)
COLORS = ("cyan", "orange", "green", "magenta", "red", "blue")
BAR_COLUMNS = 12
STYLES = {"running": "cyan", "completed": "green", "stopped": "yellow", "failed": "red", "lost": "bold red"}
"""Styles of states."""


class WatchRuns(App[None]):
    """Shows the runs in `folders`; they need not have started.

    Args:
        folders: Folders of the runs. Their curves share one plot.
    """

    CSS = """
    #runs { height: auto; max-height: 40%; }
    #curves { height: 3fr; min-height: 8; }
    #details { height: 2fr; }
    #message { height: 1; color: $warning; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "metric(1)", "metric", key_display="n p"),
        Binding("p", "metric(-1)", show=False),
        Binding("plus,equals_sign", "smooth(1)", "smooth", key_display="+ -"),
        Binding("minus", "smooth(-1)", show=False),
        Binding("t", "time", "time"),
        Binding("tab", "run", "run", priority=True),
        Binding("up,k", "scroll(-1)", "scroll", key_display="↑↓", priority=True),
        Binding("down,j", "scroll(1)", show=False, priority=True),
        Binding("s", "ask_to_stop", "stop"),
        Binding("y", "stop", show=False),
        Binding("q,ctrl+c", "quit", "quit", priority=True, key_display="q"),
    ]

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self._folders = list(folders)
        self._histories: dict[Path, History] = {}
        self._runs: dict[Path, dict[str, Any]] = {}
        """The runs that have started, as in `History.as_json`."""
        self._searches: Searches = {}
        self._metric = ""
        self._smoothing = 0
        self._chosen = 0
        self._by_time = False
        self._awaits_answer = False

    @override
    def compose(self) -> ComposeResult:
        yield Static(id="runs")
        yield Static(id="curves")
        with VerticalScroll(id="details", can_focus=False):
            yield Static(id="facts")
        yield Static(id="message")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Read the runs now, and again every second."""
        self._read()
        self.set_interval(READ_EVERY_S, self._read)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._show()

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        """Read new lines of the logs, in a thread because the first read of a long log takes seconds."""
        budget = Budget(address_of=lambda path: path)
        for folder in self._folders:
            if folder in self._histories or is_run(folder):
                history = history_of(folder, self._histories.get(folder), self._searches)
                self._histories[folder] = history
                self._runs[folder] = history.as_json(budget)
        self.call_from_thread(self._show)

    def action_metric(self, by: int) -> None:
        """Show the next metric, or the one before."""
        if names := self._metrics():
            self._metric = names[(names.index(self._metric) + by) % len(names)]
        self._show()

    def action_smooth(self, by: int) -> None:
        """Smooth more or less."""
        self._smoothing = max(0, min(self._smoothing + by, len(SMOOTHING) - 1))
        self._show()

    def action_time(self) -> None:
        """Switch between time and steps as the x axis."""
        self._by_time = not self._by_time
        self._show()

    def action_run(self) -> None:
        """Select the next run: its details are shown and it can be stopped."""
        self._chosen = (self._chosen + 1) % len(self._folders)
        self._show()

    def action_scroll(self, by: int) -> None:
        """Scroll the details."""
        self.query_one("#details", VerticalScroll).scroll_relative(y=by, animate=False, immediate=True)

    def action_ask_to_stop(self) -> None:
        """Ask whether to stop the selected run."""
        folder = self._folders[self._chosen]
        self._awaits_answer = self._runs.get(folder, {}).get("state") == "running"
        question = f"Stop {_name(folder)} after a checkpoint of its current step? y: yes"
        self._say(question if self._awaits_answer else f"{_name(folder)} is not running")

    def action_stop(self) -> None:
        """Stop the run, as the answer to `action_ask_to_stop`."""
        if not self._awaits_answer:
            return
        self._awaits_answer = False
        folder = self._folders[self._chosen]
        try:
            request_stop(folder)
        except OSError as error:
            self._say(f"the stop request to {_name(folder)} failed: {error.strerror}")
        else:
            self._say(f"stop of {_name(folder)} requested")

    def _say(self, text: str) -> None:
        self.query_one("#message", Static).update(Text(text, no_wrap=True))

    def _metrics(self) -> list[str]:
        """Return the names of all metrics. If the selected metric is not one of them, select another."""
        names = sorted({name for run in self._runs.values() for name in run["curves"]})
        if self._metric not in names:
            losses = [name for name in names if name.endswith("loss")]
            self._metric = next(iter([*(n for n in losses if n == "train/loss"), *losses, *names]), "")
        return names

    def _show(self) -> None:
        """Draw the screen again."""
        self._metrics()
        self.query_one("#runs", Static).update(self._overview())
        curves = self.query_one("#curves", Static)
        curves.update(self._curves(curves.size.width, curves.size.height))
        run = self._runs.get(self._folders[self._chosen])
        waiting = Text(f"{_name(self._folders[self._chosen])} has not started yet")
        self.query_one("#facts", Static).update(waiting if run is None else details(run))

    def _overview(self) -> Table:
        """Return the table of all runs."""
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("", "RUN", "STATE", "STEP", "", "SPEED", "LEFT", "LOSS", "BEST", "UPLOADS"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for number, folder in enumerate(self._folders):
            color = COLORS[number % len(COLORS)].replace("orange", "dark_orange")
            named = Text(_name(folder), style=color)
            marker = ">" if number == self._chosen else " "
            run = self._runs.get(folder)
            cells = [Text("waiting", style="dim")] if run is None else _cells(run)
            table.add_row(marker, named, *cells)
        return table

    def _curves(self, width: int, height: int) -> Text:
        """Return the plot of the selected metric, with one curve for each run."""
        drawn = {
            folder: run["curves"][self._metric]
            for folder, run in self._runs.items()
            if any(value is not None for value in run["curves"].get(self._metric, {}).get("values", ()))
        }
        if not drawn or width < 20 or height < 5:
            return Text("no metric has been logged yet" if not drawn else "")
        weight = SMOOTHING[self._smoothing]
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(width, height)
        start_ms = min(min(curve["times"]) for curve in drawn.values())
        for folder, curve in drawn.items():
            x = [(ms - start_ms) / 60_000 for ms in curve["times"]] if self._by_time else curve["steps"]
            points = [(at, value) for at, value in zip(x, curve["values"], strict=True) if value is not None]
            values = smooth([value for _, value in points], weight)
            color = COLORS[self._folders.index(folder) % len(COLORS)]
            label = _name(folder) if len(drawn) > 1 else None
            plotext.plot([at for at, _ in points], values, marker="braille", color=color, label=label)
        note = f", smoothed {weight:g}" if weight else ""
        plotext.title(f"{printable(self._metric)}{note}, over {'minutes' if self._by_time else 'steps'}")
        return Text.from_ansi(plotext.build(), no_wrap=True)


def _name(folder: Path) -> str:
    return printable(folder.resolve().name)


def _cells(run: Mapping[str, Any]) -> list[Text]:
    """Return the cells of a run's row after its name."""
    steps, score = run["max_steps"], run["score"]
    share = min(run["step"] / steps, 1.0) if steps else 0.0
    bar = "█" * round(share * BAR_COLUMNS)
    figures = figures_of(run)
    texts = [
        figures["steps"],
        f"{bar:░<{BAR_COLUMNS}}" if steps else "",
        figures["speed"],
        "" if run["left_s"] is None else str(timedelta(seconds=round(run["left_s"]))),
        figures["loss"],
        "" if score is None else f"{score['value']:.4g}",
        figures["uploads"],
    ]
    return [Text(run["state"], style=STYLES[run["state"]]), *(Text(printable(text)) for text in texts)]


def details(run: Mapping[str, Any]) -> Table:
    """Return the details of a run, newest entries first."""
    table = Table(box=None, pad_edge=False, show_header=False, expand=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1, overflow="fold")

    def add(name: str, lines: Sequence[str]) -> None:
        for number, line in enumerate(lines):
            table.add_row("" if number else name, Text(printable(line)))

    add("state", run["words"])
    add("findings", [_finding(each) for each in reversed(run["findings"])][:NEWEST])
    add("checkpoints", [_checkpoint(each) for each in reversed(run["checkpoints"])][:NEWEST])
    add("samples", [line for each in list(reversed(run["samples"]))[:NEWEST] for line in _sample(each)])
    if run["waiting_uploads"]:
        add("uploads", [f"{run['waiting_uploads']} wait; `genlight uploads list {run['path']}` lists them"])
    add("ranks", _ranks(run))
    add("machine", _machine(run))
    return table


def _finding(finding: Mapping[str, Any]) -> str:
    where = "" if finding["step"] is None else f"step {finding['step']}: "
    return f"{where}{finding['text']}{'. ' if finding['remedy'] else ''}{finding['remedy']}"


def _checkpoint(row: Mapping[str, Any]) -> str:
    scores = ", ".join(f"{name} {value:.4g}" for name, value in row["scores"].items() if value is not None)
    return "  ".join(filter(None, [row["name"], size_text(row["size"]), row["state"], scores]))


def _sample(sample: Mapping[str, Any]) -> list[str]:
    about = f"step {sample['step']}  {sample['name']}{': ' if sample['prompt'] else ''}{sample['prompt']}"
    shown = {file["name"]: file.get("text", "").partition("\n")[0] or file.get("note", "") for file in sample["files"]}
    return [about, *(f"  {name}  {text}".rstrip() for name, text in shown.items())]


def _ranks(run: Mapping[str, Any]) -> list[str]:
    """Return the number of processes and the settings that divide them."""
    job = run["metadata"].get("job")
    settings = job if isinstance(job, dict) else {}
    names = ("strategy", "num_nodes", "devices", "accelerator", "precision")
    chosen = [f"{name} {settings[key]}" for name in names if (key := f"lightning.{name}") in settings]
    count = run["ranks"]
    return [", ".join([*([str(count)] if count else []), *chosen])] if count or chosen else []


def _machine(run: Mapping[str, Any]) -> list[str]:
    """Return the newest measurements of the run's machine."""
    newest = {name: curve["values"][-1] for name, curve in run["curves"].items() if name.startswith("system/")}
    shown = [_figure(name.removeprefix("system/"), value) for name, value in newest.items() if value is not None]
    return [", ".join(filter(None, [run["host"], *shown]))] if run["host"] or shown else []


def _figure(name: str, value: float) -> str:
    subject, _, unit = name.rpartition("_")
    text = size_text(value) if unit == "bytes" else f"{value:.0f}{'%' if unit == 'percent' else f' {unit}'}"
    return f"{subject.replace('_', ' ')} {text}"


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of `values`, without the bias to zero at its start."""
    if not weight:
        return list(values)
    mean = total = 0.0
    result = []
    for value in values:
        mean, total = mean * weight + value * (1 - weight), total * weight + 1 - weight
        result.append(mean / total)
    return result
