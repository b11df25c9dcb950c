#!/usr/bin/env python3
"""Write the drawing of rooms in ARCHITECTURE.md from the tree: floors, and the first sentence of each `__init__`.

A room is a folder of modules. An `__init__` that takes public names from the rooms below it counts as a separate room, above them.
`tests/project/test_rooms.py` holds the walls between rooms with the same graph.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
BLOCK = re.compile(r"(^## 3\. Rooms\n.*?^```\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
NOT_OURS = {"examples", "configs", "__pycache__"}
"""Folders inside flashckpt/ that are no product: what users write."""
WHEN = ("import", "lazy", "type")
"""When an import happens: with its module, inside a function, or for the type checker alone."""


class Arrow(NamedTuple):
    """One import of one of our modules by another.

    Attributes:
        source: Dotted name of the module that imports.
        target: Dotted name of what it imports.
        when: One of WHEN.
        line: Where.
    """

    source: str
    target: str
    when: str
    line: int


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the file of each module by dotted name, links inside the package followed."""
    found = {}
    for folder, folders, names in os.walk(root / "flashckpt", followlinks=True):
        folders[:] = sorted(set(folders) - NOT_OURS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in (".py", ".pyi"):  # a stub stands for a module in C
                dotted = ".".join(path.relative_to(root).with_suffix("").parts)
                found[dotted.removesuffix(".__init__")] = path.resolve()
    return found


def arrows(files: Mapping[str, Path]) -> list[Arrow]:
    """Return all imports between `files`."""
    return [
        Arrow(name, target, when, node.lineno)
        for name, path in files.items()
        for node, when in _imports(ast.parse(path.read_text()), "import")
        for target in _targets(node, files)
        if target != name
    ]


def _imports(node: ast.AST, when: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(child, "type")
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, "lazy" if is_function and when == "import" else when)


def _targets(node: ast.Import | ast.ImportFrom, files: Mapping[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(files)
    full = {f"{node.module}.{alias.name}" for alias in node.names}
    modules_of, others = full & set(files), full - set(files)
    return modules_of | ({node.module or ""} & set(files) if others else set())


def rooms(files: Mapping[str, Path], root: Path = ROOT) -> dict[str, str]:
    """Return the room of each module: its folder, or the path of an `__init__` that has rooms below it."""
    fronts = {name.rpartition(".")[0].rpartition(".")[0] for name in files}
    paths = {name: path.relative_to(root).with_suffix("") for name, path in files.items()}
    return {
        name: (path if path.name == "__init__" and name in fronts else path.parent).as_posix()
        for name, path in paths.items()
    }


def room_graph(
    files: Mapping[str, Path], found: Iterable[Arrow], root: Path = ROOT
) -> dict[str, dict[str, list[Arrow]]]:
    """Return the arrows from each room to each other."""
    room = rooms(files, root)
    graph: dict[str, dict[str, list[Arrow]]] = {one: {} for one in room.values()}
    for arrow in found:
        source, target = room[arrow.source], room[arrow.target]
        if source != target:
            graph[source].setdefault(target, []).append(arrow)
    return graph


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of nodes each of which leads to all others of its group."""
    reached = {node: _reached(node, graph) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(sorted(group) for group in groups if group)


def _reached(node: str, graph: Mapping[str, Collection[str]]) -> set[str]:
    found: set[str] = set()
    left = [node]
    while left:
        new = set(graph[left.pop()]) - found
        found |= new
        left += new
    return found


def floors(graph: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Return the floor of each room: one above the highest that it imports; ValueError where they are a cycle."""
    if found := cycles(graph):
        raise ValueError(f"rooms import each other: {found}")
    floor: dict[str, int] = {}
    while len(floor) < len(graph):
        ready = {room: list(below) for room, below in graph.items() if room not in floor and set(below) <= set(floor)}
        floor |= {room: max((floor[one] + 1 for one in below), default=0) for room, below in ready.items()}
    return floor


def drawing(root: Path = ROOT) -> str:
    """Return the lines of the block in ARCHITECTURE.md, the highest floor first."""
    files = modules(root)
    graph = room_graph(files, arrows(files), root)
    floor = floors(graph)
    width = max(map(len, graph))
    rows = [(floor[name], name, _purpose(name, root)) for name in sorted(graph, key=lambda one: (-floor[one], one))]
    return "floor room\n" + "".join(f"{row[0]:>2} {row[1]:{width}}  {row[2]}\n" for row in rows if row[2])


def _purpose(name: str, root: Path) -> str:
    """Return the first sentence of a room, without its end; "" for an `__init__` that is nobody's front."""
    init = root / f"{name}.py" if name.endswith("__init__") else root / name / "__init__.py"
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    first, _, rest = " ".join(text.split()).partition(". ")
    _, _, here = rest.partition("Modules here: ")
    if name.endswith("__init__"):
        return "Public names, loaded on first use" if here else ""
    return (here.partition(".")[0] or first).rstrip(".")


def page(root: Path = ROOT) -> str:
    """Return ARCHITECTURE.md with the drawing of the tree."""
    text, count = BLOCK.subn(lambda found: found[1] + drawing(root), (root / PAGE.name).read_text())
    assert count == 1, f"{PAGE.name} has no block below its heading of rooms"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
