"""The generators of accelerators: of the current device, and of every other one that holds tracked tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashckpt.state import rng


class FakeModule:
    """What is used of torch.cuda: a generator per device, of one byte."""

    def __init__(self, devices: int) -> None:
        self.states, self.current, self.in_use = list(range(10, 10 + devices)), 0, True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.in_use

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.tensor([self.states[self.current if device is None else device.index]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.states[self.current if device is None else device.index] = int(state)


def machine(monkeypatch: pytest.MonkeyPatch, *, devices: int, kind: str = "cuda") -> FakeModule:
    api = FakeModule(devices)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _: api)
    return api


def held(*indices: int, kind: str = "cuda") -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device(kind, index) for index in indices)]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("used", [(), (0,), (1,), (0, 1), (0, 2, 3)])
@pytest.mark.parametrize("current", [0, 1])
def test_every_device_that_holds_state_draws_on_as_it_would_have(
    kind: str, used: tuple[int, ...], current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = machine(monkeypatch, devices=4, kind=kind)
    api.current = current
    state = rng.capture(held(*used, kind=kind))
    before = list(api.states)
    api.states = [99] * 4
    rng.restore(state)
    assert api.states == [before[one] if one in {*used, current} else 99 for one in range(4)]


def test_one_device_is_kept_as_it_always_was_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    api = machine(monkeypatch, devices=4)
    api.current = 3
    state = rng.capture(held(3))
    assert state["cuda"] == bytes([13])
    assert "devices" not in state
    other = machine(monkeypatch, devices=1)
    rng.restore(state)
    assert other.states == [13], "it is the current device that this rank continues on"


def test_a_device_that_is_not_there_any_more_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, devices=2)
    state = rng.capture(held(0, 1))
    machine(monkeypatch, devices=1)
    rng.restore(state)
    assert "the random state of cuda:1 is not restored" in caplog.text


def test_an_accelerator_that_nothing_uses_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, devices=2).in_use = False
    assert set(rng.capture(held(1))) == {"torch", "python", "numpy"}
