"""Every command line and every link in README and docs: the option, target, module or file it names exists."""

from __future__ import annotations

import importlib.util
import posixpath
import re
import shlex
from pathlib import Path

import click
import pytest

from flashckpt.cli.main import group

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("flashckpt", "dlrun", "make", "python")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROSE = {"dlrun may be PID 1: it reaps what its ranks leave behind."}
"""Lines that begin like a command and are none."""


def command_lines() -> list[tuple[str, str]]:
    """Return (page, command) of every command in code blocks, and in code spans that are one."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines = [line.strip().removeprefix("$ ") for line in text.splitlines() if line not in PROSE]
        spans = re.findall(r"`([^`\n]+)`", text)
        found += [
            (page.name, line.split("  #")[0].strip())
            for line in [*lines, *spans]
            if line.split(" ", 1)[0] in PROGRAMS and re.match(r"[a-z]+ [-\w.]", line) and "GB/s" not in line
        ]
    return sorted(set(found))


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    end = next((k for k, word in enumerate(words) if word in {"|", "&&", ";", "&"}), len(words))
    return words[:end]


def refuse_unknown_options(command: click.Command, words: list[str], line: str) -> None:
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
    for word in words:
        if re.match(r"--?[a-z]", word):
            assert word.split("=")[0] in known, f"{line!r}: {command.name} has no {word}"


def check_flashckpt(words: list[str], line: str) -> None:
    context = click.Context(group)
    command: click.Command = group
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z]+", words[0]):
        found = command.get_command(context, words.pop(0))
        assert found is not None, f"{line!r}: no such command"
        command = found
    refuse_unknown_options(command, words, line)


def check_dlrun(words: list[str], line: str) -> None:
    from flashckpt.daemon.run import get_args_parser

    known = get_args_parser()._option_string_actions
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            name = word.split("=")[0]
            assert name in known, f"{line!r}: dlrun has no {word}"
            skip = "=" not in word and known[name].nargs != 0
            if name == "-m":
                return
        else:
            return  # the script: what follows is its own


def check_python(words: list[str], line: str) -> None:
    if words[0] != "-m":
        assert words[0].startswith("-") or (ROOT / words[0]).exists() or "/" not in words[0], line
        return
    assert importlib.util.find_spec(words[1]) is not None, f"{line!r}: no module {words[1]}"


@pytest.mark.parametrize(("page", "line"), command_lines(), ids=lambda value: str(value)[:60])
def test_command_of_the_docs_names_what_exists(page: str, line: str) -> None:
    program, *words = words_of(line)
    if not words:
        return
    if program == "make":
        goals = [word for word in words if "=" not in word and not word.startswith("-")]
        assert set(goals) <= TARGETS, f"{page}: {line!r}: no such target"
    elif program == "flashckpt":
        check_flashckpt(words, line)
    elif program == "dlrun":
        check_dlrun(words, line)
    else:
        check_python(words, line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        path = (
            page if not target else ROOT / posixpath.normpath(page.parent.relative_to(ROOT).as_posix() + "/" + target)
        )
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{page.name}: {target}#{anchor}"


def test_loop_of_the_readme_is_the_example() -> None:
    """The example runs in tests/test_examples.py, so the README's block is known to run."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    _, _, program = (ROOT / "examples" / "first_loop.py").read_text().partition('"""\n\n')
    assert block == program


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_commands_are_found_at_all() -> None:
    """The patterns above must not quietly stop matching."""
    programs = {line.split(" ", 1)[0] for _, line in command_lines()}
    assert programs == set(PROGRAMS)
    assert len(command_lines()) > 30
