"""`make test-trainer`: a group restarted with the plans of a rehearsal trains as one that was never interrupted, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.dlrun import dlrun
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt import rehearsal
from flashckpt.trainer.config import to_toml, to_values
from flashckpt.trainer.demo.report import compare_traces
from flashckpt.trainer.train.metrics import read_trace

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2 x PP 2": {"parallel": {"tp": 2, "pp": 2}},
    "FSDP 2 x TP 2": {"parallel": {"tp": 2}},
    "HSDP 2 x TP 2, experts": {"parallel": {"tp": 2, "dp_replicate": 2, "dp_shard": 1}, "model": {"experts": 4}},
    "interleaved, recomputed": {
        "parallel": {
            "tp": 2, "pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2, "activation_checkpoint": "full",
        },
        "model": {"layers": 4},
    },
    "CP 2 x TP 2, a ring": {"parallel": {"tp": 2, "cp": 2, "cp_exchange": "ring"}},
    "bfloat16": {"parallel": {"tp": 2}, "train": {"precision": "bfloat16"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("rehearsal")
    return folder, write_corpus(folder / "text")


def config_of(text: Any, name: str, sections: dict[str, Any], **more: Any) -> Any:
    folder, source = text
    return run_config(folder, data={"source": source}, log={"folder": str(folder / name)}, **sections, **more)


@pytest.mark.skipif(bool(rehearsal.unsupported()), reason=rehearsal.unsupported())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_with_rehearsed_plans_trains_to_the_same_bits(layout: str, text: Any, tmp_path: Path) -> None:
    sections = LAYOUTS[layout]
    unbroken = config_of(text, f"unbroken {layout}", sections)
    assert values(run_ranks(run_rank, 4, to_values(unbroken), timeout_s=100)) == [0] * 4
    checkpoint = {"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 2, "job": "rehearsal"}
    broken = config_of(text, f"broken {layout}", sections, checkpoint=checkpoint)
    (tmp_path / "run.toml").write_text(to_toml(broken))
    (tmp_path / "memory").mkdir()
    env = {"FLASHCKPT_LOGLEVEL": "DEBUG", "FLASHCKPT_SHM_DIR": str(tmp_path / "memory")}
    words = ["--nproc-per-node", "4", "-m", "flashckpt.trainer", "--config", tmp_path / "run.toml"]
    trace = Path(broken.log.folder) / "trace.jsonl"
    with dlrun(tmp_path, *words, env=env) as launch:
        launch.until(lambda: trace.exists() and len(trace.read_text().splitlines()) > 1, "two steps")
        pid = int(re.findall(r"rank 3 pid (\d+)", launch.output)[0])
        os.kill(pid, signal.SIGSTOP)  # the others wait for it in a collective
        launch.until(lambda: launch.says("rehearsed a step") or launch.says("was not rehearsed"), "the rehearsal")
        os.kill(pid, signal.SIGKILL)
        assert launch.wait() == 0, launch.output
        assert launch.says("rehearsed a step")
        assert launch.says("the workers begin with the plans of a rehearsal")
    compared = compare_traces(read_trace(Path(unbroken.log.folder) / "trace.jsonl"), read_trace(trace), 4)
    assert compared.equal == 4, compared.first
