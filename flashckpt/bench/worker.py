"""Processes that do what they are told, one JSON line at a time: the ranks and the persister of `bench job`.

Lines on stdin and stdout instead of sockets or pickled calls; a worker dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flashckpt import errors
from flashckpt.errors import FlashckptError

_PDEATHSIG = 1
Command = Callable[..., Mapping[str, Any]]


def serve(make: Callable[[dict[str, Any]], Mapping[str, Command]]) -> None:
    """Run in the worker: build the commands from the first line, then answer every further line until end of input."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not become an answer
    commands: Mapping[str, Command] = {}
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        try:
            if number == 0:
                commands, answer = make(order), {}
            else:
                answer = dict(commands[order.pop("do")](**order))
        except FlashckptError as error:
            parts = {key: getattr(error, key) for key in ("problem", "found", "expected", "state", "remedy")}
            answer = {"error": type(error).__name__, **parts}
        except Exception as error:  # noqa: BLE001 -- told to the parent, which raises it
            traceback.print_exc()
            answer = {"error": "FlashckptError", "problem": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")


class Workers:
    """Some worker processes and what is asked of them.

    Args:
        logs: Directory for their standard error.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: list[subprocess.Popen[str]] = []
        self._names: list[str] = []

    def start(self, module: str, name: str, config: Mapping[str, Any]) -> int:
        """Start `python -m module` and send it its configuration; return its number."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with (self._logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the parent alone, which ends the others in order
            )
        self._processes.append(process)
        self._names.append(name)
        self._send(len(self._processes) - 1, config)
        return len(self._processes) - 1

    def ask(self, workers: Sequence[int], do: str, **order: Any) -> list[dict[str, Any]]:
        """Give the same order to several workers at once and return their answers, in the order of `workers`.

        Raises:
            FlashckptError: The first error of a worker, or that it died.
        """
        self.tell(workers, do, **order)
        return self.answers(workers)

    def tell(self, workers: Sequence[int], do: str, **order: Any) -> None:
        """Give an order without waiting for the answers."""
        for number in workers:
            self._send(number, {"do": do, **order})

    def answers(self, workers: Sequence[int]) -> list[dict[str, Any]]:
        """Wait for one answer of each worker; all are read before an error is raised."""
        found = [self._answer(number) for number in workers]
        for number, answer in zip(workers, found, strict=True):
            if "error" in answer:
                self._raise(number, answer)
        return found

    def close(self) -> None:
        """End all workers; what they were doing is of no use any more."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # an order that it did not live to read
                        pipe.close()
            process.wait()
        self._processes = []

    def finish(self) -> None:
        """Let idle workers end by themselves, so that their CPU time counts as ours."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _send(self, number: int, order: Mapping[str, Any]) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        except BrokenPipeError:
            self._died(number)

    def _answer(self, number: int) -> dict[str, Any]:
        stdout = self._processes[number].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._died(number)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, number: int) -> NoReturn:
        code = self._processes[number].wait()
        tail = (self._logs / f"{self._names[number]}.log").read_text()[-2000:].strip()
        raise FlashckptError(
            f"The {self._names[number]} process of the benchmark died.",
            found=f"signal {-code}" if code < 0 else f"exit code {code}" + (f"; {tail}" if tail else ""),
            state="What was written is removed.",
            remedy="a smaller --scale or fewer --ranks if it was killed for memory",
        )

    def _raise(self, number: int, answer: dict[str, Any]) -> NoReturn:
        kind = getattr(errors, str(answer.pop("error")), FlashckptError)
        problem = f"{self._names[number]}: {answer.pop('problem')}"
        raise kind(problem, **answer)
