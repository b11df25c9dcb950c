"""A training program for jobs that shrink and grow, and the check that every sample was trained exactly once.

The state is sharded over all ranks (fully_shard); the global batch stays, the micro-batches per rank follow the world.
Each rank writes a line before a step commits: life, world size, step, micro-batches, loss of the global batch, samples.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from flashckpt.sampler import ElasticSampler

LENGTH, SEED, GLOBAL, MICRO = 1_000_003, 3, 24, 2

ELASTIC = f"""
import os, sys, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

folder, pause = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler({LENGTH}, dp_rank=rank, dp_size=world, seed={SEED}, global_batch_size={GLOBAL})
ckpt = Checkpointer(f"{{folder}}/root", snapshot_every=2, persist_every=10)
ckpt.track(model=model, optimizer=optimizer, sampler=sampler)
report = ckpt.restore()
step = report.step if report else 0
life = report.life if report else 1
open(f"{{folder}}/restore{{life}}-rank{{rank}}", "w").write(
    f"{{world}} {{step}} " + " ".join(f"{{t}}={{n}}" for t, n in (report.tier_bytes.items() if report else ())))
while not ckpt.should_stop:
    step += 1
    ids = torch.as_tensor(sampler.next_ids())
    parts = ids.split({MICRO})
    optimizer.zero_grad()
    total = torch.zeros(1)
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)
        inputs = torch.sin(part[:, None] * torch.arange(1, 17) * 1e-3)
        loss = (model(inputs) - torch.cos(part[:, None] * 1e-3)).square().mean() / len(parts)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    dist.all_reduce(total)
    with open(f"{{folder}}/samples{{rank}}", "a") as file:
        words = ",".join(map(str, ids.tolist()))
        file.write(f"{{life}} {{world}} {{step}} {{len(parts)}} {{total.item() / world!r}} {{words}}\\n")
    ckpt.step(step)
    time.sleep(pause)
ckpt.wait()
ckpt.close()
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of the job: its world, the step it went on from, and where its bytes came from, over all ranks."""

    number: int
    world: int
    restored: int
    tiers: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one rank trained in one step."""

    parts: int
    loss: float
    ids: tuple[int, ...]


class History:
    """What the job has written so far."""

    def __init__(self, folder: Path) -> None:
        self.lives = _lives(folder)
        self.steps: dict[tuple[int, int], dict[int, Line]] = defaultdict(dict)  # (life, step) -> rank -> line
        for path in folder.glob("samples*"):
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) == 6:
                    life, _, step, parts = map(int, words[:4])
                    ids = tuple(map(int, words[5].split(",")))
                    rank = int(path.name.removeprefix("samples"))
                    self.steps[life, step][rank] = Line(parts=parts, loss=float(words[4]), ids=ids)

    def trained(self, world: int, after: int = 0, count: int = 1) -> int:
        """Return the last life of `world` ranks beyond `after` that has trained `count` steps, 0 if there is none."""
        for life in reversed(self.lives):
            whole = [s for (n, s), lines in self.steps.items() if n == life.number and len(lines) == world]
            if life.world == world and life.number > after and len(whole) >= count:
                return life.number
        return 0

    def kept(self) -> dict[int, dict[int, Line]]:
        """Return step -> rank -> line of the history that counts: each life up to where the next went on from it."""
        kept, end = {}, max(step for _, step in self.steps)
        for life in reversed(self.lives):
            for step in range(life.restored + 1, end + 1):
                kept[step] = self.steps[life.number, step]
            end = min(end, life.restored)
        return kept


def _lives(folder: Path) -> list[Life]:
    found: dict[int, list[list[str]]] = defaultdict(list)
    for path in folder.glob("restore*-rank*"):
        words = path.read_text().split()
        if len(words) >= 2:
            found[int(path.name.removeprefix("restore").split("-")[0])].append(words)
    lives = []
    for number, ranks in sorted(found.items()):
        tiers: dict[str, int] = defaultdict(int)
        for words in ranks:
            for word in words[2:]:
                tier, nbytes = word.split("=")
                tiers[tier] += int(nbytes)
        world, restored = map(int, ranks[0][:2])
        lives.append(Life(number=number, world=world, restored=restored, tiers=dict(tiers)))
    return lives


def check_exactly_once(history: History) -> None:
    """Every global batch is the one that the unbroken run trains, each sample once, the batch kept by accumulation."""
    order = ElasticSampler(LENGTH, dp_rank=0, dp_size=1, seed=SEED, global_batch_size=GLOBAL)
    kept, seen = history.kept(), set[int]()
    assert sorted(kept) == list(range(1, len(kept) + 1))
    for step, lines in sorted(kept.items()):
        ids = [number for line in lines.values() for number in line.ids]
        assert len(ids) == GLOBAL, (step, lines)
        assert {line.parts for line in lines.values()} == {GLOBAL // MICRO // len(lines)}, (step, lines)
        assert sorted(ids) == sorted(map(int, order.next_ids())), step
        order.commit()
        assert not seen & set(ids), step
        seen |= set(ids)
    assert len(seen) == GLOBAL * len(kept)


def check_losses(history: History) -> None:
    """A step that was trained again in another world has the same loss, to rounding."""
    by_step: dict[int, set[float]] = defaultdict(set)
    for (_, step), lines in history.steps.items():
        by_step[step] |= {line.loss for line in lines.values()}
    for step, losses in by_step.items():
        assert max(losses) - min(losses) <= 1e-4 * max(losses), (step, losses)
