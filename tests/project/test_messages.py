"""One style of error messages: the problem in lower case and without a full stop, the state in sentences.

Read from the source: every call of an error class of ours, wherever it is raised or returned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.paths import ROOT

TOPS = ("flashckpt", "daemon", "sampler", "trainer", "extras")
PROPER = ("MANIFEST", "FLASHCKPT_", "PYTHON", "GLOO", "NCCL", "DCP", "FSDP", "DTensor", "LATEST", "SIG")
"""What may begin a problem in capitals: names of files, variables and classes."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if not any((ROOT / parent).is_symlink() for parent in inside.parents):
                yield inside.as_posix(), ast.parse(path.read_text())


def error_classes() -> set[str]:
    """Return the names of FlashckptError and everything derived from it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"FlashckptError"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def text_of(node: ast.expr) -> str | None:
    """Return a string as it is written, "\N{WHITE SQUARE}" in place of what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "\N{WHITE SQUARE}" for part in node.values
        )
    return None


def parts(tree: ast.Module, classes: set[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, part, text) of every error that is made: "problem", "found", "expected", "state" and "remedy"."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in classes:
            continue
        given = [("problem", node.args[0])] if node.args else []
        given += [(keyword.arg or "", keyword.value) for keyword in node.keywords]
        for part, value in given:
            if (text := text_of(value)) is not None:
                yield node.lineno, part, text


def complaint(part: str, text: str) -> str:
    """Return what is wrong with the style of one part of an error, "" if nothing is."""
    first = text.split(" ", 1)[0]
    if part == "problem":
        if text.endswith((".", "!")) and not text.endswith("..."):
            return "the problem ends with a full stop"
        if first[:1].isupper() and not first.startswith(PROPER):
            return "the problem begins with a capital letter"
    if part == "state" and text and not text.endswith((".", "\N{WHITE SQUARE}")):
        return "the state is a sentence: it ends with a full stop"
    if part == "remedy" and text.endswith(".") and not text.endswith("..."):
        return "the remedy ends with a full stop"
    return ""


def test_errors_are_written_in_one_style() -> None:
    classes = error_classes()
    found, count = [], 0
    for name, tree in trees():
        for line, part, text in parts(tree, classes):
            count += part == "problem"
            if why := complaint(part, text):
                found.append(f"{name}:{line}: {why}: {text!r}")
    assert count > 200, "the pattern no longer finds the errors"
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('raise ConfigError("the job id is too long")', 0),
        ('raise ConfigError(f"{name} is too long")', 0),
        ('raise ConfigError("FLASHCKPT_KEEP_DEAD is no number")', 0),
        ('raise ConfigError("The job id is too long")', 1),
        ('raise ConfigError("the job id is too long.")', 1),
        ('raise errors.ConfigError(f"the {job} is too long.")', 1),
        ('raise ConfigError("bad", state="Nothing was written.", remedy="try again")', 0),
        ('raise ConfigError("bad", state="nothing was written", remedy="Try again.")', 2),
        ('raise ValueError("Anything.")', 0),
    ],
)
def test_style_of_one_error(source: str, wrong: int) -> None:
    found = [complaint(part, text) for _, part, text in parts(ast.parse(source), {"ConfigError"})]
    assert len([why for why in found if why]) == wrong
