"""The accelerator of this process, whatever its kind, and host memory that it reads and writes directly.

The only module of the core that names a kind of device. What a kind can do is asked of torch's module of it:

    torch.cuda (NVIDIA, AMD)   streams, generators, page-locked buffers; `cudart` page-locks memory that is there already
    torch.xpu, torch.npu       streams, generators, page-locked buffers; slots are filled through these (`snapshot/staging`)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch

from flashckpt.report import guarded

_PORTABLE = 1  # cudaHostRegisterPortable
_log = guarded(logging.getLogger("flashckpt"))
_refused: set[torch.device] = set()
_locked: set[int] = set()  # addresses


def runtime() -> Any:
    """Return torch's module of this process's accelerator (`torch.cuda`, `torch.xpu`, ...); `torch.cuda` where there is none."""
    found = torch.accelerator.current_accelerator()
    return torch.cuda if found is None else torch.get_device_module(found)


def in_use() -> tuple[str, Any]:
    """Return the type and the module of the accelerator that this process has started; ("", None) where it has none.

    Asking starts none.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return "", None
    api = torch.get_device_module(device)
    # in this order: to count devices, as the second does, spoils a fork
    return (device.type, api) if api.is_initialized() and api.is_available() else ("", None)


def waited_event(api: Any) -> Any:
    """Return an event that the host will wait for: asleep where this kind of device has such events, else on a busy core."""
    try:
        return api.Event(blocking=True)
    except TypeError:  # torch.xpu
        return api.Event()


def is_capturing() -> bool:
    """Whether what is queued now becomes part of a graph, to be replayed later; asked at every optimizer step."""
    api = runtime()
    return bool(api.is_initialized() and getattr(api, "is_current_stream_capturing", bool)())


def fails_in_a_fork() -> bool:
    """Whether a fork of this process could not use the accelerator: counting devices is enough to spoil it."""
    api = runtime()
    if not hasattr(api, "_is_in_bad_fork"):
        return False
    pid = os.fork()  # torch says it nowhere else
    if pid == 0:
        os._exit(1 if api._is_in_bad_fork() else 0)  # noqa: SLF001 -- what torch asks itself before it raises
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def host_buffer(nbytes: int, device: torch.device, *, api: Any = None) -> torch.Tensor:
    """Return uint8[nbytes] on the host for copies of a device: page-locked, or not where that is refused.

    A limit on locked memory makes copies slower and is warned of once per device; it is not asked for again.

    Args:
        nbytes: Its size.
        device: Made the current one meanwhile: a thread begins on device 0, and would make a context there.
        api: `runtime()`, or a stand-in.
    """
    if device.type != "cpu" and device not in _refused:
        try:
            with (api if api is not None else runtime()).device(device):
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _refused.add(device)
            _log.warning("no page-locked memory for copies of %s, which are slower without: %s", device, error)
    return torch.empty(nbytes, dtype=torch.uint8)


def register(address: int, nbytes: int, *, index: int, api: Any = None) -> bool:
    """Page-lock host memory for direct transfers of every device of this process.

    Args:
        address: Where the mapping begins.
        nbytes: Its size.
        index: The device of this rank: a thread begins on device 0, and would make a context there.
        api: `runtime()`, or a stand-in.

    Returns:
        False where it was refused (a limit on locked memory), or there is no way to: copies then go through the driver's own buffers.
    """
    api = api if api is not None else runtime()
    if not registers(api):
        return False
    with api.device(index):
        if int(api.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) != 0:
            return False
    _locked.add(address)
    return True


def unregister(address: int, *, index: int, api: Any = None) -> None:
    """Give page-locked memory back, on the device that locked it; before it is unmapped."""
    api = api if api is not None else runtime()
    _locked.discard(address)
    with api.device(index):
        api.cudart().cudaHostUnregister(address)


def registers(api: Any = None) -> bool:
    """Whether this kind of device can page-lock memory that is there already; asks nothing of the device."""
    return hasattr(api if api is not None else runtime(), "cudart")


def is_direct(address: int, device: torch.device) -> bool:
    """Whether a device copies straight to and from a slot that begins there: no host thread takes part in it."""
    return address in _locked or device.type == "cpu"


def index_of(devices: Iterable[torch.device]) -> int | None:
    """Return the index of the device to page-lock memory for: the first of these that is one, else the current one, else None.

    Asking initialises no device.
    """
    _, api = in_use()
    if api is None:
        return None
    held = (device.index for device in devices if device.type != "cpu" and device.index is not None)
    return next(held, int(api.current_device()))
