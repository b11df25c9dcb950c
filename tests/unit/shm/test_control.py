"""The control file: rows that a killed rank, or an earlier occupant, can never leave wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import ended, fork

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.shm.control import (
    MAX_COMPLETE,
    PAGE,
    ROW_BYTES,
    Control,
    RankAcks,
    decode_acks,
    encode_acks,
)


@pytest.fixture
def control(shm_dir: Path) -> Control:
    return Control.open(shm_dir / "control", rows=3)


def test_a_new_file_says_no_stop_and_knows_nobodys_snapshots(control: Any) -> None:
    assert control.stop_after == -1
    assert control.rows == 3
    assert [control.row(i).published for i in range(3)] == [None] * 3
    assert [control.row(i).complete for i in range(3)] == [[], [], []]


def test_what_one_process_writes_another_reads(control: Any, shm_dir: Any) -> None:
    def rank() -> None:
        row = Control.open(shm_dir / "control").row(1)
        row.clear()
        row.rank, row.pid, row.generation, row.step = 5, os.getpid(), 2, 120
        row.heartbeat_ns, row.paused, row.restored_step = 10**18, 1, 100
        row.complete = [SnapshotId(2, 115), SnapshotId(2, 120)]

    assert ended(fork(rank)) == 0
    row = control.row(1)
    assert (row.rank, row.generation, row.step, row.heartbeat_ns) == (5, 2, 120, 10**18)
    assert (row.paused, row.restored_step) == (1, 100)
    assert row.complete == [(2, 120), (2, 115)]
    assert control.row(0).published is None
    control.stop_after = 125
    assert Control.open(shm_dir / "control").stop_after == 125


def test_unknown_fields_and_rows_are_refused(control: Any) -> None:
    with pytest.raises(AttributeError):
        control.row(0).stepp = 1
    with pytest.raises(AttributeError):
        _ = control.row(0).stepp
    for index in (-1, 3):
        with pytest.raises(IndexError):
            control.row(index)


def test_a_row_is_512_bytes_and_rows_do_not_touch(control: Any) -> None:
    names = [name for name in vars(type(control.row(0)))["__annotations__"] if not name.startswith("_")]
    for name in names:
        setattr(control.row(1), name, -1)
    control.row(1).publish(RankAcks.of([SnapshotId(2**62, 2**62)] * MAX_COMPLETE, SnapshotId(2**62, 2**62)))
    assert control.row(1).complete == [(2**62, 2**62)] * MAX_COMPLETE
    assert all(getattr(control.row(i), name) == 0 for i in (0, 2) for name in names)


def test_a_list_of_another_generation_counts_as_unknown(control: Any) -> None:
    row = control.row(0)
    row.generation = 2
    row.complete = [(2, 10)]
    row.generation = 3
    assert row.published is None
    row.complete = [(2, 10)]
    assert row.complete == [(2, 10)]


def test_rank_killed_at_any_instant_of_publishing_leaves_an_old_a_new_or_an_unknown_list(shm_dir: Any) -> None:
    path = shm_dir / "control"

    def is_whole(pairs: tuple[tuple[int, int], ...]) -> bool:
        return not pairs or pairs == tuple((1, s) for s in range(pairs[0][1], pairs[0][1] - 3, -1))

    for _ in range(15):
        Control.open(path, rows=1).row(0).clear()
        told, tell = os.pipe()

        def publish_on(tell: int = tell) -> None:
            row = Control.open(path).row(0)
            row.generation = 1
            for n in range(10, 10**6):
                row.complete = [SnapshotId(1, n), SnapshotId(1, n - 1), SnapshotId(1, n - 2)]
                if n == 200:
                    os.write(tell, b"x")

        child = fork(publish_on)
        os.read(told, 1)
        row = Control.open(path).row(0)
        seen = [tuple(row.complete) for _ in range(200)]
        os.kill(child, signal.SIGKILL)
        ended(child)
        os.close(told)
        os.close(tell)
        assert all(map(is_whole, [*seen, tuple(row.complete)])), seen


pairs = st.tuples(st.integers(-1, 2**40), st.integers(-1, 2**40))


@given(st.lists(pairs, max_size=12), st.none() | pairs)
def test_published_lists_survive_their_bytes(identities: Any, low_watermark: Any) -> None:
    what = RankAcks.of(identities, low_watermark)
    assert decode_acks(encode_acks(what)) == what
    assert list(what.complete) == sorted(identities, reverse=True)[:MAX_COMPLETE]
    assert all(i <= what.low_watermark for i in what.complete)


def test_growing_keeps_rows_and_opening_something_else_is_refused(control: Any, shm_dir: Any) -> None:
    control.row(2).step = 77
    bigger = Control.open(shm_dir / "control", rows=8)
    assert (bigger.rows, bigger.row(2).step, bigger.stop_after) == (8, 77, -1)
    assert os.path.getsize(shm_dir / "control") == PAGE + 8 * ROW_BYTES  # noqa: PTH202 -- one number
    (shm_dir / "other").write_bytes(b"x" * 8192)
    with pytest.raises(DamagedError):
        Control.open(shm_dir / "other")
    with pytest.raises(FileNotFoundError):
        Control.open(shm_dir / "absent")


def test_a_damaged_page_stops_nobody(shm_dir: Path) -> None:
    control = Control.open(shm_dir / "control", rows=1)
    path = shm_dir / "control"
    for step in (-1, 125):
        control.stop_after = step
        good = path.read_bytes()
        for bit in range(64 * 2):
            damaged = bytearray(good)
            damaged[16 + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert Control.open(path).stop_after == -1
        path.write_bytes(good)
        assert Control.open(path).stop_after == step
    path.write_bytes(good[:8] + bytes(255 - byte for byte in good[8:4096]) + good[4096:])
    assert Control.open(path).stop_after == -1


def test_a_page_of_an_earlier_version_is_read(shm_dir: Path) -> None:
    control = Control.open(shm_dir / "control", rows=1)
    control.stop_after = 125
    path = shm_dir / "control"
    raw = bytearray(path.read_bytes())
    raw[24:32] = bytes(8)
    path.write_bytes(raw)
    assert Control.open(path).stop_after == 125
