"""Binding to processors and to the memory beside them: fake machines for the choice, the real kernel for the calls."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.daemon.machine import numa


def machine(folder: Path, nodes: dict[int, str], *, memory: str) -> Path:
    (folder / "has_memory").write_text(memory + "\n")
    (folder / "possible").write_text(memory + "\n")
    for node, cpus in nodes.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(cpus + "\n")
    return folder


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8-9", {0, 1, 2, 3, 8, 9}), ("", set()), ("7", {7}), ("0,2\n", {0, 2})]
)
def test_kernel_lists(text: str, numbers: set[int]) -> None:
    assert numa.parse_ranges(text) == numbers


def test_two_sockets_the_node_of_the_processors_is_chosen(tmp_path: Path) -> None:
    nodes = numa.nodes_with_memory(machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, memory="0-1"))
    assert numa.near([4, 5], nodes) == [1]
    assert numa.near([8], nodes) == [0]
    assert numa.near([3, 4], nodes) == [], "processors of all nodes: nothing to choose"
    assert numa.near([99], nodes) == []


def test_nodes_of_a_socket_and_a_node_without_memory(tmp_path: Path) -> None:
    """Node 3 is a device's, without processors; node 2 has processors and no memory."""
    sysfs = machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5", 3: ""}, memory="0-1,3")
    nodes = numa.nodes_with_memory(sysfs)
    assert nodes == {0: {0, 1}, 1: {2, 3}, 3: set()}
    assert numa.near([0, 1, 2, 3], nodes) == [0, 1]
    assert numa.near([4], nodes) == []


@pytest.mark.parametrize("broken", ["nothing", "words"])
def test_machine_that_does_not_tell_is_one_without_nodes(tmp_path: Path, broken: str) -> None:
    if broken == "words":
        machine(tmp_path, {0: "all of them"}, memory="0")
    assert numa.nodes_with_memory(tmp_path) == {}
    assert numa.bind(os.sched_getaffinity(0), sysfs=tmp_path) == ""


def test_refused_policy_is_said_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(numa, "prefer", lambda nodes: errno.EPERM)
    sysfs = machine(tmp_path, {0: ",".join(map(str, own)), 1: "1000-1001"}, memory="0-1")
    assert numa.bind(own, sysfs=sysfs) == "cannot prefer the memory of NUMA node [0]: Operation not permitted"
    assert "cannot bind to processors [100000]" in numa.bind([100000], sysfs=sysfs)


def test_older_kernel_gets_the_lowest_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[int]]] = []

    def old(_number: int, mode: int, nodes: list[int]) -> int:
        asked.append((mode, list(nodes)))
        return errno.EINVAL if mode == numa.PREFERRED_MANY else 0

    monkeypatch.setattr(numa, "_set", old)
    assert numa.prefer([2, 1]) == 0
    assert asked == [(numa.PREFERRED_MANY, [2, 1]), (numa.PREFERRED, [1])]


def test_real_kernel_the_policy_is_set_and_outlasts_an_exec() -> None:
    tell = "from flashckpt.daemon.machine import numa; print(numa.policy())"
    code = (
        "import os, sys\nfrom flashckpt.daemon.machine import numa\nerror = numa.prefer([0])\n"
        "print('refused', error) if error else os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    result = subprocess.run([sys.executable, "-c", code, tell], capture_output=True, text=True, check=True)
    if result.stdout.startswith("refused"):
        pytest.skip(f"this container forbids it: errno {result.stdout.split()[1]}")
    assert result.stdout.strip() in (f"({numa.PREFERRED_MANY}, [0])", f"({numa.PREFERRED}, [0])")
    plain = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True)
    assert plain.stdout.strip() == "(0, [])"
