"""dlrun's side of the zygote: start it, ask it for workers, replace it when it dies."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from flashckpt.daemon.machine.process import exit_code, is_stopped, kill_group, wait_readable
from flashckpt.daemon.zygote import messages, server
from flashckpt.daemon.zygote.spares import Spares
from flashckpt.faults import crash_point

_log = logging.getLogger("flashckpt.dlrun")
_KILL_WAIT_S = 10.0
_TICK_S = 10.0  # the agent sees no failure meanwhile


@dataclass(frozen=True)
class Unavailable(Exception):  # noqa: N818 -- a reason to spawn instead, not an error
    """The zygote cannot fork workers now; `reason` is for the user."""

    reason: str


def key_of(worker: dict[str, Any]) -> str:
    """Return what has to be equal for workers to inherit a rehearsal: command line, world, ranks of this node."""
    env = worker["env"]
    return repr(
        (worker["argv"], worker["module"], *(env.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")))
    )


@dataclass
class WarmCopy:
    """A copy of the zygote that has rehearsed: used where it is ready and fits, never waited for.

    Attributes:
        pid: Its process, a child of this one.
        key: What it rehearses, as `key_of` the first worker.
        is_asked: Whether the user named what is rehearsed, and so wants to know when it could not be.
    """

    sock: socket.socket
    pid: int
    key: str
    is_asked: bool
    ready: bool = False

    def poll(self) -> bool:
        """Look whether it is ready, without waiting; returns False when it is of no use."""
        if self.ready or not select.select([self.sock], [], [], 0)[0]:
            return True
        found = messages.exchange(self.sock, self.pid, None)
        reason = "its process died" if found is None else str(found["unfit"])
        if found is None or reason:
            level = logging.WARNING if self.is_asked else logging.DEBUG
            _log.log(level, "a step was not rehearsed, restarts start cold: %s", reason)
            return False
        _log.debug("rehearsed a step in %.2f s: the next restart begins with its plans", found["import_s"])
        self.ready = True
        return True

    def fork(self, workers: list[dict[str, Any]]) -> list[int] | None:
        """Fork workers as the zygote does; None where it is not ready, does not fit, or has died."""
        if not workers or key_of(workers[0]) != self.key or not self.poll() or not self.ready:
            return None
        answer = messages.exchange(self.sock, self.pid, {"workers": workers})
        pids: list[int] = answer["pids"] if answer else []
        if len(pids) < len(workers):
            self.ready, self.key = False, ""  # it fits nothing any more
            return None
        _log.debug("the workers begin with the plans of a rehearsal")
        return pids


class ZygoteClient:
    """Owns at most one zygote; knows the reason if there is none.

    Not thread-safe, and to be used from the main thread only: the kernel ends the zygote with the
    thread that started it.
    """

    def __init__(self, sock: socket.socket | None = None, pid: int = 0, *, disabled: str = "") -> None:
        """Take over a zygote that is already forked (`sock`, `pid`), or start one at the first request."""
        self._sock, self.pid, self.disabled = sock, pid, disabled
        self._environment = dict(os.environ)
        self._ready = False
        self._warm: WarmCopy | None = None
        self._spares = Spares()
        self._given_up = ""  # what is not rehearsed again: it could not be
        self.started = 1 if pid else 0

    @classmethod
    def forked(cls, *, is_brief: bool = False) -> ZygoteClient | dict[str, Any]:
        """Fork a zygote from this process; returns a worker's request instead in every worker forked later.

        Args:
            is_brief: The first workers are not to wait for modules that not every script needs.
        """
        here, there = socket.socketpair()
        pid = server.start_by_fork(here, there, is_brief=is_brief)
        return cls(here, pid) if isinstance(pid, int) else pid

    def fork(self, workers: list[dict[str, Any]]) -> list[int]:
        """Fork one worker per request and return their pids; they are children of this process.

        Raises:
            Unavailable: no zygote may be used (`--no-zygote`, an unfit import), or two died in a row.
        """
        if self.disabled:
            raise Unavailable(self.disabled)
        environment = workers[0]["env"] if workers else {}
        changed = server.changed_at_import(self._environment, environment)
        if changed:
            raise Unavailable(f"{changed} was changed after the zygote started")
        if taken := self._spares.take(workers):
            crash_point("standby.before-go")
        rest = [worker for local_rank, worker in enumerate(workers) if local_rank not in taken]
        forked = iter(self._fork(rest) if rest else [])
        ready = self._spares.go(workers)
        if taken:
            crash_point("standby.after-go")
        return [ready[local_rank] if local_rank in ready else next(forked) for local_rank in range(len(workers))]

    def _fork(self, workers: list[dict[str, Any]]) -> list[int]:
        if self._warm is not None and (pids := self._warm.fork(workers)) is not None:
            return pids
        for _ in range(2):
            pids = self._try_fork(workers)
            if pids:
                return pids
            self._drop()
        raise Unavailable("the zygote died, or did not answer, twice in a row")

    def keep_standbys(self, count: int, request_of: Callable[[int], dict[str, Any]], *, late: str) -> None:
        """Have `count` standby processes for the next generation, as `Spares.keep`; to be called while all ranks train.

        Args:
            count: How many.
            request_of: The request of a local rank.
            late: A variable that the script changes too late for them, or "".
        """
        if late:
            self._spares.give_up(f"the script changes {late}, which a context that is there already does not see")
        self._spares.keep(count, request_of, lambda request: self._copy({"standby": request}))

    @property
    def pids(self) -> set[int]:
        """The zygote, its copy and the standby processes, where there are any."""
        return {self.pid} | ({self._warm.pid} if self._warm is not None else set()) | self._spares.pids

    def rehearse(self, target: str, worker: dict[str, Any], *, is_asked: bool) -> None:
        """Let a copy of the zygote call `target`, and fork later generations of this layout from it. Does not wait for it.

        Asked again, it only looks whether the copy is ready.

        Args:
            target: module:function; see `rehearse.rehearse`.
            worker: The request of this node's first worker.
            is_asked: Whether the user named `target`.
        """
        if self._warm is not None and not self._warm.poll():
            self._given_up = self._warm.key
            self._end_copy()
        key = key_of(worker)
        if self._sock is None or not self._ready or key == self._given_up or (self._warm and self._warm.key == key):
            return
        self._end_copy()
        request = {"target": target, **{k: worker[k] for k in ("argv", "module", "env")}}
        if made := self._copy({"rehearse": request}):
            self._warm = WarmCopy(*made, key, is_asked)

    def _copy(self, request: dict[str, Any]) -> tuple[socket.socket, int] | None:
        """Have the zygote fork a process that has a socket to this one; None where that must wait for the next restart."""
        if self._sock is None or not self._ready or is_stopped(self.pid):
            return None
        here, there = socket.socketpair()
        answer = messages.exchange(self._sock, self.pid, request, limit_s=_TICK_S, fd=there.fileno())
        there.close()
        if answer and answer["pids"]:
            return here, answer["pids"][0]
        here.close()
        self._drop()  # it died: the next fork starts another
        return None

    def _end_copy(self) -> None:
        if self._warm is not None:
            self._warm.sock.close()
            _end(self._warm.pid)
            self._warm = None

    def prepare(self) -> None:
        """Start the zygote if it is not there, without waiting for its imports."""
        if self._sock is None and not self.disabled:
            self._start()

    def _try_fork(self, workers: list[dict[str, Any]]) -> list[int] | None:
        self.prepare()
        sock = self._sock
        assert sock is not None
        if not self._ready and not self._await_ready(sock):
            return None
        answer = messages.exchange(sock, self.pid, {"workers": workers})
        if answer and answer.get("unfit"):
            self._refuse(answer["unfit"])
        pids = answer["pids"] if answer else None
        if pids is not None and len(pids) < len(workers):  # the helper died in between: start over
            _log.warning("only %d of %d workers were forked", len(pids), len(workers))
        return pids if pids and len(pids) == len(workers) else None

    def _await_ready(self, sock: socket.socket) -> bool:
        ready = messages.exchange(sock, self.pid, None, limit_s=messages.READY_S)
        if ready is None:
            return False
        if ready["unfit"]:
            self._refuse(ready["unfit"])
        _log.debug("zygote %d ready after %.2f s of imports", self.pid, ready["import_s"])
        self._ready = True
        return True

    def _refuse(self, reason: str) -> NoReturn:
        self.disabled = f"the zygote must not be forked ({reason})"
        self._drop()
        raise Unavailable(self.disabled)

    def _start(self) -> None:
        here, there = socket.socketpair()
        self._environment = dict(os.environ)
        environment = {**os.environ, **dict.fromkeys(server.ONE_THREAD, "1")}
        environment.pop("FLASHCKPT_JOB_SECRET", None)
        command = [sys.executable, "-m", "flashckpt.daemon.zygote.server", str(there.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        process.returncode = 0  # reaped by pidfd in close(); keeps Popen from waiting for it
        there.close()
        self._sock, self.pid, self._ready = here, process.pid, False
        self.started += 1

    def close(self) -> None:
        """End the zygote, its copy and the standby processes (the workers keep running) and reap them."""
        spares = self._spares.pids
        self._spares.close()
        self._drop()
        for pid in spares:
            _end(pid)

    def _drop(self) -> None:
        self._end_copy()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self.pid:
            _end(self.pid)
            self.pid = 0
        self._ready = False


def _end(pid: int) -> None:
    """Kill a zygote with what it has forked and nobody knows of (each worker has its own group), and reap it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        kill_group(pid, signal.SIGKILL)  # loses nothing, and during its imports it would not notice the closed socket
        wait_readable([pidfd], _KILL_WAIT_S)
        if exit_code(pidfd) is None:
            _log.error("the zygote or standby, pid %d, did not end after SIGKILL: it is blocked in the kernel", pid)
    finally:
        os.close(pidfd)
