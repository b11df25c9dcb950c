"""dlrun's own process context: workers from the zygote (or spawned), watched by pidfds, killed as groups."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flashckpt import entry_points
from flashckpt.daemon.launcher import hang, job_secret, spawn_main
from flashckpt.daemon.launcher.failure import WorkerExit, first_failure, read_error
from flashckpt.daemon.launcher.log_folders import logs_elsewhere, opened
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.machine import numa
from flashckpt.daemon.machine.process import (
    die_with_parent,
    exit_code,
    is_stopped,
    kill_group,
    reap_strays,
    wait_readable,
)
from flashckpt.daemon.zygote.client import Unavailable, ZygoteClient
from flashckpt.daemon.zygote.rehearse import NO_REHEARSAL
from flashckpt.shm import agent_folder

_log = logging.getLogger("flashckpt.dlrun")
_SETTLE_S = 0.25
_KILL_WAIT_S = 30.0
_STACKS_S = 0.1  # ranks answer within a few milliseconds, and a restart waits for them


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A Python script or module that a forked worker can run itself."""

    argv: tuple[str, ...]
    module: bool


def _own_rehearsal(module: str) -> str:
    """Return what rehearses a step of a module; "" for one that is not the trainer."""
    entry = entry_points.find(entry_points.EXTRAS, "rehearsal") if module == "flashckpt.trainer" else None
    return "" if entry is None else entry.target


@dataclass(kw_only=True)
class _WorkerProcess:
    local_rank: int
    pid: int
    pidfd: int
    exit: WorkerExit | None = None  # how it ended, unless this context ended it
    ended: bool = False


