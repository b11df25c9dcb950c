"""Host memory that an accelerator reads and writes directly, and the devices of this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from flashckpt.logs import guarded

_PORTABLE = 1  # cudaHostRegisterPortable
_log = guarded(logging.getLogger("flashckpt"))
_refused: set[torch.device] = set()


def runtime() -> Any:
    """Return torch's module of this process's accelerator (`torch.cuda`, `torch.xpu`, ...); `torch.cuda` where there is none."""
    found = torch.accelerator.current_accelerator()
    return torch.cuda if found is None else torch.get_device_module(found)


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
    if not hasattr(api, "cudart"):
        return False
    with api.device(index):
        return int(api.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0


def unregister(address: int, *, index: int, api: Any = None) -> None:
    """Give page-locked memory back, on the device that locked it; before it is unmapped."""
    api = api if api is not None else runtime()
    with api.device(index):
        api.cudart().cudaHostUnregister(address)


def index_of(devices: Iterable[torch.device]) -> int | None:
    """Return the index of the device to page-lock memory for: the first of these that is one, else the current one, else None.

    Asking initialises no device.
    """
    api = runtime()
    if not (api.is_available() and api.is_initialized()):
        return None
    held = (device.index for device in devices if device.type != "cpu" and device.index is not None)
    return next(held, int(api.current_device()))
