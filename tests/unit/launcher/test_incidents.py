"""The verdict on an incident, from accounts as agents send them: where it began, its class, what the others did."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.memory import killed_at

from flashckpt.core.incident import CLASSES, Incident, decode, encode, in_ranges
from flashckpt.core.records import pack
from flashckpt.daemon.launcher import account as said
from flashckpt.daemon.launcher import classify
from flashckpt.daemon.launcher.account import NodeAccount, RankAccount
from flashckpt.daemon.launcher.classify import LostNode
from flashckpt.daemon.launcher.hang import frames_of
from flashckpt.daemon.machine.kernel_log import KernelLog, Links
from flashckpt.shm.incident_files import MOST_FILES, incident_names, incidents_in, write_incident

NOW = 1_000_000.0
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.2]:2"
TIMED_OUT = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
TORCH = "/x/site-packages/torch"
ALL_REDUCE = (f"all_reduce ({TORCH}/distributed/distributed_c10d.py:2950)", "main (/w/train.py:12)")
LOADING = (f"__getitem__ ({TORCH}/utils/data/dataset.py:10)", "main (/w/train.py:9)")
ENDLESS = ("endless (/w/train.py:33)", "main (/w/train.py:12)")


def rank(number: int, *, stack: tuple[str, ...] = (), kernel: str = "", **fields: Any) -> RankAccount:
    given: dict[str, Any] = {"pid": 100 + number, "step": 120, "phase": "training", "phase_s": 3.0, "stack": stack}
    return RankAccount(rank=number, **given | {"doing": said.doing(stack, kernel)} | fields)


def echo(number: int, error: str = CLOSED) -> RankAccount:
    doing = said.TIMEOUT if error == TIMED_OUT else said.LOST
    return rank(number, code=1, error=error, is_echo=True, doing=doing)


def node(number: int, *ranks: RankAccount, kind: str = said.FAILED, **fields: Any) -> NodeAccount:
    """An account as it is read from the store."""
    given: dict[str, Any] = {
        "at_s": NOW - 1,
        "what": "exit code 1",
        "decision": "restarting all workers, 9 of 10 restarts are left",
    } | fields
    made = NodeAccount(node=number, host=f"h{number}", kind=kind, ranks=tuple(map(pack, ranks)), **given)
    read = said.decode(said.encode(made))
    assert read is not None
    return read


def verdict(*nodes: NodeAccount, lost: tuple[LostNode, ...] = (), restarts: bool = True) -> Incident:
    accounts = {one.node: one for one in nodes}
    place = classify.judge(accounts, lost, NOW)
    assert place is not None
    made = classify.incident(
        place,
        accounts,
        lost,
        name=("20261126-051500-0a1b2c", "2026-11-26T05:15:00.000+00:00"),
        job="run7",
        restart=1,
        unheard=[],
        action=classify.action_of(place, accounts, lost, restarts=restarts),
    )
    read = decode(encode(made))
    assert read is not None
    assert read.category in CLASSES
    return read


WAITING = node(0, rank(0, stack=ALL_REDUCE), rank(1, stack=LOADING), kind=said.LEFT)
OOM = "Memory cgroup out of memory: Killed process 102 (rank2) total-vm:9kB"
LINE = "rank 2 (pid 102) on h1 at step 120: "


def test_a_kill_names_the_rank_and_what_the_others_did() -> None:
    found = verdict(WAITING, node(1, rank(2, code=-9), rank(3, stack=ALL_REDUCE), first=2, what="signal 9 (SIGKILL)"))
    assert found.verdict == f"unknown: {LINE}signal 9 (SIGKILL) -> restart"
    assert [(one["count"], one["doing"], one["ranks"]) for one in found.others] == [
        (2, "all_reduce", "0,3"),
        (1, "data loading", "1"),
    ]
    assert "the other ranks: 2 in all_reduce (rank 0,3), 1 in data loading (rank 1)" in found.render()
    assert found.reason == "restarting all workers, 9 of 10 restarts are left"


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ("memory", {"code": -9, "kernel": (OOM,)}),
        ("unknown", {"code": -9, "kernel": (OOM.replace("102 (rank2)", "7 (java)"),)}),
        ("memory", {"code": 1, "error": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}),
        ("memory", {"code": 1, "error": "DataLoader worker (pid 77) is killed by signal: Killed.",
                    "kernel": (OOM.replace("102 (rank2)", "77 (pt_data_worker)"),)}),
        ("data", {"code": 1, "error": "RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly"}),
        ("data", {"code": 12, "error": "DataError: the corpus is empty"}),
        ("script", {"code": 1, "error": "ValueError: the same thing again"}),
        ("script", {"code": 3}),
        ("script", {"code": -11}),
        ("storage", {"code": 1, "error": "OSError: [Errno 28] No space left on device: '/ckpt/x'"}),
        ("storage", {"code": 41, "error": "StoreError: no answer"}),
        ("network", {"code": 1, "error": "socket.gaierror: [Errno -3] Temporary failure in name resolution"}),
        ("machine", {"code": -6, "kernel": ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",)}),
        ("script", {"code": 1, "error": "CUDA error", "kernel": ("NVRM: Xid (PCI:0000:3b:00): 31, MMU fault",)}),
        ("machine", {"code": -6, "devices": ("device 0: 3 uncorrectable ECC errors since its driver was loaded",)}),
        ("machine", {"code": 132}),
    ],
)  # fmt: skip
def test_class_of_the_end_of_a_rank(wanted: str, fields: dict[str, Any]) -> None:
    of_node = {name: fields.pop(name) for name in ("kernel", "devices") if name in fields}
    assert all(classify.class_of_line(line) for line in of_node.get("kernel", ()))
    found = verdict(WAITING, node(1, rank(2, **fields), first=2, **of_node))
    assert (found.category, found.rank, found.step) == (wanted, 2, 120)
    assert all(any(line in one for one in found.findings) for lines in of_node.values() for line in lines)


@pytest.mark.parametrize("answers", [True, False, None])
def test_a_silent_node_comes_before_all_who_only_lost_it(answers: bool | None) -> None:
    lost = LostNode(node=1, host="h1", ranks="2-3", silent_s=7.24, answers=answers)
    for account in (node(0, echo(0), echo(1), first=0), node(0, rank(0, stack=ALL_REDUCE), kind=said.HANG)):
        found = verdict(account, lost=(lost,))
        assert (found.kind, found.node, found.host, found.rank) == ("node lost", 1, "h1", -1)
        assert "node 1 (h1): stopped answering with rank 2-3, last sign 7.2 s ago" in found.verdict
        assert found.category == ("network" if answers is False else "machine")
        assert found.action == "restart without that node"
        assert found.lost[0]["silent_s"] == 7.2


@pytest.mark.parametrize(("failed_s", "wanted"), [(60.0, "failure"), (1.0, "node lost")])
def test_what_failed_while_a_lost_node_still_answered_comes_before_it(failed_s: float, wanted: str) -> None:
    lost = LostNode(node=1, host="h1", silent_s=30.0)
    first = node(0, rank(0, code=1, error="ValueError: x"), first=0, at_s=NOW - failed_s)
    assert verdict(first, lost=(lost,)).kind == wanted


def test_a_node_that_reported_is_not_called_silent_when_it_left() -> None:
    lost = LostNode(node=1, host="h1", silent_s=30.0)
    found = verdict(WAITING, node(1, rank(2, code=1, error="ValueError: x"), first=2), lost=(lost,))
    assert (found.kind, found.rank, found.lost, found.action) == ("failure", 2, (), "restart")


def test_a_node_whose_own_link_is_down_blames_it_and_not_those_it_cannot_reach() -> None:
    lost = LostNode(node=0, host="h0", silent_s=30.0, answers=False)
    found = verdict(node(1, echo(2), first=2, devices=("link eth0 is down",)), lost=(lost,))
    assert found.verdict == "network: node 1 (h1): link eth0 is down -> restart without that node"
    alone = verdict(node(0, rank(0, stack=ENDLESS), kind=said.HANG, devices=("link eth0 is down",)))
    assert (alone.category, alone.rank, alone.findings) == ("script", 0, ("h0: link eth0 is down",))


@pytest.mark.parametrize(
    ("stack", "kernel", "category", "text"),
    [
        ((), "state T (stopped)", "unknown", "in stopped (SIGSTOP)"),
        ((), "state D (disk sleep), waits in folio_wait_bit", "storage", "uninterruptible sleep (disk or file server)"),
        (ENDLESS, "", "script", "in endless (/w/train.py:33)"),
        (LOADING, "", "data", "in data loading"),
        (ENDLESS, "state D (disk sleep)", "storage", "uninterruptible sleep (disk or file server)"),
        (("get (/w/flashckpt/storage/posix.py:3)",), "", "storage", "in storage"),
    ],
)
@pytest.mark.parametrize("seen", [said.HANG, said.FAILED])
def test_the_rank_that_the_others_wait_for_is_named_on_whatever_node_it_is(
    seen: str, stack: tuple[str, ...], kernel: str, category: str, text: str
) -> None:
    """By all nodes' stacks: the node that sees the hang first, or whose collective times out, may be another one."""
    first = node(0, rank(0, stack=ALL_REDUCE), rank(1, stack=ALL_REDUCE), kind=said.HANG)
    if seen == said.FAILED:
        first = node(0, echo(0, TIMED_OUT), rank(1, stack=ALL_REDUCE), first=0)
    found = verdict(first, node(1, rank(2, stack=stack, kernel=kernel), rank(3, stack=ALL_REDUCE), kind=said.LEFT))
    assert (found.kind, found.category, found.rank, found.host) == ("hang", category, 2, "h1")
    assert text in found.what
    assert "the others waited for it" in found.what


