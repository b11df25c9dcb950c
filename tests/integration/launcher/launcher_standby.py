"""`make test-launcher`: ranks that are taken from standby processes, on a device whose contexts are counted."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support import slow_context
from support.dlrun import ENGINE, Launch, alive, dlrun, first_steps, processes_of, traces
from support.ranks import wait_for

from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)  # two cores that others use too

FIRST_USE = 'sys.modules["slow_context"].RUNTIME.synchronize(0)\n'
WAITS_AT, STEPS = 10, 40


def program(folder: Path, text: str = ENGINE) -> Path:
    """A script of two ranks that use the device before they train, and go on behind some steps when a file is there."""
    path = folder / "train.py"
    first = "import os, sys, time\n"
    wait = f'while step >= {WAITS_AT} and not os.path.exists(f"{{folder}}/finish"):\n        time.sleep(pause)'
    path.write_text(text.replace(first, first + FIRST_USE).replace("time.sleep(pause)", wait))
    return path


@contextmanager
def launched(folder: Path, *flags: str, text: str = ENGINE, **env: str) -> Iterator[Launch]:
    words = ("--nproc-per-node=2", "--hang-timeout=0", *flags, program(folder, text), folder, STEPS, 0.02)
    environment = {"SLOW_CONTEXT_LOG": str(folder / "contexts"), "FLASHCKPT_LOGLEVEL": "DEBUG", **env}
    with dlrun(folder, *words, env=environment, program=slow_context.__file__) as launch:
        yield launch


def contexts(folder: Path) -> list[int]:
    """Return which processes have made a context, in this order."""
    return [int(line.split()[0]) for line in (folder / "contexts").read_text().splitlines()]


def ready(launch: Launch, times: int) -> None:
    launch.until(lambda: len(re.findall(r"standby processes are ready: \d", launch.output)) == times, "the standbys")


def begun(launch: Launch, folder: Path, life: int) -> dict[int, int]:
    found: dict[int, int] = launch.until(partial(first_steps, folder, life, 2), f"all ranks of life {life}")
    return found


def nothing_left(folder: Path) -> bool:
    return not processes_of(folder) and not list(memory_root().parent.glob("*/*"))


def held(pid: int) -> list[str]:
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]


def test_ranks_from_standby_make_no_context_during_a_restart_and_train_to_the_same_bits(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    (unbroken / "finish").touch()
    with launched(unbroken) as launch:
        assert launch.wait() == 0, launch.output
    with launched(broken, "--standby=2") as launch:
        for life in range(2):
            pids = begun(launch, broken, life)
            ready(launch, life + 1)
            made = contexts(broken)
            spares = made[-2:]
            assert len(made) == 2 * (life + 2)
            for pid in spares:
                assert len([name for name in held(pid) if name.startswith("socket:")]) == 1
                assert not [name for name in held(pid) if str(broken) in name and "output.log" not in name]
            os.kill(pids[life], signal.SIGKILL)
            assert sorted(begun(launch, broken, life + 1).values()) == sorted(spares)
            assert contexts(broken)[: len(made)] == made
            assert not set(contexts(broken)[len(made) :]) & set(spares)
        assert launch.output.count("took 2 of 2 ranks from standby") == 2
        ready(launch, 3)
        (broken / "finish").touch()
        assert launch.wait() == 0, launch.output
    whole = traces(unbroken, 2)
    assert [sorted(seen) for seen in whole] == [list(range(1, STEPS + 1))] * 2
    assert traces(broken, 2) == whole
    wait_for(partial(nothing_left, broken), what="a clean end that leaves nothing", deadline_s=40)


def test_with_one_standby_the_other_rank_starts_as_usual(tmp_path: Path) -> None:
    with launched(tmp_path, "--standby=1") as launch:
        pids = begun(launch, tmp_path, 0)
        ready(launch, 1)
        spare = contexts(tmp_path)[-1]
        os.kill(pids[1], signal.SIGKILL)
        again = begun(launch, tmp_path, 1)
        assert again[0] == spare
        assert launch.says("took 1 of 2 ranks from standby")
        assert contexts(tmp_path)[3] == again[1]


@pytest.mark.parametrize("point", ["standby.before-go", "standby.after-go"])
def test_an_agent_that_dies_while_it_takes_them_takes_them_along(point: str, tmp_path: Path) -> None:
    with launched(tmp_path, "--standby=2", FLASHCKPT_CRASH_AT=point) as launch:
        pids = begun(launch, tmp_path, 0)
        ready(launch, 1)
        spares = contexts(tmp_path)[-2:]
        os.kill(pids[1], signal.SIGKILL)
        assert launch.wait() == -signal.SIGKILL
        wait_for(lambda: not any(alive(pid) for pid in spares), what="the end of the standby processes")
        assert first_steps(tmp_path, 1, 2) is None
    (tmp_path / "finish").touch()
    with launched(tmp_path) as launch:  # nothing that they held is in the way
        assert launch.wait() == 0, launch.output
    assert [sorted(seen) for seen in traces(tmp_path, 2)] == [list(range(1, STEPS + 1))] * 2


def test_standbys_that_die_again_and_again_are_given_up_and_the_restart_goes_on_without(tmp_path: Path) -> None:
    with launched(tmp_path, "--standby=2") as launch:
        pids = begun(launch, tmp_path, 0)
        for lost in range(3):
            ready(launch, lost + 1)
            os.kill(contexts(tmp_path)[-1], signal.SIGKILL)
        launch.until(lambda: launch.says("no standby processes any more"), "the end of it")
        os.kill(pids[0], signal.SIGKILL)
        begun(launch, tmp_path, 1)
        assert not launch.says("ranks from standby")
        (tmp_path / "finish").touch()
        assert launch.wait() == 0, launch.output
    assert launch.output.count("no standby processes any more") == 1
    wait_for(partial(nothing_left, tmp_path), what="a clean end that leaves nothing", deadline_s=40)


def test_a_script_that_chooses_its_device_by_a_variable_gets_no_standby(tmp_path: Path) -> None:
    text = ENGINE.replace(
        "import torch,", 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]\nimport torch,'
    )
    with launched(tmp_path, "--standby=2", text=text) as launch:
        launch.until(lambda: launch.says("the script changes CUDA_VISIBLE_DEVICES"), "the reason")
        assert len(contexts(tmp_path)) == 2
        (tmp_path / "finish").touch()
        assert launch.wait() == 0, launch.output