class WorkerContext(PContext):
    """The processes of one generation on this node.

    Args:
        zygote: Where forked workers come from.
        scripts: Per local rank, what a forked worker runs; None spawns `entrypoint` with `args`.
        survivors_s: Seconds between SIGTERM and SIGKILL for the ranks left after a failure; 0 kills at once.
        cpus: Per local rank, the processors to bind to, and so the memory beside them.
        standbys: How many processes are to be ready for the next generation.
        kwargs: The arguments of torch's PContext.
    """

    def __init__(
        self,
        *,
        zygote: ZygoteClient,
        scripts: dict[int, ScriptCommand] | None,
        survivors_s: float = 0.0,
        cpus: dict[int, list[int]] | None = None,
        standbys: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._zygote, self._scripts = zygote, scripts
        self._survivors_s, self._cpus, self._standbys = survivors_s, cpus or {}, standbys
        self._workers: dict[int, _WorkerProcess] = {}
        self._result: RunProcsResult | None = None
        self._closed = False
        self.forked = False
        self.fork_s = 0.0
        self.detected_s = 0.0
        self.stopped_s = 0.0
        self.standing: list[WorkerExit] = []
        self.survivors: list[hang.RankState] = []

    def start(self) -> None:
        """Start workers and log tails; unlike torch's, this leaves signal handlers to the agent."""
        self._start()
        for tail_log in self._tail_logs:
            tail_log.start()

    def _start(self) -> None:
        begun = time.monotonic()
        pids = self._fork() if self._scripts is not None else None
        self.forked = pids is not None
        if pids is None:
            pids = [self._spawn(local_rank) for local_rank in range(self.nprocs)]
        for local_rank, pid in enumerate(pids):
            self._workers[local_rank] = _WorkerProcess(local_rank=local_rank, pid=pid, pidfd=os.pidfd_open(pid))
        self.fork_s = time.monotonic() - begun

    def _fork(self) -> list[int] | None:
        assert self._scripts is not None
        requests = [self._request(local_rank, script) for local_rank, script in sorted(self._scripts.items())]
        try:
            return self._zygote.fork(requests)
        except Unavailable as why:
            _log.warning("starting new interpreters, which takes seconds: %s", why.reason)
            return None

    def rehearse(self, asked: str) -> None:
        """Let the zygote prepare another generation like this one; called again and again, it does so once. `asked` is --warm."""
        if not self._scripts or not self.forked or asked == NO_REHEARSAL:
            return
        first = min(self._scripts)
        script = self._scripts[first]
        if target := asked or (_own_rehearsal(script.argv[0]) if script.module else ""):
            self._zygote.rehearse(target, self._request(first, script), is_asked=bool(asked))

    def keep_standbys(self, agent_dir: Path) -> None:
        """Let the zygote have processes ready for the next generation; to be called again and again while all ranks train."""
        scripts = self._scripts
        if scripts and self.forked:
            count, late = min(self._standbys, self.nprocs), agent_folder.late_variable(agent_dir)
            self._zygote.keep_standbys(count, lambda rank: self._request(rank, scripts[rank]), late=late)

    def _request(self, local_rank: int, script: ScriptCommand) -> dict[str, Any]:
        environment = self.envs[local_rank]
        folder = environment.get("FLASHCKPT_AGENT_DIR", "")
        return {
            "argv": list(script.argv),
            "module": script.module,
            "env": {**job_secret.without(os.environ), **environment},
            "stdout": self.stdouts[local_rank],
            "stderr": self.stderrs[local_rank],
            "local_rank": local_rank,
            "cpus": self._cpus.get(local_rank),
            "error_file": environment.get("TORCHELASTIC_ERROR_FILE", ""),
            "stacks_file": environment.get("FLASHCKPT_STACKS_FILE", ""),
            "late_file": f"{folder}/{agent_folder.LATE}" if self._standbys and folder else "",
        }

    def _spawn(self, local_rank: int) -> int:
        environment = {**job_secret.without(os.environ), **self.envs[local_rank]}
        command = self._command(local_rank)
        streams = [opened(path) for path in (self.stdouts[local_rank], self.stderrs[local_rank])]
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=True,
                preexec_fn=_follower(os.getpid(), self._cpus.get(local_rank)),  # noqa: PLW1509 -- system calls only
            )
        finally:
            for stream in streams:
                if stream is not None:
                    stream.close()
        process.returncode = 0  # reaped by its pidfd; keeps Popen's destructor from waiting for it
        return process.pid

    def _command(self, local_rank: int) -> list[str]:
        """Return what to spawn; a Python script starts through spawn_main, which adds stack dumps and a traceback."""
        if self._scripts is None:
            return [str(self.entrypoint), *(str(arg) for arg in self.args[local_rank])]
        script = self._scripts[local_rank]
        return spawn_main.command(list(script.argv), module=script.module, own_log=bool(self.stderrs[local_rank]))

    def pids(self) -> dict[int, int]:
        """Return pids by local rank."""
        return {local_rank: worker.pid for local_rank, worker in self._workers.items()}

    def exits(self) -> list[WorkerExit]:
        """Return the exits seen so far, except of workers that this context killed."""
        return [worker.exit for worker in self._workers.values() if worker.exit is not None]

    def wait_event(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> None:
        """Return when a worker ends, an extra descriptor is readable, or the time is up."""
        running = [worker.pidfd for worker in self._workers.values() if not worker.ended]
        wait_readable([*running, *extra_fds], timeout_s)

    def _reap(self) -> None:
        for worker in self._workers.values():
            if not worker.ended and (code := exit_code(worker.pidfd)) is not None:
                worker.exit, worker.ended = self._exit(worker, code), True

    def _exit(self, worker: _WorkerProcess, code: int) -> WorkerExit:
        summary, trace, at_ns = read_error(self.error_files.get(worker.local_rank, "")) if code else ("", "", 0)
        return WorkerExit(
            local_rank=worker.local_rank,
            rank=int(self.envs[worker.local_rank].get("RANK", worker.local_rank)),
            pid=worker.pid,
            code=code,
            at_ns=at_ns or time.time_ns(),
            summary=summary,
            traceback=trace,
        )

    def _poll(self) -> RunProcsResult | None:
        if self._result is not None:
            return self._result
        self._reap()
        failed = [item for item in self.exits() if item.failed]
        if failed:
            self._result = self._fail()
        elif len(self.exits()) == self.nprocs:
            self.close()
            done: dict[int, Any] = dict.fromkeys(range(self.nprocs))
            self._result = RunProcsResult(return_values=done, stdouts=self.stdouts, stderrs=self.stderrs)
        return self._result

    def _fail(self) -> RunProcsResult:
        """Wait briefly for the root cause if only lost connections were seen, then end the survivors."""
        self.detected_s = time.monotonic()
        end = self.detected_s + _SETTLE_S
        while all(item.is_echo for item in self.exits() if item.failed) and (left := end - time.monotonic()) > 0:
            if len(self.exits()) == self.nprocs:
                break
            self.wait_event(left)
            self._reap()
        failed = sorted((item for item in self.exits() if item.failed), key=lambda item: item.at_ns)
        first = first_failure(failed)
        self.standing = [self._exit(worker, -signal.SIGKILL) for worker in self._running() if is_stopped(worker.pid)]
        self.survivors = self._look_at(self._running())
        failed.sort(key=lambda item: item is not first)
        self.close(signal.SIGTERM if self._survivors_s else signal.SIGKILL, int(self._survivors_s))
        self.stopped_s = time.monotonic()
        failures = {item.local_rank: self._failure(item) for item in failed}
        failures[first.local_rank].timestamp = min(failure.timestamp for failure in failures.values())
        return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)

    def _look_at(self, left: Sequence[_WorkerProcess]) -> list[hang.RankState]:
        """Return where ranks are that have not failed, before they are killed."""
        awake = {worker.local_rank: worker.pid for worker in left if not is_stopped(worker.pid)}
        files = {rank: Path(self.envs[rank].get("FLASHCKPT_STACKS_FILE", "")) for rank in awake}
        stacks = hang.collect(awake, files, wait_s=_STACKS_S) if awake else {}
        found = []
        for worker in left:
            trace = read_error(self.error_files.get(worker.local_rank, ""))[1]  # it lost its peer, and is about to end
            stack = hang.frames_of(trace) or stacks.get(worker.local_rank, ())
            found.append(
                hang.RankState(
                    rank=int(self.envs[worker.local_rank].get("RANK", worker.local_rank)),
                    pid=worker.pid,
                    step=-1,
                    stack=stack,
                    kernel="" if stack else hang.kernel_state(worker.pid),
                )
            )
        return found

    def abort(self) -> None:
        """Kill every worker of a group that hangs."""
        self.detected_s = time.monotonic()
        self.close(signal.SIGKILL, 0)
        self.stopped_s = time.monotonic()

    def _failure(self, item: WorkerExit) -> ProcessFailure:
        path = self.error_files.get(item.local_rank, "") if item.traceback or item.summary else ""
        return ProcessFailure(local_rank=item.local_rank, pid=item.pid, exitcode=item.code, error_file=path)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End every worker group: `death_sig`, then SIGKILL after `timeout` seconds; children are reaped."""
        if self._closed:
            return
        left = self._running()
        for worker in left:
            kill_group(worker.pid, death_sig)
        if death_sig != signal.SIGKILL:
            self._await_end(left, timeout)
            for worker in (left := self._running()):
                kill_group(worker.pid, signal.SIGKILL)
        self._await_end(left, _KILL_WAIT_S)
        for worker in self._running():
            _log.error("worker %d did not end after SIGKILL: it is blocked in the kernel", worker.pid)
        for worker in self._workers.values():
            kill_group(worker.pid, signal.SIGKILL, reaped=True)  # children that outlive a rank hold its files and locks
            os.close(worker.pidfd)
        self._closed = True
        self._clear_display()
        reap_strays({worker.pid for worker in self._workers.values()} | self._zygote.pids)

    def _clear_display(self) -> None:
        """Erase what a rank that was killed has drawn at the end of the screen; the cursor is at the beginning of it."""
        folder = next((env["FLASHCKPT_AGENT_DIR"] for env in self.envs.values() if "FLASHCKPT_AGENT_DIR" in env), "")
        if folder and agent_folder.forget_display(Path(folder)):
            for fd in (fd for fd in (2, 1) if os.isatty(fd)):
                with contextlib.suppress(OSError):  # the terminal was closed
                    os.write(fd, b"\r\x1b[J")
                break

    def _running(self) -> list[_WorkerProcess]:
        for worker in self._workers.values():
            worker.ended = worker.ended or exit_code(worker.pidfd) is not None
        return [worker for worker in self._workers.values() if not worker.ended]

    def _await_end(self, workers: list[_WorkerProcess], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while (left := [worker for worker in workers if not worker.ended]) and time.monotonic() < end:
            wait_readable([worker.pidfd for worker in left], end - time.monotonic())
            self._running()


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """One start of the worker group on this node: how many starts and failures came before it, how far back it goes.

    `leave_out`: the steps whose samples are left out; `restore_step`: the one to go back to, -1 for the newest.
    """

    number: int
    failures: int
    job: str
    watch: JobWatch
    back: int = 0
    leave_out: tuple[int, int] = (0, 0)
    restore_step: int = -1

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return what dlrun adds to torchrun's environment of a worker."""
        extra = {
            "TORCHELASTIC_RESTART_COUNT": str(self.failures),
            "FLASHCKPT_AGENT_DIR": str(self.watch.agent_dir),
            "FLASHCKPT_RESTART": str(self.number),
            "FLASHCKPT_BACK": str(self.back),
            "FLASHCKPT_LEAVE_OUT": "{}-{}".format(*self.leave_out),
            "FLASHCKPT_RESTORE_STEP": str(self.restore_step),
            "FLASHCKPT_STACKS_FILE": str(self.watch.stacks_file(local_rank)),
        }
        return {**extra, "FLASHCKPT_JOB_ID": self.job} if self.job else extra


