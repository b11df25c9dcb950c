"""A machine without a free core: snapshots are copied inside step(), and beside training again once a core is free."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import digest
from support.one_rank import agent_of_the_test, crash, finished, opened  # noqa: F401 -- fixtures
from torch import nn

from flashckpt.snapshot import stager
from flashckpt.snapshot.runs import CoreTime, Crowding

LARGE = Crowding.LEAST_BYTES


def saw(crowding: Crowding, ran: int, waited: int, nbytes: int = LARGE) -> bool:
    return crowding.saw(CoreTime(100, 50), CoreTime(100 + ran, 50 + waited), nbytes)


def test_three_copies_in_a_row_that_waited_for_a_core_make_it_full() -> None:
    crowding = Crowding()
    rounds = [(10, 9), (10, 9), (10, 1), (10, 9), (10, 9)]
    assert not any(saw(crowding, *one) for one in rounds)
    assert not crowding.next_here(LARGE)
    assert saw(crowding, 10, 9)
    assert not saw(crowding, 10, 9), "it is news once"
    assert crowding.next_here(LARGE)


def test_one_copy_beside_training_now_and_then_finds_out_that_a_core_is_free_again() -> None:
    crowding = Crowding()
    for _ in range(Crowding.IN_A_ROW):
        saw(crowding, 10, 9)
    here = [crowding.next_here(LARGE) for _ in range(2 * Crowding.TRIED_AGAIN)]
    assert here.count(False) == 2
    saw(crowding, 10, 1)
    assert not crowding.next_here(LARGE)


def test_small_snapshots_and_kernels_that_count_nothing_change_nothing() -> None:
    crowding = Crowding()
    for _ in range(5):
        assert not saw(crowding, 10, 90, nbytes=LARGE - 1)
        assert not crowding.saw(None, CoreTime(1, 9), LARGE)
        assert not crowding.saw(CoreTime(0, 0), None, LARGE)
    for _ in range(Crowding.IN_A_ROW):
        saw(crowding, 10, 90)
    assert not crowding.next_here(LARGE - 1)


def test_of_very_many_small_rows_training_waits_for_none() -> None:
    crowding = Crowding()
    for _ in range(Crowding.IN_A_ROW):
        saw(crowding, 10, 90)
    assert crowding.next_here(LARGE, LARGE // Crowding.LEAST_ROW_BYTES)
    assert not crowding.next_here(LARGE, LARGE // Crowding.LEAST_ROW_BYTES + 1)


def test_a_thread_that_computes_has_had_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = CoreTime.now()
    if before is None:
        pytest.skip("this kernel does not count what threads wait (CONFIG_SCHED_INFO)")
    torch.randn(300, 300).matmul(torch.randn(300, 300))
    after = CoreTime.now()
    assert after is not None
    assert after.ran > before.ran
    monkeypatch.setattr("flashckpt.snapshot.runs._OWN", tmp_path / "not there")
    assert CoreTime.now() is None


def test_on_a_full_machine_the_training_thread_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, copied_by: str
) -> None:
    monkeypatch.setattr(Crowding, "LEAST_BYTES", 0)
    monkeypatch.setattr(Crowding, "LEAST_ROW_BYTES", 0)
    waited = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(CoreTime, "now", lambda: CoreTime(0, next(waited)))  # each copy waits for a millisecond
    threads: list[str] = []
    real: Any = stager.Stager._copy

    def copy(self: Any, snapshot: Any) -> None:
        threads.append(threading.current_thread().name)
        real(self, snapshot)

    monkeypatch.setattr(stager.Stager, "_copy", copy)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING, "flashckpt"):
        for step in range(1, 7):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step(step)
            if step < 4:
                finished(ckpt)
        kept = digest(model, optimizer)
        with torch.no_grad():
            model.weight.zero_()  # no fence is needed: it is copied
        finished(ckpt)
    assert threads == ["flashckpt-copy"] * 3 + ["MainThread"] * 3
    assert ckpt.stats["copied_in_step"] == 3
    (line,) = [record.getMessage() for record in caplog.records if "no idle core" in record.getMessage()]
    assert "from step 3 on snapshots are copied inside ckpt.step()" in line
    crash(ckpt)
    crash(opened(tmp_path, model=model, optimizer=optimizer))
    assert digest(model, optimizer) == kept


def test_ctrl_c_inside_the_copy_ends_step_and_leaves_nothing_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    ckpt.step(1)
    finished(ckpt)
    kept = digest(model, optimizer)
    monkeypatch.setattr(Crowding, "next_here", lambda *_: True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flashckpt.snapshot.runs.HostRuns.check_forms", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ckpt.step(2)
    finished(ckpt)  # and so would the end of the program
    assert [type(error) for error in failures] == [InterruptedError]
    crash(ckpt)
    with torch.no_grad():
        model.weight.zero_()
    crash(opened(tmp_path, model=model, optimizer=optimizer))
    assert digest(model, optimizer) == kept


def test_what_cannot_be_copied_inside_step_is_discarded_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    ckpt.step(1)
    finished(ckpt)
    kept = digest(model, optimizer)
    monkeypatch.setattr(Crowding, "next_here", lambda *_: True)

    def fail(*_: Any) -> None:
        raise OSError("the disk of swap is gone")

    with monkeypatch.context() as patch:
        patch.setattr("flashckpt.snapshot.runs.HostRuns.check_forms", fail)
        ckpt.step(2)
        finished(ckpt)
    assert [type(error) for error in failures] == [OSError]
    crash(ckpt)
    with torch.no_grad():
        model.weight.zero_()
    crash(opened(tmp_path, model=model, optimizer=optimizer))
    assert digest(model, optimizer) == kept
