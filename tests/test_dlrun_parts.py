"""The pure parts of dlrun: who failed first, exit codes in words, the ledger's arithmetic, the step to stop after."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import wait_for

from flashckpt.daemon import failure, ledger, messages, stop, zygote
from flashckpt.daemon.process import exit_code, thread_count


def ended(rank: int, code: int, at_ns: int, summary: str = "") -> failure.Exit:
    return failure.Exit(local_rank=rank, rank=rank, pid=100 + rank, code=code, at_ns=at_ns, summary=summary)


CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2"


def test_killed_rank_is_named_before_its_earlier_dated_echoes() -> None:
    exits = [ended(0, 1, 5, CLOSED), ended(1, 0, 1), ended(2, -9, 9), ended(3, 1, 6, CLOSED)]
    assert failure.first_failure(exits).rank == 2


def test_earliest_of_two_true_errors_is_first() -> None:
    exits = [ended(0, 1, 7, "ValueError: b"), ended(1, 1, 6, "ValueError: a"), ended(2, 1, 5, CLOSED)]
    assert failure.first_failure(exits).rank == 1


def test_only_echoes_the_earliest_is_named() -> None:
    assert failure.first_failure([ended(0, 1, 7, CLOSED), ended(1, 1, 6, CLOSED)]).rank == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, ("SIGKILL", "137", "killed from outside", "no OOM kill")),
        (137, ("SIGKILL", "137")),
        (-11, ("SIGSEGV", "139", "invalid memory access")),
        (-15, ("SIGTERM", "143")),
        (-6, ("SIGABRT", "134")),
        (-7, ("SIGBUS", "135", "shared memory")),
        (128, ("exit code 128", "device runtime")),
        (127, ("exit code 127", "not found")),
        (3, ("exit code 3",)),
        (255, ("exit code 255",)),
    ],
)
def test_exit_code_in_words(code: int, words: tuple[str, ...]) -> None:
    text = failure.describe_exit(code)
    assert all(word in text for word in words), text


def test_oom_kill_is_told_from_a_stray_kill() -> None:
    assert "out of memory" in failure.describe_exit(-9, oom_kills=1)
    assert "out of memory" not in failure.describe_exit(-9)


@pytest.mark.parametrize("text", ["", "{", '{"message"', "[]", '{"message": {"extraInfo": null}}', '{"message": null}'])
def test_half_written_error_file_is_no_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert failure.read_error(str(path))[:2] == ("", "")


def test_fingerprint_ignores_addresses_and_numbers_of_processes() -> None:
    one = ended(0, 1, 1, "KeyError: <object at 0x7f01> of pid 12345 in layer 3")
    two = ended(1, 1, 9, "KeyError: <object at 0x8e02> of pid 54321 in layer 3")
    assert failure.fingerprint(one) == failure.fingerprint(two)
    assert failure.fingerprint(one) != failure.fingerprint(ended(0, 1, 1, "KeyError: layer 4"))


@dataclass
class Row:
    rank: int = 0
    step: int = 0
    generation: int = 2
    entered: int = 0
    initialised: int = 0
    restore_started: int = 0
    restored: int = 0
    first_step: int = 0
    restored_step: int = -1


SECOND = 10**9


def pending() -> ledger.Failure:
    return ledger.Failure(
        time="now", host="h", restart=1, rank=2, cause="killed", step=20, detected_ns=SECOND, forked_ns=2 * SECOND
    )


def row(**changes: int) -> Row:
    stamps = {"entered": 3, "initialised": 4, "restore_started": 5, "restored": 6, "first_step": 8}
    values = {name: changes.pop(name, second) * SECOND for name, second in stamps.items()}
    return Row(**values, **{"restored_step": 15, "step": 20, **changes})


def test_phases_of_a_restart_add_up() -> None:
    one = pending()
    assert ledger.advance(one, [row(), row(first_step=7)], 11 * SECOND)
    assert one.seconds == {"init": 2.0, "restore": 2.0, "first_step": 2.0, "recompute": 3.0}
    assert (one.total_s, one.steps_lost, one.restored_step) == (7.0, 5, 15)
    assert json.loads(one.line())["steps_lost"] == 5


def test_rows_of_the_generation_that_failed_do_not_count() -> None:
    assert not ledger.advance(pending(), [row(), row(entered=1)], 11 * SECOND)
    assert not ledger.advance(pending(), [row(), row(first_step=0)], 11 * SECOND)
    assert not ledger.advance(pending(), [], 11 * SECOND)


def test_lost_steps_not_yet_trained_again_keep_the_record_open() -> None:
    one = pending()
    assert not ledger.advance(one, [row(step=19)], 9 * SECOND)
    assert one.total_s == 7.0  # already known, and written if the next failure comes before the steps are back


def test_ledger_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    book = ledger.Ledger("", path, tmp_path / "no" / "such" / "folder")
    book.append(pending())
    book.append(pending())
    path.write_bytes(path.read_bytes()[:-20])
    assert [record["rank"] for record in ledger.read(path)] == [2]


@given(
    steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=9),
    step_s=st.floats(0, 100, allow_nan=False),
)
def test_stop_step_lies_ahead_of_every_rank(steps: list[int], step_s: float) -> None:
    chosen = stop.stop_step(steps, step_s=step_s)
    assert chosen > max(steps)
    if step_s > 0.1:
        assert chosen <= max(steps) + 2
    elif step_s > 1e-3:
        assert (chosen - max(steps)) * step_s >= 0.1  # nobody gets there before the number is written


def test_changed_import_time_variable_is_named() -> None:
    assert zygote.changed_at_import({"A": "1"}, {"A": "2", "RANK": "0"}) == ""
    assert zygote.changed_at_import({}, {"LD_PRELOAD": "x"}) == "LD_PRELOAD"
    assert zygote.changed_at_import({"PYTHONPATH": "x"}, {}) == "PYTHONPATH"


def test_process_with_a_second_thread_is_not_fit_to_be_forked() -> None:
    code = (
        "import threading, time\nfrom flashckpt.daemon import zygote\nbefore = zygote.unfit()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint([before, zygote.unfit()])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "['', '2 threads after the imports, 1 expected']"


def test_messages_keep_bytes_that_are_not_utf8_and_end_with_the_peer() -> None:
    here, there = socket.socketpair()
    message = {"env": {"A": b"\xff\xfe".decode(errors="surrogateescape"), "B": "ü" * 10_000}}
    messages.send(here, message)
    assert messages.receive(there) == message
    here.sendall(b"\x10\x00\x00\x00half")
    here.close()
    assert messages.receive(there) is None
    there.close()


def test_exit_code_tells_running_exited_and_killed() -> None:
    codes = []
    actions: list[Callable[[], None]] = [lambda: os._exit(5), lambda: os.kill(os.getpid(), signal.SIGKILL)]
    for action in actions:
        gate, opener = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(opener)
            os.read(gate, 1)
            action()
        pidfd = os.pidfd_open(pid)
        assert exit_code(pidfd) is None
        os.close(opener)
        codes.append(wait_for(partial(exit_code, pidfd), what="the child's end"))
        os.close(pidfd)
        os.close(gate)
    assert codes == [5, -9]
    assert thread_count() >= 1
