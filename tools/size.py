#!/usr/bin/env python3
"""Print how large the product is, how its modules hang together, and how far the way of the data is: one table.

    make size                   # the working tree
    make size COMMIT=43fae85    # beside it an older commit

The core is everything but `extras/`. Lines are those of Python files, as they are and as `ruff format` leaves them at 100
columns. "-" is what cannot be known of an older commit: calls are counted by the `benchmarks/path.py` that it has.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import rooms

RUFF = Path(sys.executable).with_name("ruff")
WAYS = {"step with a snapshot": "step", "warm restore of 0.1 MB": "warm restore"}
_FRAMING = re.compile(r'(?:HEAD|LENGTH) = struct\.Struct\("[<>][QI]"\)|len\(\w+\)\.to_bytes\(8|pack\("[<>][QI]", len\(')
_VARIABLE = re.compile(r"\bFLASHCKPT_[A-Z0-9_]*[A-Z0-9]\b")


def _lines(files: Mapping[str, Path], root: Path) -> dict[bool, int]:
    """Return the lines of the extras (True) and of the core."""
    found = {True: 0, False: 0}
    for path in files.values():
        if path.suffix == ".py":
            found["extras" in path.relative_to(root).parts] += path.read_bytes().count(b"\n")
    return found


def _imports(files: Mapping[str, Path], root: Path) -> dict[str, object]:
    """Return what the imports of a tree say: modules, importers, cycles, and arrows from the core into extras."""
    arrows, room = rooms.arrows(files), rooms.rooms(files, root)
    graph: dict[str, set[str]] = {name: set() for name in files}
    importers: dict[str, set[str]] = {name: set() for name in files}
    for arrow in arrows:
        graph[arrow.source].add(arrow.target)
        importers[arrow.target].add(arrow.source)
    single = {name: min(by) for name, by in importers.items() if len(by) == 1}
    wrong = [a for a in arrows if room[a.target].startswith("extras/") and not room[a.source].startswith("extras/")]
    return {
        "modules": len([path for path in files.values() if path.name != "__init__.py"]),
        "with one importer": len(single),
        "in the same room": len([name for name, by in single.items() if room[name] == room[by]]),
        "cycles of modules": len(rooms.cycles(graph)),
        "cycles of rooms": len(rooms.cycles(rooms.room_graph(files, arrows, root))),
        "imports core -> extras": len(wrong),
    }


def _settings(files: Mapping[str, Path]) -> int:
    """Return the fields of the configuration's classes and of `Settings`, but those that are such a class."""
    classes = [
        node
        for name, path in files.items()
        if ".trainer." in name or name == "flashckpt.core.settings"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and (node.name.endswith("Config") or node.name == "Settings")
    ]
    fields = [ast.unparse(one.annotation) for node in classes for one in node.body if isinstance(one, ast.AnnAssign)]
    return len([kind for kind in fields if not re.search(r"Config\b|\bSettings\b", kind)])


def _calls(root: Path) -> dict[str, str]:
    """Return modules and calls of the two ways of the data."""
    program = root / "benchmarks" / "path.py"
    if not program.exists():
        return dict.fromkeys(WAYS.values(), "-")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        environment = os.environ | {"FLASHCKPT_SHM_DIR": memory, "PYTHONPATH": str(root)}
        ran = subprocess.run(
            [sys.executable, program], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    found = re.findall(rf"^({'|'.join(WAYS)}) +(\d+) +(\d+)$", ran.stdout, re.MULTILINE)
    return dict.fromkeys(WAYS.values(), "-") | {WAYS[way]: f"{modules} / {calls}" for way, modules, calls in found}


def measured(root: Path, run_in: Path) -> dict[str, object]:
    """Return the rows of a copy of a tree, whose files are formatted at 100 columns; the calls are those in `run_in`."""
    files = rooms.modules(root)
    source = "".join(path.read_text() for path in files.values())
    calls, own = _calls(run_in), _lines(files, root)
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    words = sum(len(page.read_text().split()) for page in pages)
    rest = _imports(files, root) | {
        **{f"{way}: modules / calls": found for way, found in calls.items()},
        "words of docs": words,
        "settings": _settings(files),
        "environment variables": len(set(_VARIABLE.findall(source))),
        "modules with a framing": sum(bool(_FRAMING.search(path.read_text())) for path in files.values()),
    }
    subprocess.run(
        [RUFF, "format", "--isolated", "--line-length", "100", "-q", *{*files.values()}], cwd=root, check=False
    )
    formatted = _lines(files, root)
    rows: dict[str, object] = {}
    for name, which in (("core", [False]), ("extras", [True]), ("all", [False, True])):
        rows[f"lines, {name}"] = sum(own[one] for one in which)
        rows[f"lines at 100 columns, {name}"] = sum(formatted[one] for one in which)
    return rows | rest


def _copied(commit: str, into: Path) -> Path:
    """Unpack a commit, or where it is "" the working tree, its untracked files among it."""
    tree = commit
    if not commit:
        names = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=rooms.ROOT)
        with tarfile.open(fileobj=(raw := io.BytesIO()), mode="w") as archive:
            for name in filter(None, names.decode().split("\0")):
                if os.path.lexists(rooms.ROOT / name):
                    archive.add(rooms.ROOT / name, name)
        raw.seek(0)
    else:
        raw = io.BytesIO(subprocess.check_output(["git", "archive", tree], cwd=rooms.ROOT))
    with tarfile.open(fileobj=raw) as archive:
        archive.extractall(into, filter="fully_trusted")  # noqa: S202 -- of this repository
    return into


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="", help="an older commit")
    commits = list(dict.fromkeys([parser.parse_args().commit, ""]))
    with tempfile.TemporaryDirectory() as folder:
        trees = {commit: _copied(commit, Path(folder, commit or "tree")) for commit in commits}
        # an older commit has no C copy beside it: some calls more, in Python
        columns = [measured(tree, tree if commit else rooms.ROOT) for commit, tree in trees.items()]
    rows = [["", *(commit or "this tree" for commit in commits)]]
    rows += [[name, *(str(column[name]) for column in columns)] for name in columns[-1]]
    sys.stdout.writelines(f"{name:32}" + "".join(f"{one:>14}" for one in found) + "\n" for name, *found in rows)


if __name__ == "__main__":
    main()
