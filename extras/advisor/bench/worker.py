"""Processes that carry out commands, one JSON line at a time: ranks and persister of `bench job`, and those of benchmarks/.

Lines on pipes instead of sockets or pickled calls; a worker dies with its parent. What a worker prints goes to a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from flashckpt import errors
from flashckpt.errors import FlashckptError

_PDEATHSIG = 1
_PARTS = ("problem", "found", "expected", "state", "remedy")
Command = Callable[..., Any]


def serve(make: Callable[[dict[str, Any]], Mapping[str, Command]]) -> None:
    """Run in the host process: fork one worker per pair of descriptors on the command line, and wait for them.

    The host has imported what its workers need, once for all of them, and is single-threaded.

    Args:
        make: Returns the commands of a worker from its configuration; what they return must be JSON.
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
        answer: dict[str, Any]
        try:
            if number == 0:
                commands = make(order)
                answer = {"answer": os.getpid()}
            else:
                answer = {"answer": commands[order.pop("do")](**order)}
        except FlashckptError as error:
            answer = {"error": type(error).__name__, **{part: getattr(error, part) for part in _PARTS}}
        except Exception as error:  # noqa: BLE001 -- sent to the parent, which raises it
            traceback.print_exc()
            answer = {"error": "FlashckptError", "problem": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    log: Path
    orders: TextIO
    answers: TextIO


class Workers:
    """Some worker processes and what is asked of them.

    Args:
        logs: Directory for their output.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._workers: list[_Process] = []

    def start(
        self,
        program: Sequence[str],
        configs: Mapping[str, Mapping[str, Any]],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Start one host with one worker per configuration; return the workers' numbers.

        The first answer of each worker is its process id, once its commands are made.

        Args:
            program: What follows `python` on the command line of a program that calls `serve`: a script, or -m and a module.
            configs: Configuration by name of the worker.
            python: The interpreter.
            environment: Changes to this process' environment.
        """
        pipes = [(os.pipe(), os.pipe()) for _ in configs]  # orders, answers
        theirs = [(orders[0], answers[1]) for orders, answers in pipes]
        log = self._logs / f"{Path(program[-1]).name}.{len(self._hosts)}.log"
        with log.open("w") as output:
            host = subprocess.Popen(
                [python, *program, str(os.getpid()), *(f"{r}:{w}" for r, w in theirs)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
                pass_fds=[fd for pair in theirs for fd in pair],
                start_new_session=True,  # Ctrl-C goes to the parent alone, which ends the others in order
            )
        self._hosts.append(host)
        first = len(self._workers)
        for (name, config), (orders, answers) in zip(configs.items(), pipes, strict=True):
            os.close(orders[0])
            os.close(answers[1])
            self._workers.append(_Process(name, log, os.fdopen(orders[1], "w", buffering=1), os.fdopen(answers[0])))
            self._send(len(self._workers) - 1, config)
        return list(range(first, len(self._workers)))

    def ask(self, workers: Sequence[int], do: str, **order: Any) -> list[Any]:
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

    def answers(self, workers: Sequence[int]) -> list[Any]:
        """Wait for one answer of each worker; all are read before an error is raised."""
        found = [self._answer(number) for number in workers]
        for number, answer in zip(workers, found, strict=True):
            if "error" in answer:
                self._raise(number, answer)
        return [answer["answer"] for answer in found]

    def has_answered(self, worker: int) -> bool:
        """Whether an answer of a worker can be read without waiting."""
        return bool(select.select([self._workers[worker].answers], [], [], 0)[0])

    def close(self) -> None:
        """End all workers at once; what they were doing is of no use any more."""
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
        """Let idle workers end normally, so that their CPU time counts as ours."""
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
            f"the {worker.name} process of the benchmark died",
            found=tail or "no message: it may have been killed for memory",
            state="What was written is removed.",
            remedy="a smaller --scale or fewer --ranks",
        )

    def _raise(self, number: int, answer: dict[str, Any]) -> NoReturn:
        kind = getattr(errors, str(answer.pop("error")), FlashckptError)
        problem = f"{self._workers[number].name}: {answer.pop('problem')}"
        raise kind(problem, **answer)


@contextlib.contextmanager
def workers(logs: Path) -> Iterator[Workers]:
    """Give a `Workers` whose processes have all ended after the body: normally, or by force after an error."""
    made = Workers(logs)
    try:
        yield made
        made.finish()
    finally:
        made.close()
