"""The line of the start: what is tracked and what is not; close() without a step; NaN in a snapshot."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import Holder, agent_of_the_test, crash, finished, step_kept  # noqa: F401 -- fixtures
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flashckpt import Checkpointer
from flashckpt.native.descriptors import FIGURES, figures_of_rows
from flashckpt.sampler import ElasticSampler, SeededSamples
from flashckpt.session.coverage import coverage
from flashckpt.snapshot.copy import Buffer
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.runs import digest_in_slot, places_of
from flashckpt.snapshot.witness import NumbersWatch
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout

PARTS = ("data position", "random state", "the scheduler of optimizer", "what samples draw in loader workers")


class Noisy(Dataset[torch.Tensor]):
    """Draws in each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


class Quiet(Noisy):
    """Draws from a generator of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(index))


def said(root: Path, *, rng: bool, position: bool, scheduler: bool, data: Any, workers: int) -> str:
    """Return the line of a program that tracks some of what it has."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=4, seed=0)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
    things: dict[str, Any] = {
        "scheduler": schedule if scheduler else None,
        "data": loader.sampler if position else None,
    }
    ckpt.track(model=model, optimizer=optimizer, rng=rng, **things)
    return coverage(ckpt._tracked)


@pytest.mark.parametrize(("rng", "position", "scheduler"), list(itertools.product((False, True), repeat=3)))
def test_every_part_that_is_not_tracked_is_said_and_no_other(
    rng: bool, position: bool, scheduler: bool, tmp_path: Path
) -> None:
    line = said(
        tmp_path, rng=rng, position=position, scheduler=scheduler, data=TensorDataset(torch.ones(12)), workers=0
    )
    _, _, lacking = line.partition("; not tracked: ")
    assert [part in lacking for part in PARTS] == [not position, not rng, not scheduler, False]
    assert line.startswith("tracked: model, optimizer")


@pytest.mark.parametrize(
    ("data", "workers", "is_said"),
    [
        (Noisy(), 2, True),
        (Noisy(), 0, False),
        (Quiet(), 2, False),
        (TensorDataset(torch.ones(12)), 2, False),
        (SeededSamples(Noisy(), seed=1), 2, False),
    ],
    ids=["drawn in workers", "drawn here", "seeded by itself", "nothing drawn", "seeded"],
)
def test_draws_in_workers_are_said_where_nothing_seeds_them(
    data: Any, workers: int, is_said: bool, tmp_path: Path
) -> None:
    line = said(tmp_path, rng=True, position=True, scheduler=True, data=data, workers=workers)
    assert (PARTS[3] in line) == is_said


def test_an_optimizer_without_a_scheduler_and_samples_that_are_drawn_lack_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=True)
    assert coverage(ckpt._tracked) == "tracked: model, optimizer, random state"


@pytest.mark.parametrize("is_stepped", [False, True])
def test_close_says_that_no_step_was_counted(
    is_stepped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(thing=Holder(at=1))
    ckpt.restore()
    if is_stepped:
        step_kept(ckpt, 1)
    ckpt.close()
    assert any("close() without one step()" in one.getMessage() for one in caplog.records) != is_stepped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight", "state"])
def test_what_is_not_finite_is_said_once(
    dtype: torch.dtype, value: float, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere infinity may be meant: in a mask that is a buffer."""
    caplog.set_level(logging.WARNING, logger="flashckpt")
    model = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
    model.register_buffer("mask", torch.full((8,), float("-inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    with torch.no_grad():
        if where == "weight":
            model.weight.fill_(value)
        model.weight.grad = torch.full_like(model.weight, value if where == "state" else 0.0)
    optimizer.step()
    for step in (1, 2, 3):
        step_kept(ckpt, step)
        finished(ckpt)
    crash(ckpt)
    found = [one for one in caplog.records if "holds NaN or infinity" in one.getMessage()]
    assert len(found) == (value != 1.0)


def watched(values: np.ndarray, watch: NumbersWatch) -> list[str]:
    """Return what is suspect in a snapshot of one parameter with these values."""
    model = torch.nn.Linear(64, 40, bias=False)
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.SGD(model.parameters()))
    layout = StateLayout.of(tracked.structure(tracked.capture()))
    chunks = np.zeros(layout.table.chunks, FIGURES)
    places = places_of(CopyPlan.of(layout).fenced)
    data = bytearray(layout.total)
    data[: values.nbytes] = values.tobytes()
    digest_in_slot(places, Buffer(memoryview(data)), np.zeros(len(chunks), np.uint64), chunks)
    figures = watch.look(layout, figures_of_rows(layout.table, chunks))
    return [layout.table.fqn(row) for row in np.flatnonzero(figures.suspect).tolist()]


def test_one_element_that_becomes_not_finite_is_suspect_until_it_is_finite_again() -> None:
    good, bad, watch = np.zeros(64 * 40, np.float32), np.zeros(64 * 40, np.float32), NumbersWatch()
    bad[1234] = np.nan
    found = [watched(values, watch) for values in (good, bad, bad, good, bad)]
    assert found == [[], ["model.weight"], ["model.weight"], [], ["model.weight"]]


def test_what_was_never_finite_is_not_suspect() -> None:
    mask = np.full(64 * 40, -np.inf, np.float32)
    watch = NumbersWatch()
    assert [watched(mask, watch), watch.report(), watch.report()] == [[], "model.weight", ""]
    assert watched(mask, NumbersWatch({"model.weight"})) == []


def test_what_was_finite_in_the_restored_snapshot_is_suspect_at_once() -> None:
    mask = np.full(64 * 40, -np.inf, np.float32)
    watch = NumbersWatch(set())
    assert [watched(mask, watch), watch.report()] == [["model.weight"], ""]
