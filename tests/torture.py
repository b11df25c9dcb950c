"""Kill real processes at random instants, in a loop, and prove after each kill what is restored.

    export PYTHONPATH=tests:.                               # or: make torture
    python tests/torture.py --kills 300 --seed 7            # both levels
    python tests/torture.py --level segment --kills 1000    # ranks that write numpy state into segments
    python tests/torture.py --level engine --kills 300      # a training process through Checkpointer

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
from support.memory import ended, fork, spec_of, take, verified

from flashckpt.core.lineage import Life, SlotRecord, common, is_abandoned, newest
from flashckpt.errors import DamagedError
from flashckpt.memory.control import Control
from flashckpt.memory.segment import Segment, SlotPinned, choose_slot
from flashckpt.memory.watermark import Watermark

Identity = tuple[int, int]
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
        found[event].add((int(generation), int(step)))
    return found


def rank_main(folder: Path, rank: int, world: int, life: Life, slots: int, seed: int) -> None:
    """One rank of one life: adopt the segment, mark what was abandoned, then take snapshots until killed."""
    path, parent = folder / f"r{rank}.seg", life.parent
    if path.exists():
        segment = Segment.attach(path, writable=True)
        segment.own()
    else:
        segment = Segment.create(path, spec_of(rank, slots=slots, sizes=SIZES))
    for index, header in enumerate(segment.headers()):
        if header.is_complete and is_abandoned(header.identity, [life]):
            segment.mark_empty(index)
    control, rng = Control.open(folder / "control", rows=world), random.Random((seed, life.generation, rank).__hash__())
    mark = Watermark(
        control=control, local_rank=rank, rank=rank, world_size=world, local_world_size=world,
        generation=life.generation, restored=parent,
    )  # fmt: skip
    book = Ledger(folder, rank)

    def complete() -> list[Identity]:
        return [h.identity for h in segment.headers() if h.is_complete]

    mark.publish(complete())
    step = parent[1] if parent else 0
    while True:
        step += 1
        identity = (life.generation, step)
        time.sleep(rng.random() * 0.003)
        known = mark.known()
        slot = choose_slot(segment.headers(), pinned=segment.busy(), common=known.common, hopeless=known.hopeless)
        if slot is None:
            mark.publish(complete(), passed=identity)
            continue
        book.say("take", identity)
        try:
            if rng.random() < 0.1:
                segment.begin(
                    slot, generation=life.generation, step=step, world_size=world, persist=False, parent=parent
                ).discard()
                mark.publish(complete(), passed=identity)
                continue
            take(
                segment, slot, step, generation=life.generation, world_size=world, parent=parent, sizes=SIZES,
                truth=truth_of(rank, identity),
            )  # fmt: skip
        except SlotPinned:
            mark.publish(complete(), passed=identity)
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
                    verified(pin, truth_of(rank, (g, s)))
                except (AssertionError, DamagedError) as error:
                    raise BrokenPromiseError(f"rank {rank}, {(g, s)}: TORN: {error}") from error
                found.append(SlotRecord(rank=rank, node=0, generation=g, step=s, world_size=pin.header.world_size))
        segment.close()
    return found


def segments_once(folder: Path, lives: list[Life], rng: random.Random, world: int, slots: int) -> Identity | None:
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
    lives: list[Life] = [Life(generation=1)]
    done = moved = 0
    try:
        while done < kills:
            try:
                found = segments_once(folder, lives, rng, world, slots)
            except BrokenPromiseError as error:
                raise BrokenPromiseError(f"kill {done}, seed {seed}, slots {slots}: {error}") from None
            done += world + 1
            moved += found is not None and found[0] == lives[-1].generation
            lives.append(Life(generation=lives[-1].generation + 1, parent=found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(f"segment level: seed {seed}, {slots} slots, {world} ranks: {done} kills, torn 0, lost 0; "
         f"{moved} of {len(lives) - 1} lives had moved the common snapshot on")  # fmt: skip
    return done


# -- a training process through Checkpointer -------------------------------------------------------------


def trainer_main(folder: Path, threads: int) -> None:
    """Train a small model for ever from wherever it stands, reporting the digest of every state it passes."""
    import torch
    import xxhash

    from flashckpt import Checkpointer

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
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

    book = os.open(folder / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ckpt = Checkpointer(str(folder / "root"), snapshot_every=1, persist_every=10**9, job="torture")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.on_snapshot = complete
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


def engine_once(folder: Path, rng: random.Random, states: dict[int, str], seen: int) -> tuple[int, int]:
    """Run one life until a random instant, and check its restored state; return (restored, newest complete)."""
    pid = fork(lambda: trainer_main(folder, 1))
    trace = folder / "trace"
    end = time.monotonic() + 60

    def lines() -> list[list[str]]:
        text = trace.read_text() if trace.exists() else ""
        return [line.split() for line in text[seen:].splitlines()]

    while not any(line[0] == "restored" for line in lines()):
        if time.monotonic() > end or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.005)
    time.sleep(rng.random() ** 2 * 0.3)
    os.kill(pid, signal.SIGKILL)
    require(ended(pid) == -signal.SIGKILL, "the trainer ended by itself")
    restored, complete = -1, -1
    for event, number, digest in lines():
        step = int(number)
        if event == "restored":
            restored = step
            require(step == 0 or states.get(step) == digest, f"step {step} restored as {digest}: TORN")
        elif event == "state":
            require(states.setdefault(step, digest) == digest, f"step {step} differs after a resume")
        else:
            complete = max(complete, step)
    require(restored >= 0, "the trainer did not come to restore in 60 s")
    return restored, complete


def torture_engine(kills: int, seed: int, *, tell: Callable[..., None] = print) -> int:
    """Kill a training process `kills` times; return the number of kills."""
    import torch

    import flashckpt.checkpointer  # noqa: F401 -- imported before the forks, so that a life costs tenths of a second

    torch.set_num_threads(1)
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-torture-", dir="/dev/shm"))
    os.environ["FLASHCKPT_SHM_DIR"] = str(folder)
    (folder / "agent").mkdir()
    os.environ["FLASHCKPT_AGENT_DIR"] = str(folder / "agent")  # an agent would start the daemon: none here
    states: dict[int, str] = {}
    wanted = last = 0
    try:
        for kill in range(kills):
            size = (folder / "trace").stat().st_size if (folder / "trace").exists() else 0
            try:
                restored, complete = engine_once(folder, rng, states, size)
                require(restored >= wanted, f"restored step {restored}, step {wanted} was complete")
            except BrokenPromiseError as error:
                log = (folder / "log").read_text()[-2000:]
                raise BrokenPromiseError(f"kill {kill}, seed {seed}: {error}\n{log}") from None
            wanted, last = max(restored, complete), restored
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(f"engine level: seed {seed}: {kills} kills, torn 0, lost 0; the last life began at step {last}")
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="SIGKILLs per level")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--level", choices=["segment", "engine", "both"], default="both")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    try:
        if args.level in {"segment", "both"}:
            for slots in (2, 3):
                torture_segments(args.kills // 2, seed, slots=slots)
        if args.level in {"engine", "both"}:
            torture_engine(args.kills, seed)
    except BrokenPromiseError as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
