"""Groups that train apart and may be lost: dlrun with the trainer's groups, and torchft's DiLoCo, through the same failures.

    python benchmarks/lost_groups.py [--groups 3] [--every 10] [--steps 300] [--sleep-ms 100] [--json FILE]

Both train the same model from the same first weights on the same stream, with AdamW inside and SGD with Nesterov momentum (0.7,
0.9) outside, a synchronisation every so many steps, and a wait of at most ten seconds for a group that is not there. A step
waits `--sleep-ms`, as a device would. In the middle of an interval in the middle of the run

    none    nothing happens
    rank    the training process of the last group is killed; its launcher starts it again
    away    its launcher is killed with it; a scheduler starts it again twenty seconds later

Printed: seconds from the first synchronisation to the last, samples that the weights have not seen although they have seen later ones of the
stream (skipped), seen twice (doubled), seen in all, and the loss of the last weights on held-out text. A group of torchft
notes its position in the data at each synchronisation, and continues there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from processes import clean_up_on_sigterm, end_all
from race.entrants import ENTRANTS, HERE, RESTARTS
from race.torchft_launch import LIGHTHOUSE, free_port

from flashckpt.bench.measure import LoadWatch, document, write_json

SAMPLES, AWAY_S, PATIENCE_S, KINDS = 8, 20.0, 300.0, ("none", "rank", "away")


def settings(folder: Path, groups: int, every: int, steps: int) -> Any:
    """Return the run of all groups."""
    from flashckpt.trainer.config import from_values

    return from_values({
        "model": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192},
        "train": {"steps": steps, "seq_len": 64, "global_batch": SAMPLES * groups, "micro_batch": SAMPLES, "device": "cpu"},
        "optim": {"schedule": "constant", "warmup_steps": 0, "lr": 3e-3},
        "parallel": {"groups": groups, "sync_every": every, "sync_wait_s": 10.0, "sync_address": "127.0.0.1"},
        "checkpoint": {"root": str(folder / "root"), "job": folder.name, "snapshot_every": every // 2, "persist_every": 4 * every},
        "data": {"folder": str(folder.parent / "tokens")}, "log": {"folder": str(folder / "log"), "every": 1000},
    })  # fmt: skip


def note(folder: Path, group: int, **what: Any) -> None:
    """Add a line to the log of a group."""
    with (folder / f"log{group}").open("a") as file:
        file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **what}) + "\n")


def held_out(trainer: Any) -> float:
    """Return the loss of the weights as they are on held-out text, in nats per token."""
    import torch

    from flashckpt.trainer.data.mixed import open_data

    batch = open_data(trainer.config, "held").batch(range(256))
    with torch.no_grad():
        logits = trainer.parallel.parts[0](batch.tokens)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets[:, :-1].flatten()))


def ours(folder: Path, group: int, config: Any, sleep_s: float) -> int:
    """Train a group of the trainer; its log has each step with its place in the stream."""
    from flashckpt.trainer.parallel.groups import run_of_group
    from flashckpt.trainer.train import loop

    config, plain = run_of_group(replace(config, parallel=replace(config.parallel, group=group))), loop.Trainer.one_step

    def one_step(self: Any) -> Any:
        time.sleep(sleep_s)
        step, place = self.done + 1, self.data.inner.position
        record = plain(self)
        note(folder, group, step=step, place=place)
        if self.done >= config.train.steps:
            note(folder, group, loss=held_out(self))
        return record

    loop.Trainer.one_step = one_step  # type: ignore[method-assign]  # the loop is the trainer's own
    return loop.train(config)


def torchft(folder: Path, group: int, config: Any, sleep_s: float) -> int:
    """Train a group as train_diloco.py of torchft's repository does, with the trainer's model, data and step."""
    import torch

    from flashckpt.trainer.config.parallel import ParallelConfig
    from flashckpt.trainer.parallel.distributed import process_group
    from flashckpt.trainer.train import loop

    ft, diloco = importlib.import_module("torchft"), importlib.import_module("torchft.local_sgd")
    every, groups, steps = config.parallel.sync_every, config.parallel.groups, config.train.steps
    saved, train = replace(config.checkpoint, root=""), replace(config.train, global_batch=SAMPLES)
    config = replace(config, parallel=ParallelConfig(), checkpoint=saved, train=train)
    noted, replaced = folder / f"position{group}", [False]
    with process_group(config) as device:
        trainer = loop.Trainer(config, loop.prepare(config, 1), device)
        trainer.initialise()
        model, inner = trainer.parallel.parts[0], trainer.optimizers[0]

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["inner"])
            replaced[0] = True

        manager = ft.Manager(
            pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
            replica_id=f"group_{group}", timeout=timedelta(seconds=30), use_async_quorum=False,
        )  # fmt: skip
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        done = int(noted.read_text()) if noted.exists() else 0  # batches of this group
        with diloco.DiLoCo(manager, [model], inner, outer, sync_every=every):
            while manager.current_step() * every < steps:
                before, places = manager.current_step(), []
                for _ in range(every):
                    time.sleep(sleep_s)
                    trainer.data.go_to((done * groups + group) * SAMPLES)
                    places.append(trainer.data.inner.position)
                    totals = trainer.train_step.backward(trainer.data.next())
                    trainer._update(totals, 1, config.optim.lr)
                    done += 1
                counts = manager.current_step() > before and manager.is_participating() and not replaced[0]
                replaced[0] = False  # by the weights of another group: what this one had trained is gone
                note(folder, group, step=manager.current_step() * every, places=places if counts else [])
                noted.write_text(str(done))
        note(folder, group, loss=held_out(trainer))
        manager.shutdown(wait=False)
        trainer.data.close()
    return 0


class Race:
    """One entrant through one failure, in a folder."""

    def __init__(self, folder: Path, entrant: str, options: argparse.Namespace) -> None:
        from flashckpt.trainer.config import to_toml

        self.folder, self.entrant, self.options = folder, entrant, options
        self.mark = f"lost-{os.getpid()}-{folder.name}"
        (folder / "shm").mkdir(parents=True)
        (folder / "run.toml").write_text(to_toml(settings(folder, options.groups, options.every, options.steps)))
        self.env = {
            **os.environ, "RACE_ID": self.mark, "FLASHCKPT_SHM_DIR": f"{folder}/shm", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def start(self, *words: object, **more: str) -> None:
        """Start a program."""
        with (self.folder / "output").open("ab") as out:
            subprocess.Popen([*map(str, words)], env={**self.env, **more}, stdout=out, stderr=out)

    def launch(self, group: int) -> None:
        """Start the launcher of a group."""
        words: list[object] = [sys.executable, "-m", "flashckpt.daemon.run", "--standalone"]
        if self.entrant == "torchft":
            words = [ENTRANTS[-1].python, "-m", "torch.distributed.run", f"--master-port={free_port()}", RESTARTS]
        rank = (__file__, "--rank", self.entrant, self.folder, group, self.options.sleep_ms / 1e3)
        self.start(*words, "--nproc-per-node=1", *rank, LOST_GROUP=f"{self.mark}-{group}-")

    def lines(self, group: int) -> list[dict[str, Any]]:
        """Return the log of a group."""
        path = self.folder / f"log{group}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, kind: str) -> dict[str, Any]:
        """Start all, let the last one be lost, and count."""
        port, groups, last = free_port(), range(self.options.groups), self.options.groups - 1
        self.env["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        try:
            if self.entrant == "torchft":
                self.start(ENTRANTS[-1].python.with_name("torchft_lighthouse"), *LIGHTHOUSE, f"--bind=[::]:{port}")
            for group in groups:
                self.launch(group)
            if kind != "none":
                self.strike(kind, last)
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and any("loss" not in [{}, *self.lines(one)][-1] for one in groups[:last]):
                time.sleep(0.1)
        finally:
            end_all(self.mark)
        return self.counted()

    def strike(self, kind: str, group: int) -> None:
        """Kill half an interval after a synchronisation in the middle of the run."""
        half = self.options.steps // self.options.every // 2 * self.options.every
        while not any(line.get("step", 0) >= half for line in self.lines(group)):
            time.sleep(0.01)
        time.sleep(self.options.every * self.options.sleep_ms / 2e3)
        if kind == "rank":
            os.kill(self.lines(group)[-1]["pid"], signal.SIGKILL)
            return
        end_all(f"{self.mark}-{group}-")
        time.sleep(AWAY_S)
        self.launch(group)

    def counted(self) -> dict[str, Any]:
        """Return what the weights have seen, and how long it took."""
        logs = [self.lines(group) for group in range(self.options.groups)]
        places = [place for log in logs for line in log for place in line.get("places", [])]
        seen = Counter(self.given(logs) if self.entrant == "flashckpt" else places)
        times = [line["t"] for log in logs for line in log if line.get("step", 0) >= self.options.every]
        losses = [line["loss"] for log in logs for line in log if "loss" in line]
        return {
            "finished": len(losses), "seconds": round(max(times) - min(times), 1), "loss": losses[0] if losses else None,
            "skipped": SAMPLES * sum(place not in seen for place in range(0, max(seen), SAMPLES)),
            "doubled": SAMPLES * sum(count > 1 for count in seen.values()), "seen": SAMPLES * seen.total(),
        }  # fmt: skip

    def given(self, logs: list[list[dict[str, Any]]]) -> list[int]:
        """Return the places of what counts of the trainer's groups, by the objects with which they agree."""
        from flashckpt.storage.posix import PosixStore
        from flashckpt.trainer.separate_runs.roster import Synchronisations

        meetings = Synchronisations(PosixStore(self.folder / "root" / "synchronisations"), len(logs), 0.0)
        rosters = [one for number in range(meetings.newest() + 1) if (one := meetings.roster(number)) is not None]
        of = [{line["step"]: line["place"] for line in log if "place" in line} for log in logs]
        found = []
        for roster in rosters[1:]:
            first = rosters[roster.base].step
            found += [of[one][step] for one in roster.gave for step in range(first + 1, first + self.options.every + 1)]
        return found


def _rank(entrant: str, folder: str, group: str, sleep_s: str) -> int:
    from flashckpt.trainer.config import read_config

    train = ours if entrant == "flashckpt" else torchft
    return train(Path(folder), int(group), read_config(Path(folder) / "run.toml"), float(sleep_s))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(_rank(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("groups", 3), ("every", 10), ("steps", 300), ("sleep-ms", 100)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path)
    options, rows, load = parser.parse_args(), [], LoadWatch()
    clean_up_on_sigterm()
    if why := ENTRANTS[-1].setup():
        sys.exit(f"torchft does not start: {why}")
    with tempfile.TemporaryDirectory(prefix="lost-groups-", ignore_cleanup_errors=True) as name:
        for kind in options.kinds:
            for entrant in ("flashckpt", "torchft"):
                found = Race(Path(name) / f"{entrant}-{kind}", entrant, options).run(kind)
                rows.append({"entrant": entrant, "kind": kind, **found})
                print(rows[-1], flush=True)
    if options.json:
        kept = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(options.json, document("lost-groups", kept, {"rows": rows}, load=load))


if __name__ == "__main__":
    main()
