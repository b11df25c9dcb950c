"""Standard streams of dlrun, its ranks and the daemon: what cannot be written is counted and reported, and ends nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flashckpt.daemon.launcher.log_folders import logs_elsewhere, opened
from flashckpt.nonfatal import NonfatalFile, nonfatal_text, report_lost


def test_a_full_stream_costs_lines_that_are_reported_elsewhere(tmp_path: Path) -> None:
    full, beside = os.open("/dev/full", os.O_WRONLY), os.open(tmp_path / "beside", os.O_RDWR | os.O_CREAT)
    stream = nonfatal_text(NonfatalFile(full, "rank.log", "[dlrun] ", beside), "stdout")
    print("one\ntwo", file=stream)
    stream.flush()
    report_lost(stream)
    assert (tmp_path / "beside").read_text().splitlines() == [
        "[dlrun] rank.log cannot be written (No space left on device): lines are lost until it can",
        "[dlrun] rank.log: 2 lines were lost (No space left on device)",
    ]
    os.close(full)
    os.close(beside)


def test_a_pipe_without_a_reader_raises_nothing_and_a_working_stream_gets_every_byte() -> None:
    reading, writing = os.pipe()
    stream = nonfatal_text(NonfatalFile(writing, "standard error"), "stderr", errors="backslashreplace")
    stream.write("\udcff whole\n")
    assert os.read(reading, 99) == b"\\udcff whole\n"
    os.close(reading)
    stream.write("lost\n")
    report_lost(stream)
    os.close(writing)


def test_only_a_lack_of_room_sends_logs_elsewhere(tmp_path: Path) -> None:
    found = logs_elsewhere(OSError(errno.ENOSPC, "full", "/logs"), tmp_path)
    assert found.root_log_dir == str(tmp_path / "logs")
    with pytest.raises(PermissionError):
        logs_elsewhere(PermissionError(errno.EACCES, "refused", "/logs"), tmp_path)
    with pytest.raises(FileNotFoundError):
        opened(str(tmp_path / "none" / "log"))
    assert opened("") is None
