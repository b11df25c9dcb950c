"""One vocabulary: words that this project does not use, in names, comments, docstrings, messages and pages.

`docs/glossary.md` defines the words that it does use. Every pattern below is matched against whole words of the text,
with camel case and underscores taken apart, so that `_lives_on` and `LivesOn` read as "lives on".
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from support.paths import ROOT

PRODUCT = ("flashckpt", "daemon", "sampler", "trainer", "extras")
PROSE = ("docs", "examples", "configs", "benchmarks", "tools", "changelog.d")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml", "mkdocs.yml")
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ""}


class Banned(NamedTuple):
    """A pattern of words, and what to write instead."""

    pattern: str
    better: str


BANNED = (
    Banned(r"hopeless", "unrecoverable"),
    Banned(r"nursery", "zygote"),
    Banned(r"anew|afresh", "again, or the verb with re-: restart, recreate, reseed"),
    Banned(r"mend|mends|mended|mending", "fix, repair, recover from"),
    Banned(r"wish|wishes|wished|wishing", "request, require"),
    Banned(r"told", "reported, logged, informed, or name the option"),
    Banned(r"life|(?<!half )lives", "generation, session, start; a process runs, an object exists"),
    Banned(r"living", "running"),
    Banned(r"passed up to|has passed an? id|(?:row|acks) passed", "low watermark"),
    Banned(r"go(?:es)? on|went on|going on", "continue"),
    Banned(r"of (?:its|their) own", "its own X, a separate X"),
    Banned(r"by (?:itself|themselves)", "alone, automatically, separately"),
    Banned(r"(?:is|are|was|were) said", "is logged, is reported"),
    Banned(r"said once", "logged once"),
    Banned(r"one behind the other", "one after another"),
    Banned(r"nobody(?: else)? (?:asks?|asked|counts?|tells?)", "name who does not, or use the passive"),
    Banned(r"comes? to (?:lie|life)", "is placed, is started"),
    Banned(r"(?:hold|holds|held) nowhere", "is in no snapshot"),
    Banned(r"make no sense|makes no sense", "is invalid: and what is expected"),
    Banned(r"stands? in nobody s way", "does not block"),
    Banned(r"put(?:s|ting)? out for a while", "replaced temporarily"),
    Banned(r"fresh interpreters?", "new interpreter"),
    Banned(r"takes? no time out", "has no timeout"),
)
"""Words with a private sense, or sentences that English turns round; all that is matched is in lower case."""

ALLOWED = {
    "tests/project/test_words.py": "the table itself",
}
"""Files that may use the words, and why."""

NOT_SEARCHED = re.compile(r"\btest_\w+|\b\w+\.py: \w+|\breport\.life\b|\blife(?==)|^ +life: ")
"""Names of tests, which pages quote, and the public attribute `RestoreReport.life`."""


class Finding(NamedTuple):
    """One use of a banned word."""

    file: str
    line: int
    word: str
    better: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}; write: {self.better}"


def words_of(line: str) -> str:
    """Return the words of a line in lower case, one space apart: identifiers taken apart, punctuation gone."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)
    return " ".join(re.findall(r"[a-z0-9]+", apart.lower()))


def findings(file: str, text: str) -> list[Finding]:
    """Return the banned words of a text; a phrase may go over the end of a line."""
    lines = [words_of(NOT_SEARCHED.sub("", line)) for line in text.splitlines()]
    found = []
    for number, line in enumerate(lines, start=1):
        after = lines[number] if number < len(lines) else ""
        both, only_next = f"{line} {after}", after
        for banned in BANNED:
            pattern = rf"(?<![a-z0-9])(?:{banned.pattern})(?![a-z0-9])"
            hits = len(re.findall(pattern, both)) - len(re.findall(pattern, only_next))
            if hits > 0 and (match := re.search(pattern, both)):
                found.append(Finding(file, number, match[0], banned.better))
    return found


@functools.cache
def files() -> list[Path]:
    """Return the files of product and pages; what symbolic links lead to is read once."""
    paths = [ROOT / page for page in PAGES]
    for top in (*PRODUCT, *PROSE):
        for path in sorted((ROOT / top).rglob("*")):
            inside = path.relative_to(ROOT)
            if any((ROOT / parent).is_symlink() for parent in (inside, *inside.parents)) or "results" in inside.parts:
                continue
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in inside.parts:
                paths.append(path)
    return paths


@pytest.mark.parametrize("top", [*PRODUCT, *PROSE, "."])
def test_no_banned_word_is_used(top: str) -> None:
    chosen = [p for p in files() if (p.parent == ROOT if top == "." else p.is_relative_to(ROOT / top))]
    assert chosen
    found = []
    for path in chosen:
        name = path.relative_to(ROOT).as_posix()
        if name not in ALLOWED:
            found += findings(name, path.read_text())
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def mend(self):", ["mend"]),
        ("self._hopeless = 1", ["hopeless"]),
        ("class BeginAnew:", ["anew"]),
        ("# training goes on", ["goes on"]),
        ("# training goes\n# on with the next", ["goes on"]),
        ('"""A life\nand a life."""', ["life", "life"]),
        ("lifetimes.md, recommend, lively, wishlist", []),
        ("`test_training_goes_on`", []),
        ("6 tests passed, time passed, passed as an argument", []),
        ("x\ntold", ["told"]),
    ],
)
def test_words_are_found_in_names_and_over_line_ends(text: str, words: list[str]) -> None:
    assert [finding.word for finding in findings("x", text)] == words


def test_a_finding_names_file_line_and_the_better_word() -> None:
    (finding,) = findings("room/file.py", "ok\nmend it")
    assert str(finding) == "room/file.py:2: 'mend'; write: fix, repair, recover from"


def classes() -> dict[str, list[str]]:
    """Return the places of every class of the product by its name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and name.startswith(PRODUCT):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{name}:{node.lineno}")
    return places


def test_no_class_name_is_defined_twice() -> None:
    found = classes()
    assert len(found) > 100
    twice = {name: places for name, places in found.items() if len(places) > 1}
    callbacks = twice.pop("FlashCheckpoint", [])  # the same call in every framework
    assert all(place.startswith("extras/frameworks/") for place in callbacks)
    assert not twice
