"""Plug-ins as a user installs them: the example by pip adds a store, a command and a format; the core runs alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.training import write_corpus

from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.dcp.reader import whole_tensor
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.posix import PosixStore
from flashckpt.trainer.train.metrics import read_trace

pytestmark = pytest.mark.timeout(300)  # several interpreters, on two cores that others use too

JOB = """
import torch
from flashckpt import Checkpointer
model = torch.nn.Linear(4, 4)
with Checkpointer("shelf://run7", snapshot_every=1, persist_every=1, job="shelf") as ckpt:
    ckpt.track(model=model)
    ckpt.restore()
    ckpt.step(1)
    ckpt.wait()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example into a folder of its own; return that."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "source")], check=True)
    return folder / "site"


def run(installed: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "HOME": str(home)}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=home, capture_output=True, text=True, check=False
    )


def test_installed_example_stores_a_checkpoint_and_adds_a_command(
    installed: Path, tmp_path: Path, shm_dir: Path
) -> None:
    """The job, its persister and the commands are four processes; each finds the store by its scheme."""
    command = ("-m", "flashckpt.cli.main")
    done = run(installed, tmp_path, "-c", JOB)
    assert done.returncode == 0, done.stderr
    listed = run(installed, tmp_path, *command, "ls", "shelf://run7", "--json")
    rows = json.loads(listed.stdout)["checkpoints"]
    assert [row["step"] for row in rows if row["tier"] == "storage"] == [1]
    assert (tmp_path / "shelf" / "run7").is_dir()
    shelf = run(installed, tmp_path, *command, "shelf", "--json")
    assert json.loads(shelf.stdout)["runs"] == ["run7"]
    assert "Added by the package flashckpt-shelf" in run(installed, tmp_path, *command, "--help").stdout
    refused = run(installed, tmp_path, *command, "ls", "shelf://run7", "-o", "fodler=x", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["expected"]) == (10, "folder")


def test_installed_example_imports_a_checkpoint_of_its_format(installed: Path, tmp_path: Path) -> None:
    arrays = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float16)}
    np.savez(tmp_path / "old.npz", **arrays)  # type: ignore[arg-type]  # names as keywords
    words = ["import", "old.npz", "shelf://run8", "--step", "7", "--format", "npz", "--rename", "=model."]
    done = run(installed, tmp_path, "-m", "flashckpt.cli.main", *words, "--json")
    assert done.returncode == 0, done.stderr
    store = PosixStore(tmp_path / "shelf" / "run8")
    (info,) = list_checkpoints(store)
    source = StorageSource(store, read_manifest(store, info), info.prefix)
    for name, array in arrays.items():
        assert np.array_equal(whole_tensor(source, f"model.{name}").numpy(), array)
    refused = run(installed, tmp_path, "-m", "flashckpt.cli.main", *words[:-4], "--format", "nzp")
    assert refused.returncode == 2


def test_core_alone_trains_persists_and_writes_its_trace(tmp_path: Path, shm_dir: Path) -> None:
    """The four folders of the core, with links to extras/ that lead nowhere; replicas and displays are not there."""
    core = tmp_path / "core"
    for folder in ("flashckpt", "daemon", "sampler", "trainer", "configs"):
        shutil.copytree(ROOT / folder, core / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", core)  # declares what is not there
    source = write_corpus(tmp_path / "text")[0]
    words = ["--config", str(ROOT / "configs" / "tiny.toml"), "--train.steps", "3", "--checkpoint.persist_every", "2"]
    words += ["--data.source", source, "--data.folder", str(tmp_path / "tokens"), "--log.folder", str(tmp_path / "log")]
    words += ["--checkpoint.root", str(tmp_path / "root"), "--checkpoint.job", "core"]
    done = run(core, tmp_path, "-m", "flashckpt.trainer", *words)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_trace(tmp_path / "log" / "trace.jsonl")] == [1, 2, 3]
    assert (tmp_path / "root" / "step-000000003.g1" / "MANIFEST").exists()
    place = run(core, tmp_path, "-c", "import flashckpt; print(flashckpt.__file__)").stdout.strip()
    assert place == str(core / "flashckpt" / "__init__.py")
