"""Write the results of every class in every mode to adapter/classes.md: ``python -m zoo.table``, in the tests' folder.

With names of classes, only their rows are measured; with ``--write``, nothing is measured. After ``--device``, the
measurement uses the simulated accelerator of `support.device`.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .harness import MODES, PRECISIONS, STRATEGIES, THEMES, Cell, run_cells, zoo

PAGE = Path(__file__).parents[2] / "adapter" / "classes.md"
CELLS = Path(__file__).with_name("cells.json")
DEVICE_CELLS = Path(__file__).with_name("device_cells.json")
BEGIN, END = "<!-- classes and strategies: begin -->", "<!-- classes and strategies: end -->"

_TITLES = {"one": "one device", "ddp": "DDP", "fsdp": "FSDP 2"}
DEVICE_MODES = [*(("one", precision) for precision in PRECISIONS), ("ddp", "fp32"), ("fsdp", "fp32")]

INTRODUCTION = """\
Each class of `tests/zoo/` trains five steps on tiny data: in one process, on two ranks under DDP, and sharded over two
ranks by FSDP 2, in fp32, bf16-mixed and 16-mixed. At the end, its weights, averages and bare parameters are compared
with a plain torch loop over complete batches: bit by bit for one process in fp32, otherwise up to rounding. Then each
run is resumed from its checkpoint of step 3 and must end with the same bits. `python -m zoo.table`, in `tests/`,
measures everything and writes this section; CI checks it.

- **equal**: the weights equal the plain loop and are the same on all ranks; the resume is exact.
- **differs**: data-parallel training of this class differs from training in one process, for the given reason. The
  ranks agree, and the resume is exact.
- **refused**: the run ends with the message, before or in its first steps.
- **not in torch**: the plain loop fails as well.

A single word applies to all three precisions."""

ON_A_DEVICE = """\
### On an accelerator

The same classes on the simulated accelerator of the tests. The host cannot read its memory, backward runs in a separate
thread, and two ranks use its process group. Each class is compared with a plain loop on the same device, so that random
numbers and kernels are the same. If a class leaves modules on the host, that loop moves them to the device. `python -m
zoo.table --device` measures it."""


def status(cell: Cell) -> str:
    """Return the text of a cell: a word, and for all but ``equal`` the reason."""
    if cell.verdict == "no plain":
        return "not in torch"
    if cell.verdict == "refused":
        return f"refused: {_general(cell.detail)}"
    if cell.resume in ("exact", "not tried"):
        if cell.verdict == "equal":
            return "equal"
        reason = zoo()[cell.name].differs
        if cell.verdict == "off" and cell.strategy != "one" and reason:
            return f"differs: {reason}"
    return "wrong"


def device_status(cell: Cell) -> str:
    """Return the status of a cell on the device, with the error if the plain loop fails there."""
    return f"not in torch: {_general(cell.detail)}" if cell.verdict == "no plain" else status(cell)


def jobs_of(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return all jobs of some classes, grouped by mode."""
    names = list(names)
    return [(name, *mode) for mode in MODES for name in names]


def section(cells: dict[str, dict[str, str]]) -> str:
    """Return the text of the section; `cells` has a status by class and mode."""
    notes: dict[str, str] = {}
    lines = []
    for theme in THEMES:
        rows = [name for name, cls in zoo().items() if cls.__module__ == f"zoo.{theme}"]
        lines += [f"| **{theme.replace('_', ' ')}** | | | |"]
        lines += [f"| {name} | {' | '.join(_merged(cells[name], s, notes) for s in STRATEGIES)} |" for name in rows]
    count = sum(1 for row in cells.values() for text in row.values() if text == "equal")
    total = sum(len(row) for row in cells.values())
    counted = f"{len(cells)} classes in {len(MODES)} modes: {count} of {total} cells are equal."
    head = "| class | one process | DDP | FSDP 2 |\n|---|---|---|---|"
    legend = "\n".join(f"- {note}: {text}" for text, note in notes.items())
    table = f"{INTRODUCTION}\n\n{counted}\n\n{head}\n" + "\n".join(lines) + f"\n\n{legend}"
    return f"{table}\n\n{device_section(cells, json.loads(DEVICE_CELLS.read_text()))}"


