"""dlrun together with the engine: restores, the ledger, agreed stops, the daemon it keeps alive."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.dlrun import ENGINE, Launch, alive, dlrun, first_steps, processes_of, run_dlrun, script, traces
from support.ranks import wait_for

from flashckpt.errors import RESUME_EXIT_CODE, ConfigError, HangError, RestartBudgetError
from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)  # two cores that others use too


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(ENGINE)
    return path


def step_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"trace{rank}").read_text().split()[-2])
    except (OSError, IndexError, ValueError):
        return -1


def reaches(folder: Path, step: int) -> bool:
    return step_of(folder, 0) >= step


def until_step(launch: Launch, folder: Path, step: int) -> None:
    launch.until(partial(reaches, folder, step), f"step {step}")


def nothing_left(folder: Path) -> bool:
    """No process, no agent directory, no job directory of this test."""
    return not processes_of(folder) and not list(memory_root().parent.glob("*/*"))


def test_killed_rank_restores_from_memory_and_the_ledger_says_where_the_time_went(tmp_path: Path, train: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=2", "--ledger", tmp_path / "ledger.jsonl")
    with dlrun(tmp_path, *flags, train, tmp_path, 60, 0.01) as launch:
        until_step(launch, tmp_path, 20)
        pids = first_steps(tmp_path, 0, 2)
        assert pids is not None
        os.kill(pids[1], signal.SIGKILL)
        assert launch.wait() == 0
    (record,) = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert (record["rank"], record["restart"], record["outcome"]) == (1, 1, "restarted")
    assert record["step"] >= 19  # one rank was at 20; the one that died may have been a step behind
    assert 0 <= record["steps_lost"] <= 5
    assert set(record["seconds"]) == {
        "detect",
        "stop",
        "rendezvous",
        "fork",
        "init",
        "restore",
        "first_step",
        "recompute",
    }
    assert all(seconds >= 0 for seconds in record["seconds"].values())
    assert f"failed first at step {record['step']}" in launch.output
    for seen in traces(tmp_path, 2):
        assert sorted(seen) == list(range(1, 61))
        assert all(len(losses) == 1 for losses in seen.values())  # the same loss in both lives, bit for bit
    wait_for(partial(nothing_left, tmp_path), what="a clean end that leaves nothing", deadline_s=40)


def test_sigterm_all_ranks_stop_after_the_same_step_and_the_next_launch_goes_on(tmp_path: Path, train: Path) -> None:
    """An agreed stop: one step for all ranks, persisted, exit code 75; a second signal does not cut it short."""
    with dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, 100000, 0.01) as launch:
        until_step(launch, tmp_path, 10)
        launch.process.send_signal(signal.SIGTERM)
        launch.until(partial(launch.says, "all ranks stop after step"), "the agreement")
        launch.process.send_signal(signal.SIGTERM)
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == RESUME_EXIT_CODE
    stopped = {step_of(tmp_path, rank) for rank in range(2)}
    assert len(stopped) == 1
    (step,) = stopped
    assert list((tmp_path / "root").glob(f"step-{step:09d}.g*/MANIFEST"))
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, step + 3, 0.0)
    assert code == 0, output
    assert (tmp_path / "life0-rank0").read_text().split()[2] == str(step)
    for seen in traces(tmp_path, 2):
        assert sorted(seen) == list(range(1, step + 4))
    wait_for(partial(nothing_left, tmp_path), what="a clean end that leaves nothing", deadline_s=40)


def test_daemon_killed_a_new_one_persists(tmp_path: Path, train: Path) -> None:
    with dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, 100000, 0.005) as launch:
        first = launch.until(partial(daemon_of, launch, tmp_path), "the daemon")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not alive(first), what="the daemon's end")
        second = launch.until(partial(daemon_of, launch, tmp_path), "a new daemon")
        assert second != first
        launch.until(lambda: list((tmp_path / "root").glob("step-*/MANIFEST")), "a checkpoint")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE


def daemon_of(launch: Launch, folder: Path) -> int:
    """Return the pid of the live daemon of this test's job, 0 where there is none."""
    del launch
    for pid, command in processes_of(memory_root()).items():
        if "flashckpt.daemon.persister.service" in command:
            return pid
    del folder
    return 0


