"""What differs between the releases of torch that are supported; tests/versions.py runs the suite under each of them."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from support.dlrun import dlrun

from flashckpt.daemon import run

ROOT = Path(__file__).resolve().parent.parent

AT_EXIT = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count(), flush=True))
"""


def test_worker_ends_without_objects_that_the_collector_may_not_touch(tmp_path: Path) -> None:
    """What stays frozen is alive when the interpreter has ended: nanobind modules (torch 2.14) print a list of it."""
    (tmp_path / "script.py").write_text(AT_EXIT)
    with dlrun(tmp_path, "--nproc-per-node", 1, tmp_path / "script.py") as launch:
        assert launch.wait() == 0
    assert re.findall(r"frozen (\d+)", launch.output) == ["0"], launch.output


def test_torchrun_without_shutdown_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no such option; the variable of the same meaning is dlrun's own to read."""
    from torch.distributed import run as torchrun

    from flashckpt.daemon import agent

    given: dict[str, Any] = {}
    original = torchrun.config_from_args

    def config_from_args(args: Any) -> Any:
        args.shutdown_timeout = None
        config = original(args)
        del args.shutdown_timeout
        return config

    def launch(*_: Any, options: Any, **__: Any) -> None:
        given["survivors_s"] = options.survivors_s

    monkeypatch.setattr(torchrun, "config_from_args", config_from_args)
    monkeypatch.setattr(agent, "launch", launch)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    parser: ArgumentParser = run.get_args_parser()
    run.run(parser.parse_args(["--no-zygote", "--log-dir", str(tmp_path), "script.py"]))
    assert given == {"survivors_s": 7.0}


def test_oldest_release_of_the_package_is_in_the_table() -> None:
    """pyproject.toml asks for what docs/versions.md shows to work, no more."""
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\S* \|(.*)$", page, re.MULTILINE)
    assert rows[0][0] == oldest
    assert not any("failed" in cells for _, cells in rows)
