"""Walls between rooms: no cycle of modules or of rooms, and ARCHITECTURE.md draws the rooms that are there."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.tools import load_tool

tool = load_tool("rooms")
WHENS = ["import", "lazy", "type"]


@pytest.fixture(scope="module")
def product() -> Any:
    files = tool.modules()
    assert len(files) > 300, "the tree is no longer found"
    return files, tool.arrows(files)


def module_cycles(files: Any, arrows: Iterable[Any], when: str) -> list[list[str]]:
    """Return the cycles of imports that happen by then: those inside functions add to those of modules, and so on."""
    counted = WHENS[: WHENS.index(when) + 1]
    graph: dict[str, set[str]] = {name: set() for name in files}
    for arrow in arrows:
        if arrow.when in counted:
            graph[arrow.source].add(arrow.target)
    found: list[list[str]] = tool.cycles(graph)
    return found


@pytest.mark.parametrize("when", WHENS)
def test_no_module_leads_back_to_itself(product: Any, when: str) -> None:
    files, arrows = product
    shown = [
        f"{arrow.source}:{arrow.line} imports {arrow.target} ({arrow.when})"
        for group in module_cycles(files, arrows, when)
        for arrow in arrows
        if arrow.source in group and arrow.target in group
    ]
    assert not shown, "\n".join(["modules import each other:", *shown])


def test_no_room_leads_back_to_itself(product: Any) -> None:
    files, arrows = product
    graph = tool.room_graph(files, arrows)
    shown = [
        f"{source} -> {target}: {arrow.source}:{arrow.line} imports {arrow.target}"
        for group in tool.cycles(graph)
        for source, target in itertools.permutations(group, 2)
        for arrow in graph[source].get(target, [])
    ]
    assert not shown, "\n".join(["rooms import each other:", *shown])


def test_the_drawing_is_that_of_the_tree() -> None:
    assert tool.PAGE.read_text() == tool.page(), "run: python tools/rooms.py"


def test_every_room_says_what_it_is_for(product: Any) -> None:
    for room in {room for room in tool.rooms(product[0]).values() if not room.endswith("__init__")}:
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
        assert text, f"{room}/__init__.py has no docstring"
        assert f" {room} " in tool.PAGE.read_text(), f"{room} is not drawn"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a tree of two rooms, `high` above `low`, with a front and a link as ours have."""
    for path, text in {
        "flashckpt/__init__.py": '"""Front.\n\nModules here: What all use.\n"""\nfrom flashckpt.high.top import x\n',
        "flashckpt/errors.py": "",
        "flashckpt/low/__init__.py": '"""The low room. Pure."""\n',
        "flashckpt/low/one.py": "from flashckpt import errors\n",
        "flashckpt/low/two.py": "from flashckpt.low import one\n",
        "high/__init__.py": '"""The high room."""\n',
        "high/top.py": "import flashckpt.low.two\nfrom flashckpt.low.one import x\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "flashckpt/high").symlink_to("../high")
    return tmp_path


def test_a_tree_is_drawn_by_floors(small: Path) -> None:
    assert tool.drawing(small).splitlines()[1:] == [
        " 3 flashckpt/__init__  Public names, loaded on first use",
        " 2 high                The high room",
        " 1 flashckpt/low       The low room",
        " 0 flashckpt           What all use",
    ]


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("from flashckpt.low import two\n", "import"),
        ("def f():\n    from flashckpt.low.two import x\n", "lazy"),
        ("class C:\n    async def f(self):\n        import flashckpt.low.two\n", "lazy"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flashckpt.low.two import x\n", "type"),
    ],
)
def test_a_cycle_of_modules_is_found(small: Path, text: str, when: str) -> None:
    (small / "flashckpt/low/one.py").write_text(text)
    files = tool.modules(small)
    found = {one: module_cycles(files, tool.arrows(files), one) for one in WHENS}
    expected = [["flashckpt.low.one", "flashckpt.low.two"]]
    assert found == {one: expected if WHENS.index(one) >= WHENS.index(when) else [] for one in WHENS}


def test_a_cycle_of_rooms_without_one_of_modules_is_found(small: Path) -> None:
    (small / "flashckpt/low/three.py").write_text("def f():\n    from flashckpt.high.top import x\n")
    files = tool.modules(small)
    arrows = tool.arrows(files)
    assert not module_cycles(files, arrows, "type")
    assert tool.cycles(tool.room_graph(files, arrows, small)) == [["flashckpt/low", "high"]]
    with pytest.raises(ValueError, match="import each other"):
        tool.drawing(small)


def test_the_table_of_sizes_counts_a_tree(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    rows = load_tool("size").measured(small, small)
    assert rows["lines, core"] == rows["lines, all"] == 11
    assert rows["lines at 100 columns, all"] == 12, "the formatter leaves an empty line below a docstring"
    assert rows["modules"] == 4
    assert (rows["with one importer"], rows["in the same room"]) == (3, 0)
    assert (rows["cycles of modules"], rows["imports core -> extras"]) == (0, 0)
    assert rows["warm restore: modules / calls"] == "-", "it has no program that counts them"