def test_a_rank_that_was_too_busy_to_give_its_stack_is_not_blamed_where_another_is_outside() -> None:
    busy = node(0, rank(0, step=119, kernel="state R (running)"), rank(1, stack=ALL_REDUCE), kind=said.LEFT)
    found = verdict(busy, node(1, rank(2, stack=ENDLESS), rank(3, stack=ALL_REDUCE), kind=said.HANG))
    assert (found.rank, found.host) == (2, "h1")
    found = verdict(busy, node(1, rank(2, stack=ALL_REDUCE), rank(3, stack=ALL_REDUCE), kind=said.HANG))
    assert (found.rank, found.host) == (0, "h0")


def test_of_two_ranks_without_a_stack_none_is_blamed() -> None:
    """Both may have been too busy for it: which one the others wait for is not known."""
    busy = node(0, rank(0, step=119, kernel="state R (running)"), rank(1, stack=ALL_REDUCE), kind=said.HANG, first=0)
    found = verdict(busy, node(1, rank(2, stack=ALL_REDUCE), rank(3, kernel="state S (sleeping)"), kind=said.LEFT))
    assert found.verdict == "network: all_reduce never returned, what rank 0,3 did is not known -> restart"
    assert found.rank == -1


def test_all_ranks_are_only_said_to_be_in_a_collective_where_that_is_known_of_all() -> None:
    found = verdict(node(0, rank(0, stack=ALL_REDUCE), kind=said.HANG), node(1, rank(1), kind=said.LEFT))
    assert found.verdict == "network: all_reduce never returned, what rank 1 did is not known -> restart"


