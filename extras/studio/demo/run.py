"""Starts, watches, kills and cleans up the runs of the demo; it is a user of dlrun and of the job directory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.errors import DataError, FlashckptError, JobInUseError
from flashckpt.printable import printable
from flashckpt.shm import block
from flashckpt.shm.control import Control
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.private import private_directory, remove_tree
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.prepared import check_prepared
from flashckpt.trainer.prepare.corpus import prepare_corpus
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.train.metrics import TRACE, read_trace

PROMPT = "The "
TOKENS = 40


def without_library(config: RunConfig) -> list[str]:
    """Return the settings with which a run that trains a BPE reads bytes, where the tokenizers library is not installed."""
    if not config.data.bpe or importlib.util.find_spec("tokenizers") is not None:
        return []
    return ["--data.bpe", "0", "--model.vocab", "256", "--data.folder", f"{config.data.folder}-bytes"]


def prepare_text(config: RunConfig) -> str:
    """Prepare the tokens of a run, unless they are; return what they are, channel by channel.

    Raises:
        DataError, ConfigError: They cannot be prepared.
    """
    if not config.data.sources:
        index = prepare_corpus(config.data.folder, config.data.source, config.data.holdout_every)
        sets = [entry for entry in index["sets"].values() if entry["split"] == "train"]
        return ", ".join(f"{entry['channel']} {entry['tokens'] / 1e6:.2f} M bytes" for entry in sets)
    try:
        index = check_prepared(config) or prepare(config.data)
    except DataError:
        index = prepare(config.data)
    kind = f"tokens of a BPE of {index['vocab']}" if config.data.bpe else "bytes"
    counts = [sum(record["train"]["tokens"] for record in records) for records in index["sources"]]
    channels = [source.channel for source in config.data.sources]
    return ", ".join(f"{name} {count / 1e6:.2f} M {kind}" for name, count in zip(channels, counts, strict=True))


def say_words(root: Path) -> tuple[bool, str]:
    """Return whether `generate` worked on the newest checkpoint of a root, and what it printed."""
    command = [
        sys.executable, "-m", "flashckpt.trainer", "generate", str(root), PROMPT,
        "--max-tokens", str(TOKENS), "--temperature", "0.6", "--seed", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    text = done.stdout if done.returncode == 0 else done.stderr
    return done.returncode == 0, printable(" ".join(text.split()))


STALL_S = 300.0
_POLL_S = 0.02


@dataclass(kw_only=True)
class DemoRun:
    """One job of the demo under dlrun."""

    name: str
    folder: Path
    root: Path
    job: str
    config: Path
    ranks: int
    overrides: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def ledger(self) -> Path:
        """The file in which dlrun writes one line per failure."""
        return self.folder / "ledger.jsonl"

    def trace(self) -> list[dict[str, Any]]:
        """Return the finished steps so far."""
        return read_trace(self.folder / TRACE)

    @contextlib.contextmanager
    def running(self) -> Iterator[DemoRun]:
        """Start dlrun; nothing of it is left running on any exit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "flashckpt.daemon.run", "--nproc-per-node", str(self.ranks), "--max-restarts", "3",
            "--ledger", str(self.ledger), "-m", "flashckpt.trainer", "--config", str(self.config),
            "--log.folder", str(self.folder), "--checkpoint.root", str(self.root), "--checkpoint.job", self.job, *self.overrides,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with (self.folder / "dlrun.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        try:
            yield self
        finally:
            self._end()

    def wait(self, done: Callable[[], bool], tick: Callable[[list[dict[str, Any]]], None], what: str) -> None:
        """Wait until `done()`; call `tick(trace)` meanwhile.

        Raises:
            FlashckptError: dlrun ended first, or no step finished for five minutes.
        """
        seen, since = -1, time.monotonic()
        while not done():
            trace = self.trace()
            tick(trace)
            if len(trace) != seen:
                seen, since = len(trace), time.monotonic()
            if self.process is not None and self.process.poll() is not None and not done():
                raise self._failed(
                    f"the {self.name} ended while waiting for {what}", f"exit code {self.process.returncode}"
                )
            if time.monotonic() - since > STALL_S:
                raise self._failed(
                    f"the {self.name} finished no step for {STALL_S:.0f} s", f"{seen} steps, waiting for {what}"
                )
            time.sleep(_POLL_S)
        tick(self.trace())

    def wait_step(
        self, step: int, tick: Callable[[list[dict[str, Any]]], None], *, since: float = 0.0
    ) -> dict[str, Any]:
        """Wait until `step` is finished (again, if `since` is a time.time()) and return its line."""
        found: list[dict[str, Any]] = []

        def done() -> bool:
            found[:] = [line for line in self.trace() if line["step"] >= step and line["time"] > since]
            return bool(found)

        self.wait(done, tick, f"step {step}")
        return found[0]

    def wait_end(self, tick: Callable[[list[dict[str, Any]]], None]) -> None:
        """Wait until dlrun has ended with code 0."""
        process = self.process
        assert process is not None
        self.wait(lambda: process.poll() == 0, tick, "the end")

    def rank_pids(self) -> dict[int, int]:
        """Return pid by rank, from the job's control page."""
        control = Control.open(JobDirectory.open(self.job, create=False).control_path)
        rows = [control.row(i) for i in range(control.rows)]
        return {row.rank: row.pid for row in rows if row.pid > 0 and row.rank >= 0}

    def kill_rank(self, rank: int) -> float:
        """Send SIGKILL to one rank and return time.time() of it."""
        pid = self.rank_pids()[rank]
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def lose_machine(self) -> int:
        """Kill launcher, ranks and daemon at once and delete the job's shared memory; return the bytes lost."""
        assert self.process is not None
        directory = JobDirectory.open(self.job, create=False)
        pids = [*self.rank_pids().values()]
        os.killpg(self.process.pid, signal.SIGKILL)
        for pid in pids:
            _kill(pid)
        stop_daemon(directory)
        self.process.wait()
        for pid in pids:
            _wait_gone(pid)
        lost = sum(path.stat().st_blocks * 512 for path in directory.path.rglob("*") if path.is_file())
        block.withdraw_all(directory.path)
        shutil.rmtree(directory.path)
        return lost

    def _end(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _failed(self, problem: str, found: str) -> FlashckptError:
        log = (self.folder / "dlrun.log").read_text(errors="replace").splitlines()[-25:]
        return FlashckptError(
            problem,
            found=found + "; the last lines of its output:\n    " + "\n    ".join(log),
            remedy=f"the whole output is in {self.folder / 'dlrun.log'}",
        )


def forget_job(job: str) -> None:
    """Remove what an earlier, interrupted demo left in memory under this job id.

    Raises:
        JobInUseError: its ranks are still running.
    """
    try:
        directory = JobDirectory.open(job, create=False)
    except FileNotFoundError:
        return
    if directory.anyone_alive():
        raise JobInUseError(
            "another demo is running in this folder",
            found=f"live ranks of job {job}",
            expected="none",
            remedy="wait until it ends, or run this one elsewhere: python -m flashckpt.trainer.demo --folder out/demo2",
        )
    stop_daemon(directory)
    block.withdraw_all(directory.path)
    with contextlib.suppress(FileNotFoundError), private_directory(directory.path.parent) as base:
        remove_tree(directory.path.name, base)


def stop_daemon(directory: JobDirectory) -> None:
    """Kill the job's daemon, if one is running, and wait until it is gone."""
    status = directory.read_status()
    if directory.daemon_alive() and status is not None and status.pid > 0:
        _kill(status.pid)
        _wait_gone(status.pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.005)
