"""The race: every entrant through every failure, by a referee that only starts, kills, and reads logs.

    make race [ARGS="--entrants flashckpt dcp --kinds rank machine --seed 7"]
    python -m race.referee --setup            # environments alone
    python -m race.referee --tune             # the interval of each entrant, by a search in unbroken runs

Printed and written: per entrant and kind of failure the time from the first step to the last over that of the same loop
without failures and checkpoints, steps trained again, samples lost or doubled, whether the last weights have the bits of
the entrant's own unbroken run, bytes written, peak memory, and how often somebody had to intervene.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from processes import with_environment

from flashckpt.bench.measure import LoadWatch, document, median, write_json
from race import failures, score, table
from race.disk import Disk
from race.entrants import ENTRANTS, HERE, PLAIN, Entrant, tuned
from race.failures import Failure

RANKS, EPOCHS = 2, 2
PATIENCE_S, START_S = (
    30.0,
    180.0,
)  # without a line in the log, after which somebody looks: beside its starts; for the first one
DELAY_S = 2.0  # until a scheduler, or somebody, has started it again
MOST_BY_HAND = 3
EVERY = (2, 5, 10, 20, 40)


class Run:
    """One run of one entrant, through at most one failure.

    Args:
        entrant: Who.
        failure: What strikes.
        steps: How many there are.
        step_s: What an ordinary step takes.
        folder: Everything of the run.
    """

    def __init__(self, entrant: Entrant, failure: Failure, steps: int, step_s: float, folder: Path) -> None:
        self.entrant, self.failure, self.steps, self.step_s, self.folder = entrant, failure, steps, step_s, folder
        self.disk, self.log, self.mark = Disk(folder), folder / "log", f"race-{os.getpid()}-{time.time_ns()}"
        self.shm = Path("/dev/shm") / self.mark
        self.ranks, self.by_hand, self.skip, self.peak_bytes = RANKS, 0, 0, 0
        self.struck_at = self.full_until = 0.0
        self.notes: list[str] = []
        self.lines: list[score.Line] = []
        self._read = 0
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
        end = time.monotonic() + 20
        while (found := self.processes()) and time.monotonic() < end:
            for pid in found:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)
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
            _kill(pids[self.failure.rank], signal.SIGSTOP)
        elif kind == "disk":
            self.disk.fill()
            self.full_until = time.monotonic() + failures.DISK_S
        elif kind == "machine":
            self.kill_all()
            self.forget_memory()
            self.disk.lose_power()
        elif kind == "resize":
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.notes.append("did not end after SIGTERM within 60 s")
            self.kill_all()
            self.forget_memory()
            self.ranks = 1
        if kind in failures.RESTARTED:
            time.sleep(DELAY_S)
            self.start()

    def forget_memory(self) -> None:
        """What a machine forgets: shared memory, and sockets."""
        shutil.rmtree(self.shm, ignore_errors=True)
        for path in [*Path("/dev/shm").glob(f"*{self.mark}*"), *Path("/tmp/ckpt_sock").glob(f"*{self.mark}*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def drive(self) -> None:
        """Run to the end, or until nobody knows what to do."""
        self.start()
        seen = looked = time.monotonic()
        trained, tried_at, patience_s = 0, -1, START_S
        while True:
            time.sleep(0.01)
            self.look()
            now = time.monotonic()
            done = max((line["s"] for line in self.lines[-8:] if line["event"] == "step"), default=0)
            if len(self.lines) != trained:
                if not trained:
                    patience_s = PATIENCE_S + 3 * (now - seen)
                trained, seen = len(self.lines), now
            if now - looked > 1.0:
                self.note_memory()
                looked = now
            if self.is_due(done):
                self.strike()
                seen = now
            if self.full_until and now > self.full_until:
                self.disk.free()
                self.full_until = 0.0
            assert self._process is not None
            if any(line["event"] == "end" for line in self.lines[-8:]):
                return  # its last save is through, and the weights are logged
            ended = self._process.poll() is not None
            if not ended and now - seen < patience_s:
                continue
            if self.by_hand == MOST_BY_HAND:
                self.notes.append("given up")
                return
            self.notes.append(
                f"the launcher ended with {self._process.returncode}" if ended else f"no step in {patience_s:.0f} s"
            )
            self.by_hand += 1
            self.skip += tried_at == done  # it does not start from what it saved last: somebody removes that
            tried_at = done
            self.kill_all()
            time.sleep(DELAY_S)
            self.start()
            seen = time.monotonic()

    def is_due(self, done: int) -> bool:
        """Whether the failure strikes now."""
        if self.struck_at or self.failure.kind == "none" or done < self.failure.step:
            return False
        newest = [line["t"] for line in self.lines[-8:] if line["event"] == "step" and line["s"] == done]
        return bool(time.time() >= min(newest) + self.failure.later * (self.step_s + self.failure.sleep_s))

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill_all()
        self.forget_memory()
        self.disk.close()


def one(entrant: Entrant, failure: Failure, steps: int, step_s: float, keep: Path | None = None) -> dict[str, Any]:
    """Run once; return the line of the scoreboard, still without what the unbroken run says."""
    with tempfile.TemporaryDirectory(prefix="race-", ignore_cleanup_errors=True) as name:
        run = Run(entrant, failure, steps, step_s, Path(name))
        try:
            run.drive()
            run.kill_all()
            run.look()
            found = score.score(run.lines, score_samples(steps), EPOCHS)
            weights = Path(f"{run.log}.weights")
            return {
                "entrant": entrant.name, "kind": failure.kind, "finished": bool(found.sha256), **asdict(found),
                "ideal_s": score.ideal_s(run.lines, steps), "interventions": run.by_hand, "peak_bytes": run.peak_bytes,
                "written_bytes": run.disk.written_bytes(), "notes": run.notes, "failure": asdict(failure),
                "weights": weights.read_bytes() if found.sha256 else b"",
            }  # fmt: skip
        finally:
            run.close()
            if keep is not None:
                left_out = shutil.ignore_patterns("tmp", "disk", "image")
                shutil.copytree(name, keep / f"{entrant.name}-{failure.kind}-{time.time_ns()}", ignore=left_out)


def score_samples(steps: int) -> int:
    """Return how many samples an epoch of the problem has: 32 per step, half of the steps."""
    return 32 * steps // EPOCHS


def judged(row: dict[str, Any], unbroken: dict[str, Any], off_s: float, steps: int) -> dict[str, Any]:
    """Return the line with its ratio and its weights beside those of the unbroken run."""
    whole = row["ideal_s"] if row["kind"] == "resize" else off_s + steps * row["failure"]["sleep_s"]
    mine, theirs = row["weights"], unbroken["weights"]
    distance = None
    if mine and len(mine) == len(theirs):
        import numpy as np

        a, b = np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32)
        distance = float(np.abs(a - b).max() / np.abs(b).max())
    ratio = row["seconds"] / whole if whole else 0.0
    equal = bool(mine) and row["sha256"] == unbroken["sha256"]
    return {
        **{key: value for key, value in row.items() if key != "weights"},
        "ratio": ratio,
        "equal": equal,
        "distance": distance,
    }


def unbroken_s(entrants: list[Entrant], steps: int, runs: int, keep: Path | None) -> dict[str, float]:
    """Return the seconds of each loop that the entrants need, without checkpoints and failures."""
    found = {}
    for name in dict.fromkeys(entrant.off for entrant in entrants):
        who = PLAIN if name == "loop" else replace(next(one for one in entrants if one.off == name), every=0)
        nothing = failures.Failure(kind="none", step=0, later=0, rank=0)
        rows = [one(who, nothing, steps, 0.0, keep) for _ in range(runs if who is PLAIN else 1)]
        if not all(row["finished"] for row in rows):
            raise SystemExit(f"the loop {name!r} does not come to its end without failures: {rows[0]['notes']}")
        found[name] = median([row["seconds"] for row in rows])
        print(f"unbroken, no checkpoints, {name}: {found[name]:.2f} s", flush=True)
    return found


def tune(entrants: list[Entrant], steps: int) -> None:
    """Write the interval of each entrant with the lowest cost: what saving adds, and half an interval trained again.

    Of those with a memory tier files are written every 20 steps while that is searched.
    """
    path = HERE / "intervals.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    off, nothing = unbroken_s(entrants, steps, 2, None), failures.Failure(kind="none", step=0, later=0, rank=0)
    for entrant in entrants:
        costs = {}
        for every in EVERY:
            persist = max(every, 20)
            rows = [one(replace(entrant, every=every, persist=persist), nothing, steps, 0.0) for _ in range(2)]
            if took := [row["seconds"] for row in rows if row["finished"]]:  # what disturbs only adds: the shorter one
                costs[every] = min(took) - off[entrant.off] * (1 - every / 2 / steps)
        print(
            f"{entrant.name}: seconds by interval { ({every: round(cost, 2) for every, cost in costs.items()}) }",
            flush=True,
        )
        if costs:
            best = min(costs, key=lambda every: costs[every])
            found[entrant.name] = {"every": best, "persist": max(best, 20)}
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [entrant.name for entrant in ENTRANTS]
    parser.add_argument("--entrants", nargs="+", choices=names, default=names)
    parser.add_argument("--kinds", nargs="+", choices=list(failures.KINDS), default=list(failures.KINDS))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=20261126)
    parser.add_argument("--runs", type=int, default=2, help="of the loop without checkpoints; of those of trainers one")
    parser.add_argument("--setup", action="store_true", help="make the environments, and end")
    parser.add_argument("--tune", action="store_true", help="search the interval of each entrant, and end")
    parser.add_argument("--keep", type=Path, help="a folder for logs and output of each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="the table as a file")
    parser.add_argument("--svg", type=Path, help="the picture")
    return parser.parse_args()


def main() -> int:
    """Run the race."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, load = time.monotonic(), LoadWatch()
    left_out, entrants = {}, []
    PLAIN.setup()
    for entrant in (entrant for entrant in tuned() if entrant.name in args.entrants):
        if why := entrant.setup():
            left_out[entrant.name] = why
            print(f"{entrant.name} does not start: {why}", flush=True)
        else:
            entrants.append(entrant)
    if args.setup:
        return 0
    if args.tune:
        tune(entrants, args.steps)
        return 0
    off = unbroken_s(entrants, args.steps, args.runs, args.keep)
    rows = []
    for entrant in entrants:
        step_s = off[entrant.off] / args.steps
        drawn = failures.draw(args.seed, args.steps, RANKS, step_s)
        unbroken: dict[str, Any] = {}
        for kind in dict.fromkeys(["none", *args.kinds]):
            row = one(entrant, drawn[kind], args.steps, step_s, args.keep)
            unbroken = unbroken or row
            rows.append(judged(row, unbroken, off[entrant.off], args.steps))
            print(
                f"{time.monotonic() - began:5.0f} s  "
                + " | ".join(table._cells(rows[-1], {}))
                + f"  {row['notes'] or ''}",
                flush=True,
            )
    return finish(args, rows, {"unbroken_s": off, "left_out": left_out, "seconds": time.monotonic() - began}, load)


def finish(args: argparse.Namespace, rows: list[dict[str, Any]], more: dict[str, Any], load: LoadWatch) -> int:
    """Print, and write what was asked for."""
    made = document("race", {"seed": args.seed, "steps": args.steps}, {**more, "rows": rows}, load=load)
    text = f"{table.matrix(rows)}\n\n{table.markdown(rows)}"
    print(
        f"\n{text}\n\n{more['seconds']:.0f} s in all; time of the loop without failures and checkpoints: {more['unbroken_s']}"
    )
    if args.json:
        write_json(args.json, made)
    if args.table:
        args.table.write_text(text + "\n")
    if args.svg:
        notes = [
            "length: time from the first step to the last over that of the same loop without failures and checkpoints"
        ]
        args.svg.write_text(table.svg(rows, "Time to the last step through one failure (lower is better)", notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
