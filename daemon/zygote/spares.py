"""dlrun's side of the standby processes: one after another is made, none is waited for, those that are ready are taken."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flashckpt.daemon.machine.process import kill_group
from flashckpt.daemon.zygote import messages, server
from flashckpt.daemon.zygote.standby import CONTEXT_S, READ_BY_CONTEXT

_log = logging.getLogger("flashckpt.dlrun")
_LOSSES = 3
_ANSWER_S = 5.0
_LATE_S = 5.0  # after its own limit: it is blocked in the kernel
_FIXED = (*server.IMPORT_TIME, *READ_BY_CONTEXT)

Request = dict[str, Any]


@dataclass
class _Spare:
    sock: socket.socket
    pid: int
    env: dict[str, str]
    began_s: float
    ready: bool = False


class Spares:
    """The standby processes of one node, by local rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spares: dict[int, _Spare] = {}
        self._lost = Counter[int]()
        self._is_kept = self._on_trial = self._has_said = False
        self.given_up = ""

    @property
    def pids(self) -> set[int]:
        """The processes."""
        return {spare.pid for spare in self._spares.values()}

    def keep(
        self,
        count: int,
        request_of: Callable[[int], Request],
        fork: Callable[[Request], tuple[socket.socket, int] | None],
    ) -> None:
        """Look after the standby processes and have the next one made; to be called while all ranks train.

        Args:
            count: How many there are to be.
            request_of: The request of a local rank as it would be started today.
            fork: Has a standby forked for a request; None where it cannot be.
        """
        if self._on_trial:  # the ranks that were taken train
            self._on_trial = False
            self._lost.clear()
        self._is_kept = True
        self._each(self._look)
        if self.given_up or not all(spare.ready for spare in self._spares.values()):
            return
        missing = [local_rank for local_rank in range(count) if local_rank not in self._spares]
        if missing:
            self._has_said = False
            request = request_of(missing[0])
            if made := fork(request):
                self._spares[missing[0]] = _Spare(*made, request["env"], self._clock())
        elif not self._has_said:
            self._has_said = True
            _log.info("standby processes are ready: %d", count)

    def _each(self, look: Callable[[int, _Spare], str]) -> None:
        """Lose those of which `look` says what is wrong; giving all up ends the others meanwhile."""
        for local_rank in [*self._spares]:
            if local_rank in self._spares and (reason := look(local_rank, self._spares[local_rank])):
                self._end([local_rank])
                self._count(local_rank, f"the standby for local rank {local_rank} {reason}")

    def _look(self, _: int, spare: _Spare) -> str:
        """Return what is wrong with a standby that waits, or "", without waiting for it."""
        waited_s = self._clock() - spare.began_s
        if select.select([spare.sock], [], [], 0)[0]:
            reason = self._answer(spare)
            if reason and not spare.ready and waited_s >= CONTEXT_S:
                reason = f"had no context after {CONTEXT_S:.0f} s (its stack is above)"
            spare.ready = not reason
            return reason
        return "is blocked in the kernel" if not spare.ready and waited_s >= CONTEXT_S + _LATE_S else ""

    def _answer(self, spare: _Spare, message: Request | None = None, *, limit_s: float = _ANSWER_S) -> str:
        """Return what is wrong with a standby that has said something or is asked, or ""."""
        found = messages.exchange(spare.sock, spare.pid, message, limit_s=limit_s, who="standby")
        if found is None:
            return "died"
        return f"has no context: {found['unfit']}" if found["unfit"] else ""

    def _count(self, key: int, what: str) -> None:
        self._lost[key] += 1
        if not self.given_up:
            _log.info("%s", what)
        if self._lost[key] >= _LOSSES:
            self.give_up(f"{_LOSSES} times in a row {what}")

    def give_up(self, reason: str) -> None:
        """Have no standby processes any more, and say so once."""
        if not self.given_up:
            self.given_up = reason
            self._end([*self._spares])
            _log.warning("no standby processes any more, restarts make their contexts themselves: %s", reason)

    def take(self, workers: list[Request]) -> list[int]:
        """Return the local ranks whose standby fits and answers; `go` lets them run; the others are ended."""
        if self._on_trial:
            self._on_trial = False
            self._count(-1, "ranks that were standby processes ended before their first step")
        self._end([local_rank for local_rank, spare in self._spares.items() if not spare.ready])
        end = self._clock() + _ANSWER_S

        def ask(local_rank: int, spare: _Spare) -> str:
            if changed := server.changed_at_import(spare.env, workers[local_rank]["env"], _FIXED):
                return f"is older than the value of {changed}"
            return self._answer(spare, {"check": local_rank}, limit_s=max(0.1, end - self._clock()))

        self._each(ask)
        return sorted(self._spares)

    def go(self, workers: list[Request]) -> dict[int, int]:
        """Let those run that `take` returned; return their pids by local rank."""
        pids = {local_rank: spare.pid for local_rank, spare in self._spares.items()}
        for local_rank in pids:
            spare = self._spares.pop(local_rank)
            spare.sock.settimeout(_ANSWER_S)
            with contextlib.suppress(OSError):  # it has just died: a rank that failed
                messages.send(spare.sock, workers[local_rank])
            spare.sock.close()
        self._on_trial = bool(pids)
        if self._is_kept and not self.given_up:
            _log.info("took %d of %d ranks from standby", len(pids), len(workers))
        return pids

    def close(self) -> None:
        """End all of them."""
        self._end([*self._spares])

    def _end(self, local_ranks: Iterable[int]) -> None:
        """End these without waiting for them: the agent reaps what it does not know."""
        for local_rank in local_ranks:
            spare = self._spares.pop(local_rank)
            spare.sock.close()
            kill_group(spare.pid, signal.SIGKILL)
