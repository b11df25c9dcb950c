"""Kill real processes at random instants, in a loop, and prove after each kill what is restored.

    export PYTHONPATH=tests:.                               # or: make torture
    python tests/crash/torture.py --kills 300 --seed 7            # both levels
    python tests/crash/torture.py --level segment --kills 1000    # ranks that write numpy state into segments
    python tests/crash/torture.py --level engine --kills 300      # training processes through Checkpointer, half of them
                                                            # alone, half in a job of --ranks 2

After every kill: what a restart chooses is byte-identical to a step that was really taken, and it is never older
than the newest snapshot that all ranks had reported complete. The seed is printed; a failure names kill and seed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.agents import pretend_agent
from support.lineage import newest
from support.memory import ended, fork, request_of, spec_of, take, verified

from flashckpt.core.lineage import Generation, SlotRecord, common, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.shm.acks import SnapshotAcks, choose_slot
from flashckpt.shm.control import Control
from flashckpt.shm.segment import Segment, SlotPinned

Identity = SnapshotId
BYTES = 6 << 20


class BrokenPromiseError(Exception):
    """A promise was broken."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise BrokenPromiseError(text)


# -- ranks that write numpy state into segments ----------------------------------------------------------


def truth_of(rank: int, identity: Identity) -> list[np.ndarray]:
    """The state of one rank at one step: every eight bytes of it differ between any two steps."""
    key = np.uint64((identity[0] * 1_000_003 + identity[1]) * 0x9E3779B97F4A7C15 % 2**64)
    base = np.arange(rank, rank + BYTES // 8, dtype=np.uint64)
    return [(base ^ key).view(np.uint8), ((base[:9] + np.uint64(1)) ^ key).view(np.uint8)]


SIZES = (BYTES, 72)


class Ledger:
    """What ranks report, one line per event, in a file per rank: a line is there whole or not at all."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.fd = os.open(folder / f"ledger-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: str, identity: Identity) -> None:
        os.write(self.fd, f"{event} {identity[0]} {identity[1]}\n".encode())


def ledger(folder: Path, rank: int) -> dict[str, set[Identity]]:
    found: dict[str, set[Identity]] = {"take": set(), "complete": set()}
    path = folder / f"ledger-{rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        event, generation, step = line.split()
        found[event].add(SnapshotId(int(generation), int(step)))
    return found


def rank_main(folder: Path, rank: int, world: int, life: Generation, slots: int, seed: int) -> None:
    """One rank of one life: adopt the segment, mark what was abandoned, then take snapshots until killed."""
    path, parent = folder / f"r{rank}.seg", life.parent
    if path.exists():
        segment = Segment.attach(path, writable=True)
        segment.own()
    else:
        segment = Segment.create(path, spec_of(rank, slots=slots, sizes=SIZES))
    for index, header in enumerate(segment.headers()):
        if header.is_complete and is_rolled_back(header.identity, [life]):
            segment.mark_empty(index)
    control, rng = Control.open(folder / "control", rows=world), random.Random((seed, life.number, rank).__hash__())
    mark = SnapshotAcks(
        control=control, local_rank=rank, rank=rank, world_size=world, local_world_size=world,
        generation=life.number, restored=parent,
    )  # fmt: skip
    book = Ledger(folder, rank)

    def complete() -> list[Identity]:
        return [h.identity for h in segment.headers() if h.is_complete]

    mark.publish(complete())
    step = parent[1] if parent else 0
    while True:
        step += 1
        identity = SnapshotId(life.number, step)
        time.sleep(rng.random() * 0.003)
        known = mark.known()
        slot = choose_slot(
            segment.headers(), pinned=segment.busy(), common=known.common, unrecoverable=known.unrecoverable
        )
        if slot is None:
            mark.publish(complete(), low_watermark=identity)
            continue
        book.say("take", identity)
        try:
            if rng.random() < 0.1:
                request = request_of(life.number, step, rank=rank, world_size=world, parent=parent)
                segment.begin(slot, request).discard()
                mark.publish(complete(), low_watermark=identity)
                continue
            take(
                segment, slot, step, generation=life.number, world_size=world, parent=parent, sizes=SIZES,
                truth=truth_of(rank, identity),
            )  # fmt: skip
        except SlotPinned:
            mark.publish(complete(), low_watermark=identity)
            continue
        book.say("complete", identity)
        mark.publish(complete())


def persister_main(folder: Path, world: int, seed: int) -> None:
    """Pin slots at random, read them whole, hold them a while, read them again."""
    rng = random.Random(seed)
    while True:
        path = folder / f"r{rng.randrange(world)}.seg"
        if not path.exists():
            time.sleep(0.001)
            continue
        segment = Segment.attach(path)
        pin = segment.pin(rng.randrange(segment.spec.slots))
        segment.close()
        if pin is None:
            continue
        with pin:
            check(pin)
            time.sleep(rng.random() * 0.02)
            check(pin)


def check(pin: Any) -> None:
    try:
        verified(pin, truth_of(pin.spec.rank, pin.header.identity))
    except DamagedError:
        if pin.is_current():  # abandoned meanwhile is fine
            raise


def records_of(folder: Path, world: int) -> list[SlotRecord]:
    """Read every slot that says COMPLETE, byte by byte, as a restart does."""
    found = []
    for rank in range(world):
        path = folder / f"r{rank}.seg"
        if not path.exists():
            continue
        segment = Segment.attach(path)
        require(not segment.is_owned and not segment.busy(), f"rank {rank}: a lock outlived its holder")
        for slot in range(segment.spec.slots):
            pin = segment.pin(slot)
            if pin is None:
                continue
            with pin:
                g, s = pin.header.identity
                require((g, s) in ledger(folder, rank)["take"], f"rank {rank}: {(g, s)} was never taken")
                try:
                    verified(pin, truth_of(rank, SnapshotId(g, s)))
                except (AssertionError, DamagedError) as error:
                    raise BrokenPromiseError(f"rank {rank}, {(g, s)}: TORN: {error}") from error
                found.append(SlotRecord(rank=rank, node=0, generation=g, step=s, world_size=pin.header.world_size))
        segment.close()
    return found


def segments_once(folder: Path, lives: list[Generation], rng: random.Random, world: int, slots: int) -> Identity | None:
    """Start all ranks and a persister, kill them at random instants, and return what is restorable afterwards."""
    life = lives[-1]
    seed = rng.randrange(2**32)
    ranks = [fork(partial(rank_main, folder, rank, world, life, slots, seed)) for rank in range(world)]
    persister = fork(lambda: persister_main(folder, world, seed))
    time.sleep(rng.random() * 0.6)
    victims = [*ranks, persister]
    rng.shuffle(victims)
    for pid in victims:  # as a launcher does: one dies, the others are killed a moment later
        os.kill(pid, signal.SIGKILL)
        time.sleep(rng.choice([0, 0, 0.001, 0.005]))
    codes = [ended(pid) for pid in victims]
    require(set(codes) == {-signal.SIGKILL}, f"a process ended by itself: {codes}")
    found = newest(common(records_of(folder, world)), lives)
    reported = set.intersection(*(ledger(folder, r)["complete"] for r in range(world)))
    wanted = newest(reported, lives)
    require(wanted is None or (found is not None and found >= wanted), f"restores {found}, {wanted} was complete")
    return found


def torture_segments(
    kills: int, seed: int, *, world: int = 3, slots: int = 2, tell: Callable[..., None] = print
) -> int:
    """Kill worker groups until `kills` SIGKILLs; return how many processes were killed."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-torture-", dir="/dev/shm"))
    lives: list[Generation] = [Generation(number=1)]
    done = moved = 0
    try:
        while done < kills:
            try:
                found = segments_once(folder, lives, rng, world, slots)
            except BrokenPromiseError as error:
                raise BrokenPromiseError(f"kill {done}, seed {seed}, slots {slots}: {error}") from None
            done += world + 1
            moved += found is not None and found[0] == lives[-1].number
            lives.append(Generation(number=lives[-1].number + 1, parent=found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(f"segment level: seed {seed}, {slots} slots, {world} ranks: {done} kills, torn 0, lost 0; "
         f"{moved} of {len(lives) - 1} lives had moved the common snapshot on")  # fmt: skip
    return done


# -- training processes through Checkpointer ----------------------------------------------------------------


def trainer_main(folder: Path, rank: int, world: int, store: Path) -> None:
    """Train a small model of this rank's own for ever from wherever it stands, reporting the digest of every state."""
    import torch
    import torch.distributed as dist
    import xxhash

    from flashckpt import Checkpointer

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    book = os.open(folder / f"trace-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)  # type: ignore[attr-defined]  # not in the stubs
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 700), torch.nn.GELU(), torch.nn.Linear(700, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> str:
        hasher = xxhash.xxh3_64()
        for p in model.parameters():
            hasher.update(p.detach().numpy().tobytes())
            for _, tensor in sorted(optimizer.state.get(p, {}).items()):
                hasher.update(tensor.numpy().tobytes())
        return str(hasher.hexdigest())

    def complete(step: int) -> None:
        os.write(book, f"complete {step} -\n".encode())

    ckpt = Checkpointer(str(folder / "root"), snapshot_every=1, persist_every=None, job="torture")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.on_snapshot = complete
    os.write(book, b"begins 0 -\n")
    report = ckpt.restore()
    step = report.step if report else 0
    os.write(book, f"restored {step} {state()}\n".encode())
    while True:
        step += 1
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
        (model(x) - x.roll(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(book, f"state {step} {state()}\n".encode())
        ckpt.step(step)


class Trainers:
    """The lives of one job, one after another, and what they said.

    Args:
        folder: On tmpfs; holds the job's memory and what the ranks report.
        world: Ranks.
        rng: Chooses the instants.

    Attributes:
        wanted: Step that the next life must reach at least: the newest that all ranks reported complete.
        early: Lives that were killed before all ranks had restored.
    """

    def __init__(self, folder: Path, world: int, rng: random.Random) -> None:
        self.folder, self.world, self.rng = folder, world, rng
        self.states: list[dict[int, str]] = [{} for _ in range(world)]
        self.read = [0] * world
        self.wanted = self.lives = self.early = 0

    def live(self) -> None:
        """Start all ranks, kill them at random instants, and check what they said."""
        store = self.folder / f"store-{self.lives}"
        pids = [fork(partial(trainer_main, self.folder, rank, self.world, store)) for rank in range(self.world)]
        self.lives += 1
        early = self.rng.random() < 0.2
        self._wait_for("begins" if early else "restored", pids)
        time.sleep(self.rng.random() ** 2 * 0.3)
        self.rng.shuffle(pids)
        for pid in pids:  # one dies, the launcher kills the others a moment later
            os.kill(pid, signal.SIGKILL)
            time.sleep(self.rng.choice([0, 0.001, 0.02]))
        codes = [ended(pid) for pid in pids]
        require(set(codes) == {-signal.SIGKILL}, f"a trainer ended by itself: {codes}")
        self._check([self._new_lines(rank) for rank in range(self.world)])

    def _trace(self, rank: int) -> str:
        path = self.folder / f"trace-{rank}"
        return path.read_text()[self.read[rank] :] if path.exists() else ""

    def _wait_for(self, event: str, pids: list[int]) -> None:
        end = time.monotonic() + 60
        while not all(f"{event} " in self._trace(rank) for rank in range(self.world)):
            require(time.monotonic() < end, f"not all ranks came to {event!r} in 60 s")
            if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
                break
            time.sleep(0.005)

    def _new_lines(self, rank: int) -> list[list[str]]:
        text = self._trace(rank)
        self.read[rank] += len(text)
        return [line.split() for line in text.splitlines()]

    def _check(self, said: list[list[list[str]]]) -> None:
        restored: set[int] = set()
        for rank, lines in enumerate(said):
            states = self.states[rank]
            for event, number, digest in lines:
                step = int(number)
                if event == "restored":
                    restored.add(step)
                    require(step == 0 or states.get(step) == digest, f"rank {rank}: step {step} is {digest}: TORN")
                elif event == "state":
                    require(
                        states.setdefault(step, digest) == digest, f"rank {rank}: step {step} differs after a resume"
                    )
        require(len(restored) <= 1, f"ranks restored different steps: {sorted(restored)}")
        require(not restored or min(restored) >= self.wanted, f"restored {restored}, step {self.wanted} was complete")
        complete = [{int(line[1]) for line in lines if line[0] == "complete"} for lines in said]
        self.early += sum(line[0] == "restored" for lines in said for line in lines) < self.world
        self.wanted = max(self.wanted, *restored, *set.intersection(*complete), 0)


def torture_engine(kills: int, seed: int, *, ranks: int = 1, tell: Callable[..., None] = print) -> int:
    """Kill training processes until `kills` SIGKILLs; return the number of kills."""
    import torch

    import flashckpt.session.checkpointer  # noqa: F401 -- imported before the forks, so that a life costs tenths of a second

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-torture-", dir="/dev/shm"))
    os.environ["FLASHCKPT_SHM_DIR"] = str(folder)
    (folder / "agent").mkdir()
    os.environ["FLASHCKPT_AGENT_DIR"] = pretend_agent(folder / "agent")  # an agent would start the daemon: none here
    job = Trainers(folder, ranks, random.Random(seed))
    done = 0
    try:
        while done < kills:
            try:
                job.live()
            except BrokenPromiseError as error:
                log = (folder / "log").read_text()[-2000:]
                raise BrokenPromiseError(f"kill {done}, seed {seed}, {ranks} ranks: {error}\n{log}") from None
            done += ranks
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(f"engine level: seed {seed}, {ranks} ranks: {done} kills, torn 0, lost 0; {job.lives} lives came to step "
         f"{job.wanted}, {job.early} of them were killed while they restored")  # fmt: skip
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="SIGKILLs per level")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=2, help="of the second half of the engine level")
    parser.add_argument("--level", choices=["segment", "engine", "both"], default="both")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    try:
        if args.level in {"segment", "both"}:
            for slots in (2, 3):
                torture_segments(args.kills // 2, seed, slots=slots)
        if args.level in {"engine", "both"}:
            for ranks in sorted({1, args.ranks}):
                torture_engine(args.kills // len({1, args.ranks}), seed, ranks=ranks)
    except BrokenPromiseError as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
