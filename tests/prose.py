"""Find prose that a reader has to read twice, in docstrings, comments and Markdown pages.

    python tests/prose.py                        # a summary for each part of the repository
    python tests/prose.py adapter/feed README.md # every finding in these files and folders

Each habit below was common here once and hides the subject of a sentence, or leaves its verb out. A regular expression
finds only some of them, and some findings are good English: the limit in `test_prose.py` is a floor for a reader's own
judgment.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("adapter", "callbacks", "reporters")
PARTS = {
    "packages": _PACKAGES,
    "tests": ("tests",),
    "pages": ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *_PACKAGES, "examples"),
}
"""Python files of the first two parts, Markdown files of the last."""

_PREPOSITIONS = "After|As|At|Before|Behind|Beside|By|For|From|In|Of|On|To|Until|What|Where|Which|Who|Whose|With"
_FIRST_WORD = re.compile(rf"({_PREPOSITIONS}) (?!default|Python|long as|soon as|most|least)")

HABITS = {
    "starts with a preposition or a relative pronoun": _FIRST_WORD,
    "where, for if or when": re.compile(r"(?<!place )(?<!know )\bwhere\b", re.IGNORECASE),
    "that of, those of": re.compile(r"\b(?:that|those) of\b"),
    "alone, for only": re.compile(r"\balone\b"),
    "a passive that hides who speaks": re.compile(
        r"\b(?:is|are|was|were|be|been) (?:told|said|asked|looked at|named|given)\b"
    ),
    "of its own": re.compile(r"\bof (?:its|their|his|our|a|one's) own\b"),
    "a clause with what, for a noun": re.compile(r"(?:^|[.;:,(] |\b(?:and|of|in|by|with) )[Ww]hat (?!if\b|to\b)\w+"),
    "an unusual word": re.compile(r"\b(?:anew|besides?|wholes?|go(?:es)? on|leaves? out|left out|for ever)\b"),
    "a chain with which": re.compile(r", which\b"),
}


class Finding(NamedTuple):
    """One occurrence of a habit."""

    path: Path
    line: int
    habit: str
    text: str


class Text(NamedTuple):
    """One docstring, comment or paragraph, with the line on which it starts."""

    line: int
    text: str
    is_docstring: bool


def python_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings, including those of attributes, and the comments of a Python file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield Text(statement.lineno, " ".join(text.split()), True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.search(r"noqa|type:", token.string):
            yield Text(token.start[0], token.string.lstrip("# "), False)


def markdown_texts(path: Path) -> Iterator[Text]:
    """Yield the lines of a Markdown page without its code."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield Text(number, re.sub(r"`[^`]*`", "`code`", line), False)


def files_below(names: tuple[str, ...], suffix: str) -> Iterator[Path]:
    """Yield the files with `suffix` that `names` (files and folders of the repository) stand for."""
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]:
            if file.suffix == suffix and "stubs" not in file.parts and "project" not in file.parts:
                yield file


def read(paths: list[Path]) -> tuple[int, list[Finding]]:
    """Return the number of words in these files, and the findings."""
    words, findings = 0, []
    for path in paths:
        for text in python_texts(path) if path.suffix == ".py" else markdown_texts(path):
            words += len(text.text.split())
            for habit, pattern in HABITS.items():
                if pattern is _FIRST_WORD:
                    count = int(text.is_docstring and pattern.match(text.text) is not None)
                else:
                    count = len(pattern.findall(text.text))
                findings += [Finding(path, text.line, habit, text.text)] * count
    return words, findings


def read_part(part: str) -> tuple[int, list[Finding]]:
    """Like `read`, for a part of the repository."""
    return read(list(files_below(PARTS[part], ".md" if part == "pages" else ".py")))


def main(names: list[str]) -> int:
    """Print a summary of every part, or the findings in the named files and folders."""
    if names:
        both = [*files_below(tuple(names), ".py"), *files_below(tuple(names), ".md")]
        words, findings = read(both)
        for found in findings:
            sys.stdout.write(f"{found.path.relative_to(ROOT)}:{found.line}: [{found.habit}] {found.text[:160]}\n")
        sys.stdout.write(f"{words} words, {len(findings)} findings\n")
        return 0
    for part in PARTS:
        words, findings = read_part(part)
        sys.stdout.write(f"{part}: {words} words, {1000 * len(findings) / words:.1f} findings in 1,000\n")
        for habit in HABITS:
            sys.stdout.write(f"  {sum(found.habit == habit for found in findings):5} {habit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