def test_agent_killed_the_daemon_persists_what_is_complete_and_the_next_launch_restores(
    tmp_path: Path, train: Path
) -> None:
    with dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, 100000, 0.01) as launch:
        until_step(launch, tmp_path, 10)
        pids = first_steps(tmp_path, 0, 2) or {}
        os.kill(launch.process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), what="the workers' end")
    reached = step_of(tmp_path, 0)
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, reached + 3, 0.0)
    assert code == 0, output
    restored = int((tmp_path / "life0-rank0").read_text().split()[2])
    assert reached - 5 <= restored <= reached + 1
    for seen in traces(tmp_path, 2):
        assert all(len(losses) == 1 for losses in seen.values())


def test_same_error_at_the_same_step_twice_is_the_scripts_and_stops(tmp_path: Path, train: Path) -> None:
    """Ten restarts are left, but the traceback and the step are those of the failure before."""
    (tmp_path / "explode").touch()
    code, output = run_dlrun(
        tmp_path, "--nproc-per-node=2", "--max-restarts=10", "--escalate=0", train, tmp_path, 40, 0.0
    )
    assert code == RestartBudgetError.exit_code, output
    assert output.count("  | ValueError: the same thing again") == 2
    assert "the same error at step 11 twice" in output


def test_stopped_rank_is_a_hang_it_is_named_and_the_group_restarts(tmp_path: Path, train: Path) -> None:
    """SIGSTOP of one rank: the others wait in a collective; the stopped one gives no stack and is the suspect."""
    flags = ("--nproc-per-node=3", "--max-restarts=1", "--hang-timeout=1.5", "--ledger", tmp_path / "ledger.jsonl")
    with dlrun(tmp_path, *flags, train, tmp_path, 100000, 0.005) as launch:
        until_step(launch, tmp_path, 10)
        pids = first_steps(tmp_path, 0, 3) or {}
        os.kill(pids[1], signal.SIGSTOP)
        launch.until(partial(first_steps, tmp_path, 1, 3), "the next life")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE
    assert "look at rank 1" in launch.output
    assert "rank 1 (step" in launch.output
    assert "gave no stack: state T (stopped)" in launch.output
    assert "all_reduce" in launch.output
    record = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert (record["rank"], record["cause"][:5]) == (1, "hang:")
    assert 1.5 < record["seconds"]["detect"] < record["total_s"]  # what the hang cost counts as lost


def test_rank_in_an_endless_loop_is_a_hang_and_without_restarts_the_job_ends(tmp_path: Path, train: Path) -> None:
    """The rank whose stack differs from all others is named, with the line it loops in."""
    text = train.read_text().replace(
        "    if ckpt.should_stop:",
        "    def endless():\n        while True: pass\n    if rank == 2 and step == 8: endless()\n    if ckpt.should_stop:",
    )
    train.write_text(text)
    code, output = run_dlrun(
        tmp_path, "--nproc-per-node=3", "--hang-timeout=1.5", "--max-restarts=0", train, tmp_path, 100, 0.0
    )
    assert code == HangError.exit_code, output
    assert "look at rank 2" in output
    assert "endless (" in output
    assert "rank 0 (step 8), 1 (step 8):" in output or "rank 0 (step 9), 1 (step 9):" in output


def test_spawned_ranks_give_stacks_and_tracebacks_too(tmp_path: Path, train: Path) -> None:
    """--no-zygote: the endless loop is named with its line, and in the next life the exception, without @record."""
    text = train.read_text().replace(
        "    if ckpt.should_stop:",
        "    def endless():\n        while True: pass\n    if rank == 1 and step in (6, 9):\n"
        "        if step == 6: endless()\n        raise RuntimeError('in the second life')\n    if ckpt.should_stop:",
    )
    train.write_text(text)
    flags = ("--no-zygote", "--nproc-per-node=2", "--hang-timeout=4", "--max-restarts=1")
    code, output = run_dlrun(tmp_path, *flags, train, tmp_path, 100, 0.0)
    assert code == 1, output
    assert "look at rank 1" in output
    assert "endless (" in output
    assert "RuntimeError: in the second life" in output
    assert output.count("Traceback (most recent call last)") <= 2  # the first failure's, and torch's of the chain


