"""Runs of host memory: copied and digested by one call, in C and in Python, held while they are read, refused in another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flashckpt import faults
from flashckpt.core.digest import CHUNK_BYTES, chunk_digests
from flashckpt.snapshot import runs
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError
from flashckpt.snapshot.runs import Runs, digest_in_slot, places_of
from flashckpt.state.placement import LocalBox

SIZES = (0, 1, 3, 64, 4096, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 700_001)
"""Elements of float32: nothing, less than a line, one chunk exactly, one and a bit, several."""


def items_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Item], int]:
    items, offset, chunk = [], 0, 0
    for number, tensor in enumerate(tensors):
        zero, shape = (0,) * tensor.ndim, tuple(tensor.shape)
        box = LocalBox(global_shape=shape, offsets=zero, lengths=shape, starts=zero)
        form = (tensor.nbytes, tensor.dtype, tensor.shape)
        items.append(Item(f"t{number}", box, tensor, offset, tensor.nbytes, chunk, 0, *form))
        offset += -(-tensor.nbytes // 64) * 64 + 64
        chunk += -(-tensor.nbytes // CHUNK_BYTES)
    return items, chunk


class Slot:
    """A slot and the runs that go into it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.items, chunks = items_of(tensors)
        self.data = bytearray(max(item.offset + item.nbytes for item in self.items) + 64)
        self.digests = np.zeros(chunks, np.uint64)
        self.buffer, self.runs = Buffer(memoryview(self.data)), Runs(self.items)

    def take(self) -> None:
        self.runs.check_forms()
        self.runs.copy_and_digest(self.buffer, self.digests)


def test_bytes_and_digests_are_those_of_the_format_whatever_copies(copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    for _ in range(3):  # the third time every storage is kept
        slot.digests[:] = 0
        slot.take()
        expected = np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors])
        assert np.array_equal(slot.digests, expected)
        for item, tensor in zip(slot.items, tensors, strict=True):
            assert bytes(slot.data[item.offset : item.offset + item.nbytes]) == tensor.numpy().tobytes()
            tensor.add_(1)


def test_what_is_copied_without_digests_gets_the_same_ones_in_the_slot(copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    slot.runs.copy(slot.buffer)
    digest_in_slot(places_of(slot.items), slot.buffer, slot.digests)
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


def test_any_number_of_tensors_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = runs.copy_and_digest
    monkeypatch.setattr(runs, "copy_and_digest", lambda rows, **more: [calls.append(len(rows)), real(rows, **more)][1])
    slot = Slot([torch.ones(3) for _ in range(3000)])
    slot.take()
    slot.runs.copy(slot.buffer)
    assert calls == [3000, 3000]


def test_memory_that_is_given_up_while_it_is_copied_stays_until_the_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch, copied_by: str
) -> None:
    parameter = torch.nn.Parameter(torch.full((1000,), 7.0))
    slot, real, alive = Slot([parameter]), runs.copy_and_digest, []

    def call(rows: Any, **more: Any) -> None:
        storage = StorageWeakRef(parameter.untyped_storage())
        parameter.data = torch.zeros(1000)
        alive.append(not storage.expired())
        real(rows, **more)
        alive.append(storage)

    monkeypatch.setattr(runs, "copy_and_digest", call)
    slot.take()
    assert alive[0] is True
    assert slot.digests[0] == chunk_digests(np.full(1000, 7.0, np.float32))[0]
    assert alive[1].expired(), "nothing keeps a tensor's memory that has moved"


@pytest.mark.parametrize(
    "other",
    [torch.zeros(10, 30), torch.zeros(30, 10, dtype=torch.int32), torch.zeros(10, 30).t(), torch.zeros(30, 9)],
    ids=["shape", "dtype", "strides", "size"],
)
def test_a_tensor_of_another_form_is_refused(other: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30, 10), requires_grad=False)
    slot = Slot([torch.ones(5), parameter])
    slot.take()
    parameter.data = other
    slot.data[:] = bytes(len(slot.data))
    with pytest.raises(StalePlanError, match="t1"):
        slot.take()
    assert not any(slot.data), "nothing was copied"


def test_a_tensor_that_moves_between_the_look_and_the_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30))
    slot, real = Slot([parameter]), Runs._find

    def moved(self: Runs) -> Any:
        found = real(self)
        parameter.data = torch.ones(30)
        return found

    monkeypatch.setattr(Runs, "_find", moved)
    with pytest.raises(StalePlanError):
        slot.take()


def test_the_crash_point_is_behind_each_chunk(monkeypatch: pytest.MonkeyPatch, copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    seen: list[int] = []
    monkeypatch.setattr(faults, "crash_point", lambda _name: seen.append(int(np.count_nonzero(slot.digests))))
    faults.arm("slot.during-copy:1000000")
    try:
        slot.take()
    finally:
        faults.arm(None)
    assert seen == [0, *range(1, len(slot.digests) + 1)], "the first tensor is empty"
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


def test_memory_is_checked_each_time_in_c_and_once_per_slot_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []
    real = runs.copy_and_digest
    monkeypatch.setattr(
        runs, "copy_and_digest", lambda rows, **more: [checks.append(more["check"]), real(rows, **more)][1]
    )
    monkeypatch.setattr(runs, "is_native", lambda: False)
    tensor = torch.nn.Parameter(torch.ones(100))
    slot = Slot([tensor])
    slot.take()
    slot.take()
    tensor.data = torch.ones(100)
    slot.take()
    monkeypatch.setattr(runs, "is_native", lambda: True)
    slot.take()
    assert checks == [True, False, True, True]
