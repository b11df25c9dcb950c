"""`pytest --workers N`: the files of the suite side by side, in N processes forked from the one that collected them.

Not xdist: its workers have a second thread, and ranks are forked from the test process, which must have one. Here
the collecting process imports everything once, forks, takes no part itself, and shows each file's reports when the
file is done, so that output, exit code, `--last-failed`, `--durations` and `-x` are those of a serial run.

A file is never divided: its module fixtures are made once, and session fixtures once per file. Files are handed
out through a pipe, the longest first (`LONGEST_FIRST`), so that no worker is left alone with one at the end. A
worker that dies is a failure of the test it was in, and another worker goes on with the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import marshal
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import warm

# Files that take longest, by `--durations`; a file missing here is only handed out later.
LONGEST_FIRST = (
    "test_restore_peers.py",
    "test_dlrun.py",
    "test_store.py",
    "test_program_groups.py",
    "test_frameworks.py",
    "test_restore_replicas.py",
    "test_store_faults.py",
    "test_cli_output.py",
    "test_dcp.py",
)
GRACE_S = 30.0  # for the tear-down of a worker that is interrupted
_LENGTH = struct.Struct("!I")
_GROUP = struct.Struct("!H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run the files of the suite in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in workers; None, the usual loop, where one process is asked for or enough."""
    wanted: int = session.config.getoption("--workers")
    groups = group_by_file(session.items)
    if wanted < 2 or len(groups) < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"importing the tests started a thread, which no fork takes along: {threads}"
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all, removed by us
    pool = Pool(session, groups)
    try:
        pool.run(min(wanted, len(groups)))
    finally:
        pool.stop()
    return True


def group_by_file(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the items of each file in their order, the files that take longest first."""
    groups = [list(items) for _, items in itertools.groupby(items, key=lambda item: item.path)]
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    return sorted(groups, key=lambda group: place.get(group[0].path.name, len(place)))


class Pool:
    """The collecting process: it starts workers, receives what they report and shows it file by file."""

    def __init__(self, session: pytest.Session, groups: list[list[pytest.Item]]) -> None:
        self.session, self.groups = session, groups
        self.queue, queue_end = os.pipe()
        os.write(queue_end, b"".join(_GROUP.pack(number) for number in range(len(groups))))
        os.close(queue_end)  # a reader that finds the pipe empty knows that no file is left
        self.workers: list[Worker] = []

    def run(self, count: int) -> None:
        for _ in range(count):
            self.workers.append(self._fork([]))
        while self.workers:
            select.select([source for worker in self.workers for source in (worker.pipe, worker.pidfd)], [], [])
            for worker in list(self.workers):
                gone = worker.gone()  # asked first: nothing is sent after it
                for message in worker.receive():
                    self._take(worker, message)
                if gone:
                    self.workers.remove(worker)
                    self._bury(worker)

    def stop(self) -> None:
        """Interrupt what still runs: its fixtures are torn down, its processes end."""
        for worker in self.workers:
            worker.interrupt()
        end = time.monotonic() + GRACE_S
        while any(not worker.gone() for worker in self.workers):
            if time.monotonic() > end:
                for worker in self.workers:
                    worker.kill()
            time.sleep(0.01)
        os.close(self.queue)

    def _fork(self, first: list[pytest.Item]) -> Worker:
        source, target = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work(self.session, self._claims(first, target), target)
        os.close(target)
        return Worker(pid, source, first)

    def _claims(self, first: list[pytest.Item], target: int) -> Iterator[list[pytest.Item]]:
        yield first
        while number := os.read(self.queue, _GROUP.size):
            (group,) = _GROUP.unpack(number)
            _send(target, {"claimed": group})
            yield self.groups[group]

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        if "claimed" in message:
            worker.claimed += self.groups[message["claimed"]]
        elif "report" in message:
            worker.reports.append(message["report"])
        elif "finished" in message:
            done = worker.claimed.pop(0)
            worker.finished.append((done, worker.reports))
            worker.reports = []
            if not worker.claimed:
                self._show(worker)

    def _show(self, worker: Worker) -> None:
        """Replay a file's reports, as if its tests had just run here."""
        finished, worker.finished = worker.finished, []
        for item, reports in finished:
            hook = item.ihook
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for data in reports:
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(config=item.config, data=data)
                )
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def _bury(self, worker: Worker) -> None:
        """Close what a worker left that has ended; if it was in a test, that has failed, and a new worker does the rest."""
        os.close(worker.pipe)
        os.close(worker.pidfd)
        if worker.claimed:
            item = worker.claimed.pop(0)
            reason = f"the test process ended ({worker.how()}) in this test; the tests after it run in a new one"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            worker.finished.append((item, [data]))
            self.workers.append(self._fork(worker.claimed))
        self._show(worker)


class Worker:
    """What the collecting process knows of one worker."""

    def __init__(self, pid: int, pipe: int, claimed: list[pytest.Item]) -> None:
        self.pid, self.pipe, self.claimed = pid, pipe, list(claimed)
        self.reports: list[dict[str, Any]] = []
        self.finished: list[tuple[pytest.Item, list[dict[str, Any]]]] = []
        self._bytes = bytearray()
        self._status: int | None = None
        self.pidfd = os.pidfd_open(pid)
        os.set_blocking(pipe, False)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield what has arrived. The end of the pipe tells nothing: forked ranks hold it open too."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 20):
                self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            yield marshal.loads(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]

    def gone(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def interrupt(self) -> None:
        if not self.gone():
            os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        if not self.gone():
            os.kill(self.pid, signal.SIGKILL)

    def how(self) -> str:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class _Reporting:
    """Stands for the terminal in a worker: sends reports to the collecting process instead of showing them."""

    def __init__(self, config: pytest.Config, target: int) -> None:
        self._config, self._target = config, target
        self._tw = config.get_terminal_writer()  # pytest-timeout writes the stacks of all threads with it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        _send(self._target, {"report": data})


def _work(session: pytest.Session, files: Iterator[list[pytest.Item]], target: int) -> None:
    """The life of a worker, from its fork to its end."""
    code = 1
    signal.signal(signal.SIGINT, _interrupted_once)
    try:
        _take_over(session.config, target)
        for items in files:
            for item, following in itertools.zip_longest(items, items[1:]):  # None: all fixtures end with their file
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                _send(target, {"finished": True})
        code = 0
    except BaseException as error:  # noqa: BLE001 -- the process ends here, whatever it is
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        session._setupstate.teardown_exact(None)
    finally:
        with contextlib.suppress(OSError):  # it may have been killed
            warm.stop()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _interrupted_once(*_: object) -> None:
    """Ctrl-C reaches a worker twice, from the terminal and from `stop`: the second must not cut the clean-up short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _take_over(config: pytest.Config, target: int) -> None:
    """Give this process a capture and a reporter of its own; both were made for the process it was forked from."""
    plugins = config.pluginmanager
    reporting = _Reporting(config, target)
    plugins.unregister(name="terminalreporter")
    plugins.register(reporting, "terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")
    capture.read_global_capture()
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _send(target: int, message: dict[str, Any]) -> None:
    data = marshal.dumps(message)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(target, rest) :]
