"""The zygote: what it imports before and behind the first fork, when it may not be forked, and its messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import Any

import pytest

from flashckpt.daemon.zygote import messages, server
from flashckpt.errors import DamagedError


def test_changed_import_time_variable_is_named() -> None:
    assert server.changed_at_import({"A": "1"}, {"A": "2", "RANK": "0"}) == ""
    assert server.changed_at_import({}, {"LD_PRELOAD": "x"}) == "LD_PRELOAD"
    assert server.changed_at_import({"PYTHONPATH": "x"}, {}) == "PYTHONPATH"


class _Ended(Exception):  # noqa: N818 -- dlrun is gone
    pass


@pytest.mark.parametrize(
    ("is_brief", "asked", "order"),
    [
        (False, ["workers"], ["first", "later", "later", "ready", "fork"]),
        (True, ["workers", "workers"], ["first", "ready", "fork", "fork", "later", "later"]),
        (True, ["standby"], ["first", "ready", "later", "later", "standby"]),
        (True, ["unfit"], ["first", "ready", "refused"]),
        (True, ["late", "workers"], ["first", "ready", "later", "later", "fork"]),  # of a spare
    ],
)
def test_the_first_workers_of_few_do_not_wait_for_modules_that_not_every_script_needs(
    is_brief: bool, asked: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    here, there = socket.socketpair()  # readable for as long as a request is left

    def receive(sock: socket.socket) -> dict[str, Any]:
        if not asked:
            raise _Ended
        name = asked.pop(0)
        if not asked:
            here.recv(1)
        monkeypatch.setattr(server, "unfit", lambda: "a thread" if name == "unfit" else "")
        return {"workers" if name == "unfit" else name: [{}]}

    def preload(names: Any) -> None:
        done.append("first" if names is server.FIRST_MODULES else "later")
        if is_late and not modules:
            there.send(b"r")

    is_late, modules = "late" in asked, deque("ab")
    if is_late:  # it is asked for workers once all is imported
        asked = asked[1:]
        monkeypatch.setattr(server, "_SOON_S", 0.0)
    else:
        there.send(b"r")
    here.settimeout(0)
    monkeypatch.setattr(server, "later_modules", lambda: modules)
    monkeypatch.setattr(server, "preload", preload)
    monkeypatch.setattr(server, "set_title", lambda *_: None)
    monkeypatch.setattr(server, "_keep_shared", lambda: None)
    monkeypatch.setattr(server, "unfit", lambda: "")
    monkeypatch.setattr(server, "_announce", lambda *_: done.append("ready"))
    monkeypatch.setattr(server, "_fork_asked", lambda *_: done.append("fork"))
    monkeypatch.setattr(server, "_forked", lambda *_: done.append("standby"))
    monkeypatch.setattr(messages, "receive", receive)
    monkeypatch.setattr(messages, "send", lambda *_: done.append("refused"))
    with here, there, pytest.raises(_Ended):
        server.serve(here, 1, is_brief=is_brief)
    assert done == order


@pytest.mark.parametrize("asked_after", [0, 1, 9])
def test_small_modules_are_imported_until_the_first_workers_are_asked_for(
    asked_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = socket.socketpair()
    done: list[str] = []

    def preload(names: list[str]) -> None:
        done.extend(names)
        if len(done) == asked_after:
            there.send(b"r")

    if not asked_after:
        there.send(b"r")
    monkeypatch.setattr(server, "_SOON_S", 0.0)
    monkeypatch.setattr(server, "preload", preload)
    monkeypatch.setattr(server, "_import_all", lambda *_, **__: done.append("all"))
    own = server.OWN_MODULES[:3]
    with here, there:
        server._use_wait(here, deque([*own, "torch.large"]))
    assert done == ([*own, "all"] if asked_after == 9 else list(own[:asked_after]))


def test_process_with_a_second_thread_is_not_fit_to_be_forked() -> None:
    code = (
        "import threading, time\nfrom flashckpt.daemon.zygote import server as zygote\nbefore = zygote.unfit()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint([before, zygote.unfit()])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "['', '2 threads after the imports, 1 expected']"


def test_process_that_has_counted_its_gpus_is_not_fit_to_be_forked() -> None:
    """torch marks it: in each of its forks the first use of a device raises."""
    code = (
        "import os, torch\nfrom flashckpt.daemon.zygote import server as zygote\nbefore = zygote.unfit()\n"
        "parent = os.getpid()\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != parent\n"
        "print([before, zygote.unfit()])"
    )
    environment = {**os.environ, **dict.fromkeys(server.ONE_THREAD, "1")}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == "['', 'an import has asked the accelerator for its devices']"


def test_messages_keep_bytes_that_are_not_utf8_and_end_with_the_peer() -> None:
    here, there = socket.socketpair()
    message = {"env": {"A": b"\xff\xfe".decode(errors="surrogateescape"), "B": "ü" * 10_000}}
    messages.send(here, message)
    assert messages.receive(there) == message
    here.sendall(b"\x10" + bytes(7) + b"half")
    here.close()
    assert messages.receive(there) is None
    there.close()


def test_message_of_an_absurd_length_is_refused_before_memory_is_taken() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\xff" * 8)
        with pytest.raises(DamagedError, match="between dlrun and its zygote") as caught:
            messages.receive(there)
    assert f"a message of {2**64 - 1} bytes" in str(caught.value)


def test_stop_signal_sent_to_a_worker_that_is_still_being_forked_is_not_lost() -> None:
    """The zygote ignores SIGTERM; a worker that inherited that would train on until it is killed."""
    code = (
        "import os, signal, sys\nfrom flashckpt.daemon.zygote import server as zygote\nfrom flashckpt.daemon.zygote.worker import run_worker\n"
        "zygote._shield()\nworker = zygote._fork_workers([{}])\n"
        "if isinstance(worker, dict):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    sys.exit(run_worker({'env': dict(os.environ), 'stdout': '', 'stderr': '', 'module': False, 'argv': ['/x']}))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(worker[0], 0)[1]))"
    )
    become = "from flashckpt.daemon.machine.process import become_subreaper\nbecome_subreaper()\n"
    result = subprocess.run([sys.executable, "-c", become + code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(-signal.SIGTERM), result
