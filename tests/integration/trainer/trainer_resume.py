"""A run that was killed goes on to the same trace, bit for bit, whichever rank died and wherever the state was."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest
from support import warm
from support.ranks import run_ranks, values, wait_for
from support.training import run_config, run_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.trainer.config import from_values, to_toml, to_values
from flashckpt.trainer.demo.report import compare_traces, read_restores
from flashckpt.trainer.train import loop  # noqa: F401 -- the same
from flashckpt.trainer.train.metrics import read_trace

STEPS = 9
KILL_AT = 7
SNAPSHOT = 6  # the newest snapshot that is complete on all ranks when step 7 dies
SMALL = (4, {"pp": 2, "dp_shard": 2})


class Job:
    """One small job and its unbroken twin."""

    def __init__(self, text: Any, world: Any, parallel: Any, **sections: Any) -> None:
        self.folder, self.world = text[0], world
        self._model = sections.pop("model", {})
        self._source, self._sections = text[1], {"parallel": parallel, **sections}

    def values(self, name: Any, **more: Any) -> Any:
        sections = {
            **self._sections,
            "model": {"dropout": 0.1, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64, **self._model},
            "train": {"steps": STEPS, "seq_len": 16, "global_batch": 8, "micro_batch": 2, "device": "cpu"},
            "data": {"source": self._source, "folder": str(self.folder / "tokens")},
            "log": {"folder": str(self.folder / name), "every": 1000},
        }
        root = {
            "root": str(self.folder / name / "root"),
            "job": f"test-{name}",
            "snapshot_every": 2,
            "persist_every": 4,
        }
        sections["checkpoint"] = root if name != "untracked" else {}
        for section, content in more.items():
            sections[section] = {**sections.get(section, {}), **content}
        return to_values(run_config(self.folder, **sections))

    def train(self, name: Any, forget: str = "", **more: Any) -> Any:
        args = (self.values(name, **more), None, forget)
        assert values(run_ranks(run_rank, self.world, *args, timeout_s=100)) == [0] * self.world
        return self.trace(name)

    def kill(self, name: Any, rank: Any, forget: str = "", **more: Any) -> None:
        kill = {"rank": rank, "step": KILL_AT}
        results = run_ranks(run_rank, self.world, self.values(name, **more), kill, forget, timeout_s=100)
        assert results[rank].signal == signal.SIGKILL

    def trace(self, name: Any) -> Any:
        return read_trace(self.folder / name / "trace.jsonl")

    def memory(self, name: Any) -> Any:
        return memory_root() / f"test-{name}"


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("resume")
    return folder, write_corpus(folder / "text")


@pytest.fixture(scope="module")
def untracked(text: Any) -> Any:
    """The unbroken trace of the small layout, without any checkpoint."""
    return Job(text, *SMALL).train("untracked")


@pytest.fixture(scope="module")
def without_dropout(text: Any) -> Any:
    return Job(text, *SMALL, model={"dropout": 0.0}).train("without-dropout", checkpoint={"root": ""})


def check_same(one: Any, other: Any) -> None:
    result = compare_traces(one, other, STEPS)
    assert result.identical, result.first
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))


def test_a_tracked_run_has_the_trace_of_an_untracked_one_from_the_first_step(text: Any, untracked: Any) -> None:
    check_same(untracked, Job(text, *SMALL).train("tracked"))


@pytest.mark.parametrize("rank", range(SMALL[0]))
def test_rank_killed_in_a_step_restart_from_memory_same_trace(rank: Any, text: Any, untracked: Any) -> None:
    job, name = Job(text, *SMALL), f"rank{rank}"
    job.kill(name, rank)
    check_same(untracked, job.train(name))
    (restored,) = read_restores(job.folder / name)
    assert (restored.step, restored.ranks, set(restored.tiers)) == (SNAPSHOT, SMALL[0], {"memory"})
    # the step that died was told only if the reporting rank was past it
    assert [line["step"] for line in read_trace(job.folder / name / "abandoned.jsonl")] in ([], [KILL_AT])


@pytest.mark.parametrize("state", ["rng", "optimizer", "sampler"])
def test_a_kind_of_state_left_out_shows_in_the_resumed_trace(state: str, text: Any) -> None:
    """The comparison of traces is sharp: each of these is needed for it to hold."""
    job, name = Job(text, 2, {"pp": 2}), f"without-{state}"
    unbroken = job.train(f"{name}-untracked", checkpoint={"root": ""})
    job.kill(name, 1, forget=state)
    resumed = job.train(name, forget=state)
    result = compare_traces(unbroken, resumed, STEPS)
    assert result.equal == SNAPSHOT + (state == "optimizer")  # without its state, the step after the next one differs
    assert result.first.startswith(f"step {result.equal + 1}: loss")


def test_rank_killed_and_memory_gone_restart_from_storage_same_trace(text: Any, untracked: Any) -> None:
    job = Job(text, *SMALL)
    job.kill("lost", 1)
    root = job.folder / "lost" / "root"
    wait_for(lambda: list(root.glob("*/MANIFEST")), what="a checkpoint on storage")
    directory = JobDirectory.open("test-lost", create=False)
    wait_for(lambda: not directory.anyone_alive(), what="the ranks to be gone")
    from flashckpt.trainer.demo.run import stop_daemon

    stop_daemon(directory)
    shutil.rmtree(directory.path)
    check_same(untracked, job.train("lost"))
    (restored,) = read_restores(job.folder / "lost")
    assert set(restored.tiers) == {"storage"}
    assert restored.step in (4, SNAPSHOT)


def test_a_run_that_ends_leaves_nothing_in_memory(text: Any, untracked: Any) -> None:
    job = Job(text, *SMALL)
    job.train("clean")
    wait_for(lambda: not job.memory("clean").exists(), what="the job's memory to be given back")
    assert list((job.folder / "clean" / "root").glob("*/MANIFEST"))


def test_a_changed_dimension_on_resume_is_refused_with_one_error(text: Any, untracked: Any) -> None:
    job = Job(text, *SMALL)
    job.kill("changed", 0)
    results = run_ranks(run_rank, job.world, job.values("changed", model={"dim": 64}), timeout_s=100)
    assert any("model.dim changed since the checkpoint" in result.error for result in results)


def test_2x2x2_rank_killed_in_a_step_restart_from_memory_same_trace(text: Any) -> None:
    world, parallel = 8, {"pp": 2, "dp_shard": 2, "tp": 2}
    job = Job(text, world, parallel)
    unbroken = job.train("eight-untracked", checkpoint={"root": ""})
    job.kill("eight", 5)
    check_same(unbroken, job.train("eight"))
    (restored,) = read_restores(job.folder / "eight")
    assert (restored.step, restored.ranks, set(restored.tiers)) == (SNAPSHOT, 8, {"memory"})


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=["dp2", "tp2"])
def test_restart_in_another_layout_same_samples_and_losses_to_rounding(
    parallel: Any, text: Any, without_dropout: Any
) -> None:
    job, name = Job(text, *SMALL, model={"dropout": 0.0}), f"moved-{'-'.join(parallel)}"
    job.kill(name, 1)
    trace = Job(text, 2, parallel, model={"dropout": 0.0}).train(name)
    unbroken = without_dropout
    assert [line["samples"] for line in trace] == [line["samples"] for line in unbroken]
    losses, wanted = ([float.fromhex(line["loss"]) for line in lines] for lines in (trace, unbroken))
    assert losses == pytest.approx(wanted, abs=1e-5)
    (restored,) = read_restores(job.folder / name)
    assert (restored.step, restored.ranks, set(restored.tiers)) == (SNAPSHOT, 2, {"memory"})


def test_asked_to_stop_ends_with_75_and_the_next_start_goes_on_to_the_same_trace(text: Any) -> None:
    """SIGTERM to dlrun: every rank stops after the same step, the state is on storage, nothing is trained twice."""
    job = Job(text, *SMALL, optim={"schedule": "constant"})
    (job.folder / "stop").mkdir()
    (job.folder / "stop.toml").write_text(to_toml(from_values(job.values("stop", train={"steps": 5000}))))
    words = [
        "-m",
        "flashckpt.daemon.run",
        "--nproc-per-node",
        str(job.world),
        "-m",
        "flashckpt.trainer",
        "--config",
    ]
    log = job.folder / "stop" / "log"
    launcher = warm.start([*words, str(job.folder / "stop.toml")], log, cwd=job.folder, env=dict(os.environ))
    wait_for(lambda: len(job.trace("stop")) >= 3 or launcher.poll() is not None, what="three steps")
    launcher.send_signal(signal.SIGTERM)
    code = launcher.wait(timeout=60)
    assert code == RESUME_EXIT_CODE, log.read_text()
    stopped = job.trace("stop")[-1]["step"]
    shutil.rmtree(job.memory("stop"))
    more = {"steps": stopped + 3}
    resumed, unbroken = job.train("stop", train=more), job.train("stop-untracked", train=more, checkpoint={"root": ""})
    assert compare_traces(unbroken, resumed, stopped + 3).identical
    (restored,) = read_restores(job.folder / "stop")
    assert (restored.step, set(restored.tiers)) == (stopped, {"storage"})


@pytest.mark.parametrize("ranks", [4, 2])
def test_experts_killed_rank_restart_from_memory_over_as_many_or_fewer_ranks(ranks: int, text: Any) -> None:
    """Experts are state that no other rank holds: nothing may be taken from a replica that is none."""
    experts, name = {"experts": 4, "ffn": 32, "dropout": 0.0}, f"experts{ranks}"
    job = Job(text, 4, {}, model=experts)
    unbroken = job.train(f"{name}-untracked", checkpoint={"root": ""})
    job.kill(name, 2)
    trace = Job(text, ranks, {}, model=experts).train(name)
    if ranks == job.world:
        check_same(unbroken, trace)
    losses, wanted = ([float.fromhex(line["loss"]) for line in lines] for lines in (trace, unbroken))
    assert losses == pytest.approx(wanted, abs=1e-5)
    (restored,) = read_restores(job.folder / name)
    assert (restored.step, restored.ranks, set(restored.tiers)) == (SNAPSHOT, ranks, {"memory"})
