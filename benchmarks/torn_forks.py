"""Processes of one saver for `torn_savers.py`: one process imports what is slow, and every trial is a fork of it.

A fork has no state of the saver: that is made after it. `torn_saver.py SAVER serve` is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import stream

DEADLINE_S = 60.0


class Zygote:
    """The process that is forked.

    Args:
        command: That starts it.
        env: Of it, beside the harness's own.
    """

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._forks: list[Fork] = []
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **env},
        )

    def fork(self, words: list[str], env: Mapping[str, str], folder: Path) -> Fork:
        """Return a fork that does what `words` say; `folder` is for the pipe that it speaks through."""
        pipe = folder / f"said-{time.time_ns()}"
        os.mkfifo(pipe)
        asked = stream(self._process.stdin)
        asked.write(json.dumps({"words": words, "env": dict(env), "pipe": str(pipe)}) + "\n")
        asked.flush()
        answer = stream(self._process.stdout).readline()
        if not answer:
            self.log.seek(0)
            raise RuntimeError(f"the saver does not start:\n{self.log.read()[-2000:]}")
        self._forks.append(Fork(int(json.loads(answer)["pid"]), pipe))
        return self._forks[-1]

    def close(self) -> None:
        """End it, and the forks that are left."""
        for fork in self._forks:
            fork.kill()
        stream(self._process.stdin).close()
        self._process.wait(20)
        stream(self._process.stdout).close()
        self.log.close()


class Fork:
    """One process, and what it said so far.

    Args:
        pid: Of it.
        pipe: That it writes its events to.
    """

    def __init__(self, pid: int, pipe: Path) -> None:
        self.pid, self._pipe = pid, pipe
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._pipe.open() as lines:
            for line in lines:
                self.said.append(json.loads(line))

    def newest(self, event: str) -> int:
        """Return the last step of an event; 0 where there is none."""
        return max((one["step"] for one in self.said if one["event"] == event), default=0)

    def wait_for(self, event: str, step: int) -> None:
        """Wait until it has said so; RuntimeError where it ended before."""
        end = time.monotonic() + DEADLINE_S
        while self.newest(event) < step:
            if not self._reader.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"{event!r} of step {step} did not come")
            time.sleep(0.0005)

    def join(self) -> bool:
        """Wait for its end; False, and SIGKILL, after the deadline."""
        self._reader.join(DEADLINE_S)
        in_time = not self._reader.is_alive()
        self.kill()
        return in_time

    def kill(self) -> None:
        """SIGKILL; return when it is gone, with what it said before."""
        while Path(f"/proc/{self.pid}").exists():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(0.001)
        self._reader.join(DEADLINE_S)
