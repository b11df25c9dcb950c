"""One run of one entrant through at most one failure: started, struck, watched and restarted by what its log says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from processes import end_all, with_environment

from race import failures, score
from race.disk import Disk
from race.entrants import HERE, Entrant
from race.failures import Failure
from race.lanes import Span

RANKS = 2
PATIENCE_S = 30.0  # without a line in the log, after which somebody looks: beside its starts
START_S = 180.0  # the same for the first line
DELAY_S = 2.0  # until a scheduler, or somebody, has started it again
SETTLES_S = 1.0  # after a rank was stopped: what the others still do before they wait for it
MOST_BY_HAND = 3


class Run:
    """One run of one entrant, through at most one failure.

    Args:
        entrant: Who.
        failure: What strikes.
        steps: How many there are.
        step_s: What an ordinary step takes.
        brief_s: In how many seconds it will have ended for certain, its start included; 0 if nobody knows.
        folder: Everything of the run; made by `begin`.
    """

    def __init__(self, entrant: Entrant, failure: Failure, steps: int, step_s: float, brief_s: float, folder: Path) -> None:  # fmt: skip
        self.entrant, self.failure, self.steps, self.step_s, self.folder = entrant, failure, steps, step_s, folder
        self.log, self.mark = folder / "log", f"race-{os.getpid()}-{time.time_ns()}"
        self.brief_s = brief_s
        self.waits, self.core = failure.kind == "hang" and entrant.waits_s > 0, -1
        self.shm = Path("/dev/shm") / self.mark
        self.ranks, self.by_hand, self.skip, self.peak_bytes = RANKS, 0, 0, 0
        self.began = self.struck_at = self.full_until = self.first_at = self.woke_at = self.ended_at = 0.0
        self.notes: list[str] = []
        self.lines: list[score.Line] = []
        self._read, self._trained, self._tried_at, self._stopped = 0, 0, -1, 0
        self._seen = self._looked = 0.0
        self._patience_s = START_S
        self._process: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        """Return what the ranks get."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        self.shm.mkdir(exist_ok=True)
        own = {
            "RACE_ID": self.mark, "RACE_LOG": self.log, "RACE_FOLDER": self.disk.path / "run", "RACE_STEPS": self.steps,
            "RACE_SLEEP_S": self.failure.sleep_s, "RACE_EVERY": self.entrant.every, "RACE_PERSIST": self.entrant.persist,
            "RACE_SKIP": self.skip, "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "PYTHONPATH": HERE.parent,
            "TMPDIR": self.folder / "tmp", "FLASHCKPT_SHM_DIR": self.shm, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,  # torchrun 2.13 hangs after a restart under gloo without it
            "ELASTIC_JOB_NAME": self.mark, "TORCHELASTIC_RUN_ID": self.mark,  # DLRover's names in shared memory
        }  # fmt: skip
        (self.disk.path / "run").mkdir(exist_ok=True)
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    def begin(self) -> None:
        """Start the launcher for the first time; it has the core that the calling thread has."""
        self.folder.mkdir()
        self.disk = Disk(self.folder)
        self.began = self._seen = self._looked = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start the launcher."""
        with (self.folder / "output").open("ab") as out:
            self._process = subprocess.Popen(
                self.entrant.command(self.ranks),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
            )

    def look(self) -> None:
        """Read what the log has got."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._read += len(new)
            self.lines += score.lines_of(new.decode())

    def processes(self) -> list[int]:
        """Return those of this run, whoever their parents are."""
        return with_environment(self.mark)

    def note_memory(self) -> None:
        """Keep the largest sum of what its processes hold, shared pages once."""
        held = 0
        for pid in self.processes():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            held += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
        self.peak_bytes = max(self.peak_bytes, held)

    def kill_all(self) -> None:
        """SIGKILL everything; return when it is gone."""
        end_all(self.mark)
        if self._process is not None:
            self._process.wait()

    def newest_ranks(self) -> dict[int, int]:
        """Return process ids by rank of the newest attempt."""
        starts = [line for line in self.lines if line["event"] == "start"]
        newest = max((line["a"] for line in starts), default=0)
        return {line["r"]: line["pid"] for line in starts if line["a"] == newest}

    def strike(self) -> None:
        """Do what the failure is."""
        self.struck_at = time.monotonic()
        kind, pids = self.failure.kind, self.newest_ranks()
        if kind == "rank":
            _kill(pids[self.failure.rank], signal.SIGKILL)
        elif kind == "ranks":
            for pid in pids.values():
                _kill(pid, signal.SIGKILL)
        elif kind == "hang":
            self._stopped = pids[self.failure.rank]
            _kill(self._stopped, signal.SIGSTOP)
        elif kind == "disk":
            self.disk.fill()
            self.full_until = time.monotonic() + failures.DISK_S
        elif kind == "machine":
            self.kill_all()
            self.forget_memory()
            self.disk.lose_power()
        elif kind == "resize":
            self.resize()
        if kind in failures.RESTARTED:
            time.sleep(DELAY_S)
            self.start()

    def resize(self) -> None:
        """SIGTERM, as a scheduler's, and one rank from then on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.notes.append("did not end after SIGTERM within 60 s")
        self.kill_all()
        self.forget_memory()
        self.ranks = 1

    def forget_memory(self) -> None:
        """What a machine forgets: shared memory, and sockets."""
        shutil.rmtree(self.shm, ignore_errors=True)
        for path in [*Path("/dev/shm").glob(f"*{self.mark}*"), *Path("/tmp/ckpt_sock").glob(f"*{self.mark}*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def tick(self) -> bool:
        """Do what is due; return whether the run has ended, or nobody knows what to do."""
        self.look()
        now = time.monotonic()
        done = max((line["s"] for line in self.lines[-8:] if line["event"] == "step"), default=0)
        self._notice(now)
        if self.is_due(done):
            self.strike()
            self._seen = now
        if self.full_until and now > self.full_until:
            self.disk.free()
            self.full_until = 0.0
        if any(line["event"] == "end" for line in self.lines[-8:]):
            return self.ends()  # its last save is through, and the weights are logged
        assert self._process is not None
        ended = self._process.poll() is not None
        return (ended or now - self._seen >= self._patience_s) and self._is_given_up(done, ended)

    def ends(self) -> bool:
        """Note when, and let nothing of it disturb others."""
        self.ended_at = time.monotonic()
        self.kill_all()
        return True

    def _notice(self, now: float) -> None:
        """Note what is new: lines, memory, a stopped rank that is gone."""
        if len(self.lines) != self._trained:
            if not self._trained:
                self._patience_s = PATIENCE_S + 3 * (now - self._seen)
                self.first_at = now
            self._trained, self._seen = len(self.lines), now
        if now - self._looked > 1.0:
            self.note_memory()
            self._looked = now
        if self._stopped and not self.woke_at and not Path(f"/proc/{self._stopped}").exists():
            self.woke_at = now

    def _is_given_up(self, done: int, ended: bool) -> bool:
        """Intervene, as somebody would who looks; return whether that was done too often already."""
        assert self._process is not None
        if self.by_hand == MOST_BY_HAND:
            self.notes.append("given up")
            return self.ends()
        self.notes.append(
            f"the launcher ended with {self._process.returncode}" if ended else f"no step in {self._patience_s:.0f} s"
        )
        self.by_hand += 1
        self.skip += self._tried_at == done  # it does not start from what it saved last: somebody removes that
        self._tried_at = done
        self.kill_all()
        time.sleep(DELAY_S)
        self.start()
        self._seen = time.monotonic()
        return False

    def is_due(self, done: int) -> bool:
        """Whether the failure strikes now."""
        if self.struck_at or self.failure.kind == "none" or done < self.failure.step:
            return False
        newest = [line["t"] for line in self.lines[-8:] if line["event"] == "step" and line["s"] == done]
        return bool(time.time() >= min(newest) + self.failure.later * (self.step_s + self.failure.sleep_s))

    def waits_until(self) -> float:
        """Return until when it does nothing but wait for a time-out; 0 where it does something."""
        if not self._stopped or self.woke_at or not self.waits:
            return 0.0
        return self.struck_at + self.entrant.waits_s if time.monotonic() > self.struck_at + SETTLES_S else 0.0

    def worked(self) -> list[Span]:
        """Return when it did something: all the time, but for a wait."""
        if not self.waits or not self._stopped:
            return [(self.began, self.ended_at)]
        return [(self.began, self.struck_at + SETTLES_S), (self.woke_at or self.ended_at, self.ended_at)]

    def close(self) -> None:
        """Nothing of it is left but its log and output."""
        if self.began:
            self.kill_all()
            self.forget_memory()
            self.disk.close()


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
