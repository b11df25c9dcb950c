"""The pure parts of dlrun: who failed first, exit codes in words, the ledger's arithmetic, the step to stop after."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import killed_at
from support.ranks import wait_for
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError

from flashckpt.core.lineage import Generation
from flashckpt.daemon.launcher import budget, cli, failure, findings, hang, ledger, reporting, stop
from flashckpt.daemon.launcher.agent import DlrunAgent
from flashckpt.daemon.launcher.rounds import JobNotes
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.launcher.way_back import WayBack
from flashckpt.daemon.machine.process import (
    adopt_parent,
    exit_code,
    own_child,
    reap_strays,
    thread_count,
    zombies,
)
from flashckpt.daemon.zygote import server
from flashckpt.errors import ConfigError
from flashckpt.restore import gather
from flashckpt.shm import agent_folder, gc, job_directory
from flashckpt.shm.job_directory import JobDirectory


def ended(rank: int, code: int, at_ns: int, summary: str = "") -> failure.WorkerExit:
    return failure.WorkerExit(local_rank=rank, rank=rank, pid=100 + rank, code=code, at_ns=at_ns, summary=summary)


CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2"


def test_killed_rank_is_named_before_its_earlier_dated_echoes() -> None:
    exits = [ended(0, 1, 5, CLOSED), ended(1, 0, 1), ended(2, -9, 9), ended(3, 1, 6, CLOSED)]
    assert failure.first_failure(exits).rank == 2


def test_earliest_of_two_true_errors_is_first() -> None:
    exits = [ended(0, 1, 7, "ValueError: b"), ended(1, 1, 6, "ValueError: a"), ended(2, 1, 5, CLOSED)]
    assert failure.first_failure(exits).rank == 1


def raised(lost: Exception) -> failure.WorkerExit:
    """The exit of a rank whose pipeline stage raised its own error from `lost`, as torch's does."""
    try:
        try:
            raise lost
        except type(lost) as cause:
            raise RuntimeError("[Stage 1] failed to run forward:\nargs: (Tensor(2, 8),)") from cause
    except RuntimeError as error:
        return dataclasses.replace(ended(1, 1, 5), summary=str(error), traceback=traceback.format_exc())