def test_hang_of_a_command_that_is_not_python_names_what_the_kernel_knows(tmp_path: Path, train: Path) -> None:
    """Under --no-python nothing of ours runs before the script: no Python stacks, but state and kernel functions."""
    flags = ("--no-python", "--nproc-per-node=2", "--hang-timeout=1.5", "--max-restarts=0")
    with dlrun(tmp_path, *flags, sys.executable, train, tmp_path, 100000, 0.005) as launch:
        pids = launch.until(partial(first_steps, tmp_path, 0, 2), "the first step")
        os.kill(pids[1], signal.SIGSTOP)
        assert launch.wait() == HangError.exit_code
    assert re.search(r"rank 1 \(step \d+\) gave no stack: state T \(stopped\)", launch.output), launch.output
    assert re.search(r"rank 0 \(step \d+\) gave no stack: state \w", launch.output)
    if os.geteuid() == 0 and Path("/proc/self/stack").exists():
        assert "in the kernel: do_signal_stop" in launch.output


def test_refused_configuration_ends_the_job_with_its_exit_code_and_no_restart(tmp_path: Path, train: Path) -> None:
    """A permanent error: reported once, with its own exit code, however many restarts are left."""
    train.write_text(train.read_text().replace("persist_every=50", "persist_every=0"))
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=5", train, tmp_path, 5, 0.0)
    assert code == ConfigError.exit_code, output
    assert output.count("failed first") == 1
    assert "is permanent" in output


def test_job_that_fails_waits_for_the_newest_snapshot_to_be_persisted(tmp_path: Path, train: Path) -> None:
    """--wait-flush, as for PID 1: the last snapshot (step 10) is on storage when dlrun ends, though 50 is not due."""
    (tmp_path / "explode").touch()
    code, output = run_dlrun(
        tmp_path, "--nproc-per-node=2", "--wait-flush", "--max-restarts=0", train, tmp_path, 40, 0.01
    )
    assert code == 1, output
    assert list((tmp_path / "root").glob("step-000000010.g*/MANIFEST")), output


STOPS = int(os.environ.get("DLRUN_TEST_STOPS", "1"))  # make test-restarts stops a 2x2x2 run instead


@pytest.mark.timeout(120 + 60 * STOPS)
def test_sigterm_at_a_random_instant_no_hang_and_nothing_lost(tmp_path: Path, train: Path) -> None:
    """Stops and starts one job; every step is trained exactly once, with the losses of the unbroken run."""
    seed = random.randrange(2**32)
    rng, last = random.Random(seed), 0
    for stop in range(STOPS):
        with dlrun(tmp_path, "--nproc-per-node=4", train, tmp_path, 100000, 0.003) as launch:
            until_step(launch, tmp_path, last + 1)
            wait_for(time_after(rng.uniform(0.0, 0.5)), what="a random instant")
            launch.process.send_signal(signal.SIGTERM)
            assert launch.wait() == RESUME_EXIT_CODE, (seed, stop, launch.output)
        stopped = {step_of(tmp_path, rank) for rank in range(4)}
        assert len(stopped) == 1, (seed, stop, stopped)
        last = stopped.pop()
    for seen in traces(tmp_path, 4):
        assert sorted(seen) == list(range(1, last + 1)), seed
        assert all(len(losses) == 1 for losses in seen.values()), seed
    lines = (tmp_path / "trace0").read_text().splitlines()
    assert len(lines) == last, (seed, "a step was trained twice: its state was lost")


def time_after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def test_a_restart_whose_script_names_another_root_says_why_it_begins_from_scratch(tmp_path: Path) -> None:
    """As a root with the time of the start in its name does."""
    program = script(tmp_path, ENGINE.replace('/root", snap', '/root{life}", snap'))
    with dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=1", program, tmp_path, 5000, 0.01) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "the first steps")
        assert not launch.says("begins from scratch")
        os.kill(pids[1], signal.SIGKILL)
        launch.until(lambda: launch.says("this restart begins from scratch: its root is another one"), "the warning")
        launch.until(lambda: list((tmp_path / "root1").glob("step-*/MANIFEST")), "a commit on the other root")
