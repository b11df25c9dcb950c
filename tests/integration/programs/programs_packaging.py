"""What is built and installed: the wheel with and without a compiler, the source distribution, coverage of all folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

from flashckpt import entry_points

pytestmark = pytest.mark.timeout(300)  # several interpreters, on two cores that others use too

LINKED = ("sampler", "trainer", "daemon")
SHIPPED = {"examples": "*.py", "configs": "*.toml"}
"""What `flashckpt examples` lists."""


def build_wheel(folder: Path, **environment: str) -> Path:
    source = folder / "source"  # a build leaves its folders behind: not in the checkout
    shutil.copytree(ROOT, source, symlinks=True, ignore=_not_of_the_source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_has_flashckpt_as_its_only_top_level_name(tmp_path: Path) -> None:
    """`daemon`, `trainer` and `sampler` are names that other distributions install."""
    wheel = build_wheel(tmp_path)
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"flashckpt"}
    extras = ("integrations", "interop", "bench", "plan", "replicate", "stores", "dashboard", "trainer/hub")
    for package in (*LINKED, *extras):
        assert f"flashckpt/{package}/__init__.py" in names
    assert "flashckpt/py.typed" in names
    assert {f"flashckpt/dashboard/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "-cp310-abi3-" in wheel.name
    if shutil.which("cc"):
        assert "flashckpt/native/_copy.abi3.so" in names
    assert {name: archive.read(name) for name in names if name.split("/")[1] in SHIPPED} == shipped()


def shipped() -> dict[str, bytes]:
    """Return the example programs and configurations of the checkout by their name in a wheel."""
    paths = [path for folder, pattern in SHIPPED.items() for path in (ROOT / folder).glob(pattern)]
    return {f"flashckpt/{path.relative_to(ROOT)}": path.read_bytes() for path in paths}


@pytest.mark.parametrize(("variable", "tag"), [("CC", "-cp310-abi3-linux"), ("FLASHCKPT_PURE", "-py3-none-any")])
def test_wheel_without_the_c_part_works_in_python(tmp_path: Path, variable: str, tag: str) -> None:
    """Where there is no compiler, and the one for machines that no other wheel is for."""
    wheel = build_wheel(tmp_path, **{variable: "false" if variable == "CC" else "1"})
    assert tag in wheel.name
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    assert not list(unpacked.rglob("*.so"))
    code = "import flashckpt.native as n; print(n.__file__, n.implementation())"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == [str(unpacked / "flashckpt" / "native" / "__init__.py"), "python"]
    code = "from flashckpt import entry_points as p; print(*(e.load().name for e in p.every(p.COMMANDS)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
    declared = [entry.name for entry in entry_points.every(entry_points.COMMANDS)]
    assert sorted(done.stdout.split()) == sorted(declared), "extras are found by the metadata of a wheel"
    command = [sys.executable, "-m", "flashckpt.cli.main", "examples", "--to", "written"]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=tmp_path)
    written = [path for path in (tmp_path / "written").rglob("*") if path.is_file()]
    assert {f"flashckpt/{path.relative_to(tmp_path / 'written')}": path.read_bytes() for path in written} == shipped()


def test_source_distribution_is_the_checkout(tmp_path: Path) -> None:
    """All that its tests need is in it, links as links; the release builds its wheels from it."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_not_of_the_source)
    for name in (".ci", ".github", ".gitignore", ".pre-commit-config.yaml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    tree = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() or path.is_symlink()}
    tree = {name for name in tree if "__pycache__" not in name}
    links = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_symlink()}
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=source, check=True, capture_output=True)
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = {one.name.partition("/")[2]: one for one in tar.getmembers() if not one.isdir()}
    made = {"PKG-INFO", "setup.cfg", "flashckpt.egg-info/SOURCES.txt"}
    assert {name for name in members if not name.startswith("flashckpt.egg-info/")} | made == tree | made
    assert {name for name, one in members.items() if one.issym()} == links


def _not_of_the_source(folder: str, names: list[str]) -> set[str]:
    made = {"out", "data", "build", "site"} if Path(folder) == ROOT else set()
    return {name for name in names if name in made or name.startswith(".") or name.endswith((".egg-info", ".so"))}


def test_coverage_sees_all_five_folders(tmp_path: Path) -> None:
    """Coverage records files by their real path, so each of the five folders must be named as a source."""
    code = "import flashckpt.errors, flashckpt.sampler, flashckpt.trainer, flashckpt.daemon, flashckpt.interop"
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
    assert {"flashckpt", "extras", *LINKED} <= seen


def _script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code + "\n")
    return path
