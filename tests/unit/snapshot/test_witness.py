"""Writes that torch does not count: a snapshot holds the state of its step, or is discarded; nothing between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import tensors_as_on_a_device
from support.one_rank import agent_of_the_test, crash, finished, opened  # noqa: F401 -- fixtures
from torch import nn

from flashckpt.errors import FenceError
from flashckpt.snapshot import witness
from flashckpt.snapshot.copy import Item
from flashckpt.snapshot.runs import HostRuns
from flashckpt.state.placement import LocalBox

Write = Callable[[torch.Tensor, torch.Tensor], None]


def by_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data.copy_(value)


def swap_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value.clone(memory_format=torch.preserve_format)


def by_numpy(tensor: torch.Tensor, value: torch.Tensor) -> None:
    np.copyto(tensor.detach().numpy(), value.numpy())


WRITES: dict[str, Write] = {
    ".data.copy_": by_data,
    ".data = ": swap_memory,
    "numpy": by_numpy,
}


def box_of(*shape: int) -> LocalBox:
    return LocalBox(global_shape=shape, offsets=(0,) * len(shape), lengths=shape, starts=(0,) * len(shape))


def memory() -> Any:
    return np.empty((2, witness.BLOCKS * witness.BLOCK_BYTES), np.uint8)


def models() -> dict[str, nn.Module]:
    return {
        "linear layers": nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)]),
        "channels last": nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]  # torch has no overload for it
        "one large tensor": nn.Linear(700, 700, bias=False),
        "many small ones": nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(200)]),
    }


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(may copy, has copied): the copy thread waits for the first, also to read anything, and sets the second."""
    may, has = threading.Event(), threading.Event()
    may.set()
    real: Any = HostRuns.check_forms
    read: Any = witness.Witness.changed

    def held(*args: Any) -> None:
        assert may.wait(30)
        real(*args)

    def changed(*args: Any) -> Any:
        has.set()
        assert may.wait(30)
        return read(*args)

    monkeypatch.setattr(HostRuns, "check_forms", held)
    monkeypatch.setattr(witness.Witness, "changed", changed)
    yield may, has
    may.set()


@pytest.mark.parametrize("is_undone", [True, False])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", models())
def test_weights_that_are_swapped_in_behind_torchs_back_are_in_no_snapshot(
    kind: str, write: str, is_undone: bool, tmp_path: Path, copying: tuple[threading.Event, threading.Event]
) -> None:
    may_copy, has_copied = copying
    model, failures = models()[kind], list[Exception]()
    parameters = list(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=torch.optim.SGD(parameters, lr=0.1))
    ckpt.on_failure = failures.append
    for step in range(1, 4):
        own = [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]
        may_copy.clear()
        has_copied.clear()
        ckpt.step(step)
        for p, value in zip(parameters, own, strict=True):
            WRITES[write](p, value + 1)
        may_copy.set()
        if is_undone:  # as an evaluation with averaged weights ends: in front of the next optimizer.step()
            assert has_copied.wait(30)
            for p, value in zip(parameters, own, strict=True):
                WRITES[write](p, value)
        finished(ckpt)
        assert len(failures) == step, "each was seen, wherever its blocks lay"
    crash(ckpt)
    assert all(isinstance(error, FenceError) for error in failures)
    assert "a write that torch does not count" in str(failures[0])


