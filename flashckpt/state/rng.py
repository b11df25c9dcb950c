"""The random number generators of one rank: torch (CPU, CUDA where it is initialised), Python and numpy."""

from __future__ import annotations

import random
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from flashckpt.errors import UnsupportedStateError


class Generators(NamedTuple):
    """The state of all generators at one instant, each as its library gives it out: copies, which nothing changes any more."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> Generators:
        """Return them as they are. Draws nothing, initialises no device."""
        has_cuda = torch.cuda.is_initialized() and torch.cuda.is_available()  # type: ignore[no-untyped-call]  # torch leaves it without types
        return cls(
            torch=torch.get_rng_state(),
            python=random.getstate(),
            numpy=np.random.get_state(legacy=True),  # noqa: NPY002 -- the global generator is what users' code draws from
            cuda=torch.cuda.get_rng_state() if has_cuda else None,
        )

    def packed(self) -> dict[str, Any]:
        """Return them as msgpack values, about 8 KB: half of the work, which a snapshot leaves to the copy thread."""
        kind, keys, position, has_gauss, gauss = self.numpy
        state: dict[str, Any] = {
            "torch": self.torch.numpy().tobytes(),
            "python": _python(self.python),
            "numpy": [kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(gauss)],
        }
        if self.cuda is not None:
            state["cuda"] = self.cuda.numpy().tobytes()
        return state


def capture() -> dict[str, Any]:
    """Return the state of all generators as msgpack values. Draws nothing, initialises no device."""
    return Generators.now().packed()


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
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def reseed(*, step: int, rank: int) -> None:
    """Seed all generators from (step, rank): what a rank does whose own state was never taken (another layout)."""
    mixed = (step * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & ((1 << 63) - 1)
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)  # noqa: NPY002 -- as in capture
