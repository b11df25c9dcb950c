"""Standby processes: when one is made, taken, replaced and given up; and what such a process does itself."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.ranks import wait_for
from support.sockets import Made, made, pair

from flashckpt.daemon.launcher import cli
from flashckpt.daemon.machine.process import has_ended
from flashckpt.daemon.zygote import messages, server, spares, standby
from flashckpt.daemon.zygote.spares import Spares
from flashckpt.errors import ConfigError

__all__ = ["made"]

FIT = {"unfit": ""}


def request_of(local_rank: int, **more: str) -> dict[str, Any]:
    env = {"LOCAL_RANK": str(local_rank), "MASTER_PORT": "1", **more}
    return {"argv": ["train.py"], "module": False, "env": env, "local_rank": local_rank}


class Node:
    """A node whose standby processes are sockets in the hands of the test, and whose clock is too."""

    def __init__(self, ranks: int, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.ranks, self.stack = 0.0, ranks, made
        self.spares = Spares(lambda: self.now_s)
        self.made: list[int] = []
        self.sockets: dict[int, socket.socket] = {}
        self.killed: list[int] = []
        monkeypatch.setattr(spares, "kill_group", lambda pid, _: self.killed.append(pid))
        monkeypatch.setattr(messages, "_SLICE_S", 0.01)
        monkeypatch.setattr(spares, "_ANSWER_S", 0.05)

    def fork(self, request: dict[str, Any]) -> tuple[socket.socket, int]:
        here, there = pair(self.stack)
        self.made.append(request["local_rank"])
        self.sockets[request["local_rank"]] = there
        return here, 100 * len(self.made) + request["local_rank"]

    def keep(self, count: int = 2) -> None:
        self.spares.keep(count, request_of, self.fork)

    def says(self, local_rank: int, answer: dict[str, Any]) -> None:
        messages.send(self.sockets[local_rank], answer)

    def fill(self, count: int = 2) -> None:
        for local_rank in range(count):
            self.keep(count)
            self.says(local_rank, FIT)
        self.keep(count)

    def restart(self, *checks: dict[str, Any] | None, **more: str) -> dict[int, int]:
        """Start the ranks anew; each standby answers with one of `checks` (None: it dies) when it is asked."""
        for local_rank, check in enumerate(checks):
            if check is None:
                self.sockets[local_rank].close()
            else:
                self.says(local_rank, check)
        workers = [request_of(local_rank, **{**more, "MASTER_PORT": "2"}) for local_rank in range(self.ranks)]
        self.spares.take(workers)
        return self.spares.go(workers)


@pytest.fixture
def node(made: Made, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(2, made, monkeypatch)


def test_one_after_another_is_made_and_those_that_answer_become_ranks_with_todays_environment(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashckpt.dlrun")
    node.keep()
    node.keep()
    assert node.made == [0]  # the second waits: contexts are made beside training
    node.says(0, FIT)
    node.keep()
    assert node.made == [0, 1]
    node.says(1, FIT)
    node.keep()
    assert node.restart(FIT, FIT) == {0: 100, 1: 201}
    assert [record.message for record in caplog.records] == [
        "standby processes are ready: 2",
        "took 2 of 2 ranks from standby",
    ]
    for local_rank in (0, 1):
        assert messages.receive(node.sockets[local_rank]) == {"check": local_rank}
        sent = messages.receive(node.sockets[local_rank])
        assert sent is not None
        assert sent["env"]["MASTER_PORT"] == "2"
    assert node.spares.pids == set()
    assert node.killed == []
    node.keep()
    assert node.made == [0, 1, 0]


def test_with_fewer_than_ranks_the_rest_starts_as_usual(node: Node) -> None:
    node.fill(1)
    assert node.restart(FIT) == {0: 100}


def test_one_that_is_still_at_its_context_is_ended_by_a_restart_and_not_counted_as_lost(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashckpt.dlrun")
    node.keep()
    assert node.restart() == {}
    assert node.killed == [100]
    assert [record.message for record in caplog.records] == ["took 0 of 2 ranks from standby"]


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"])
def test_what_a_context_or_an_import_reads_must_be_as_it_was(name: str, node: Node) -> None:
    node.fill()
    assert node.restart(FIT, FIT, **{name: "other"}) == {}
    assert node.killed == [100, 201]


@pytest.mark.parametrize("how", [None, {"unfit": "AcceleratorError: device lost"}], ids=["died", "device lost"])
def test_one_whose_context_does_not_answer_is_left_out(how: dict[str, Any] | None, node: Node) -> None:
    node.fill()
    assert node.restart(how, FIT) == {1: 201}
    assert node.killed == [100]


def test_one_that_says_nothing_is_waited_for_some_seconds_only(node: Node) -> None:
    node.fill()
    node.says(1, FIT)
    assert node.restart() == {1: 201}


def test_three_lost_in_a_row_are_said_once_and_no_more_are_made(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        node.keep(1)
        node.sockets[0].close()
        node.keep(1)
    assert node.made == [0, 0, 0]
    (said,) = [record.message for record in caplog.records]
    assert said.endswith("themselves: 3 times in a row the standby for local rank 0 died")


def test_a_restart_that_loses_all_of_them_for_the_third_time_gives_them_up(made: Made, monkeypatch: Any) -> None:
    node = Node(4, made, monkeypatch)
    for _ in range(3):
        assert not node.spares.given_up
        node.fill(4)
        assert node.restart(None, None, None, None) == {}
    assert node.spares.given_up
    node.keep(4)
    assert len(node.made) == 12


def test_all_that_die_for_the_third_time_between_two_looks_give_them_up(made: Made, monkeypatch: Any) -> None:
    node = Node(4, made, monkeypatch)
    for _ in range(3):
        node.fill(4)
        for there in node.sockets.values():
            there.close()
    node.keep(4)
    assert node.spares.given_up
    assert len(node.killed) == 12


def test_ranks_from_standby_that_train_begin_the_count_again_and_those_that_do_not_are_counted(node: Node) -> None:
    for _ in range(4):
        node.fill(1)
        assert node.restart(FIT)
        node.keep(1)  # they train
        node.sockets[0].close()
    assert not node.spares.given_up
    for _ in range(3):
        assert not node.spares.given_up
        node.fill(1)
        assert node.restart(FIT)
        node.restart()  # they have not trained; those that begin now do
    assert node.spares.given_up


def test_one_that_ends_itself_at_its_limit_has_left_a_stack_and_one_that_cannot_is_ended(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashckpt.dlrun")
    node.keep(1)
    node.now_s += standby.CONTEXT_S
    node.sockets[0].close()
    node.keep(1)
    assert "the standby for local rank 0 had no context after 60 s (its stack is above)" in caplog.text
    node.now_s += standby.CONTEXT_S + 4
    node.keep(1)
    assert len(node.killed) == 1
    node.now_s += 2
    node.keep(1)
    assert len(node.killed) == 2
    assert "is blocked in the kernel" in caplog.text


# -- the process


def child(made: Made, body: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
    here, there = pair(made)
    pid = os.fork()
    if pid == 0:
        here.close()
        try:
            body(there)
        finally:
            os._exit(9)
    there.close()
    return pid, here


def a_standby(made: Made, runtime: Any, output: Path, **env: str) -> tuple[int, socket.socket]:
    parent = os.getpid()

    def body(sock: socket.socket) -> None:
        with mock.patch.object(standby, "_runtime", return_value=runtime):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
            for signum in server.SHIELDED:  # as in the zygote
                signal.signal(signum, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, server.SHIELDED)
            message = standby.stand_by(sock, parent, request_of(3, **env))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            found = [message["argv"], os.environ["MASTER_PORT"], blocked == {*server.SHIELDED}]
            output.write_text(json.dumps([*found, os.getsid(0) == os.getpid(), [*signal.sigpending()]]))
            os._exit(0)

    return child(made, body)


class Runtime:
    def __init__(self, path: Path, fails: str = "") -> None:
        self.path, self.fails = path, fails

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def synchronize(self, index: int) -> None:
        if self.fails == "hangs":
            self.path.touch()
            signal.pause()
        if self.fails and self.path.exists() == (self.fails == "later"):
            raise RuntimeError("device lost\nand more")
        with self.path.open("a") as file:
            file.write(f"{index}\n")


def test_it_makes_the_context_of_its_device_and_becomes_a_rank_when_it_is_told_to(tmp_path: Path, made: Made) -> None:
    pid, sock = a_standby(made, Runtime(tmp_path / "log"), tmp_path / "out")
    ready = messages.receive(sock)
    assert ready is not None
    assert ready["unfit"] == ""
    assert (tmp_path / "log").read_text() == "1\n"  # local rank 3 of a machine with two devices
    messages.send(sock, {"check": 3})
    assert messages.receive(sock) == FIT
    os.kill(pid, signal.SIGUSR1)  # of a scheduler, to every process of the job
    messages.send(sock, {"argv": ["x.py"]})
    assert os.waitpid(pid, 0)[1] == 0
    assert json.loads((tmp_path / "out").read_text()) == [["x.py"], "1", True, True, []]


def test_a_device_that_fails_is_answered_at_once_and_when_it_is_asked_again(tmp_path: Path, made: Made) -> None:
    for fails in ("at once", "later"):
        pid, sock = a_standby(made, Runtime(tmp_path / fails, fails), tmp_path / "out")
        answers = [messages.receive(sock)]
        messages.send(sock, {"check": 3})
        answers.append(messages.receive(sock))
        found = [answer["unfit"] for answer in answers if answer is not None]
        assert found == (["RuntimeError: device lost"] * 2 if fails == "at once" else ["", "RuntimeError: device lost"])
        sock.close()
        assert os.waitpid(pid, 0)[1] == 0  # dlrun is gone


def test_a_device_that_hangs_ends_it_with_its_stack(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "CONTEXT_S", 0.05)
    pid, sock = a_standby(made, Runtime(tmp_path / "log", "hangs"), tmp_path / "out")
    assert messages.receive(sock) is None
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "in first_use" in (tmp_path / "out").read_text()


def test_without_an_accelerator_it_waits_all_the_same(tmp_path: Path, made: Made) -> None:
    runtime = mock.Mock(is_available=lambda: False)
    pid, sock = a_standby(made, runtime, tmp_path / "out")
    assert (messages.receive(sock) or {})["unfit"] == ""
    messages.send(sock, {"check": 3})
    assert messages.receive(sock) == FIT
    sock.close()
    os.waitpid(pid, 0)
    assert has_ended(pid)


# -- variables that come too late


def test_a_variable_that_the_script_changes_and_a_context_reads_is_noted(tmp_path: Path, made: Made) -> None:
    def body(_: socket.socket) -> None:
        os.environ.update({"CUDA_DEVICE_ORDER": "x"})
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        standby.note_late_variables(tmp_path / "late")
        os.environ["OTHER"] = "y"
        os.environ["CUDA_DEVICE_ORDER"] = "x"
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"  # torch's own
        if os.fork() == 0:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker of a loader
            os._exit(0)
        os.wait()
        (tmp_path / "before").write_text(str((tmp_path / "late").exists()))
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        os._exit(0 if os.environ["CUDA_VISIBLE_DEVICES"] == "1" else 2)

    pid, _ = child(made, body)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "before").read_text() == "False"
    assert (tmp_path / "late").read_text() == "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize("words", [["-1"], ["1", "--no-zygote"], ["1", "--warm=a:b"]])
def test_what_standby_does_not_go_with_is_refused(words: list[str]) -> None:
    args = cli.parse_args([f"--standby={words[0]}", *words[1:], "train.py"])
    with pytest.raises(ConfigError, match="--standby cannot be used"):
        cli._standbys(args)


def test_a_standby_dies_with_dlrun_even_in_its_device(tmp_path: Path, made: Made) -> None:
    def agent(to_test: socket.socket) -> None:
        pid, _ = a_standby(made, Runtime(tmp_path / "log", "hangs"), tmp_path / "out")
        messages.send(to_test, {"pid": pid})
        signal.pause()

    pid, sock = child(made, agent)
    found = messages.receive(sock)
    assert found is not None
    wait_for((tmp_path / "log").exists, what="its device, which hangs")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: has_ended(found["pid"]), what="the end of the standby")
