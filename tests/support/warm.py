"""Programs forked from an interpreter that has imported torch, where importing it again is not the point of a test.

`start(["-m", "flashckpt.daemon.run", ...])` is `python -m flashckpt.daemon.run ...` without the seconds of imports: one
process, single-threaded and started as any program is, has imported what dlrun's zygote imports; each program is a fork
of it that runs the module or script as `__main__`, in a session, folder and environment of its own, and ends as an
interpreter does. What an interpreter reads when it starts (PYTHON*, LD_*, ...) a fork cannot change: then, or with
`fresh=True`, the program is started the usual way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from flashckpt.daemon.machine.process import set_title
from flashckpt.daemon.zygote import server

ALSO = (
    "flashckpt.daemon.launcher.launch",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
PADDING = "." * 2000
"""Makes room for the command lines of the programs: a process may write over its own, but not beyond its end."""
LARGEST = 1 << 20


class Program:
    """A program that was forked; waits, polls and codes are those of `subprocess.Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"reap": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; negative: the signal.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)  # nobody else reaps it
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            finally:
                os.close(pidfd)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The warm interpreter, a child of the process that made this."""

    def __init__(self) -> None:
        self.owner, self.environment, self._turn = os.getpid(), dict(os.environ), threading.Lock()
        self._sock, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            for end in (self._sock, there):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
            command = [sys.executable, __file__, str(there.fileno()), PADDING]
            self._process = subprocess.Popen(  # the kind of its streams decides how programs buffer theirs
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            self._sock.send(json.dumps(request).encode())
            answer = self._sock.recv(LARGEST)
        assert answer, "the warm interpreter has ended"
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        self._sock.send(b"{}")  # not only closed: a rank that was forked here may hold a copy of the socket
        self._sock.close()
        self._process.wait()


_server: Server | None = None


def start(
    words: list[str], log: Path, *, cwd: Path, env: dict[str, str], errors: Path | None = None, fresh: bool = False
) -> Program | subprocess.Popen[bytes]:
    """Run `python WORDS`, a module (-m) or a script, in a session of its own; its output goes to files.

    Args:
        words: What follows `python` on the command line.
        log: The file of standard output, and of standard error where `errors` is not given.
        cwd: The working directory.
        env: The whole environment.
        errors: The file of standard error.
        fresh: Start an interpreter as usual.
    """
    streams = [log, errors or log]
    if fresh or server.changed_at_import(_warm().environment, env):
        with log.open("wb") as out, errors.open("wb") if errors else contextlib.nullcontext(out) as err:
            command = [sys.executable, *words]
            return subprocess.Popen(command, stdout=out, stderr=err, cwd=cwd, env=env, start_new_session=True)
    places = {"streams": [str(path.absolute()) for path in streams], "cwd": str(cwd.absolute())}
    return Program(_warm(), _warm().ask({"words": words, "env": env, **places})["pid"])


def run(
    words: list[str], folder: Path, *, env: dict[str, str] | None = None, timeout: float = 110.0
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end; its output is written to `folder` and returned. Killed after `timeout` seconds."""
    out, err = folder / "program.stdout", folder / "program.stderr"
    program = start(words, out, cwd=Path.cwd(), env={**os.environ, **(env or {})}, errors=err)
    try:
        code = program.wait(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _warm() -> Server:
    global _server  # noqa: PLW0603 -- one per test process
    if _server is None or _server.owner != os.getpid():
        _server = Server()
    return _server


def stop() -> None:
    """End the warm interpreter of this process, if it has one."""
    global _server  # noqa: PLW0603
    if _server is not None and _server.owner == os.getpid():
        _server.close()
    _server = None


def serve(sock: socket.socket) -> list[str]:
    """Fork programs until the owner has gone; returns only in a program, with its words."""
    while request := json.loads(sock.recv(LARGEST) or b"{}"):
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                sock.close()
                return become(request)
            answer = {"pid": pid}
        sock.send(json.dumps(answer).encode())
    os._exit(0)


def become(request: dict[str, Any]) -> list[str]:
    """Take on session, folder, environment, streams and arguments of the program that is asked for."""
    import numpy as np  # not before the single-threaded imports

    words: list[str] = request["words"]
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # torch has asked for it during the imports: another folder then, which may be gone
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666) for path in request["streams"])
    if request["streams"][0] == request["streams"][1]:
        os.dup2(out, err)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    set_title("python", " ".join([sys.executable, *words]))
    np.random.seed()  # noqa: NPY002 -- the global generator of the program, which an interpreter seeds at its start
    return words


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    sock = socket.socket(fileno=int(sys.argv[1]))
    server.preload((*server.FIRST_MODULES, *server.later_modules()))
    with server.single_threaded_imports():
        for name in ALSO:
            importlib.import_module(name)
    assert not server.unfit(), server.unfit()
    words = serve(sock)
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)  # runpy warns of a module that was imported before it runs
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
