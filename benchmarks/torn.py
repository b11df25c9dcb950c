"""Kill a writer in the middle of its copy into shared memory, let its agent commit what is there, and look at what was committed.

The same kill for flashckpt and for DLRover's two engines: the harness watches one element of the state, at a random place
in shared memory, and sends SIGKILL the moment it changes to the new step. Then the agent of each system does what it does
when a worker has died: flashckpt's daemon commits the newest snapshot automatically; of DLRover's saver the method is called that
dlrover-run's agent calls (`save_shm_to_storage`). Every element of the state is the number of its step.

    .venv/bin/python benchmarks/torn.py [--kills 10] [--mb 256] [--seed 7] [--dlrover-python DIR/bin/python] [--json FILE]

torn: what was committed mixes two steps. missing: what was committed names a step of which there is no file.
lost: a snapshot was complete in memory, and neither memory nor storage holds it or a newer one. intact: none of these.
Exit code 1 when flashckpt lost or tore anything, 2 when DLRover's Python cannot be used.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from dlrover_peer import check_dlrover, environment, remove_leftovers
from processes import clean_up_on_sigterm, stream

from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.core.superblock import SlotState
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import open_store

HERE = Path(__file__).parent
DEADLINE_S = 120.0


class Writer:
    """A process that takes snapshots, and what it said so far."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **env},
        )
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in stream(self.process.stdout):
            if line.startswith("{"):
                self.said.append(json.loads(line))

    def newest(self, event: str) -> int:
        """Return the last step of an event; 0 where there is none."""
        return max((one.get("step", 1) for one in self.said if one["event"] == event), default=0)

    def wait_for(self, event: str, step: int = 1) -> None:
        """Wait until it has said so; RuntimeError with the end of its log where it does not."""
        try:
            wait_until(lambda: self.newest(event) >= step, f"{event!r} of step {step}", self.process)
        except RuntimeError as error:
            self._log.seek(0)
            raise RuntimeError(f"{error}:\n{self._log.read()[-3000:]}") from None

    def kill(self) -> None:
        """SIGKILL, and read what it had said before."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def close(self) -> None:
        """End it; its input first, then by force."""
        stream(self.process.stdin).close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        stream(self.process.stdout).close()
        self._log.close()


def wait_until(holds: Callable[[], Any], what: str, process: subprocess.Popen[str] | None = None) -> Any:
    """Return the first true value; RuntimeError after the deadline, or when the process ended."""
    end = time.monotonic() + DEADLINE_S
    while not (value := holds()):
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise RuntimeError(f"{what} did not come")
        time.sleep(0.0005)
    return value


def kill_when(changed: Callable[[], bool], writer: Writer) -> None:
    """SIGKILL the writer in the instant in which `changed` holds."""
    end = time.monotonic() + DEADLINE_S
    while not changed():
        if writer.process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the writer ended, or did not come to the wanted step")
    writer.kill()


def steps_in(values: np.ndarray) -> dict[str, float]:
    """Return the share of every step among the elements."""
    steps, counts = np.unique(values, return_counts=True)
    return {f"{step:g}": round(float(count) / values.size, 4) for step, count in zip(steps, counts, strict=True)}


def trial_flashckpt(folder: Path, nbytes: int, rng: random.Random, shm: Path) -> dict[str, Any]:
    """One kill of a training process with flashckpt; then its own daemon commits."""
    os.environ["FLASHCKPT_SHM_DIR"] = str(shm)
    root, target, place = folder / "root", rng.randint(3, 6), rng.uniform(0.02, 0.98)
    writer = Writer([sys.executable, str(HERE / "torn_worker.py"), str(root), str(nbytes)], {})
    directory = JobDirectory(shm / f"flashckpt-{os.getuid()}" / "torn")
    try:
        writer.wait_for("complete")  # the first steps have no snapshot: their memory is being reserved
        with mapped(directory.segments()[0]) as data:
            segment = Segment.attach(directory.segments()[0])
            index = int(place * (nbytes // 4))

            def changed() -> bool:
                for slot, header in enumerate(segment.headers()):
                    if header.state == SlotState.WRITING and header.step >= target:
                        at = segment.spec.data_at(slot) // 4 + index
                        while (value := data[at]) != header.step:
                            if writer.process.poll() is not None or segment.header(slot).sequence != header.sequence:
                                return False
                        return bool(value == header.step)
                return False

            kill_when(changed, writer)
            headers = segment.headers()
            segment.close()
        committed = wait_until(lambda: list_checkpoints(open_store(root)) if root.exists() else [], "the commit")
        from torn_worker import model_of

        from flashckpt import Checkpointer

        model = model_of(nbytes)
        reader = Checkpointer.readonly(str(root))
        reader.track(model=model)
        reader.restore()
        found = steps_in(np.concatenate([p.detach().numpy() for p in model.parameters()]))
        end_daemon(directory)
    finally:
        writer.close()
    result = {"place": place, "complete": writer.newest("complete"), "committed": committed[0].step}
    result |= {"half_written": [h.step for h in headers if h.state == SlotState.WRITING], "elements": found}
    return result | {"outcome": judged(result)}


def end_daemon(directory: JobDirectory) -> None:
    """Stop the daemon of a job whose processes are dead."""
    status = directory.read_status()
    if status is not None and status.pid and directory.daemon_alive():
        os.kill(status.pid, signal.SIGTERM)
        wait_until(lambda: not directory.daemon_alive(), "the end of the daemon")


class mapped:  # noqa: N801 -- a context manager, used like a function
    """A file as float32, while it is written by another process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> np.ndarray:
        with self.path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return np.frombuffer(self.map, np.float32, len(self.map) // 4)

    def __exit__(self, *_: object) -> None:
        return  # the array may still be in use; the mapping goes with it


def trial_dlrover(engine: str, python: str, folder: Path, nbytes: int, rng: random.Random) -> dict[str, Any]:
    """One kill of a process that saves by DLRover; then the saver in its agent commits."""
    run = f"torn{os.getpid()}"
    env, script = environment(0, 1, run), str(HERE / "torn_dlrover.py")
    remove_leftovers(run)
    target, place = rng.randint(3, 6), rng.uniform(0.02, 0.98)
    folder.mkdir()
    agent = Writer([python, script, "agent", str(folder)], env)
    writer = None
    try:
        agent.wait_for("ready")
        writer = Writer([python, script, engine, str(folder), str(nbytes)], env)
        writer.wait_for("complete", 1)
        with mapped(Path(f"/dev/shm/{run}_ckpt_shm_0")) as data:
            index = int(place * (nbytes // 4))
            kill_when(lambda: data[index] >= target, writer)
        time.sleep(1.0)  # the agent notices a death at its next look, not in the same instant
        stream(agent.process.stdin).write("failed\n")
        stream(agent.process.stdin).flush()
        agent.wait_for("saved")
        tracker = next(one["tracker"] for one in agent.said if one["event"] == "saved")
        result: dict[str, Any] = {"place": place, "complete": writer.newest("complete")}
        result |= {"committed": None if tracker is None else int(tracker)}
        result |= {"half_written": [writer.newest("take")] if writer.newest("take") > result["complete"] else []}
        result["elements"] = committed_elements(engine, folder, tracker)
        return result | {"outcome": judged(result)}
    finally:
        for one in (writer, agent):
            if one is not None:
                one.close()
        remove_leftovers(run)


def committed_elements(engine: str, folder: Path, tracker: str | None) -> dict[str, float]:
    """Return the share of each step in the files of the step that the tracker names; {} where there is no file."""
    if tracker is None:
        return {}
    if engine == "sharded":
        path = folder / tracker / "__0_0.distcp"
        return steps_in(np.fromfile(path, np.float32)) if path.exists() else {}
    path = folder / tracker / "rank_0.pt"
    if not path.exists():
        return {}
    import torch

    tensors = torch.load(path, weights_only=True)
    return steps_in(np.concatenate([tensor.numpy() for tensor in tensors.values()]))


def judged(result: dict[str, Any]) -> str:
    """Return the word for what became of the state."""
    elements = result["elements"]
    if len(elements) > 1:
        return "torn"
    if result["committed"] is not None and not elements:
        return "missing"
    if not elements or float(next(iter(elements))) != result["committed"]:
        return "lost" if not elements else "torn"
    return "intact" if result["committed"] >= result["complete"] else "lost"


def measure(
    name: str, kills: int, seed: int, trial: Callable[[Path, random.Random, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Run trials of one system; each has its own folders."""
    rng, trials = random.Random(f"{seed}{name}"), []
    for number in range(kills):
        with (
            tempfile.TemporaryDirectory(prefix="flashckpt-torn-") as disk,
            tempfile.TemporaryDirectory(prefix="flashckpt-torn-", dir="/dev/shm") as shm,
        ):
            one = trial(Path(disk) / "checkpoints", rng, Path(shm))
            for left in Path(shm).iterdir():  # not the directory itself: another user could take its name
                shutil.rmtree(left, ignore_errors=True)
        trials.append(one)
        print(f"{name}, kill {number + 1}: {one['outcome']}; complete in memory was step {one['complete']}, "
              f"half written {one['half_written']}, committed {one['committed']}, elements by step {one['elements']}", flush=True)  # fmt: skip
    words = ("torn", "missing", "lost", "intact")
    return (
        {"kills": kills} | {word: sum(one["outcome"] == word for one in trials) for word in words} | {"trials": trials}
    )


def main() -> int:
    """Run all systems; print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each system")
    parser.add_argument("--mb", type=float, default=256, help="size of the state, 10^6 bytes")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dlrover-python", help="a Python that has DLRover; without it DLRover is left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    clean_up_on_sigterm()
    versions = check_dlrover(args.dlrover_python) if args.dlrover_python else None
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    nbytes, load = int(args.mb * 1e6) // (1 << 20) * (1 << 20), LoadWatch()
    print(f"seed {seed}, {nbytes / 1e6:.0f} MB", flush=True)
    results = {
        "flashckpt": measure(
            "flashckpt", args.kills, seed, lambda folder, rng, shm: trial_flashckpt(folder, nbytes, rng, shm)
        )
    }
    for engine in ("sharded", "full") if versions else ():
        results[f"DLRover, {engine} engine"] = measure(
            f"DLRover, {engine} engine",
            args.kills,
            seed,
            lambda folder, rng, _, engine=engine: trial_dlrover(engine, args.dlrover_python, folder, nbytes, rng),  # type: ignore[misc]  # bound now
        )
    if versions is None:
        print("DLRover was left out: no --dlrover-python was given (stall.py --dlrover-setup says how to get one).")
    print("\n| system | kills | torn | missing | lost | intact |\n|---|---|---|---|---|---|")
    for name, found in results.items():
        print(
            f"| {name} | {found['kills']} | "
            + " | ".join(str(found[w]) for w in ("torn", "missing", "lost", "intact"))
            + " |"
        )
    if args.json:
        arguments = {"kills": args.kills, "bytes": nbytes, "seed": seed, "dlrover": versions}
        write_json(args.json, document("torn", arguments, results, load=load))
    return 0 if results["flashckpt"]["intact"] == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
