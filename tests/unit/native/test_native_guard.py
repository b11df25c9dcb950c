"""Mappings of files that another process cuts short: what is lost reads as zeros and is marked, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from support import sanitized
from support.ranks import wait_for

from flashckpt.native import GuardedMap, digest_ranges, guarding

PAGE = 4096
PAGES = 64
MOST_RANGES = 256

pytestmark = pytest.mark.skipif(not hasattr(guarding._c, "guard"), reason="needs the C part")


@pytest.fixture
def file(shm_dir: Path) -> Iterator[BinaryIO]:
    with (shm_dir / "segment").open("wb+") as opened:
        opened.write(b"x" * (PAGES * PAGE))
        opened.flush()
        yield opened


def mapped(file: BinaryIO) -> GuardedMap:
    made = GuardedMap.of(file.fileno(), PAGES * PAGE, 0)
    assert made is not None
    return made


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: `made` is a guarded mapping of 4 pages of `file`, `path` its name."""
    start = (
        "import faulthandler, mmap, os, signal, sys\nfrom flashckpt.native import GuardedMap\n"
        f"path = {str(folder / 'other')!r}\nfile = open(path, 'wb+')\nfile.write(b'x' * 16384)\nfile.flush()\n"
    )
    command = [sys.executable, "-c", start + code]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=sanitized.clean_environment() | {"PYTHONPATH": "."}
    )


def test_a_file_that_stays_is_read_as_any_mapping(file: BinaryIO) -> None:
    made = mapped(file)
    assert bytes(memoryview(made)) == b"x" * (PAGES * PAGE)
    assert not made.is_lost
    with pytest.raises(TypeError):
        memoryview(made)[0] = 1


def test_what_is_cut_off_reads_as_zeros_and_is_marked_once_it_is_read(file: BinaryIO) -> None:
    made = mapped(file)
    view = memoryview(made)
    file.truncate(3 * PAGE)
    assert bytes(view[: 3 * PAGE]) == b"x" * (3 * PAGE)
    marks = [made.is_lost]
    assert marks == [False], "nothing of it was read"
    assert view[10 * PAGE + 5] == 0
    marks.append(made.is_lost)
    assert marks == [False, True]
    assert bytes(view) == b"x" * (3 * PAGE) + bytes((PAGES - 3) * PAGE)
    assert digest_ranges(view, [0], [PAGES * PAGE])[0] != digest_ranges(b"x" * (PAGES * PAGE), [0], [PAGES * PAGE])[0]


def test_a_system_call_on_lost_memory_fails_and_nothing_more(file: BinaryIO, tmp_path: Path) -> None:
    made = mapped(file)
    file.truncate(0)
    with (tmp_path / "out").open("wb", buffering=0) as out, pytest.raises(OSError, match="Bad address"):
        os.pwrite(out.fileno(), memoryview(made)[:PAGE], 0)


def test_threads_that_read_while_the_file_is_cut_live_on(file: BinaryIO) -> None:
    made = mapped(file)
    view, started, ends = memoryview(made), threading.Barrier(3), threading.Event()
    found: list[bool] = []

    def read() -> None:
        started.wait()
        while not ends.is_set():
            digest_ranges(view, [0, PAGE], [PAGES * PAGE, PAGE])
        found.append(made.is_lost)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    file.truncate(PAGE)
    wait_for(lambda: made.is_lost, what="a thread to have met the end")
    ends.set()
    for thread in threads:
        thread.join()
    assert found == [True, True]


def test_each_mapping_has_its_own_mark_and_a_later_one_starts_without(file: BinaryIO, shm_dir: Path) -> None:
    one = mapped(file)
    with (shm_dir / "second").open("wb+") as second:
        second.write(b"y" * (PAGES * PAGE))
        second.flush()
        other = mapped(second)
        file.truncate(0)
        assert memoryview(one)[0] == 0
        assert (one.is_lost, other.is_lost) == (True, False)
        del one
        again = mapped(second)
        assert not again.is_lost


def test_a_range_is_given_up_with_the_last_view_of_it(file: BinaryIO) -> None:
    """Else the table would be full after some hundred snapshots, and readers would copy from then on."""
    view = memoryview(mapped(file))
    number = view.obj._number  # type: ignore[attr-defined]  # of a GuardedMap
    for _ in range(2 * MOST_RANGES):
        assert GuardedMap.of(file.fileno(), PAGE, 0) is not None
    file.truncate(0)
    assert view[5] == 0, "the view outlived the name of its mapping"
    del view
    gc.collect()
    file.truncate(PAGES * PAGE)
    assert mapped(file)._number <= number


def test_what_does_not_fit_into_the_table_is_not_mapped(file: BinaryIO) -> None:
    held = [GuardedMap.of(file.fileno(), PAGE, 0) for _ in range(MOST_RANGES + 1)]
    assert held[0] is not None
    assert held[-1] is None
    del held
    assert mapped(file) is not None


def test_other_bus_errors_end_the_process_as_before(shm_dir: Path) -> None:
    code = (
        "made = GuardedMap.of(file.fileno(), 16384, 0)\n"
        "plain = mmap.mmap(file.fileno(), 16384)\n"
        "os.truncate(path, 0)\n"
        "assert memoryview(made)[9] == 0\n"
        "print('guarded', flush=True)\n"
        "plain[9]\n"
    )
    done = run(code, shm_dir)
    assert (done.stdout, done.returncode) == ("guarded\n", -7), done.stderr
    done = run("made = GuardedMap.of(file.fileno(), 16384, 0)\nos.kill(os.getpid(), signal.SIGBUS)\n", shm_dir)
    assert done.returncode == -7, done.stderr


def test_a_handler_that_was_there_before_gets_what_is_not_guarded(shm_dir: Path) -> None:
    code = (
        "faulthandler.enable(sys.stderr)\n"
        "made = GuardedMap.of(file.fileno(), 16384, 0)\n"
        "plain = mmap.mmap(file.fileno(), 16384)\n"
        "os.truncate(path, 0)\n"
        "assert memoryview(made)[9] == 0\n"
        "print('guarded', file=sys.stderr, flush=True)\n"
        "plain[9]\n"
    )
    done = run(code, shm_dir)
    assert done.returncode == -7
    assert done.stderr.startswith("guarded\nFatal Python error: Bus error"), done.stderr


def test_where_another_handler_came_later_nothing_is_mapped(shm_dir: Path) -> None:
    code = (
        "made = GuardedMap.of(file.fileno(), 16384, 0)\n"
        "signal.signal(signal.SIGBUS, lambda *_: None)\n"
        "print(made is not None, GuardedMap.of(file.fileno(), 16384, 0))\n"
    )
    done = run(code, shm_dir)
    assert done.stdout == "True None\n", done.stderr


def test_a_file_that_is_too_short_from_the_start_is_an_error(file: BinaryIO) -> None:
    with pytest.raises(ValueError, match="greater than file size"):
        GuardedMap.of(file.fileno(), (PAGES + 1) * PAGE, 0)


def test_an_array_over_it_keeps_it(file: BinaryIO) -> None:
    made = GuardedMap.of(file.fileno(), PAGES * PAGE, 0)
    array = np.frombuffer(memoryview(made), np.uint8)  # type: ignore[arg-type]  # not None: as above
    with contextlib.suppress(NameError):
        del made
    gc.collect()
    file.truncate(0)
    assert array.sum() == 0