def test_a_stage_that_fails_because_its_peer_is_gone_only_lost_its_peer() -> None:
    assert raised(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:7123")).is_echo
    assert not raised(ValueError("mat1 and mat2 shapes cannot be multiplied")).is_echo


def test_only_echoes_the_earliest_is_named() -> None:
    assert failure.first_failure([ended(0, 1, 7, CLOSED), ended(1, 1, 6, CLOSED)]).rank == 1


def test_ranks_that_only_lost_another_node_are_not_blamed() -> None:
    exits = [ended(0, 1, 6, CLOSED), ended(1, 1, 7, CLOSED)]
    report = failure.FailureReport(first=exits[0], others=exits[1:], host="a", cause="x", step=30, elsewhere=True)
    text = report.render("restarting")
    assert text.startswith("the failure did not begin on a at step 30: ranks 0, 1 lost the connection to another node")
    assert "failed first" not in text
    assert "Connection closed by peer" in text


def test_finding_of_another_node_is_read_and_what_is_no_finding_is_not() -> None:
    store = DictStore()
    assert findings.read(store) is None
    assert "no node of the job reported" in findings.cause(store, {})
    findings.publish(store, findings.Finding(rank=3, host="b", cause="killed", step=7))
    findings.publish(store, findings.Finding(rank=0, host="a", cause="later", step=9))
    assert findings.cause(store, {}) == "rank 3 on b failed first at step 7: killed"
    findings.introduce(store, 2, host="c", ranks=[4, 5])
    assert findings.cause(store, {2: "10.0.0.3"}).startswith("node 10.0.0.3 (c) with ranks 4, 5 is gone")
    assert findings.cause(store, {1: "10.0.0.2"}).startswith("node 10.0.0.2 is gone")
    for text in ("", "[]", "null", '{"rank": "x"}', "[" * 100_000):
        store["flashckpt/first-failure"] = store["flashckpt/node/2"] = text
        assert findings.read(store) is None
        assert findings.describe_lost(store, 2, "c").startswith("node c is gone")
    store["flashckpt/first-failure"] = json.dumps({"rank": 1, "step": 2, "host": "a\x1b[2J", "cause": "y" * 9999})
    found = findings.read(store)
    assert found is not None
    assert (found.host, len(found.cause)) == ("a?[2J", 300)


def test_node_that_is_silent_is_waited_for_until_the_rendezvous_has_lost_it() -> None:
    looks = iter([{}, {}, {1: "b"}])
    assert findings.await_cause(DictStore(), lambda: next(looks), timeout_s=60.0) == {1: "b"}
    store = DictStore()
    findings.publish(store, findings.Finding(rank=3, host="b", cause="killed", step=7))
    assert findings.await_cause(store, lambda: next(looks), timeout_s=60.0) == {}


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


def pending() -> ledger.LedgerEntry:
    return ledger.LedgerEntry(
        time="now", host="h", restart=1, rank=2, cause="killed", step=20, begun_ns=SECOND, forked_ns=2 * SECOND
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


def test_every_start_is_said_once_with_its_phases(caplog: pytest.LogCaptureFixture) -> None:
    reporter = reporting.FailureReporter(JobWatch(), "")
    with caplog.at_level(logging.INFO, logger="flashckpt.dlrun"):
        begun = time.monotonic_ns() - 2 * SECOND
        reporter.started(rendezvous_s=1.0, fork_s=2.0)
        now = {"entered": 3, "initialised": 4, "restored": 6, "first_step": 9}
        started = Row(**{name: begun + seconds * SECOND for name, seconds in now.items()}, restored_step=7)
        reporter.tick([Row(entered=begun + SECOND), started])
        assert not caplog.records
        for _ in range(2):
            reporter.tick([started])
    (line,) = [record.getMessage() for record in caplog.records]
    phases = "(restored step 7): rendezvous 1.00, fork 2.00, init 2.00, restore 2.00, first step 3.00 s"
    assert line == f"first step of all ranks 10.00 s after the start {phases}"


def test_memory_of_a_job_is_found_where_its_ranks_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that sets FLASHCKPT_SHM_DIR itself: dlrun ran without a persister, and ended with 0."""
    watch = JobWatch()
    with monkeypatch.context() as script:
        script.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))
        job = JobDirectory.open("chosen", create=True)
    agent_folder.write_job(watch.agent_dir, job.path)
    watch.tick()
    assert watch.job is not None
    assert watch.job.path == job.path
    assert watch.unpersisted() is None
    assert not caplog.records
    watch.request("ended")
    job.let_go()
    watch.close()


def test_job_that_ranks_are_about_to_begin_has_a_persister_and_is_not_one_that_they_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = JobWatch()
    job = JobDirectory.open("opened", create=True)
    agent_folder.write_opening(watch.agent_dir, job.path)
    watch.tick()
    assert watch.job is not None
    assert watch.job.path == job.path
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", str(watch.agent_dir))
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert not gather._restarts(job), "what memory holds need not be the newest"
    agent_folder.write_job(watch.agent_dir, job.path)
    assert gather._restarts(job) == 1
    watch.request("ended")
    job.let_go()
    watch.close()


def test_node_that_waits_for_a_job_has_its_persister_and_keeps_nothing_where_it_is_not_needed() -> None:
    watch = JobWatch()
    watch.expect("awaited")
    assert watch.job is not None
    job = watch.job
    wait_for(job.daemon_alive, what="the persister, before any rank")
    assert [job.job, watch.control(), watch.unpersisted()] == ["awaited", None, None]
    watch.tick()
    assert watch.job is job
    watch.close()
    wait_for(lambda: not job.path.exists(), what="its memory to go with it")


def test_ranks_that_come_to_the_job_that_was_awaited_find_its_persister_and_end_it_as_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    watch = JobWatch()
    watch.expect("awaited")
    job = watch.job
    assert job is not None
    wait_for(job.daemon_alive, what="the persister")
    status = wait_for(job.read_status, what="its status")
    ranks = JobDirectory.open("awaited")
    agent_folder.write_opening(watch.agent_dir, ranks.path)
    watch.tick()
    assert watch.job is job
    ranks.write_generation(Generation(number=1))
    watch.close()
    assert not job.request_path("ended").exists(), "who restarts finds what there is"
    assert job.daemon_alive()
    ranks.let_go()
    wait_for(lambda: not job.daemon_alive(), what="the persister to end")
    assert status.pid > 0
    assert job.path.exists(), "a record is there"
    gc.remove(gc.dead_memory("awaited")[0])


@pytest.mark.parametrize("name", ["", "../awaited", "held"])
def test_nothing_is_made_for_a_name_that_is_none_nor_where_memory_of_the_job_is(name: str) -> None:
    held = JobDirectory.open("held")
    held.let_go()
    watch = JobWatch()
    watch.expect(name)
    assert watch.job is None
    assert not held.daemon_alive()
    watch.close()
    gc.remove_unused(held.path)


def test_persister_of_a_job_that_nobody_began_ends_with_it_when_its_agent_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    pid = os.fork()
    if pid == 0:
        watch = JobWatch()
        watch.expect("orphaned")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    path = JobDirectory(job_directory.memory_root() / "orphaned").path
    wait_for(lambda: not path.exists(), what="the directory to go")


def test_agent_killed_before_the_persister_starts_leaves_a_place_that_ranks_take_or_that_is_removed() -> None:
    killed_at("expect.before-persister", lambda: JobWatch().expect("awaited"))
    watch, path = JobWatch(), job_directory.memory_root() / "awaited"
    watch.expect("awaited")
    assert watch.job is None, "memory that is here is left to ranks"
    ranks = JobDirectory.open("awaited")
    agent_folder.write_opening(watch.agent_dir, ranks.path)
    watch.tick()
    wait_for(ranks.daemon_alive, what="the persister")
    watch.request("ended")
    ranks.let_go()
    watch.close()
    wait_for(lambda: not path.exists(), what="the directory to go")
    killed_at("expect.before-persister", lambda: JobWatch().expect("awaited"))
    gc.remove_unused(path)
    assert not path.exists()


def test_ranks_that_have_another_job_than_the_one_awaited_are_followed() -> None:
    watch = JobWatch()
    watch.expect("awaited")
    awaited = watch.job
    assert awaited is not None
    other = JobDirectory.open("other")
    agent_folder.write_job(watch.agent_dir, other.path)
    watch.tick()
    assert watch.job is not None
    assert watch.job.path == other.path
    wait_for(lambda: not awaited.path.exists(), what="what was awaited to go")
    watch.request("ended")
    other.let_go()
    watch.close()


def test_memory_of_a_job_that_cannot_be_reached_is_said_once_and_is_no_success(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks in a container with a tmpfs of their own."""
    watch = JobWatch()
    agent_folder.write_job(watch.agent_dir, tmp_path / "in-the-container")
    for _ in range(3):
        watch.tick()
    (record,) = caplog.records
    assert "cannot reach the job's memory" in record.message
    error = watch.unpersisted()
    assert error is not None
    assert error.exit_code == 40
    watch.close()


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
def test_stop_step_is_reached_by_no_rank_before_it_can_be_seen(steps: list[int], step_s: float) -> None:
    chosen = stop.stop_step(steps, step_s=step_s)
    assert chosen >= max(steps) + 2  # the step under way may end at once
    if step_s > 0.1:
        assert chosen == max(steps) + 2
    elif step_s > 1e-3:
        assert (chosen - max(steps) - 1) * step_s >= 0.1


class DictStore(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]  # a c10d store, not a dict
        del default
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise NotImplementedError


@dataclass
class Page:
    stop_after: int = -1


class Watch:
    def __init__(self) -> None:
        self.page = Page()

    def control(self) -> Page:
        return self.page


def test_three_nodes_agree_on_one_step_whoever_asks() -> None:
    store, watches = DictStore(), [Watch() for _ in range(3)]
    stops = [stop.AgreedStop(cast("Any", watch), 60.0) for watch in watches]
    stops[2].ask(store)
    told: dict[int, int] = {}
    for look in range(6):
        for rank, one in enumerate(stops):
            assert one.hear(store)
            rows = cast("Any", [Row(step=100 + rank + look)] * 2)
            group = stop.Group(store=store, rank=rank, size=3)
            step = one.advance(rows, ranks=2, step_s=0.5, group=group)
            if step is not None:
                told[rank] = step
    assert told == dict.fromkeys(range(3), 106)  # 102, one under way, and three of 0.5 s within the margin
    assert [watch.page.stop_after for watch in watches] == [106] * 3
    assert all(one.has_stopped(cast("Any", [Row(step=106)])) for one in stops)
    assert [watch.page.stop_after for watch in watches] == [-1] * 3


def test_stop_waits_until_all_ranks_of_the_node_have_a_row() -> None:
    watch = Watch()
    one = stop.AgreedStop(cast("Any", watch), 60.0)
    one.ask(None)
    assert one.advance(cast("Any", [Row(step=3)]), ranks=2, step_s=1.0, group=None) is None
    assert one.advance(cast("Any", [Row(step=3)] * 2), ranks=2, step_s=1.0, group=None) == 5
    assert watch.page.stop_after == 5


def test_budget_is_refilled_by_progress_and_ends_without() -> None:
    one = budget.Budget(2, refill_steps=20)
    steps = [10, 15, 40, 41, 42, 43]
    assert [one.spend(fingerprint="", step=step).restart for step in steps] == [True, True, True, True, False, False]
    never = budget.Budget(1, refill_steps=0)
    assert [never.spend(fingerprint="", step=step).restart for step in (10, 1000)] == [True, False]
    assert "not restarting: all 2 restarts were used without 20 new steps" in one.spend(fingerprint="", step=44).reason
    assert "--max-restarts is 0" in budget.Budget(0).spend(fingerprint="", step=4).reason
    uncounted = budget.Budget(1)
    assert [uncounted.spend(fingerprint="x", step=-1).restart for _ in range(2)] == [True, False]


def test_same_error_at_the_same_step_stops_but_a_kill_or_another_step_does_not() -> None:
    one = budget.Budget(9)
    assert one.spend(fingerprint="ValueError", step=5).restart
    assert one.spend(fingerprint="ValueError", step=6).restart
    assert one.spend(fingerprint="", step=6).restart
    assert one.spend(fingerprint="", step=6).restart
    assert one.spend(fingerprint="ValueError", step=6).restart
    assert one.spend(fingerprint="ValueError", step=6).repeats


def test_the_same_failure_goes_back_as_often_as_it_may_and_the_end_says_how_often() -> None:
    one, reasons = budget.Budget(9), []
    for _ in range(2):
        one.spend(fingerprint="ValueError", step=5)
    backs = [one.go_back(fingerprint="ValueError", step=5, limit=3) for _ in range(4)]
    found = [verdict and (verdict.restart, verdict.back, verdict.leave_out) for verdict in backs]
    assert found == [(True, 1, (0, 0)), (True, 2, (6, 6)), (True, 3, (0, 6)), None], "ever more samples are left out"
    assert ["samples" in verdict.reason for verdict in backs if verdict] == [False, True, True]
    reasons = [one.spend(fingerprint="ValueError", step=step).reason for step in (5, 6)]
    assert "at step 5 twice, and again from 3 older states" in reasons[0]
    assert one.go_back(fingerprint="ValueError", step=6, limit=2) is not None  # another failure has its own count
    assert [one.comes_again(budget.HANG, step) for step in (7, 7, 8)] == [False, True, False]


@pytest.mark.parametrize(
    ("code", "said"), [(-11, "a rank ends by SIGSEGV"), (-6, "a rank ends by SIGABRT"), (-9, ""), (1, ""), (0, "")]
)
def test_a_crash_is_told_from_a_kill(code: int, said: str) -> None:
    first = failure.WorkerExit(rank=0, local_rank=0, pid=1, code=code, at_ns=0)
    assert failure.FailureReport(first=first, host="a", cause="", others=[], step=5).crash == said


def test_a_hang_from_every_state_that_was_tried_ends_the_job() -> None:
    one = budget.Budget(9)
    assert one.stays(budget.HANG, 5) is None
    assert one.go_back(fingerprint=budget.HANG, step=5, limit=1) is not None
    decided = one.stays(budget.HANG, 5)
    assert decided is not None
    assert (decided.restart, decided.repeats) == (False, True)
    assert "the ranks hang at step 5 again and again, and again from 1 older state" in decided.reason


def test_default_budget_tells_a_crash_loop_from_bad_luck_where_nobody_counts_steps() -> None:
    loop = budget.Budget(None)
    verdicts = [loop.spend(fingerprint="SyntaxError", step=-1, ran_s=1.0) for _ in range(2)]
    assert [(verdict.restart, verdict.repeats) for verdict in verdicts] == [(True, False), (False, True)]
    luck = budget.Budget(None)
    hours = [luck.spend(fingerprint=error, step=-1, ran_s=budget.REFILL_S) for error in ["x", "x", ""] * 10]
    assert all(verdict.restart for verdict in hours)
    killed = budget.Budget(None)
    count = [killed.spend(fingerprint="", step=-1, ran_s=1.0).restart for _ in range(budget.RESTARTS + 1)]
    assert count == [True] * budget.RESTARTS + [False]
    number = budget.Budget(2)  # as torchrun: so many in all, whatever they are
    assert [number.spend(fingerprint="x", step=-1, ran_s=9999.0).restart for _ in range(3)] == [True, True, False]


@dataclass
class Beating:
    rank: int = 0
    pid: int = 0
    step: int = 5
    heartbeat_ns: int = 100 * SECOND
    first_step: int = 1
    paused: int = 0


def test_hang_is_off_before_the_first_step_and_while_any_rank_is_paused() -> None:
    late = 170 * SECOND
    assert hang.is_hanging([Beating(), Beating(heartbeat_ns=late)], late, 60.0)
    assert not hang.is_hanging([Beating(), Beating()], 150 * SECOND, 60.0)
    assert not hang.is_hanging([Beating(), Beating(first_step=0)], late, 60.0)
    assert not hang.is_hanging([Beating(), Beating(paused=1)], late, 60.0)
    assert not hang.is_hanging([], late, 60.0)


@pytest.mark.parametrize(
    ("lost", "failed", "said"),
    [
        ({2: "10.0.0.3"}, False, "node 10.0.0.3 (c) with ranks 4, 5 is gone: it sends no heartbeats"),
        ({}, True, "rank 3 on b failed first at step 7: killed"),
        ({}, False, ""),
    ],
)
def test_node_that_learns_of_a_failure_by_the_others_that_rejoin_says_which(
    lost: dict[int, str], failed: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under load the ranks here have not noticed it yet: the store is that of the round that ended."""
    before = HashStore()
    findings.introduce(before, 2, host="c", ranks=[4, 5])
    if failed:
        findings.publish(before, findings.Finding(rank=3, host="b", cause="killed", step=7))
    agent: Any = SimpleNamespace(_starts=0, _stores=mock.Mock(lost_since_the_round_before=lambda: lost), store=before)
    agent._pcontext = None
    agent._way_back, agent._watch, agent._end_suspects = WayBack(), SimpleNamespace(job=None), lambda: None
    agent._others = lambda _: stop.Group(store=agent.store, rank=0, size=3)
    agent._restart_judged = lambda *_: setattr(agent, "store", HashStore())
    with caplog.at_level(logging.WARNING, "flashckpt.dlrun"):
        DlrunAgent._join(agent, mock.Mock())
    assert (caplog.messages, agent._starts) == ([said] if said else [], 1)


def test_hang_timeout_is_learnt_never_under_a_minute_and_off_by_zero() -> None:
    pace = hang.Pace()
    assert hang.timeout_s(pace.step_s, None) == float("inf")
    for second, step in ((0, 1), (10, 2), (20, 3), (200, 4), (210, 5)):
        pace.see(second, step)
    assert hang.timeout_s(pace.step_s, None) == 200.0
    assert hang.timeout_s(0.01, None) == 60.0
    assert hang.timeout_s(0.01, 2.5) == 2.5
    assert hang.timeout_s(0.01, 0.0) == float("inf")


def test_steps_that_ended_since_the_last_tick_are_not_taken_for_one_long_step() -> None:
    """A stop 0.15 s after the first look, in a run of 2 ms a step: two steps ahead, some rank would be past the one to stop after."""
    pace = hang.Pace()
    pace.see(10.0, 0)
    assert pace.at_least_s(10.1, 0) == pytest.approx(0.1)
    step_s = pace.at_least_s(10.15, 75)
    assert step_s == pytest.approx(0.002)
    assert stop.stop_step([75, 74], step_s=step_s) >= 75 + 50
    assert hang.Pace().at_least_s(10.0, -1) == 0.0


STACK = """Thread 0x00007f1 (most recent call first):
  File "copy.py", line 3 in run

Current thread 0x00007f2 (most recent call first):
  File "train.py", line {line} in {name}
  File "train.py", line 99 in <module>
"""


def test_hang_groups_equal_stacks_and_names_the_odd_rank() -> None:
    states = [
        hang.RankState(rank=rank, pid=rank, step=7, stack=hang.parse_stack(STACK.format(line=line, name=name)))
        for rank, (line, name) in enumerate([(5, "all_reduce"), (5, "all_reduce"), (9, "endless"), (5, "all_reduce")])
    ]
    assert states[2].stack == ("endless (train.py:9)", "<module> (train.py:99)")
    assert hang.odd_ranks(states) == [2]
    text = hang.render(states, silent_s=61.0, limit_s=60.0)
    assert "look at rank 2" in text
    assert "rank 0 (step 7), 1 (step 7), 3 (step 7):" in text
    stopped = hang.RankState(rank=1, pid=1, step=7, kernel="state T (stopped)")
    assert hang.odd_ranks([states[0], stopped, states[2]]) == [1]


def test_dlrun_has_one_thread_when_it_begins_whatever_the_user_says_of_threads() -> None:
    """numpy starts others at its import: the zygote would be a second interpreter, which imports all of torch again."""
    code = "import os, flashckpt.daemon.launcher.cli\nprint(len(os.listdir('/proc/self/task')))"
    chosen = {name: value for name, value in os.environ.items() if name not in server.ONE_THREAD}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=chosen).stdout
    assert output.strip() == "1"


@pytest.mark.parametrize("option", ["max-restarts", "refill-steps", "escalate"])
def test_counts_below_0_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} cannot be negative"):
        cli.run(cli.parse_args([f"--{option}=-1", "train.py"]))


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


def test_a_child_that_somebody_waits_for_keeps_its_exit_code_when_strays_are_reaped() -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    with own_child(partial(subprocess.Popen, command)) as child:
        wait_for(lambda: child.pid in zombies(), what="its end")
        assert reap_strays(set()) == 0
        assert child.wait() == 3
    with own_child(partial(subprocess.Popen, command)) as child:
        wait_for(lambda: child.pid in zombies(), what="its end")
    assert reap_strays(set()) == 1
    child.returncode = 3


@pytest.mark.parametrize("reaped", [True, False])
def test_worker_whose_launcher_died_while_it_was_forked_ends_at_once(reaped: bool) -> None:
    """It would otherwise wait for half a minute to become the child of a process that is no more."""
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    launcher.returncode = 0
    pid = os.fork()
    if pid == 0:
        adopt_parent(launcher.pid)
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    assert wait_for(partial(exit_code, pidfd), what="the worker's end", deadline_s=10) == 1
    os.close(pidfd)


def notes_of(store: Any) -> JobNotes:
    return JobNotes(store, "job")


def test_exit_code_that_one_node_notes_is_read_by_the_others_and_outlives_the_store() -> None:
    store = HashStore()
    one, other = notes_of(store), notes_of(store)
    assert [one.ended(), other.ended(), other.code] == [0, 0, 0]
    one.end(11)
    assert other.code == 0, "only known once it was read"
    assert [one.code, other.ended(), other.code] == [11, 11, 11]

    def gone(*_: Any) -> Any:
        raise DistNetworkError("closed")

    lost = mock.Mock(check=gone, set=gone, timeout=timedelta(seconds=60))
    assert notes_of(lost).ended() == 0
    late = notes_of(lost)
    late.end(11)
    assert late.ended() == 11
    assert late.job() == ""
    late.leave(2, timeout_s=60)  # its host has left: nothing to wait for


def test_notes_of_a_stranger_do_not_count_nor_does_a_note_under_another_name() -> None:
    store, secret = HashStore(), b"correct-horse-battery-staple"
    notes = JobNotes(store, "job", secret)
    for name, value in (("end", "11"), ("trained", "1"), ("refused.2", "1"), ("end", "- 11")):
        store.set(f"flashckpt.job.job.{name}", value)
        JobNotes(store, "job", b"another secret of a job").refuse(3)
        assert [notes.ended(), notes.has_trained(), notes.is_refused(2), notes.is_refused(3)] == [
            0,
            False,
            False,
            False,
        ]
    assert [notes.has_trained(), notes.job()] == [False, ""]
    notes.note_trained("mine")
    assert notes.job() == "mine"
    store.set("flashckpt.job.job.refused.2", store.get("flashckpt.job.job.trained").decode())
    assert [notes.has_trained(), notes.is_refused(2)] == [True, False]
    JobNotes(store, "job", secret).end(11)
    assert notes.ended() == 11


def test_node_that_ends_waits_for_the_others_but_not_for_ever() -> None:
    store = HashStore()
    first = threading.Thread(target=notes_of(store).leave, args=(2, 60))
    first.start()
    assert first.is_alive()
    notes_of(store).leave(2, timeout_s=60)
    first.join(30)
    assert not first.is_alive()
    notes_of(HashStore()).leave(2, timeout_s=0)