def test_a_part_of_the_model_is_enough(tmp_path: Path, copying: tuple[threading.Event, threading.Event]) -> None:
    may_copy, _ = copying
    model, failures = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), list[Exception]()
    ckpt = opened(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    ckpt.on_failure = failures.append
    for step, layer in enumerate(model, 1):
        assert isinstance(layer, nn.Linear)
        may_copy.clear()
        ckpt.step(step)
        layer.weight.data.mul_(0.5)  # pruning, say
        may_copy.set()
        finished(ckpt)
        assert f"'model.{step - 1}.weight'" in str(failures[-1])
    assert len(failures) == 8
    crash(ckpt)


@pytest.mark.parametrize("kind", models())
def test_training_that_leaves_state_alone_between_step_and_fence_loses_no_snapshot(kind: str, tmp_path: Path) -> None:
    model = models()[kind]
    ckpt = opened(tmp_path, model=model, optimizer=(adam := torch.optim.AdamW(model.parameters())))
    for step in range(1, 8):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        adam.step()
        ckpt.step(step)
        finished(ckpt)
    assert (ckpt.stats["snapshots"], ckpt.stats.get("discarded", 0)) == (7, 0)
    crash(ckpt)


@pytest.mark.parametrize("kind", models())
def test_the_same_on_a_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    model, failures = models()[kind], list[Exception]()
    own = list(model.parameters())
    with tensors_as_on_a_device(monkeypatch):
        ckpt = opened(tmp_path, model=model, optimizer=torch.optim.SGD(own, lr=0.1))
        ckpt.on_failure = failures.append
        enter = ckpt._alive()._stager._lanes.enqueue
        monkeypatch.setattr(
            ckpt._alive()._stager._lanes,
            "enqueue",
            lambda *given, **more: (may_copy.wait(30), enter(*given, **more))[1],
        )
        for step in (1, 2, 3):
            may_copy.clear()
            ckpt.step(step)
            if step != 2:
                for p in own:
                    p.data.add_(1)
            may_copy.set()
            finished(ckpt)
        crash(ckpt)
    assert len(failures) == 2, "the first and the third"
    assert all("a write that torch does not count" in str(error) for error in failures)


@pytest.mark.matrix
def test_blocks_of_a_tensor_lie_in_it_and_reach_all_of_it() -> None:
    for shape in [(), (1,), (7,), (3, 5), (2, 3000), (4, 2, 9)]:
        tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        box = box_of(*shape)
        item = Item("x", box, tensor, 64, tensor.nbytes, 0, 0, tensor.nbytes, tensor.dtype, tensor.shape)
        seen = set[float]()
        for number in range(10_000):
            block = witness.block_of(item, number / 10_000)
            elements = witness._bytes_of(block).view(torch.float32).tolist()
            assert (block.offset - 64) // 4 == elements[0], "its place in the slot is that of its first element"
            assert len(elements) * 4 == block.nbytes <= witness.FEW_BYTES
            seen.update(elements)
        assert len(seen) == tensor.numel()


def test_blocks_of_host_memory_cover_small_tensors_and_spread_over_large_ones() -> None:
    sizes = [4, 1000, 3_000_000]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    items = [
        Item(str(number), box_of(n), tensor, 0, n, 0, 0, n, tensor.dtype, tensor.shape)
        for number, (n, tensor) in enumerate(zip(sizes, tensors, strict=True))
    ]
    samples = witness.HostSamples(items, memory())
    read = np.zeros(3_000_000, np.int64)
    for number in range(200):
        assert samples.take(number * witness._GOLDEN % 1)
        for item, at, size in zip(samples._item, samples._at, samples._size, strict=True):
            assert 0 <= at <= sizes[item] - size
            if item == 2:
                read[at : at + size] += 1
    whole = {int(item): int(size) for item, size in zip(samples._item, samples._size, strict=True)}
    assert (whole[0], whole[1]) == (4, 1000)
    assert (read > 0).mean() > 0.9, "in 200 snapshots nearly all of it was looked at"


def test_memory_that_is_gone_is_left_to_the_copy() -> None:
    tensor = torch.zeros(100)
    item = Item("x", box_of(100), tensor, 0, 400, 0, 0, 400, tensor.dtype, tensor.shape)
    samples = witness.HostSamples([item], memory())
    with contextlib.suppress(RuntimeError):
        tensor.untyped_storage().resize_(0)
    assert not samples.take(0.5)
