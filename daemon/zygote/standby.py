"""A standby: a process forked ahead of a restart that has made its context of the accelerator and waits to become a rank.

It holds nothing that a rank holds: no lease, no socket but the one to dlrun. It dies with dlrun, and in a dead device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashckpt.daemon.machine import numa
from flashckpt.daemon.machine.process import adopt_parent, set_title
from flashckpt.daemon.zygote import messages

CONTEXT_S = 60.0
"""Seconds in which a context is made; a device that takes longer is dead."""
READ_BY_CONTEXT = (
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "GPU_", "ZE_", "ONEAPI_", "SYCL_", "UR_", "ASCEND_"),
    *("PYTORCH_", "LOCAL_RANK"),
)
"""Prefixes of variables that drivers and torch's allocators read when a context is made: later it does not see them."""
_BY_TORCH = {("CUDA_MODULE_LOADING", "LAZY")}
"""What torch sets itself when it starts a device (2.11 and older)."""


def stand_by(sock: socket.socket, agent: int, request: dict[str, Any]) -> dict[str, Any]:
    """Make the context, tell dlrun, wait; return the request of the rank that this process becomes.

    Args:
        sock: To dlrun, which asks by any message whether the context still works, and ends the wait by a request.
        agent: The pid of dlrun.
        request: Of the rank that this process stands for, as it would be today.
    """
    adopt_parent(agent)
    os.setsid()
    held_back = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the zygote ignores them: none waits here for the rank
    set_title("dlrun-standby", f"dlrun standby for local rank {request['local_rank']}")
    os.environ.clear()
    os.environ.update(request["env"])
    if request.get("cpus"):
        numa.bind(request["cpus"])  # the driver's threads and memory too; a refusal is reported by the rank
    began = time.monotonic()
    faulthandler.dump_traceback_later(CONTEXT_S, exit=True, file=2)  # also where the driver never gives the GIL back
    problem, check = _make_context(int(request["env"].get("LOCAL_RANK", 0)))
    faulthandler.cancel_dump_traceback_later()
    try:
        messages.send(sock, {"unfit": problem, "context_s": round(time.monotonic() - began, 3)})
        while (message := messages.receive(sock)) is not None:
            if "argv" in message:
                signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
                sock.close()
                return message
            messages.send(sock, {"unfit": _problem(check)})
    except OSError:
        pass
    os._exit(0)  # dlrun is gone, or has given this process up


def _make_context(local_rank: int) -> tuple[str, Callable[[], object]]:
    """Make the context that a rank would make at its first use of a device; return what failed, and how to ask it again.

    Nothing more: libraries such as cuBLAS read variables at their first use that scripts set.
    """
    import torch

    api = _runtime()
    if not api.is_available():
        return "", bool
    index = local_rank % api.device_count()

    def first_use() -> None:
        api.synchronize(index)
        if (kind := torch.accelerator.current_accelerator()) is not None:
            torch.zeros(1, device=torch.device(kind.type, index))
            api.synchronize(index)

    return _problem(first_use), first_use


def _runtime() -> Any:
    from flashckpt.accelerator import runtime

    return runtime()


def _problem(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:  # noqa: BLE001 -- this process is given up, and the rank starts without it
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def note_late_variables(path: Path) -> None:
    """Write to `path` the name of a variable that this process changes from now on, and that a context reads.

    The context of a standby is made before the script runs and would not see it: then no standby may be used.
    """
    putenv, owner, given = os.putenv, os.getpid(), dict(os.environ)  # its children choose their devices themselves

    def noted(name: Any, value: Any) -> None:
        key, new = os.fsdecode(name), os.fsdecode(value)
        is_new = key.startswith(READ_BY_CONTEXT) and given.get(key) != new and (key, new) not in _BY_TORCH
        if is_new and os.getpid() == owner:
            with contextlib.suppress(OSError):
                path.write_text(key, encoding="utf-8")
        putenv(name, value)

    os.putenv = noted
