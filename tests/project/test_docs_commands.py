"""Every command line in the pages is read by the program that it is for: dlrun, flashckpt, make, the trainer, benchmarks.

A command line is an indented line or a code span that begins with one of these programs. A span may stop before the
arguments (`flashckpt export`) or before the value of its last option (`flashckpt bench job --sizes`); what it does
say must exist.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from support.paths import ROOT

from flashckpt.errors import FlashckptError

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
PROGRAMS = r"(?:dlrun|flashckpt|python3?|torchrun|make|eval|pip|git|\.venv/bin/python|\.ci/run)"
NOT_RUN = {
    "python3 -m venv ~/dlrover": ("benchmarking.md", "DLRover"),
    'eval "$(_FLASHCKPT_COMPLETE=': ("test_cli.py", "def test_shell_completion_completes_commands"),
    "pip install -e CHECKOUT": ("interop.md", "pip install"),
}
"""Command lines that none of the programs below reads: where they are dealt with, and by which words."""
PARSED_ONLY = "Tests parse the command lines of the pages and do not run them"


def indented(path: Path) -> list[str]:
    """Return the indented command lines of a page, without comments and with continued lines joined."""
    text = re.sub(r"^```\w*\n.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    lines = re.findall(rf"^ {{4}}(?:\$ )?({PROGRAMS}(?: .*)?)$", text, re.MULTILINE)
    return [re.split(r"\s+#\s", line)[0].strip() for line in lines]


def spans(path: Path) -> list[str]:
    """Return the code spans of a page that are command lines; a pipe ends one."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    found = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [re.split(r" \\?\| ", span)[0] for span in found if re.match(rf"{PROGRAMS} ", span)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


LINES = [(name_of(path), line) for path in PAGES for line in indented(path)]
SPANS = sorted({(name_of(path), span) for path in PAGES for span in spans(path)})


@pytest.mark.parametrize(("page", "command"), LINES, ids=lambda value: str(value)[:60])
def test_command_line_is_accepted(page: str, command: str) -> None:
    """Options, arguments and targets are those of the programs; paths and hosts are the reader's."""
    for start, (file, text) in NOT_RUN.items():
        if command.startswith(start):
            place = next(p for p in [*PAGES, *(ROOT / "tests").rglob("*.py")] if p.name == file)
            assert text in place.read_text()
            return
    _read(page, command, is_complete=True)


@pytest.mark.parametrize(("page", "command"), SPANS, ids=lambda value: str(value)[:60])
def test_code_span_names_what_exists(page: str, command: str) -> None:
    _read(page, command, is_complete=False)


def test_command_lines_are_found_at_all() -> None:
    """The patterns above must not quietly stop matching."""
    assert len(LINES) > 30
    assert len(SPANS) > 40


def test_the_readme_says_that_command_lines_were_not_run() -> None:
    assert PARSED_ONLY in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize(
    "refused",
    [
        "dlrun --ranks 8 train.py",
        "flashckpt ls --nonsense root",
        "flashckpt lss root",
        "flashckpt bench jobs",
        "flashckpt bench job --size",
        "make tests",
        "make test NONSENSE=3",
        "python benchmarks/restart.py --state-gb 1",
        "python benchmarks/no_such.py",
        "python -m pytest tests/test_no_such.py",
        "python -m flashckpt.trainer --train.stepz 3",
        "python -m flashckpt.no_such",
        "python -m flashckpt.trainer data prepares --config configs/sources.toml",
        "python -m flashckpt.trainer generate ROOT prompt --temperatur 3",
        "dlrun -m flashckpt.trainer --train.stepz 3",
        "python -m flashckpt.trainer --dry-run --config configs/tiny.toml",
        "python -m flashckpt.trainer --dry-run --world none --config configs/tiny.toml",
    ],
)
def test_wrong_command_lines_are_found(refused: str) -> None:
    for is_complete in (True, False):
        with pytest.raises((SystemExit, click.UsageError, AssertionError, FlashckptError, OSError)):
            _read("", refused, is_complete=is_complete)