@pytest.mark.parametrize("kind", [said.HANG, said.FAILED])
def test_a_collective_that_never_returns_though_all_are_in_it_blames_no_rank(kind: str) -> None:
    ranks = [rank(0, stack=ALL_REDUCE) if kind == said.HANG else echo(0, TIMED_OUT), rank(1, stack=ALL_REDUCE)]
    found = verdict(node(0, *ranks, kind=kind, first=-1 if kind == said.HANG else 0))
    assert found.verdict == "network: all_reduce never returned, though all ranks are in it -> restart"
    assert found.kind == "hang"


def test_ranks_in_different_collectives_are_the_scripts_fault() -> None:
    barrier = (ALL_REDUCE[0].replace("all_reduce", "barrier"), *ALL_REDUCE[1:])
    ranks = [rank(0, stack=barrier), rank(1, stack=barrier), rank(2, stack=ALL_REDUCE), rank(3, stack=ALL_REDUCE)]
    found = verdict(node(0, *ranks, kind=said.HANG))
    assert (found.category, found.what) == (
        "script",
        "the ranks wait for one another in different collectives: all_reduce, barrier",
    )


@pytest.mark.parametrize("torch", ["2.12", "2.13"])
def test_a_node_with_another_environment_is_named_with_what_differs(torch: str) -> None:
    """Before the first step, on one node alone; what all nodes fail by is the script's."""
    error = "ModuleNotFoundError: No module named 'flash_attn'"
    first: dict[str, Any] = {"step": -1, "phase": "start", "code": 1, "error": error}
    facts = {"torch": "2.13"}
    others = [node(n, rank(n, step=-1, stack=ALL_REDUCE), kind=said.LEFT, facts=facts) for n in (0, 1)]
    found = verdict(*others, node(2, rank(2, **first), first=2, facts={"torch": torch}))
    differs = "torch 2.12, elsewhere 2.13" in found.findings[0]
    assert (found.category, found.rank, differs) == ("machine", 2, torch == "2.12")
    same = [node(n, rank(n, **first), first=n, facts=facts) for n in range(3)]
    assert verdict(*same).category == "script"


def test_a_persister_that_fails_is_a_finding_and_alone_an_incident() -> None:
    broken = "no space left on device"
    found = verdict(WAITING, node(1, rank(2, code=-9), first=2, persister=broken))
    assert (found.rank, found.findings) == (2, (f"h1, persister: {broken}",))
    alone = verdict(NodeAccount(node=1, host="h1", kind=said.PERSISTER, at_s=NOW, persister=broken))
    assert alone.verdict == f"storage: node 1 (h1): its persister: {broken} -> continue"


def test_no_incident_where_nodes_only_join() -> None:
    assert classify.judge({0: WAITING}, [], NOW) is None