def make_context(
    start: GroupStart,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    *,
    envs: dict[int, dict[str, str]],
    start_method: str,  # noqa: ARG001 -- of functions only
    numa_options: Any,
    **rest: Any,
) -> WorkerContext:
    """Build the context of one start from the arguments of torch's start_processes, with its own log directory.

    torch names the log directory by TORCHELASTIC_RESTART_COUNT, which does not count changes of membership.
    """
    for env in envs.values():
        env["TORCHELASTIC_RESTART_COUNT"] = str(start.number)
    given = {
        "envs": envs,
        "cpus": bindings(numa_options, len(args)),
        "entrypoint": entrypoint if isinstance(entrypoint, str) else sys.executable,
        "args": args if isinstance(entrypoint, str) else {rank: ("-u", *item) for rank, item in args.items()},
        **rest,
    }
    try:
        context = WorkerContext(**given)
    except OSError as error:  # torch makes the folders of the logs there
        context = WorkerContext(**given | {"logs_specs": logs_elsewhere(error, start.watch.agent_dir)})
    for local_rank, env in envs.items():
        env.update(start.environment(local_rank))
    return context


def script_commands(
    entrypoint: Callable[..., Any] | str, args: dict[int, tuple[Any, ...]]
) -> dict[int, ScriptCommand] | None:
    """Return what a forked worker can run in place of this command, None if it must be spawned."""
    if entrypoint is torchrun.run_script_path:
        return {rank: ScriptCommand(argv=tuple(map(str, item)), module=False) for rank, item in args.items()}
    if entrypoint != sys.executable:
        return None
    commands = {}
    for rank, item in args.items():
        words = [str(word) for word in item]
        if words[:1] != ["-u"]:
            return None
        module = words[1:2] == ["-m"]
        rest = words[2:] if module else words[1:]
        if not rest or rest[0].startswith("-"):
            return None
        commands[rank] = ScriptCommand(argv=tuple(rest), module=module)
    return commands


def bindings(numa_options: Any, count: int) -> dict[int, list[int]]:
    """Return the processors of each local rank under --numa-binding, {} without it."""
    if numa_options is None:
        return {}
    from torch.numa.binding import _get_logical_cpus_to_bind_to

    return {
        rank: sorted(_get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=numa_options)) for rank in range(count)
    }


def _follower(parent: int, cpus: list[int] | None) -> Callable[[], None]:
    return functools.partial(_follow, parent, cpus)


def _follow(parent: int, cpus: list[int] | None) -> None:
    die_with_parent()
    if cpus and (refused := numa.bind(cpus)):
        os.write(2, f"[dlrun] {refused}\n".encode())
    if os.getppid() != parent:
        os._exit(1)
