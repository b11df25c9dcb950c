"""The process that exports and copies: `python -m flashckpt.after_commit PARENT`, started by the persister.

It reads lines of JSON from its standard input, first an `Assignment`, then one for each commit, and writes one for each thing that
became of a checkpoint. A lease keeps retention away from each checkpoint from the moment it is seen to be wanted. It ends when
nothing is wanted any more, and is killed with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from flashckpt.after_commit.tasks import Due, Task, due_now, read_tasks
from flashckpt.checkpoint.retention import leased
from flashckpt.daemon.machine.process import die_with_parent
from flashckpt.environment import env
from flashckpt.errors import FencedError, FlashckptError, NoCheckpointError
from flashckpt.faults import crash_point
from flashckpt.shm.persister_process import in_one_line
from flashckpt.storage.factory import open_store

NICE = 19
MOST_DUE = 4
"""Checkpoints that wait, under a lease each; of more the oldest is left out."""


class Assignment(NamedTuple):
    """What the persister sends first.

    Attributes:
        is_first: Whether this persister has started no such process before.
        done: What is made, or cannot be: (generation, step) by place.
    """

    root: str
    options: dict[str, Any]
    is_first: bool
    done: dict[str, list[int]]


class Worker:
    """Makes what is wanted, the oldest first, while `look` adds to it from another thread."""

    def __init__(self, order: Assignment, tasks: list[Task]) -> None:
        self._order, self._tasks = order, tasks
        self._lock = threading.Lock()
        self._due: deque[tuple[Due, contextlib.ExitStack]] = deque()
        self._seen = {place: (one[0], one[1]) for place, one in order.done.items()}
        self._is_first = order.is_first

    def look(self) -> None:
        """Note what is wanted now."""
        store = open_store(self._order.root, **self._order.options)
        try:
            found = [one for one in due_now(store, self._tasks) if self._seen.get(one.place) != one.info.identity]
            there = [one for one in found if one.is_there()]
            newest = {one.task.target: one.info.identity for one in there if one.task.every and self._is_first}
            self._is_first = False
            for due in found:
                self._seen[due.place] = due.info.identity
                if due in there or due.info.identity < newest.get(due.task.target, (0, 0)):
                    _say("there", due)  # an older one that is not there was moved away, or left out
                else:
                    self._add(due)
        finally:
            store.close()
        sys.stdout.write('{"what": "looked"}\n')
        sys.stdout.flush()

    def _add(self, due: Due) -> None:
        lease = contextlib.ExitStack()
        store = open_store(self._order.root, **self._order.options)
        lease.callback(store.close)
        lease.enter_context(leased(store, due.info.prefix))
        with self._lock:
            self._due.append((due, lease))
            late = self._due.popleft() if len(self._due) > MOST_DUE else None
        if late is not None:
            late[1].close()
            _say(
                "left out",
                late[0],
                f"{MOST_DUE} newer ones wait: what is asked for takes longer than commits take to come",
            )

    def work(self) -> bool:
        """Make the oldest that is wanted; False where there is none."""
        with self._lock:
            if not self._due:
                return False
            due, lease = self._due.popleft()
        store = open_store(self._order.root, **self._order.options)
        lease.callback(store.close)
        with lease:
            try:
                begun_s = time.monotonic()
                made = due.make(store, self._order.options)
                crash_point("after-commit.before-report")
                _say("made", due, f"{made} in {time.monotonic() - begun_s:.3g} s")
            except (NoCheckpointError, FencedError) as error:
                _say("left out", due, in_one_line(str(error)))
            except (FlashckptError, OSError) as error:
                _say("failed", due, in_one_line(str(error)))
        return True


def _say(what: str, due: Due, why: str = "") -> None:
    line = {"what": what, "kind": due.task.kind, "place": due.place, "identity": due.info.identity, "why": why}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _listen(worker: Worker) -> None:
    for _ in sys.stdin:
        with contextlib.suppress(FlashckptError, OSError):  # the next process looks again
            worker.look()


def main(arguments: list[str]) -> int:
    """Run; 1 where the root cannot be read."""
    die_with_parent()
    if os.getppid() != int(arguments[0]):
        return 0
    os.nice(NICE)
    order = Assignment(**json.loads(sys.stdin.readline()))
    try:
        worker = Worker(order, read_tasks(env.FLASHCKPT_AFTER_COMMIT))
        worker.look()
    except (FlashckptError, OSError) as error:
        sys.stdout.write(json.dumps({"what": "refused", "why": in_one_line(str(error))}) + "\n")
        return error.exit_code if isinstance(error, FlashckptError) else 1
    threading.Thread(target=_listen, args=(worker,), name="flashckpt-commits", daemon=True).start()
    while worker.work():
        pass
    sys.stdout.flush()
    os._exit(0)  # the other thread may be reading a line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