def device_section(on_host: dict[str, dict[str, str]], otherwise: dict[str, dict[str, str]]) -> str:
    """Return the part about the device: how often each word occurs, and the differences from the host."""
    rows = []
    for mode in (" ".join(mode) for mode in DEVICE_MODES):
        texts = [otherwise.get(name, {}).get(mode, row[mode]) for name, row in on_host.items()]
        words = Counter(text.partition(":")[0] for text in texts)
        rows.append(f"| {_of(mode)} | {', '.join(f'{count} {word}' for word, count in words.most_common())} |")
    others: dict[str, list[str]] = {}
    for name, row in otherwise.items():
        for mode, text in row.items():
            others.setdefault(f"{text}; on the host: {on_host[name][mode]}", []).append(f"{name} ({_of(mode)})")
    listed = [f"- {', '.join(cells)}: {text}" for text, cells in others.items()]
    head = "| mode | classes |\n|---|---|\n" + "\n".join(rows)
    return "\n\n".join([ON_A_DEVICE, head, "These cells differ from the host:", "\n".join(listed) or "- none"])


def _of(mode: str) -> str:
    strategy, precision = mode.split()
    return f"{_TITLES[strategy]}, {precision}"


def measure_on_device(names: Sequence[str]) -> None:
    """Run classes on the device, and store the results that differ from the host."""
    on_host = json.loads(CELLS.read_text())
    kept = json.loads(DEVICE_CELLS.read_text()) if names else {}
    jobs = [(name, *mode) for mode in DEVICE_MODES for name in names or zoo()]
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        for cell in run_cells(Path(folder), jobs, device="sim"):
            text, row = device_status(cell), kept.setdefault(cell.name, {})
            row.pop(cell.mode, None)
            if text != on_host[cell.name][cell.mode]:
                row[cell.mode] = text
                print(f"{cell.name}, {cell.mode}: {cell.verdict} {cell.detail} | {cell.resume}")
    found = {name: kept[name] for name in zoo() if kept.get(name)}
    DEVICE_CELLS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write(on_host)


def _merged(row: dict[str, str], strategy: str, notes: dict[str, str]) -> str:
    texts = [_short(row[f"{strategy} {precision}"], notes) for precision in PRECISIONS]
    if len(set(texts)) == 1:
        return texts[0]
    return " · ".join(f"{precision}: {text}" for precision, text in zip(PRECISIONS, texts, strict=True))


def _short(text: str, notes: dict[str, str]) -> str:
    word, colon, why = text.partition(": ")
    if not colon:
        return word
    number = sum(1 for note in notes.values() if note.startswith(word)) + 1
    return notes.setdefault(f"{why}", f"{word} {number}")


def _general(message: str) -> str:
    """Return a message without the names, addresses and values of one run, so that equal messages appear once."""
    message = re.sub(r'(state\["\w+"\]|trainer\.\w+)(\.\w+|\["?\w+"?\])*', "`…`", message.partition(" torch says:")[0])
    message = re.sub(r"\S*/(\w+\.py):\d+", r"\1", re.sub(r" \(at [^)]*\)", "", message))
    message = re.sub(r"\[\d{6,}\]", "[…]", re.sub(r"-?\d+\.\d+(e-?\d+)?", "…", message))
    return " ".join(message.partition("; `…`")[0].split())[:300]


def write(cells: dict[str, dict[str, str]]) -> None:
    """Store the statuses, and write the section between its marks."""
    CELLS.write_text(json.dumps({name: cells[name] for name in sorted(cells)}, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text() if PAGE.exists() else "# Classes and strategies\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## Classes and strategies\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{section(cells)}\n{END}{rest.partition(END)[2]}")


def main(names: Sequence[str]) -> None:
    if names and names[0] == "--device":
        measure_on_device(names[1:])
        return
    kept = json.loads(CELLS.read_text()) if names and CELLS.exists() else {}
    if list(names) == ["--write"]:
        write(kept)
        return
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        for cell in run_cells(Path(folder), jobs_of(names or zoo())):
            kept.setdefault(cell.name, {})[cell.mode] = status(cell)
            if kept[cell.name][cell.mode] == "wrong":
                print(f"{cell.name}, {cell.mode}: {cell.verdict} {cell.detail} | {cell.resume}")
    write({name: kept[name] for name in zoo()})  # without removed classes


def in_memory() -> str | None:
    """Return a folder in memory for temporary checkpoints, or None if the system has none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main(sys.argv[1:])
