#!/usr/bin/env python3
"""List the promises of README and docs that lack a test, and the lines of promises.txt that lack a sentence.

A promise is a sentence with one of the words below. `tests/project/promises.txt` says of each what holds it, a line each:

    page | the words it begins with, or others that no other sentence of the page has | test, or test; test
    page | ... | - why it promises nothing about this program

where a test is a file below tests/, with `::name` for one of its functions, and "/" stands for the bars of a table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "tests" / "project" / "promises.txt"
WORDS = re.compile(
    r"\b(never|always|bit for bit|exactly|guarantee\w*|(every|no) (sample|checkpoint)|nothing is lost|at most once)\b",
    re.IGNORECASE,
)
LEFT_OUT = {"compatibility.md", "environment.md", "glossary.md", "benchmarking.md"}
"""Generated, definitions, measurements."""


class Promise(NamedTuple):
    """A sentence of a page.

    Attributes:
        page: Path from the root.
        text: The sentence on one line.
    """

    page: str
    text: str


class Line(NamedTuple):
    """What promises.txt says of one sentence.

    Attributes:
        words: That only this sentence of the page has.
        tests: That hold it; none for a sentence that promises nothing.
        why: Why it promises nothing.
    """

    page: str
    words: str
    tests: tuple[str, ...]
    why: str


def pages() -> list[Path]:
    """Return README and the pages of docs."""
    return [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in LEFT_OUT)]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without blocks of code; a cell of a table or an item of a list is one at least."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*\-|] |\d+\. |\|))|\n(?=#)", text):
        line = " ".join(part.split())
        yield from (s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[(])", line) if s)


def promises() -> list[Promise]:
    """Return every sentence that promises something."""
    found = ((page, s) for page in pages() for s in sentences(page.read_text()) if WORDS.search(s))
    return [Promise(page.relative_to(ROOT).as_posix(), sentence) for page, sentence in found]


def lines() -> list[Line]:
    """Read promises.txt."""
    found = []
    for text in LINES.read_text().splitlines():
        if not text or text.startswith("#"):
            continue
        page, words, held = (part.strip() for part in text.split("|"))
        why = held[1:].strip() if held.startswith("-") else ""
        tests = () if why else tuple(test.strip() for test in held.split(";"))
        found.append(Line(page, words, tests, why))
    return found


def pairs() -> tuple[list[tuple[Promise, Line]], list[str]]:
    """Return each promise with its line, and what does not fit, as sentences for people."""
    known, found, wrong = lines(), [], []
    used: set[Line] = set()
    for promise in promises():
        plain = promise.text.replace("|", "/")
        own = [line for line in known if line.page == promise.page and line.words in plain]
        if len(own) == 1:
            found.append((promise, own[0]))
            used.add(own[0])
        else:
            wrong.append(f"{len(own)} lines for: {promise.page} | {promise.text}")
    wrong += [f"no sentence for: {line.page} | {line.words}" for line in known if line not in used]
    wrong += [f"there is no {test}" for line in known for test in line.tests if not _is_there(test)]
    return found, wrong


def _is_there(test: str) -> bool:
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (not name or re.search(rf"def {re.escape(name)}\b", file.read_text()) is not None)


def main() -> int:
    """Print what does not fit; 1 if anything does not."""
    _, wrong = pairs()
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
