"""dlrun and its ranks on streams and log folders that take nothing: the job ends well, and lost lines are counted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dlrun import ENGINE, dlrun, run_dlrun

LINES = 3000
SCRIPT = f"""
import os, sys
for line in range({LINES}):
    print("out", line)
    print("err", line, file=sys.stderr)
open(f"{{sys.argv[1]}}/done{{os.environ['RANK']}}", "w").write("done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "talk.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def tiny(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of few bytes or few files."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", request.param, "none", str(mount)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.parametrize("ending", [">/dev/full 2>&1", "2>/dev/full | head -1", "2>&1 | head -1"])
@pytest.mark.parametrize("more", ["", "--no-zygote"])
def test_full_and_closed_streams_end_no_job(tmp_path: Path, script: Path, ending: str, more: str) -> None:
    command = f"{sys.executable} -m flashckpt.daemon.run --nproc-per-node 2 {more} {script} {tmp_path} {ending}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=False, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["done", "done"]


@pytest.mark.root
@pytest.mark.parametrize("tiny", ["size=24k"], indirect=True)
def test_a_full_log_folder_costs_lines_and_dlrun_says_how_many_of_which_file(
    tmp_path: Path, script: Path, tiny: Path
) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=0", "--log-dir", tiny / "logs", "--redirects=3")
    code, output = run_dlrun(tmp_path, *flags, script, tmp_path)
    assert code == 0, output
    for rank in range(2):
        for name in ("stdout", "stderr"):
            assert f"attempt_0/{rank}/{name}.log cannot be written (No space left on device)" in output
    kept = sum(len(path.read_text().splitlines()) for path in tiny.glob("logs/*/attempt_0/*/*.log"))
    lost = sum(int(line.split(": ")[-1].split()[0]) for line in output.splitlines() if "lines were lost (" in line)
    assert 4 * LINES - 4 <= kept + lost <= 4 * LINES + 4  # a line that was cut is counted twice or not at all


@pytest.mark.root
@pytest.mark.parametrize("tiny", ["nr_inodes=3", "nr_inodes=7"], indirect=True)
@pytest.mark.parametrize("more", [(), ("--no-zygote",)])
def test_log_folders_that_cannot_be_made_end_no_job(
    tmp_path: Path, script: Path, tiny: Path, more: tuple[str, ...]
) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=0", "--log-dir", tiny / "logs", "--redirects=3")
    code, output = run_dlrun(tmp_path, *more, *flags, script, tmp_path)
    assert code == 0, output
    assert "No space left on device" in output
    assert "out 9" in output  # what has no file is shown
    assert [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["done", "done"]


def test_the_log_of_the_persister_goes_to_the_folder_of_the_ranks_logs(tmp_path: Path) -> None:
    """Also that of one that goes on from a launch before, which wanted it elsewhere."""
    (tmp_path / "train.py").write_text(ENGINE)
    words = ("--redirects=3", "--rdzv-id=logged", tmp_path / "train.py", tmp_path, 10_000, 0.01)
    for number in range(2):
        with dlrun(tmp_path, "--nproc-per-node=1", "--log-dir", tmp_path / f"logs{number}", *words) as launch:
            copy = f"logs{number}/logged_*/persister.log"
            launch.until(lambda: any("daemon of job" in p.read_text() for p in tmp_path.glob(copy)), copy)  # noqa: B023
            (log,) = tmp_path.glob(copy)
            launch.until(lambda: "committed after" in log.read_text().rpartition("daemon of job")[2], "a commit")  # noqa: B023
            launch.process.send_signal(signal.SIGTERM)
            launch.wait()
        assert (log.parent / "attempt_0/0/stderr.log").exists()
