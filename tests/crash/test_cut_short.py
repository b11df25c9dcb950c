"""Files in shared memory that another process cuts short (`truncate`): ranks may die of it, who watches over them may not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.daemons import forked
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.commands.status import describe
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.errors import DamagedError
from flashckpt.shm.control import PAGE, ROW_BYTES, Control, ControlView
from flashckpt.storage.posix import PosixStore

pytestmark = pytest.mark.timeout(400)


def test_what_is_read_without_a_mapping_is_an_error_when_cut_and_is_whole_again_after_the_next_start(
    shm_dir: Path,
) -> None:
    path = shm_dir / "control"
    control = Control.open(path, rows=2)
    view = ControlView(path)
    control.row(1).step, control.stop_after = 77, 90
    assert [row.step for row in view.rows()] == [0, 77]
    assert view.stop_after == 90
    view.stop_after = 91
    assert control.stop_after == 91
    for size in (0, 20, PAGE - 1):
        os.truncate(path, size)
        with pytest.raises(DamagedError, match="truncated"):
            view.rows()
        with pytest.raises(DamagedError, match="truncated"):
            view.stop_after = 5
        assert path.stat().st_size == size, "nothing is written behind the end"
    again = Control.open(path, rows=2)
    assert (len(view.rows()), view.stop_after, again.stop_after) == (2, -1, -1)
    assert path.stat().st_size == PAGE + 2 * ROW_BYTES
    path.unlink()
    with pytest.raises(FileNotFoundError):
        view.rows()


def test_the_daemon_outlives_a_segment_that_is_cut_short_while_it_is_persisted(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path / "root"))
    job.step(5, persist=True)
    paths = job.directory.segments()
    real = PosixStore.put_object

    def cut_first(self: PosixStore, key: str, *args: object) -> None:
        for path in paths:
            os.truncate(path, 8192)
        real(self, key, *args)  # type: ignore[arg-type]  # handed on

    def prepare() -> None:
        PosixStore.put_object = cut_first  # type: ignore[method-assign,assignment]  # in a process of its own

    with forked(job, prepare=prepare, times=DaemonTimeouts(linger_s=60.0)) as daemon:
        said = wait_for(
            lambda: daemon.poll() is not None or getattr(job.directory.read_status(), "error", ""),
            what="the daemon to say it",
        )
        assert daemon.poll() is None, "it died"
        assert "is truncated" in str(said) or "is damaged" in str(said), "the next attempt finds it so"
        assert describe(job.directory)["committed"] is None
        assert not list((tmp_path / "root").glob("step-*/MANIFEST"))
    job.directory.let_go()
