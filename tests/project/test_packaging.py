"""The links to the folders of the package are links. What is built of them: integration/programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

LINKED = ("sampler", "trainer", "daemon")
SHIPPED = {"examples": "*.py", "configs": "*.toml"}
"""What `flashckpt examples` lists."""


def test_every_room_of_extras_has_one_link_and_none_of_another_package() -> None:
    """A link into extras/ is relative, and what it leads to is a package: its import path is where the link lies."""
    links = [
        p
        for top in ("flashckpt", "trainer")
        for p in (ROOT / top).iterdir()
        if "extras" in str(p.readlink() if p.is_symlink() else "")
    ]
    assert all(str(link.readlink()).startswith("../extras/") for link in links)
    targets = sorted(link.resolve() for link in links)
    rooms = sorted(path.parent for path in (ROOT / "extras").rglob("__init__.py") if path.parent != ROOT / "extras")
    assert targets == rooms


@pytest.mark.parametrize("name", [*LINKED, *SHIPPED])
def test_link_is_relative_and_points_to_the_folder_beside_the_engine(name: str) -> None:
    link = ROOT / "flashckpt" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize("text", ["../daemon", None])
def test_a_checkout_without_links_is_not_built_and_says_why(tmp_path: Path, text: str | None) -> None:
    """As git makes one with core.symlinks=false, where each link is a file, and as a copy that left them out."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    for folder in ("flashckpt/native", "trainer"):
        (tmp_path / folder).mkdir(parents=True)
    for name in LINKED:
        if text is not None:
            (tmp_path / "flashckpt" / name).write_text(f"../{name}")
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "flashckpt/daemon is " + ("missing" if text is None else "a file that says ../daemon") in done.stderr
    assert "git config core.symlinks true" in done.stderr
