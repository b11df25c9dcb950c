"""The random number generators of one rank: torch (CPU, accelerators that are in use), Python and numpy."""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from flashckpt import accelerator
from flashckpt.errors import UnsupportedStateError
from flashckpt.report import guarded

_log = guarded(logging.getLogger("flashckpt"))
_Device = torch.device


class Generators(NamedTuple):
    """The state of all generators at one instant, each as its library gives it out: copies, which nothing changes any more.

    Attributes:
        current: (type, state) of the accelerator that is the current one, where one is in use.
        others: By device, of those beside it.
    """

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    current: tuple[str, torch.Tensor] | None
    others: dict[str, torch.Tensor]

    @classmethod
    def now(cls, devices: Iterable[_Device] = ()) -> Generators:
        """Return them as they are. Draws nothing, initialises no device.

        Args:
            devices: That hold tracked tensors: dropout on one that is not the current one draws from its own generator.
        """
        kind, api = _accelerator()
        here = None if api is None else api.current_device()
        beside = [] if api is None else [d for d in devices if d.type == kind and d.index not in (None, here)]
        return cls(
            torch=torch.get_rng_state(),
            python=random.getstate(),
            numpy=np.random.get_state(legacy=True),  # noqa: NPY002 -- the global generator is what users' code draws from
            current=None if api is None else (kind, api.get_rng_state()),
            others={str(device): api.get_rng_state(device) for device in beside},
        )

    def packed(self) -> dict[str, Any]:
        """Return them as msgpack values, about 8 KB: half of the work, which a snapshot leaves to the copy thread."""
        kind, keys, position, has_gauss, gauss = self.numpy
        state: dict[str, Any] = {
            "torch": self.torch.numpy().tobytes(),
            "python": _python(self.python),
            "numpy": [kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(gauss)],
        }
        if self.current is not None:
            state[self.current[0]] = self.current[1].numpy().tobytes()
        if self.others:
            state["devices"] = {device: own.numpy().tobytes() for device, own in self.others.items()}
        return state


def _accelerator() -> tuple[str, Any]:
    """Return the accelerator in use and torch's module of it, where that has generators; ("", None) else."""
    kind, api = accelerator.in_use()
    return (kind, api) if hasattr(api, "get_rng_state") else ("", None)


def capture(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the state of all generators as msgpack values. Draws nothing, initialises no device; `devices` as `Generators.now`."""
    return Generators.now(devices).packed()


def _python(state: Any) -> list[Any]:
    version, words, gauss = state
    return [version, struct.pack(f"<{len(words)}I", *words), gauss]


def restore(state: dict[str, Any]) -> None:
    """Set all generators to what `capture` returned.

    Raises:
        UnsupportedStateError: The state of a generator is not one this Python or numpy has.
    """
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, words, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    try:
        random.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), gauss))
        np.random.set_state((kind, np.frombuffer(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002 -- as in capture
    except ValueError as error:
        raise UnsupportedStateError(
            "the random state was taken by another Python or numpy", found=str(error)
        ) from error
    _restore_accelerators(state)


def _restore_accelerators(state: dict[str, Any]) -> None:
    device = torch.accelerator.current_accelerator()
    if device is None or device.type not in state:
        return
    api = torch.get_device_module(device)
    if not api.is_available():
        return
    api.set_rng_state(torch.frombuffer(bytearray(state[device.type]), dtype=torch.uint8))
    for name, own in state.get("devices", {}).items():
        there = torch.device(name)
        if there.type == device.type and there.index < api.device_count():
            api.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8), there)
        else:
            _log.warning("the random state of %s is not restored: this process has no such device", name)


def reseed(*, step: int, rank: int) -> None:
    """Seed all generators from (step, rank): what a rank does whose own state was never taken (another layout)."""
    mixed = (step * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & ((1 << 63) - 1)
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)  # noqa: NPY002 -- as in capture
