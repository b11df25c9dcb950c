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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from flashckpt import errors
from flashckpt.errors import FlashckptError

_PDEATHSIG = 1
Command = Callable[..., Mapping[str, Any]]


def serve(make: Callable[[dict[str, Any]], Mapping[str, Command]]) -> None:
    """Run in the host process: fork one worker per pair of descriptors on the command line, and wait for them.

    The host has imported what its workers need, once for all of them, and is single-threaded.
    """
    parent, *pairs = sys.argv[1:]
    _die_with(int(parent))
    ends = [tuple(map(int, pair.split(":"))) for pair in pairs]
    host, children = os.getpid(), []
    for orders, answers in ends:
        if child := os.fork():
            children.append(child)
            continue
        _die_with(host)
        for other in {fd for pair in ends for fd in pair} - {orders, answers}:
            os.close(other)
        _work(make, orders, answers)
        os._exit(0)
    for pair in ends:
        for fd in pair:
            os.close(fd)
    for child in children:
        os.waitpid(child, 0)  # its CPU time becomes ours, and ours the benchmark's


def _die_with(parent: int) -> None:
    """Let this process be killed when its parent dies, also if that has just happened."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(make: Callable[[dict[str, Any]], Mapping[str, Command]], orders: int, answers: int) -> None:
    """Build the commands from the first line, then answer every further line until end of input."""
    out = os.fdopen(answers, "w", buffering=1)
    commands: Mapping[str, Command] = {}
    for number, line in enumerate(os.fdopen(orders)):
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


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    log: Path
    orders: TextIO
    answers: TextIO


class Workers:
    """Some worker processes and what is asked of them.

    Args:
        logs: Directory for their standard error.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._workers: list[_Worker] = []

    def start(self, module: str, configs: Mapping[str, Mapping[str, Any]]) -> list[int]:
        """Start `python -m module` with one worker per name in `configs`; return their numbers."""
        pipes = [(os.pipe(), os.pipe()) for _ in configs]  # orders, answers
        theirs = [(orders[0], answers[1]) for orders, answers in pipes]
        log = self._logs / f"{module}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log.open("w") as errors_to:
            host = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), *(f"{r}:{w}" for r, w in theirs)],
                stdin=subprocess.DEVNULL,
                stdout=errors_to,
                stderr=errors_to,
                env=environment,
                pass_fds=[fd for pair in theirs for fd in pair],
                start_new_session=True,  # Ctrl-C goes to the parent alone, which ends the others in order
            )
        self._hosts.append(host)
        first = len(self._workers)
        for (name, config), (orders, answers) in zip(configs.items(), pipes, strict=True):
            os.close(orders[0])
            os.close(answers[1])
            self._workers.append(_Worker(name, log, os.fdopen(orders[1], "w", buffering=1), os.fdopen(answers[0])))
            self._send(len(self._workers) - 1, config)
        return list(range(first, len(self._workers)))

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
        for host in self._hosts:
            host.kill()  # and its workers with it
        for host in self._hosts:
            host.wait()
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # an order that it did not live to read
                worker.orders.close()
            worker.answers.read()  # until the last of them has died
            worker.answers.close()
        self._hosts, self._workers = [], []

    def finish(self) -> None:
        """Let idle workers end by themselves, so that their CPU time counts as ours."""
        for worker in self._workers:
            worker.orders.close()
        for host in self._hosts:
            host.wait()

    def _send(self, number: int, order: Mapping[str, Any]) -> None:
        try:
            self._workers[number].orders.write(json.dumps(order) + "\n")
        except BrokenPipeError:
            self._died(number)

    def _answer(self, number: int) -> dict[str, Any]:
        line = self._workers[number].answers.readline()
        if not line:
            self._died(number)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, number: int) -> NoReturn:
        worker = self._workers[number]
        tail = worker.log.read_text()[-2000:].strip()
        raise FlashckptError(
            f"The {worker.name} process of the benchmark died.",
            found=tail or "no message: it may have been killed for memory",
            state="What was written is removed.",
            remedy="a smaller --scale or fewer --ranks",
        )

    def _raise(self, number: int, answer: dict[str, Any]) -> NoReturn:
        kind = getattr(errors, str(answer.pop("error")), FlashckptError)
        problem = f"{self._workers[number].name}: {answer.pop('problem')}"
        raise kind(problem, **answer)
