"""What a save is worth: savers are forks of one process, which a kill and an error end alone. By torch.save, which needs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

PROGRAMS = ROOT / "benchmarks"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
    forks = importlib.import_module("torn_forks")
    zygote = forks.Zygote([sys.executable, str(PROGRAMS / "torn_saver.py"), "torch.save", "serve"], {})
    out = tmp_path / "out"
    out.mkdir()
    try:
        yield lambda *words: zygote.fork([str(out), str(1 << 16), *words], {}, tmp_path)
    finally:
        zygote.close()
        for name in ("torn_forks", "processes"):
            sys.modules.pop(name, None)


def test_one_fork_saves_and_another_loads_what_it_saved(start: Callable[..., Any]) -> None:
    saver = start("steps", "0", "0")
    assert saver.join()
    assert [one["step"] for one in saver.said if one["event"] == "saved"] == [1, 2]
    loader = start("load", "1")
    assert loader.join()
    assert loader.said == [{"event": "loaded", "step": 1, "values": [1.0]}]


def test_a_fork_is_gone_when_its_kill_returns_and_the_next_one_starts(start: Callable[..., Any]) -> None:
    saver = start("saves")
    saver.wait_for("saved", 1)
    saver.kill()
    assert not Path(f"/proc/{saver.pid}").exists()
    loader = start("load")
    assert loader.join()
    assert loader.said[0]["values"] == [float(loader.said[0]["step"])]


def test_a_fork_that_fails_says_nothing_and_ends_alone(start: Callable[..., Any]) -> None:
    loader = start("load", "7")
    assert loader.join()
    assert loader.said == []
    with pytest.raises(RuntimeError, match="did not come"):
        loader.wait_for("loaded", 1)
    assert start("steps", "0").join()
