"""One table names every environment variable: no other module reads one, and the page of the docs is generated from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.tools import load_tool

from flashckpt.environment import TABLE

READ_BY_OTHERS = re.compile(r"'(_FLASHCKPT_COMPLETE|PET_[A-Z_]+)'")
"""click's, and torchrun's own names for options."""
KEEPS = {"daemon/zygote/server.py"}
"""Sets variables for a while, and puts back what was there."""


def product() -> Iterator[Path]:
    """Yield the modules of the product; examples are what users write."""
    for folder in ("flashckpt", "daemon", "trainer", "sampler", "extras"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            if folder != "flashckpt" or parts[1] not in ("daemon", "trainer", "sampler", "examples"):
                yield path


def reads(tree: ast.AST) -> Iterator[str]:
    """Yield the source of every look-up of a single environment variable."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get" | "pop" | "setdefault" as verb)
            ):
                if verb == "get":
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="getenv" | "getenvb")):
                yield ast.unparse(node)
            case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Load()):
                yield ast.unparse(node)
            case ast.Compare(comparators=[ast.Attribute(attr="environ")]):
                yield ast.unparse(node)


def test_no_other_module_reads_a_variable() -> None:
    found = []
    for path in product():
        name = path.relative_to(ROOT).as_posix()
        if name in KEEPS | {"flashckpt/environment.py"}:
            continue
        found += [f"{name}: {text}" for text in reads(ast.parse(path.read_text())) if not READ_BY_OTHERS.search(text)]
    assert not found, "\n".join(["", *found, "", "read it by flashckpt.environment.env"])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("os.environ.get('FLASHCKPT_RESTART') or 0", 1),
        ("os.environ['RANK']", 1),
        ("'RANK' in os.environ", 1),
        ("os.getenv('X')", 1),
        ("{**os.environ, 'FLASHCKPT_RESTART': '1'}", 0),
        ("os.environ['FLASHCKPT_RESTART'] = '1'", 0),
        ("env.FLASHCKPT_RESTART", 0),
    ],
)
def test_look_ups_are_found(source: str, count: int) -> None:
    assert len(list(reads(ast.parse(source)))) == count


def test_every_name_in_the_product_is_in_the_table() -> None:
    for path in product():
        named = {
            n.value
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        assert {name for name in named if re.fullmatch("FLASHCKPT_[A-Z_]+", name)} <= TABLE.keys(), path


def test_page_is_the_generated_one() -> None:
    tool = load_tool("environment")
    assert tool.PAGE.read_text() == tool.page(), "run: python tools/environment.py"


def test_pages_name_no_variable_that_is_not_in_the_table() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = {
            name
            for name in re.findall(r"\bFLASHCKPT_[A-Z_]+", path.read_text())
            if not name.startswith("FLASHCKPT_TEST_")
        }
        assert named <= TABLE.keys(), path.name
