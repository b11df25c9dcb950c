"""Runs that change their lengths, data, batch and rate on the way: killed around each change, they continue bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from integration.trainer.trainer_data import sources
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.demo.report import compare_traces, read_restores
from flashckpt.trainer.hub.source import CheckpointWeights
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.metrics import read_trace
from flashckpt.trainer.train.phases import phases_of

STEPS = 11
LAYOUT = {"pp": 2, "dp_shard": 2}
PHASES = [
    {"from_step": 4, "weights": {"a": 1, "b": 5}, "global_batch": 16},
    {"from_step": 7, "seq_len": 32, "rope_base": 50000.0, "global_batch": 8},
    {"from_tokens": 3 * 8 * 16 + 3 * 16 * 16 + 2 * 8 * 32, "lr": 2e-3, "schedule": "linear", "weights": {"a": 0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("phases")
    write_corpus(folder / "text")
    prepare(from_values({"data": sources(folder)}).data)
    return folder


def config_of(folder: Path, name: str, parallel: Any, *, root: bool = True, ahead: int = 2, **more: Any) -> RunConfig:
    place = {"root": str(folder / name / "root"), "job": f"test-phases-{name}", "snapshot_every": 1, "persist_every": 5}
    return run_config(
        folder,
        parallel=parallel,
        model={"layers": 2, "dropout": 0.1},
        train={"steps": STEPS, "global_batch": 8},
        data={**sources(folder), "read_ahead": ahead},
        checkpoint=place if root else {},
        log={"folder": str(folder / name)},
        phase={"each": PHASES},
        **more,
    )


def train(folder: Path, name: str, world: int = 4, parallel: Any = LAYOUT, **more: Any) -> Any:
    config = to_values(config_of(folder, name, parallel, **more))
    assert values(run_ranks(run_rank, world, config, timeout_s=150)) == [0] * world
    return read_trace(folder / name / "trace.jsonl")


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Any:
    return train(folder, "unbroken", root=False)


def test_the_phases_are_what_the_settings_say(folder: Path, unbroken: Any) -> None:
    phases = phases_of(config_of(folder, "settings", LAYOUT))
    assert [(one.first_step, one.stream, one.rate_from) for one in phases] == [
        (1, 0, 0),
        (4, 0, 0),
        (7, 1, 0),
        (9, 1, 8),
    ]
    tokens = [line["tokens"] for line in unbroken]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [128] * 3 + [256] * 3 + [256] * 5
    assert [phases[3].rate(step) for step in (9, 10, 11)] == pytest.approx(
        [3e-4 + 1.7e-3 * (1 - step / 3) for step in (1, 2, 3)]
    )
    assert all(set(line["channels"]) == {"b"} for line in unbroken[8:]), "the other channel has no weight any more"


@pytest.mark.parametrize("step", [3, 4, 5, 7, 9])
def test_a_run_killed_around_a_change_has_the_same_trace(step: int, folder: Path, unbroken: Any) -> None:
    """In the last step of a phase, in the first of the next, and in the one after that."""
    name = f"killed{step}"
    config = to_values(config_of(folder, name, LAYOUT))
    results = run_ranks(run_rank, 4, config, {"rank": 1, "step": step}, timeout_s=150)
    assert results[1].signal == signal.SIGKILL
    result = compare_traces(unbroken, train(folder, name), STEPS)
    assert result.identical, result.first
    assert [restored.step for restored in read_restores(folder / name)] == [step - 1]


def test_another_layout_takes_the_same_samples_through_all_phases(folder: Path, unbroken: Any) -> None:
    trace = train(folder, "other", world=1, parallel={}, ahead=0)
    assert [line["samples"] for line in trace] == [line["samples"] for line in unbroken]
    source = CheckpointWeights(str(folder / "other" / "root"))
    assert (source.model.rope_base, source.run.train.seq_len) == (50000.0, 32), "an export is of the last phase"
    source.close()


def run_rolled_back(_rank: int, config_values: Any, spike_at: int) -> Any:
    """Run to the end with a guard that sees a spike at the first visit of one step."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        seen: list[int] = []

        def is_spike(_loss: float) -> bool:
            seen.append(trainer.done + 1)
            return seen[-1] == spike_at and seen.count(spike_at) == 1

        trainer.guard.is_spike = is_spike  # type: ignore[method-assign, assignment]  # what the loop asks
        return trainer.run(), seen


def test_a_rollback_over_a_change_leaves_out_the_samples_of_the_spike(folder: Path, unbroken: Any) -> None:
    config = config_of(folder, "rolled", {}, guard={"on_spike": "rollback"})
    config = from_values({**to_values(config), "checkpoint": {**to_values(config)["checkpoint"], "snapshot_every": 6}})
    ((code, seen),) = values(run_ranks(run_rolled_back, 1, to_values(config), 8, timeout_s=100))
    assert (code, seen) == (0, [*range(1, 9), *range(7, 12)])
    trace = read_trace(folder / "rolled" / "trace.jsonl")
    assert [line["step"] for line in trace] == list(range(1, STEPS + 1))
    assert trace[6]["samples"] not in {unbroken[6]["samples"], unbroken[7]["samples"]}
