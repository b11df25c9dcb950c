"""What a forked worker does before and after the user's script: become like a new interpreter, but with imports done.

A request (a JSON object from dlrun) holds: `argv` (script or module, then its arguments), `module`
(run as `python -m`), `env` (the whole environment), `stdout` and `stderr` (a file, or "" for dlrun's
own), `local_rank`, `cpus` (affinity, or null), `error_file`, `stacks_file`, `late_file` (see
`standby.note_late_variables`, or "").
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

from flashckpt.daemon.machine import numa
from flashckpt.daemon.machine.process import set_title
from flashckpt.daemon.zygote.standby import note_late_variables
from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.nonfatal import NonfatalFile, nonfatal_text, report_lost
from flashckpt.shm.agent_folder import agent_folder, write_permanent_error
from flashckpt.shm.private import create_file

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal on which a worker writes the stacks of its threads (real-time: scripts and Slurm use USR1 and USR2)."""

_stacks: Any = None  # the open file faulthandler writes to must outlive the worker's set-up


def run_worker(request: dict[str, Any]) -> int:
    """Run the user's script in this forked process; return the exit code to end with.

    The caller passes it to `sys.exit`, so that threads are joined, exit handlers run and files of the
    script are flushed as in any interpreter.
    """
    _become_fresh(request)
    code = run_recorded(request)
    gc.unfreeze()  # undo the zygote's freeze: classes in cycles are collected at exit as in a new interpreter
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
        report_lost(stream)
    return code


def _become_fresh(request: dict[str, Any]) -> None:
    if os.getsid(0) != os.getpid():  # a standby has done so
        os.setsid()  # its own process group: killed as a whole, with the children it forks
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    held_back = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)  # a stop request that arrived during the fork ends it here
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    rank = env.RANK if env.is_set("RANK") else request.get("local_rank", "?")
    set_title(f"rank{rank}", f"rank {rank}: {' '.join(request['argv'])}")
    reports = os.dup(2) if request["stdout"] or request["stderr"] else None  # a full log cannot say what it lost
    _redirect(1, "stdout", request["stdout"], reports)
    _redirect(2, "stderr", request["stderr"], reports)
    if request.get("cpus") and (refused := numa.bind(request["cpus"])):
        sys.stderr.write(f"[dlrun] local rank {request['local_rank']}: {refused}\n")
    _set_threads()
    _reseed()
    faulthandler.enable(all_threads=True)
    register_stacks(request.get("stacks_file", ""))
    if request.get("late_file"):
        note_late_variables(Path(request["late_file"]))


def _redirect(fd: int, name: str, path: str, reports: int | None) -> None:
    """Point one standard stream at a file, and rebuild the Python object as `python -u` makes it.

    A file that cannot be made (its disk is full) must not end the rank: its lines then go where dlrun's own go.
    """
    problem = ""
    if path:
        try:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            problem = f"[dlrun] {path} cannot be opened ({error.strerror}): its output continues here\n"
        else:
            os.dup2(target, fd)
            os.close(target)
    is_own = bool(path) and not problem
    rebuild_stream(fd, name, path if is_own else "", reports if is_own else None)
    if problem:
        getattr(sys, name).write(problem)


