"""What the tests of this folder share: the device, or why there is none, and their part's time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_cuda import tensors_as_on_a_device

NO_GPU = "no GPU: torch sees no CUDA device (make gpu runs this on a machine that has one)"


def has_gpu() -> bool:
    """Whether these tests are to run on a device of this machine; makes no context."""
    return os.environ.get("GPU_TEST_DEVICE", "cuda") == "cuda" and torch.cuda.is_available()


@pytest.fixture(autouse=True)
def in_time() -> None:
    """Skip what the time of this part is over for."""
    until = os.environ.get("GPU_TEST_UNTIL")
    if until is not None and time.time() > float(until):
        pytest.skip("the time of this part is over")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device; with GPU_TEST_DEVICE=cpu the host, whose tensors then take the path of device memory."""
    if os.environ.get("GPU_TEST_DEVICE") == "cpu":
        with tensors_as_on_a_device(monkeypatch):
            yield torch.device("cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real device: for what stand-ins cannot show."""
    if device.type != "cuda":
        pytest.skip(
            "needs a GPU: streams that run by themselves; their order is shown in tests/unit/snapshot/test_device_order.py"
        )
    return device


@pytest.fixture
def device_type() -> str:
    """The kind of device for jobs in processes of their own; this process makes no context."""
    if os.environ.get("GPU_TEST_DEVICE") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return "cuda"


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, wherever it lies and whatever its strides."""
    plain: Any = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    found: bytes = plain.numpy().tobytes()
    return found
