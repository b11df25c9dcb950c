"""Let one job commit for minutes or hours, and prove that nothing of it grows: `make soak MINUTES=60`.

    PYTHONPATH=tests:. python tests/crash/soak.py --minutes 60 --ranks 2 [--json FILE]

Two ranks under dlrun take a snapshot each step and commit each second one, as fast as they can. Of ranks, agent and daemon are
watched: private memory, descriptors, threads; of the job: shared memory, its logs, objects on storage. The first third
of the time is warming up. Over the rest memory may grow by 1 KB per commit (64 KB in all is noise), and the daemon's by
2.5 KB for each checkpoint that was deleted within the hour; of everything else the smallest value of the second half
must not exceed that of the first by more than 4. Exit code 0 if all of it is flat, 1 if something grows, which is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from support.dlrun import Launch, dlrun

from flashckpt.bench.host import anonymous_bytes
from flashckpt.daemon.machine.logs import LOG_BYTES
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.control import ControlView
from flashckpt.shm.job_directory import jobs_in_memory

PROGRAM = Path(__file__).with_name("soak_rank.py")
SAMPLES = 120
STEPS_PER_COMMIT = 2
BYTES_PER_COMMIT = 1024
NOISE_BYTES = 64 << 10
DELETED = "root: deleted within the hour"
BYTES_PER_DELETED = 2500
"""What the daemon may hold for each of them: the names, read with each commit. In a job that commits once a minute there are 60."""
NOISE_COUNT = 4
"""Threads, descriptors and objects of what happens to be under way when it is looked at."""
LOGS_BYTES = 2 * LOG_BYTES + (1 << 20)

Sample = Mapping[str, float]


def size_below(folder: Path) -> int:
    """Bytes that the files of a folder occupy; files that go meanwhile do not count."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(base) / name).lstat().st_blocks * 512
    return total


def deleted_within_the_hour(root: Path) -> set[str]:
    """Checkpoints of which a tombstone and a catalogue entry are left: for an hour, and the daemon reads their names."""
    return {
        n.removesuffix("_deleted") for _, _, files in os.walk(root / "catalog") for n in files if n.endswith("_deleted")
    }


def count_data(root: Path, deleted: set[str]) -> int:
    """Objects below a root but those that a deleted checkpoint leaves."""
    return sum(len(files) for base, _, files in os.walk(root) if Path(base).name not in {*deleted, "catalog"})


def look_at(name: str, pid: int) -> dict[str, float]:
    """Return what one process holds."""
    return {
        f"{name}: memory": anonymous_bytes(pid),
        f"{name}: descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        f"{name}: threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
    }


class Soak:
    """One job under dlrun and what is seen of it.

    Args:
        folder: For everything it writes.
        launch: Its dlrun.
        ranks: How many it has.
    """

    def __init__(self, folder: Path, launch: Launch, ranks: int) -> None:
        self.folder, self.launch, self.ranks = folder, launch, ranks
        self.progress = folder / "progress"
        launch.until(lambda: self.commits() > 10, "the first commits")
        (self.directory,) = jobs_in_memory()[0]
        status = self.directory.read_status()
        assert status is not None
        self.pids = {"agent": launch.process.pid, "daemon": status.pid} | self._ranks()

    def _ranks(self) -> dict[str, int]:
        rows = ControlView(self.directory.control_path).rows()
        return {f"rank {row.rank}": row.pid for row in rows}

    def commits(self) -> int:
        """Steps committed so far, as rank 0 says."""
        text = self.progress.read_text() if self.progress.exists() else ""
        return int(text or 0) // STEPS_PER_COMMIT

    def sample(self) -> Sample:
        """Look at everything once."""
        found: dict[str, float] = {"commits": self.commits()}
        for name, pid in self.pids.items():
            found |= look_at(name, pid)
        deleted = deleted_within_the_hour(self.folder / "root")
        logs = sum(path.stat().st_blocks * 512 for path in self.directory.path.glob("daemon.log*"))
        return found | {
            "job: shared memory": size_below(self.directory.path) - logs,
            "job: log files": logs,
            "job: output of dlrun": self.launch.log.stat().st_size,
            DELETED: len(deleted),
            "root: objects": count_data(self.folder / "root", deleted),
        }


@contextmanager
def soaking(folder: Path, ranks: int, *more: object) -> Iterator[Soak]:
    """Start the job; stop it as a scheduler does at the end. `more` goes to its ranks."""
    memory = folder / "memory"
    memory.mkdir(mode=0o700)
    os.environ["FLASHCKPT_SHM_DIR"] = str(memory)
    flags = ["--standalone", f"--nproc-per-node={ranks}", PROGRAM, folder / "root", folder / "progress", *more]
    with dlrun(folder, *flags, fresh=True) as launch:
        yield Soak(folder, launch, ranks)
        launch.process.send_signal(signal.SIGTERM)
        code = launch.wait(300)
        if code != RESUME_EXIT_CODE:
            raise SystemExit(f"the job ended with {code}:\n{launch.output}")


def growth(samples: list[Sample], name: str) -> str:
    """Return what is wrong with one series after its first third; "" if it is flat."""
    rest = samples[len(samples) // 3 :]
    values, commits = [one[name] for one in rest], [one["commits"] for one in rest]
    half = len(values) // 2
    if name == DELETED:  # as many as commits, until an hour has passed
        return ""
    if name.endswith(": memory"):
        if name.startswith("daemon"):
            values = [one[name] - BYTES_PER_DELETED * one[DELETED] for one in rest]
        each = float(np.polyfit(commits, values, 1)[0])
        if each <= BYTES_PER_COMMIT or each * (commits[-1] - commits[0]) <= NOISE_BYTES:
            return ""
        return f"{name} grows by {each:.0f} bytes per commit"
    if name == "job: log files":  # turned over: bounded, and growing until then
        return "" if max(values) <= LOGS_BYTES else f"{name}: {max(values):.0f} bytes"
    first, second = min(values[:half]), min(values[half:])
    return "" if second <= first + NOISE_COUNT else f"{name} grew from {first:.0f} to {second:.0f}"


def run(minutes: float, ranks: int, folder: Path) -> list[Sample]:
    """Sample a job for so long; print a line now and then."""
    samples: list[Sample] = []
    with soaking(folder, ranks) as job:
        end = time.monotonic() + minutes * 60
        while (left := end - time.monotonic()) > 0:
            samples.append(job.sample())
            if len(samples) % 12 == 1:
                print(f"{samples[-1]['commits']:.0f} commits, {left / 60:.1f} minutes left", flush=True)
            time.sleep(min(left, minutes * 60 / SAMPLES))
            if job.launch.process.poll() is not None:
                raise SystemExit(f"the job ended by itself:\n{job.launch.output}")
    return samples


def report(samples: list[Sample]) -> list[str]:
    """Print every series; return what grows."""
    print(f"\n{'':24}{'a third':>14}{'the end':>14}{'largest':>14}")
    problems = []
    for name in samples[0]:
        values = [one[name] for one in samples]
        print(f"{name:24}{values[len(values) // 3]:14.0f}{values[-1]:14.0f}{max(values):14.0f}")
        if name != "commits" and (problem := growth(samples, name)):
            problems.append(problem)
    return problems


def main() -> int:
    """Parse arguments; run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-soak-", ignore_cleanup_errors=True) as folder:
        samples = run(args.minutes, args.ranks, Path(folder))
    problems = report(samples)
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "problems": problems}, indent=1))
    print("\n".join(problems) or f"nothing grows over {samples[-1]['commits']:.0f} commits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