def rebuild_stream(fd: int, name: str, path: str = "", reports: int | None = None) -> None:
    """Give Python a new standard stream, to which a failed write costs lines and raises nothing: it is a log.

    `path` is the file that it is, "" for dlrun's own stream; lost lines are reported to `reports`, or with None in
    the stream itself.
    """
    old = getattr(sys, name)
    errors = "backslashreplace" if name == "stderr" else getattr(old, "errors", "strict")
    encoding = getattr(old, "encoding", None) or "utf-8"
    place = path or {"stdout": "standard output", "stderr": "standard error"}[name]
    stream = nonfatal_text(NonfatalFile(fd, place, "[dlrun] ", reports), name, encoding=encoding, errors=errors)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _set_threads() -> None:
    """Give torch the thread count a new interpreter would have chosen: OMP_NUM_THREADS is read at import only."""
    import torch

    wanted = env.OMP_NUM_THREADS.split(",")[0]
    count = int(wanted) if wanted.isdigit() and int(wanted) else physical_cores()
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def physical_cores() -> int:
    """Return how many cores this process may run on, counting hyperthreads once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _reseed() -> None:
    """Reseed numpy's and torch's CPU generators from entropy, as a fresh import does; `random` reseeds itself.

    Device generators are created at their first use, after the fork.
    """
    import numpy as np
    import torch

    np.random.seed()  # noqa: NPY002 -- the global generator is what scripts inherit
    torch.default_generator.seed()


def register_stacks(path: str) -> None:
    """Have the stacks of all threads written to a file on STACKS_SIGNAL; "" does nothing."""
    global _stacks  # noqa: PLW0603
    if path:
        _stacks = os.fdopen(create_file(Path(path)), "w", encoding="utf-8")  # kept open for the handler
        faulthandler.register(STACKS_SIGNAL, file=_stacks, all_threads=True)


def run_recorded(request: dict[str, Any]) -> int:
    """Run the script; write its exception to the error file, without needing @record in the script."""
    try:
        return _run_reported(request)
    except Exception as later:  # noqa: BLE001 -- a handler of the script's raised before the report began: see _undisturbed
        _report(request, later)
        return 1


def _run_reported(request: dict[str, Any]) -> int:
    try:
        _run_script(request["argv"], module=request["module"])
    except SystemExit as error:
        return _system_exit(error)
    except KeyboardInterrupt as error:
        _report(request, error)
        return 128 + signal.SIGINT
    except FlashckptError as error:
        code = error.settle()
        _refuse(error)
        _report(request, error)
        return code
    except BaseException as error:  # noqa: BLE001 -- whatever ends the script is reported
        _report(request, error)
        return 1
    return 0


def _refuse(error: FlashckptError) -> None:
    """Record the exit code of a permanent error for dlrun (the agent may kill this rank before it exits)."""
    folder = agent_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            write_permanent_error(folder, error.exit_code)


def _system_exit(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _run_script(argv: list[str], *, module: bool) -> None:
    """Execute argv[0] as `python argv[0]` or `python -m argv[0]` would."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv = list(argv)
    if module:
        _set_path(str(Path.cwd()))
        runpy._run_module_as_main(argv[0], alter_argv=True)  # type: ignore[attr-defined]  # noqa: SLF001 -- what python -m calls
        return
    path = argv[0]
    if not Path(path).exists():  # the interpreter's message and exit code
        sys.stderr.write(f"{sys.executable}: can't open file '{Path(path).absolute()}': [Errno 2] No such file\n")
        raise SystemExit(2)
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        if not sys.flags.safe_path:
            del sys.path[0]  # run_path puts the directory or archive there itself
        runpy.run_path(path, run_name="__main__")
        return
    _set_path(str(Path(path).resolve().parent))
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 -- running the user's script is the purpose


def _set_path(first: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = first


def _report(request: dict[str, Any], error: BaseException) -> None:
    """Write the traceback to the error file in torch's form; print it if dlrun will not.

    On the console only dlrun prints, once, for the rank that failed first: the "connection closed" of
    the others would hide it. A rank with its own log file prints to it.
    """
    error = _undisturbed(error)
    error.__traceback__ = _without_launcher(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    path = request.get("error_file") or ""
    recorded = bool(path) and _write_error(Path(path), error, text)
    if request["stderr"] or not recorded or not _default_hook():
        sys.excepthook(type(error), error, error.__traceback__)


def _undisturbed(error: BaseException) -> BaseException:
    """Let no handler raise while an error is reported: a loader's does, when a worker of it has ended. Return the error to report.

    What the handler raises names the worker; the error before it may say only that a connection was reset.
    """
    for _ in range(2):  # it may run, and raise, at any of these lines
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except Exception as later:  # noqa: BLE001 -- of the script's
            error = later
    return error


def _default_hook() -> bool:
    """Return whether the script left the exception hook alone; init_process_group sets one that adds the rank, and we do."""
    hook = sys.excepthook
    usual = {"torch.distributed.distributed_c10d", "flashckpt.report"}
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "") in usual


def _without_launcher(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Remove our own frames and runpy's from the top of a traceback."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in own:
        rest = rest.tb_next
    return rest if rest is not None else trace


def _write_error(path: Path, error: BaseException, text: str) -> bool:
    try:
        if path.exists() and path.stat().st_size:
            return True  # the script is decorated with @record and has written it
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        data = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data), encoding="utf-8")
        part.rename(path)
    except OSError:
        return False
    return True
