"""ARCHITECTURE.md says what is true: its paths exist, M1's proof runs what it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.paths import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
TOPS = ("flashckpt", "daemon", "sampler", "trainer", "extras")


def tree_of(root: Path) -> set[str]:
    """Return the modules of the tree, `__init__` left out; links are not followed."""
    found = set()
    for path in (path for top in TOPS for path in (root / top).rglob("*.py")):
        inside = path.relative_to(root)
        if path.stem != "__init__" and not any((root / parent).is_symlink() for parent in inside.parents):
            found.add(inside.with_suffix("").as_posix())
    return found


def test_modules_named_in_the_text_exist() -> None:
    """`room/module` in prose names a module of the tree, or a room."""
    modules = tree_of(ROOT)
    rooms = {name.rpartition("/")[0] for name in modules}
    known = {*modules, *rooms}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    named = {span for span in re.findall(r"`([a-z_]+/[a-z_/]+)`", prose) if not span.endswith("/")}
    assert len(named) > 10, "the pattern no longer finds any"
    for span in sorted(named):
        assert any(name == span or name.endswith("/" + span) for name in known), f"there is no {span}"


def test_the_proof_of_m1_runs_the_functions_that_the_text_names() -> None:
    """Both ways: what the text names is imported by the test, and no decision that the test runs goes unnamed."""
    proof = TEXT.split("*Shown by* `tests/scenarios/test_m1_state_machine.py`")[1].split("It also shows progress")[0]
    named = set(re.findall(r"`([A-Za-z_]+)`", proof))
    tree = ast.parse((ROOT / "tests/scenarios/test_m1_state_machine.py").read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("flashckpt")]
    imported = {alias.name for node in imports for alias in node.names}
    assert named <= imported, f"the test does not run {sorted(named - imported)}"
    decisions = {name for name in imported if name.islower()}
    assert decisions <= named, f"the text does not name {sorted(decisions - named)}"


def test_it_is_short_and_narrow_enough_to_be_read() -> None:
    assert len(TEXT.encode()) <= 12 * 1024
    assert not [line for line in TEXT.splitlines() if len(line) > 100]
