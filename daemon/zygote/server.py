"""The zygote: a single-threaded process that has imported everything and is forked for every worker.

Most of a restart under torchrun is Python importing torch and torch._dynamo in every rank. The zygote
imports them once, touches no device, store, process group or user code, and forks ranks in
milliseconds. The conditions that make the fork safe are checked: `unfit` names the first one that does
not hold, and dlrun then spawns new interpreters instead.

A worker is forked twice, so that it becomes the agent's own child (the agent is a child subreaper):
it survives the zygote, dies with the agent, and the agent reaps its true exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from flashckpt import entry_points
from flashckpt.daemon.machine.process import adopt_parent, set_title, thread_count
from flashckpt.daemon.zygote import messages
from flashckpt.daemon.zygote.rehearse import rehearse
from flashckpt.daemon.zygote.standby import stand_by

FIRST_MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
)
"""The modules that any script needs: the first workers wait for no others, where there are cores for their own imports."""
OWN_MODULES = (
    "numpy.ma",  # the first np.unique imports it
    "flashckpt.core.manifest",
    "flashckpt.checkpoint.catalog",
    "flashckpt.restore.gather",
    "flashckpt.restore.candidate",
    "flashckpt.restore.absent_state",
    "flashckpt.restore.coordinator",
    "flashckpt.session.opening",
    "flashckpt.session.checkpointer",
    "flashckpt.storage.conditional",
    "flashckpt.storage.factory",
    "flashckpt.storage.posix",
    "flashckpt.storage.direct_io",
    "flashckpt.state.replication",
    "flashckpt.sampler",
)
"""Those of scripts with a Checkpointer, in parts: what is there when the first workers are asked for, these need not import."""
LATER_MODULES = (
    "torch._dynamo",  # the first torch.optim construction imports it
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.parallel",
    "torch.optim",
    "torch.profiler._cupti_monitor",  # torch.profiler imports it late
    "torch.utils.data",
    "torch.utils.checkpoint",
    "flashckpt.trainer.train.loop",
    "flashckpt.trainer.config",
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that keep numpy and torch from starting thread pools at import; workers get their real values back."""

IMPORT_TIME = (
    "LD_",
    "PYTHON",
    "KMP_",
    "GOMP_",
    "OMP_PROC",
    "OMP_PLACES",
    "MALLOC_",
    "TORCH_LOGS",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
)
"""Prefixes of variables that are read when an interpreter or a library starts; a fork cannot apply them."""

_SOON_S = 1.0
"""Within it the first workers are asked for where nothing is waited for."""

SHIELDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the zygote ignores. A worker keeps them blocked (not lost) until it has its own handlers."""

_log = logging.getLogger("flashckpt.dlrun")


@contextlib.contextmanager
def single_threaded_imports() -> Iterator[None]:
    """Import numpy and torch without their thread pools; the environment is as before afterwards."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def preload(names: Iterable[str]) -> None:
    """Import what workers need, so that none of them imports it; a missing module is skipped."""
    with single_threaded_imports():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 -- also what a plug-in raises
                # never fatal: a worker that needs it will raise the real error
                _log.debug("zygote: %s is not preloaded: %s", name, error)


def later_modules() -> deque[str]:
    """Return what is imported behind FIRST_MODULES, in order: what plug-ins name comes last."""
    return deque((*OWN_MODULES, *LATER_MODULES, *(entry.target for entry in entry_points.every(entry_points.PRELOAD))))


def unfit() -> str:
    """Return why this process must not be forked, or "" if it may."""
    threads = thread_count()
    if threads != 1:
        return f"{threads} threads after the imports, 1 expected"
    if "torch" in sys.modules:
        from flashckpt import accelerator  # imports torch

        kind, _ = accelerator.in_use()
        if kind:
            return f"an import has started the accelerator ({kind})"
        if accelerator.fails_in_a_fork():
            return "an import has asked the accelerator for its devices"
    return ""


def changed_at_import(before: dict[str, str], now: dict[str, str], prefixes: tuple[str, ...] = IMPORT_TIME) -> str:
    """Return the name of an import-time variable that differs between zygote and worker, or ""."""
    for name in sorted(before.keys() | now.keys()):
        if name.startswith(prefixes) and before.get(name) != now.get(name):
            return name
    return ""


def serve(sock: socket.socket, agent: int, *, is_brief: bool = False) -> dict[str, Any]:
    """Fork workers on request until dlrun is gone; returns only in a worker, with its request.

    Args:
        sock: This side of the socket pair to dlrun.
        agent: The pid of dlrun, which becomes the parent of every worker.
        is_brief: The first workers are not to wait for what not every script needs; it is imported behind their fork.
    """
    started = time.monotonic()
    set_title("dlrun-zygote", "dlrun zygote (forks the workers)")
    preload(FIRST_MODULES)
    later = later_modules()
    if not is_brief:
        _import_all(later)
    _announce(sock, started, unfit())
    _use_wait(sock, later)
    while True:
        request = messages.receive(sock)
        if request is None:
            os._exit(0)
        if "workers" not in request:
            _import_all(later)
        if reason := unfit():
            messages.send(sock, {"pids": [], "unfit": reason})
            continue
        if "rehearse" in request:
            sock = _copied(sock, agent, request["rehearse"]) or sock
            continue
        if "standby" in request:
            if (own := _forked(sock)) is not None:
                return stand_by(own, agent, request["standby"])
            continue
        worker = _fork_asked(sock, agent, request["workers"])
        if worker is not None:
            return worker
        _import_all(later, until=sock)


