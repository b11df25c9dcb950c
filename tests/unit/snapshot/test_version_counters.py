"""Version counters read by the C part: always those of the attribute, or not used."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import sanitized  # noqa: F401 -- the build with sanitizers, where one is named, comes before flashckpt.native
from torch import nn

from flashckpt.native import LEVEL_VARIABLE, is_native
from flashckpt.native.copying import read_counters
from flashckpt.snapshot import witness
from flashckpt.snapshot.witness import VersionCounters, counter_path

needs_c = pytest.mark.skipif(not is_native(), reason="the C part was not built")


class Marked(torch.Tensor):
    """A subclass."""


def tensors_of_all_kinds() -> list[torch.Tensor]:
    base = torch.zeros(6, 4)
    with torch.no_grad():
        loose = nn.Parameter(torch.zeros(4, 4)) * 2
    return [
        base,
        base.view(24),
        base[1:3],
        base.detach(),
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(3), requires_grad=False),
        nn.Buffer(torch.zeros(2)),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(0),
        torch.zeros((1,) * 9),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, device="meta"),
        torch.zeros(4, 4).to_sparse(),
        torch.zeros(3).as_subclass(Marked),
        loose,
        *[torch.zeros(2) for _ in range(200)],
    ]


def written(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.zero_()


def given_other_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones_like(tensor)


def counted(tensor: torch.Tensor) -> None:
    torch.autograd.graph.increment_version(tensor)


def set_far(tensor: torch.Tensor) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (2**32 - 2,))


def swapped(tensor: torch.Tensor) -> None:
    other = torch.zeros(5)
    for _ in range(random.randrange(9)):
        other.zero_()
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]  # torch leaves it without types


WRITES: tuple[Callable[[Any], None], ...] = (written, given_other_memory, counted, set_far, swapped)


def attributes(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


@needs_c
def test_where_counters_lie_is_found_out_for_this_torch() -> None:
    assert counter_path() is not None


@pytest.mark.parametrize("seed", range(20))
def test_counters_are_those_of_the_attribute_whatever_is_done_to_a_tensor(seed: int, copied_by: str) -> None:
    random.seed(seed)
    tensors = tensors_of_all_kinds()
    counters = VersionCounters(tensors)
    assert counters.changed(counters.read()) == []  # from here on C reads alone, where it runs
    for _ in range(12):
        before, expected = counters.read(), attributes(tensors)
        assert list(before) == expected
        for tensor in random.sample(tensors, random.randrange(4)):
            try:
                random.choice(WRITES)(tensor)
            except (RuntimeError, TypeError):  # a view of something, a sparse one: not every write is allowed
                continue
        now = attributes(tensors)
        assert counters.changed(before) == [at for at, one in enumerate(now) if one != expected[at]]


@needs_c
def test_c_reads_them_where_it_runs_and_python_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(2)]
    assert isinstance(VersionCounters(tensors).read(), np.ndarray)
    monkeypatch.setenv(LEVEL_VARIABLE, "python")
    assert isinstance(VersionCounters(tensors).read(), list)


@needs_c
def test_a_path_that_leads_to_something_else_costs_one_snapshot_and_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = counter_path()
    assert path is not None
    beside = path._replace(to_value=path.to_value - 8)  # how often the counter is held: memory of the same object
    monkeypatch.setattr(witness, "counter_path", lambda: beside)
    tensors = [torch.zeros(2) for _ in range(5)]
    counters = VersionCounters(tensors)
    assert counters.changed(counters.read()) == list(range(5))
    before = counters.read()
    assert before == attributes(tensors)
    written(tensors[3])
    assert counters.changed(before) == [3]


@needs_c
def test_a_tensor_without_a_counter_is_left_to_the_attribute() -> None:
    path = counter_path()
    assert path is not None
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert read_counters([torch.zeros(2), tensor], path) is None
    with pytest.raises(RuntimeError, match="version counter"):
        VersionCounters([tensor]).read()


def test_nothing_is_read_where_memory_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert counter_path.__wrapped__() is None


def test_a_torch_that_keeps_no_counter_within_reach_is_left_to_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_VERSION", lambda _: 0xDEADBEEF)
    assert counter_path.__wrapped__() is None


def test_a_torch_whose_objects_have_another_form_is_left_to_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_BODY", lambda tensor: id(tensor) ^ 8)
    assert counter_path.__wrapped__() is None