def _read(page: str, command: str, *, is_complete: bool) -> None:
    """Have a command line read by its program, or by what is known of the program."""
    command = re.sub(r"(?<=\s)N\b", "1", command.replace("...", "1:2"))  # the reader's numbers
    first, *words = shlex.split(command)
    if first == "dlrun":
        _dlrun(words)
    elif first == "torchrun":
        from torch.distributed import run

        run.parse_args(words)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    elif first == "flashckpt":
        _flashckpt(words, is_complete=is_complete)
    elif first == "make":
        _make(words)
    elif first == "pip":
        assert not words[1:] or re.fullmatch(r"\.(\[\w+\])?", words[1]), f"{page}: only the checkout: {command}"
    elif first == ".ci/run":
        assert (ROOT / first).exists()
    else:
        assert Path(first).name in {"python", "python3"}, f"{page}: nothing reads this: {command}"
        _python(words)


def _dlrun(words: list[str]) -> None:
    from flashckpt.daemon.launcher import cli

    args = cli.parse_args(words)
    if args.module:
        assert args.training_script == "flashckpt.trainer"
        _trainer(args.training_script_args)


def _flashckpt(words: list[str], *, is_complete: bool) -> None:
    from flashckpt.cli import main as cli

    (group,) = [value for value in vars(cli).values() if isinstance(value, click.Group)]
    _click(group, words, is_complete=is_complete)


def _click(group: Any, words: list[str], *, is_complete: bool) -> None:
    command, context = group, click.Context(group, info_name=group.name)
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        assert found is not None, words[0]
        command, words = found, words[1:]
    if isinstance(command, click.Group):
        return  # only named
    for parameter in command.params:  # only what this machine has could be there
        if isinstance(parameter.type, click.Path):
            parameter.type.exists = False
    try:
        command.make_context(command.name, list(words), parent=context)
    except click.MissingParameter:  # a span may stop before the arguments, or before the value of its last option
        if is_complete:
            raise
    except click.BadOptionUsage as error:
        if is_complete or "requires an argument" not in error.message:
            raise


def _make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = rf"\$\([^)\n]*\b{name}\b" if is_variable else rf"^{name}:"
        assert re.search(known, MAKEFILE, re.MULTILINE), f"make {word}"


def _python(words: list[str]) -> None:
    if words[0] != "-m":
        _program(ROOT / words[0], words[1:])
    elif words[1] == "pytest":
        for word in words[2:]:
            if word.startswith("tests/"):
                module, _, test = word.partition("::")
                assert re.search(rf"^def {test}", (ROOT / module).read_text(), re.MULTILINE), word
    elif words[1] == "flashckpt.trainer":
        _trainer(words[2:])
    elif words[1] == "flashckpt.daemon.run":
        assert words[2:], "a command line of dlrun"
        if words[2:] != ["1:2"]:  # "...": whatever dlrun takes
            _dlrun(words[2:])
    else:
        package, _, name = words[1].rpartition(".")
        assert package.startswith("flashckpt"), words[1]
        place = ROOT / package.replace(".", "/") / name
        _program(place / "__main__.py" if place.is_dir() else place.with_suffix(".py"), words[2:])


def _program(file: Path, words: list[str]) -> None:
    """A program whose parser is inside `main`: the options must be among those that its source adds."""
    assert file.exists(), file
    known = {"-h", "--help", *re.findall(r'"(--?[a-z][\w-]*)"', file.read_text())}
    assert {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} <= known, f"{file.name} {words}"


def _trainer(words: list[str]) -> None:
    from flashckpt.trainer.config import read_config
    from flashckpt.trainer.dry_run.options import take_options

    if words[:1] == ["plan"]:
        from flashckpt.trainer.plan import options

        _, rest = options.parse(words[1:])
        read_config(None, rest)
        return
    if "--profile" in words:
        from flashckpt.trainer.train.profile_range import profile_range

        at = words.index("--profile")
        assert profile_range(words[at + 1], 1000)
        words = words[:at] + words[at + 2 :]
    if "--profile-phases" in words:
        at = words.index("--profile-phases")
        assert int(words[at + 1])
        words = words[:at] + words[at + 2 :]
    if words[:1] == ["hub"]:
        from flashckpt.trainer.hub.command import group

        _click(group, words[1:], is_complete=True)
        return
    if words[:1] == ["generate"]:
        from flashckpt.trainer.generate.command import command

        _click(command, words[1:], is_complete=True)
        return

    if words[:1] == ["data"]:
        assert words[1:2] in (["prepare"], ["duplicates"]), words
        words = words[2:]
    words = [word for word in words if word not in {"--check", "--evaluate", "--print-config", "--help", "--near"}]
    take_options(words)
    config = None
    if words[:1] == ["--config"]:
        config, words = str(ROOT / words[1]), words[2:]
    read_config(config, words)
