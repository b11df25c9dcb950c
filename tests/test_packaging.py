"""The wheel holds one top-level package with everything in it, and the links are links."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("sampler", "trainer", "daemon")


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_points_to_the_folder_beside_the_engine(name: str) -> None:
    link = ROOT / "flashckpt" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_wheel_has_flashckpt_as_its_only_top_level_name(tmp_path: Path) -> None:
    """`daemon`, `trainer` and `sampler` are names that other distributions install."""
    source = tmp_path / "source"  # a build leaves its folders behind: not in the checkout
    shutil.copytree(ROOT, source, symlinks=True, ignore=_not_of_the_source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"flashckpt"}
    for package in LINKED:
        assert f"flashckpt/{package}/__init__.py" in names
    assert "flashckpt/py.typed" in names


def _not_of_the_source(folder: str, names: list[str]) -> set[str]:
    made = {"out", "data", "build", "site"} if Path(folder) == ROOT else set()
    return {name for name in names if name in made or name.startswith(".") or name.endswith(".egg-info")}


def test_coverage_sees_all_four_folders(tmp_path: Path) -> None:
    """Coverage records files by their real path, so each of the four folders must be named as a source."""
    code = "import flashckpt.errors, flashckpt.sampler, flashckpt.trainer, flashckpt.daemon"
    env_file = tmp_path / "coverage"
    run = [sys.executable, "-m", "coverage", "run", f"--data-file={env_file}", "-c", code]
    subprocess.run([*run[:-2], str(_script(tmp_path, code))], cwd=ROOT, check=True)
    report = tmp_path / "coverage.json"
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", f"--data-file={env_file}", "-o", str(report), "--quiet"],
        cwd=ROOT,
        check=True,
    )
    seen = {Path(name).parts[0] for name in json.loads(report.read_text())["files"]}
    assert {"flashckpt", *LINKED} <= seen


def _script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code + "\n")
    return path
