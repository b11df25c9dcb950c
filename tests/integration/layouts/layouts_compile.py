"""Blocks by torch.compile with each value of every other switch: they train as one process without it, and survive a kill.

The compiler is the one that a run uses, inductor; what it made of a block is kept in a folder of the module, so that a row
whose blocks are those of another one, and the leg after the kill, compile nothing. It is imported once, before ranks are forked.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.covering import Row, cover_each
from support.switches import FACTORS, Alone, Switches, killed_and_resumed, world_of, write_texts
from support.training import run_config

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.parallel.layout import resolve_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch about torch
    import torch._inductor.compile_fx  # noqa: F401

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1000)]  # a busy machine is slow to compile
DATA = {name: value for name, value in FACTORS["data"].items() if name != "zero 2"}
"""1 and 3 have what 2 has; each row compiles for seconds."""
SWITCHES = Switches(factors={**FACTORS, "data": DATA}, base={"train": {"compile": True}})
ROWS, REFUSED = cover_each(SWITCHES.values, SWITCHES.works)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    return write_texts(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def alone(corpus: Any) -> Any:
    return Alone(SWITCHES, corpus)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: Any, tmp_path: Any, corpus: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(corpus[0] / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # ranks wait for each other anyhow
    monkeypatch.setattr(JobDirectory, "ensure_daemon", lambda *_: None)  # restores here are from memory


@pytest.mark.parametrize("row", ROWS, ids=SWITCHES.name_of)
def test_compiled_blocks_train_as_plain_ones_in_one_process_and_survive_a_kill(
    row: Row, corpus: Any, alone: Any, tmp_path: Path
) -> None:
    found = killed_and_resumed(SWITCHES.sections_of(row), corpus, tmp_path, timeout_s=450)
    near = 3e-6 if row["precision"] == "float32" else 3e-3  # rounding of another order of sums
    assert found == pytest.approx(alone(row), abs=near)


@pytest.mark.parametrize("row", REFUSED, ids=SWITCHES.name_of)
def test_what_does_not_go_with_the_compiler_is_refused_with_the_reason(row: Row) -> None:
    sections = SWITCHES.sections_of(row)
    with pytest.raises((LayoutError, ConfigError), match=r"compile") as caught:
        resolve_layout(run_config(Path("unused"), **sections), world_of(sections))
    assert caught.value.found
    assert caught.value.expected