def _use_wait(sock: socket.socket, later: deque[str]) -> None:
    """Import the small modules until the first workers are asked for, the rest where that is not soon: the node waits for others, or as a spare."""
    while later and later[0] in OWN_MODULES and not select.select([sock], [], [], 0)[0]:
        preload([later.popleft()])
    if later and not select.select([sock], [], [], _SOON_S)[0]:
        _import_all(later, until=sock)


def _fork_asked(sock: socket.socket, agent: int, workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Fork workers and tell dlrun; return the request in each of them once it may run, None in this process."""
    gate, opener = os.pipe()
    worker = _fork_workers(workers)
    if isinstance(worker, dict):
        sock.close()
        return _await_go(gate, opener, agent, worker)
    os.close(gate)
    try:
        messages.send(sock, {"pids": worker})
        os.write(opener, b"g" * len(worker))  # only now: a worker that dlrun does not know about must not run
    except OSError:  # dlrun is gone; its workers die with it
        os._exit(0)
    os.close(opener)
    return None


def _import_all(later: deque[str], until: socket.socket | None = None) -> None:
    """Import the modules, or those that there is time for until a request comes."""
    while later and not (until and select.select([until], [], [], 0)[0]):
        preload([later.popleft()])
        if not later:
            _keep_shared()


def _keep_shared() -> None:
    gc.collect()
    gc.freeze()  # keeps shared pages shared: the collector would write to every object's header


def _announce(sock: socket.socket, started_s: float, reason: str) -> None:
    _keep_shared()
    try:
        messages.send(sock, {"unfit": reason, "import_s": round(time.monotonic() - started_s, 3)})
    except OSError:  # dlrun is gone, or has given this process up
        os._exit(0)


def _copied(sock: socket.socket, agent: int, request: dict[str, Any]) -> socket.socket | None:
    """Fork a copy of this process that rehearses; return its socket to dlrun in the copy, None in this process.

    This process stays as it is: it answers meanwhile, and when the copy fails or another layout is started.
    """
    copy = _forked(sock)
    if copy is not None:
        adopt_parent(agent)
        set_title("dlrun-warm", "dlrun zygote (has rehearsed; forks the workers)")
        started = time.monotonic()
        _announce(copy, started, rehearse(request) or unfit())
    return copy


def _forked(sock: socket.socket) -> socket.socket | None:
    """Fork one process for whoever has sent a request and a socket; return that socket in it, None in this process."""
    _, (fd, *_), *_ = socket.recv_fds(sock, 1, 1)
    answer = _fork_workers([{}])
    if isinstance(answer, list):
        os.close(fd)
        messages.send(sock, {"pids": answer})
        return None
    sock.close()
    return socket.socket(fileno=fd)


def _await_go(gate: int, opener: int, agent: int, worker: dict[str, Any]) -> dict[str, Any]:
    os.close(opener)
    if os.read(gate, 1) != b"g":
        os._exit(1)
    os.close(gate)
    # behind the gate, where it is the parent already: before, each worker would look for it all the time the others are forked
    adopt_parent(agent)
    return worker


def _fork_workers(workers: list[dict[str, Any]]) -> dict[str, Any] | list[int]:
    """Fork all workers through one short-lived process; return their pids, or in a worker its request."""
    here, there = socket.socketpair()
    middle = os.fork()
    if middle:
        there.close()
        answer = messages.receive(here)
        here.close()
        os.waitpid(middle, 0)  # from here on every worker is the agent's child
        return answer["pids"] if answer else []
    here.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    pids = []
    for worker in workers:
        pid = os.fork()
        if pid == 0:
            there.close()
            return worker
        pids.append(pid)
    # if dlrun and with it the zygote end just now, the workers notice it themselves
    with contextlib.suppress(OSError):
        messages.send(there, {"pids": pids})
    os._exit(0)


def start_by_fork(
    agent_socket: socket.socket, zygote_socket: socket.socket, *, is_brief: bool = False
) -> int | dict[str, Any]:
    """Fork the zygote from this very process; return its pid, or a request in each worker it forks later.

    A caller that gets a request is a worker and must unwind its own frames at once. `is_brief` is as in `serve`.
    """
    agent = os.getpid()
    pid = os.fork()
    if pid:
        zygote_socket.close()
        return pid
    agent_socket.close()
    adopt_parent(agent)
    _shield()
    return serve(zygote_socket, agent, is_brief=is_brief)


def _shield() -> None:
    """Leave the terminal's session; ignore stop signals (the zygote ends when its socket closes)."""
    os.setsid()
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)


def main() -> int:
    """Run as `python -m flashckpt.daemon.zygote.server FD AGENT_PID`: the way a lost zygote is replaced."""
    fd, agent = int(sys.argv[1]), int(sys.argv[2])
    adopt_parent(agent)
    _shield()
    request = serve(socket.socket(fileno=fd), agent)
    from flashckpt.daemon.zygote.worker import run_worker

    return run_worker(request)


if __name__ == "__main__":
    sys.exit(main())
