"""Starts the process that exports and copies after a commit, tells it of others, and logs what it says. It never waits for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from flashckpt.checkpoint.retention import kept_prefixes
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.printable import printable
from flashckpt.shm.inventory import NodeInventory
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.storage.factory import is_process_local, open_store

LOOK_S, AGAIN_S, MOST_AGAIN_S = 30.0, 60.0, 960.0
"""Seconds between two looks at keep marks, and from a failure to the next attempt, which doubles."""
_log = logging.getLogger("flashckpt.daemon")


class AfterCommit:
    """Extension of the persister, where FLASHCKPT_AFTER_COMMIT is set, on the first node."""

    def __init__(self, directory: JobDirectory, wake: Callable[[], None]) -> None:
        del wake
        self._directory = directory
        self._commands = env.FLASHCKPT_AFTER_COMMIT
        self._every = [int(words[words.index("--every") + 1]) for words in self._commands if "--every" in words]
        self._child: subprocess.Popen[bytes] | None = None
        self._config: JobConfig | None = None
        self._done: dict[str, list[int]] = {}
        self._news: tuple[object, ...] = (None, None, frozenset())
        self._is_first, self._has_failed, self._is_late, self._rest = True, False, False, b""
        self._again_s, self._due_s, self._looked_s = AGAIN_S, float("inf"), float("-inf")
        self._kept: frozenset[str] = frozenset()
        self._looker: threading.Thread | None = None
        self._unlooked = 0  # lines that the process has not acted on yet

    def turn(
        self, config: JobConfig, view: NodeInventory, record: Generation, committed: SnapshotId | None = None
    ) -> None:
        """Have it look where there is a new commit or mark, or a failure is to be tried again."""
        del view, record
        if not self._commands or config.node or committed is None or is_process_local(config.root):
            return
        self._config = config
        self._hear()
        is_wanted = self._is_first or any(committed.step % every == 0 for every in self._every)
        news = config.root, committed if is_wanted else None, self._marks(config)
        is_due = time.monotonic() >= self._due_s and self._child is None
        if is_due or (news != self._news and (is_wanted or news[2] != self._news[2])):
            self._due_s = float("inf")
            self._tell(config)
        self._news = news

    def _marks(self, config: JobConfig) -> frozenset[str]:
        """Return which checkpoints were kept at the last look; a thread looks, where a command asks for those."""
        is_due = len(self._every) < len(self._commands) and time.monotonic() - self._looked_s >= LOOK_S
        if is_due and (self._looker is None or not self._looker.is_alive()):
            self._looked_s = time.monotonic()
            self._looker = threading.Thread(target=self._look, args=(config,), name="flashckpt-marks", daemon=True)
            self._looker.start()
        return self._kept

    def _look(self, config: JobConfig) -> None:
        with (
            contextlib.suppress(FlashckptError, OSError),
            contextlib.closing(open_store(config.root, **config.storage_options)) as store,
        ):
            self._kept = frozenset(kept_prefixes(store))

    def _tell(self, config: JobConfig) -> None:
        self._unlooked += 1
        if self._child is not None:
            assert self._child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, which the next turn hears
                self._child.stdin.write(b"{}\n")
                self._child.stdin.flush()
            return
        order = {"root": config.root, "options": config.storage_options, "is_first": self._is_first, "done": self._done}
        command = [sys.executable, "-m", "flashckpt.after_commit", str(os.getpid())]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, cwd="/")
        assert child.stdin is not None
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
        self._child, self._is_first, self._has_failed = child, False, False

    def _hear(self) -> None:
        """Log what the process says; note its end."""
        if self._child is None:
            return
        code = self._child.poll()  # before its last words are read
        assert self._child.stdout is not None
        *lines, self._rest = (self._rest + (self._child.stdout.read() or b"")).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        if code is not None:
            self._over(code)

    def _note(self, said: Mapping[str, Any]) -> None:
        what, why = said["what"], printable(said.get("why", ""))
        if what == "looked":
            self._unlooked -= 1
            return
        if what == "refused":
            _log.warning("nothing is exported or copied: %s", why)
            return
        place = printable(said["place"])
        if what == "failed":
            self._has_failed = True
            _log.warning("%s cannot be made after its commit, and is tried again: %s", place, why)
            return
        self._done[said["place"]] = said["identity"]
        if what != "there":
            _log.log(logging.INFO if what == "made" else logging.WARNING, "%s is %s: %s", place, what, why)

    def _over(self, code: int) -> None:
        assert self._child is not None
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._child, self._rest = None, b""
        self._is_late = not code and self._unlooked > 0  # it ended before it had read of the last commit
        if self._is_late:
            self._due_s = time.monotonic()
        elif code or self._has_failed:
            self._due_s = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
        else:
            self._again_s = AGAIN_S
        self._unlooked = 0
        if code < 0:
            _log.warning("the process that exports and copies was ended by signal %d", -code)

    def report(self, trouble: str) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """Return nothing."""
        del trouble
        return {}, {}

    def close(self) -> None:
        """After the end of a job wait until all is made that is wanted, or a signal comes; else leave it to the next persister."""
        if self._child is None:
            return
        if self._directory.path.exists():
            self._child.kill()
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        while self._is_at_work():
            pass
        for number, handler in before.items():
            signal.signal(number, handler)

    def _is_at_work(self) -> bool:
        """Wait a moment for its words or end; begin again where it did not read of the last commit."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
        self._hear()
        if self._child is None and self._is_late and self._config is not None:
            self._tell(self._config)
        return self._child is not None

    def _stop(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