@pytest.mark.parametrize("raw", [b"", b"x", b"[]", b'{"node": "0"}', b"{" * 10**6, b'{"ranks": [1]}'])
def test_what_a_stranger_leaves_in_the_store_is_no_account(raw: bytes) -> None:
    assert said.decode(raw) is None


def test_a_stranger_can_neither_break_the_terminal_nor_fill_the_log() -> None:
    hostile = "\x1b[2J" + "x" * 900
    found = verdict(
        node(0, rank(0, code=1, error=hostile, stack=(hostile,) * 20), first=0, what=hostile, kernel=(hostile,) * 20)
    )
    text = found.render()
    assert "\x1b" not in text
    assert len(text) < 8000
    assert "\x1b" not in found.what
    assert all(len(one) < 320 for one in found.findings)
    assert len(encode(found)) < 20_000


def test_an_account_of_any_size_fits_and_keeps_who_is_blamed() -> None:
    ranks = [rank(number, stack=("f" * 150,) * 12) for number in range(500)]
    text = said.encode(NodeAccount(node=0, host="h", kind=said.HANG, at_s=NOW, first=3, ranks=tuple(map(pack, ranks))))
    read = said.decode(text)
    assert len(text) <= said.MOST_BYTES
    assert read is not None
    assert read.blamed() is not None


def test_the_kernels_log_is_read_from_the_beginning_of_the_job(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"6,1,2,-;{OOM}\n")
    kernel = KernelLog(str(log), classify.class_of_line)
    assert kernel.fresh() == []
    with log.open("a") as file:
        file.write(f"6,1,2,-;usb 1-1: new device\n3,1,2,-;{OOM}\nI/O error, dev sda, sector 8\n")
    assert kernel.fresh() == [OOM, "I/O error, dev sda, sector 8"]
    assert kernel.fresh() == []
    kernel.close()
    assert KernelLog(str(tmp_path / "none"), classify.class_of_line).fresh() == []


@pytest.mark.parametrize(
    ("state", "changes", "wanted"),
    [("up", 2, []), ("up", 4, ["link e was lost and came back"]), ("down", 3, ["link e is down"])],
)
def test_links_that_went_down_since_the_start(tmp_path: Path, state: str, changes: int, wanted: list[str]) -> None:
    def set_all(state: str, changes: int) -> None:
        for name in ("e", "container", "docker0"):
            (tmp_path / name / "operstate").write_text(f"{state}\n")
            (tmp_path / name / "carrier_changes").write_text(f"{changes}\n")

    for name in ("e", "container", "docker0/bridge"):
        (tmp_path / name).mkdir(parents=True)
    set_all("up", 2)
    links = Links(tmp_path, lambda name: name != "container")
    set_all(state, changes)
    assert links.changed() == wanted


def test_a_job_directory_keeps_the_newest_incidents_and_what_is_no_incident_is_left_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = verdict(WAITING, node(1, rank(2, code=-9), first=2))
    for number in range(MOST_FILES + 2):
        write_incident(tmp_path, replace(first, id=f"20261126-0515{number:02}-0a1b2c", restart=number))
    assert len(list((tmp_path / "incidents").iterdir())) == MOST_FILES
    assert [one.restart for one in incidents_in(tmp_path)] == list(range(2, MOST_FILES + 2))
    newest = tmp_path / "incidents" / incident_names(tmp_path)[-1]
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"version": 2}))
    assert len(incidents_in(tmp_path)) == MOST_FILES - 1


def test_an_agent_that_dies_or_finds_no_room_while_it_reports_leaves_no_half_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    first = verdict(WAITING, node(1, rank(2, code=-9), first=2))
    killed_at("incident.before-rename", lambda: write_incident(tmp_path, first))
    assert incidents_in(tmp_path) == []
    (left,) = (tmp_path / "incidents").iterdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    later = replace(first, id="20261126-061500-0a1b2c")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            write_incident(tmp_path, later)
    assert [*(tmp_path / "incidents").iterdir()] == [left]
    write_incident(tmp_path, later)
    assert incidents_in(tmp_path) == [later]


def test_ranges_of_ranks() -> None:
    assert in_ranges([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


def test_what_a_rank_did_when_it_lost_its_connection_is_in_its_traceback() -> None:
    lines = [
        f'  File "{where[:-1]}", line 7, in {name}'
        for name, _, where in (one.partition(" (") for one in ALL_REDUCE[::-1])
    ]
    trace = "\n".join(["Traceback (most recent call last):", *lines, "    work.wait()", CLOSED]).replace(":2950", "")
    assert said.doing(frames_of(trace)) == "all_reduce"
    assert said.doing(frames_of("")) == ""
    assert said.doing(("_write_error (/w/flashckpt/daemon/zygote/worker.py:266)",)) == said.ENDING
    assert said.doing(ALL_REDUCE, "state D (disk sleep)") == "all_reduce", "a moment of it"
