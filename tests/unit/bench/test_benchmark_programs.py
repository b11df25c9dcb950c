"""What the programs under benchmarks/ decide by themselves: which methods fit into memory together, and what was torn."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.ranks import wait_for

from flashckpt.errors import SharedMemoryError

PROGRAMS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
    yield
    for name in [name for name in sys.modules if (PROGRAMS / f"{name}.py").exists()]:
        del sys.modules[name]


def program(name: str) -> Any:
    return importlib.import_module(name)


def test_methods_share_one_group_where_memory_allows() -> None:
    stall = program("stall")
    groups, left_out = stall.plan_groups(list(stall.METHODS), room=100.0)
    assert [group.methods for group in groups] == [tuple(stall.METHODS)]
    assert groups[0].slots is None
    assert left_out == {}


@pytest.mark.parametrize("room", [3.0, 4.5, 5.0, 6.5, 8.0, 9.0])
def test_every_method_is_in_one_group_that_fits_or_named_as_left_out(room: float) -> None:
    stall = program("stall")
    groups, left_out = stall.plan_groups(list(stall.METHODS), room)
    placed = [method for group in groups for method in group.methods]
    assert sorted([*placed, *left_out]) == sorted(stall.METHODS)
    for group in groups:
        assert stall.need_of(list(group.methods), slots=group.slots or 3) <= room
        for first, second in stall.PAIRS.items():  # a pair shares one checkpointer: never in two groups
            assert (first in group.methods) == (second in group.methods)
    assert ("flashckpt" in left_out) == (room < stall.LOOP_COPIES + 2)


@pytest.mark.parametrize(
    ("elements", "committed", "complete", "word"),
    [
        ({"4": 1.0}, 4, 4, "intact"),
        ({"5": 1.0}, 5, 4, "intact"),  # complete before its report was read
        ({"4": 0.4, "5": 0.6}, 4, 4, "torn"),
        ({"5": 1.0}, 4, 4, "torn"),  # another step than it says
        ({"3": 1.0}, 3, 4, "lost"),
        ({}, 4, 4, "missing"),
        ({}, None, 4, "lost"),
    ],
)
def test_what_a_kill_left_is_judged(
    elements: dict[str, float], committed: int | None, complete: int, word: str
) -> None:
    assert program("torn").judged({"elements": elements, "committed": committed, "complete": complete}) == word


def test_bytes_after_a_lost_node_are_counted_by_where_they_were() -> None:
    before = {0: "a", 1: "b", 2: "lost"}
    after = [
        {"rank": 0, "host": "a", "tiers": {"memory": 1}},
        {"rank": 1, "host": "new", "tiers": {"peer": 2}},  # ranks have moved: b still holds these rows
        {"rank": 2, "host": "b", "tiers": {"memory": 4, "peer": 8, "storage": 16}},
    ]
    found = program("node_loss").sources_of(before, after, "lost")
    assert found == {"own memory": 1, "peers": 2, "replica": 12, "storage": 16}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["x", "x"], ""),
        (["x", "y"], "step 5: ['x', 'y']"),
        (["y", "y"], "step 5: y, but ['x'] before the loss"),
        (["torn: [1, 2]"], "step 5: ['torn: [1, 2]']"),
    ],
)
def test_values_after_a_lost_node_are_compared_with_those_before(values: list[str], words: str) -> None:
    assert program("node_loss").compared(5, values, {4: {"w"}, 5: {"x"}}) == words


def test_sizes_that_do_not_fit_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, loss = program("node_machine"), program("node_loss")
    monkeypatch.setattr(machine, "available_bytes", lambda: 10e9)
    sizes, left_out = loss.sizes_that_fit([0.1, 4.0])
    assert sizes == [0.1]
    assert "3 nodes of 4 GB of state do not fit" in left_out[4.0]
    with pytest.raises(SharedMemoryError, match="smaller --gb"):
        loss.sizes_that_fit([2.0, 4.0])


def test_steps_count_as_beside_a_transfer_by_the_counters_of_the_link() -> None:
    replication = program("replication")
    times, counts = [0.0, 1.0, 2.0, 3.0, 4.0], [1000, 1004, 1050, 1094, 1096]
    assert replication.within(times, counts, 100) == (2.0, 4.0)
    assert replication.within(times, counts, 200) is None
    steps = [{"t": end / 10, "seconds": 0.1} for end in range(1, 60)]
    assert replication.mean_step(steps, (2.0, 4.0)) == pytest.approx(0.1)
    assert replication.mean_step(steps, (2.0, 2.3)) is None  # too few
    row = {"in_time": True, "replicas": 0.3, "raw": 0.2, "quiet": 0.1}
    assert replication.summary([row, {**row, "in_time": False, "replicas": 9.0}])["replicas / raw"].max == 0.3 / 0.2
    assert replication.summary([{**row, "raw": None}]) == {}


def test_a_python_without_dlrover_ends_the_program_with_the_command_that_makes_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        program("dlrover_peer").check_dlrover("/bin/false")
    assert end.value.code == 2
    assert 'pip install torch==2.13.0 "dlrover[torch]==' in capfd.readouterr().err


def test_programs_of_all_quiet_exist_and_know_the_options_it_gives() -> None:
    script = PROGRAMS / "all_quiet.sh"
    assert os.access(script, os.X_OK)
    text = script.read_text().replace("\\\n", " ")
    names = re.findall(r"benchmarks/(\w+\.py)", text)
    assert {"stall.py", "persist.py", "torn.py"} <= set(names)
    for line in [line for line in text.splitlines() if re.search(r"\"\$python\" benchmarks/\w+\.py", line)]:
        source = (PROGRAMS / re.findall(r"benchmarks/(\w+\.py)", line)[0]).read_text()
        for option in [
            word.strip('"()') for word in shlex.split(line.replace("(", " ").replace(")", " "), comments=True)
        ]:
            assert not option.startswith("--") or f'"{option}"' in source, option


def test_workers_protocol_needs_nothing_that_another_python_may_lack() -> None:
    """DLRover's Python has its own packages, and runs ranks of `stall.py`."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import flashckpt.bench.worker, processes"
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code.replace("import flashckpt", f"sys.path.append({str(PROGRAMS)!r}); import flashckpt"),
    ]
    done = subprocess.run([*words, str(PROGRAMS.parent)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_places_end_who_would_make_a_folder_again_behind_their_removal(tmp_path: Path) -> None:
    """As a persister does, in a session apart."""
    script = "import os, time\nwhile True:\n    os.makedirs(os.environ['PLACE'] + '/again', exist_ok=True)\n    time.sleep(0.001)"
    with program("processes").places(str(tmp_path)) as (disk, memory):
        running = subprocess.Popen(
            [sys.executable, "-c", script],
            env={"PLACE": str(memory)},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for((memory / "again").exists, what="the folder")
    assert running.wait(30) == -signal.SIGKILL
    assert not memory.exists()
    assert not disk.exists()
