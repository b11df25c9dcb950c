"""dlrun's side of a copy of the zygote that has rehearsed: used where it is ready and fits, never waited for."""

from __future__ import annotations

import logging
import select
import socket
from dataclasses import dataclass
from typing import Any

from flashckpt.daemon.zygote import messages

_log = logging.getLogger("flashckpt.dlrun")


def key_of(worker: dict[str, Any]) -> str:
    """Return what has to be equal for workers to inherit a rehearsal: command line, world, ranks of this node."""
    env = worker["env"]
    return repr(
        (worker["argv"], worker["module"], *(env.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")))
    )


@dataclass
class WarmCopy:
    """A copy of the zygote.

    Attributes:
        sock: To it.
        pid: Its process, a child of this one.
        key: What it rehearses, as `key_of` the first worker.
        is_asked: Whether the user named what is rehearsed, and so wants to know when it could not be.
        ready: Whether it has rehearsed.
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
