"""`make test-layouts`: a run moves from one layout to the next and goes on as if it had never moved.

A journey trains in its first layout, then goes on in each following one, killed at each border. At every border the
state is gathered with `full_tensor` (torch's way, not ours) and hashed: it must be the same to the bit before and
after, both when the new ranks restore from this node's memory and when they find nothing there and restore from
storage. The losses after a border must be those of the ranks before it, had they gone on in their layout, and over
the whole journey each sample is trained exactly once.

Not part of `make test`: about 30 launches of up to 8 ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agents import pretend_agent
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.sampler import ElasticSampler
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.demo.run import stop_daemon
from flashckpt.trainer.train import loop  # noqa: F401 -- the same

pytestmark = pytest.mark.timeout(1200)  # a journey is made once, by the first test that asks for it

FIRST_STEPS = 20
STEPS = 10
TOLERANCE = 1e-5
BATCH = 8
SEED = 5


def dense(dp: int, tp: int, pp: int) -> dict[str, Any]:
    return {"dp_shard": dp, "tp": tp, "pp": pp}


INTERLEAVED = {"schedule": "Interleaved1F1B"}
EXPERTS = {"experts": 4, "ffn": 32}
JOURNEYS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "dense": (
        {},
        [
            ("2x2x2", dense(2, 2, 2)),
            ("1x2x4", dense(1, 2, 4)),
            ("4x2x1", dense(4, 2, 1)),
            ("8x1x1", dense(8, 1, 1)),
            ("1x1x1", dense(1, 1, 1)),
            ("1x4x2", dense(1, 4, 2)),
            ("2x2x2", dense(2, 2, 2)),
        ],
    ),
    "schedules": (
        {},
        [
            ("2x1x2 interleaved", {"dp_shard": 2, "pp": 2, **INTERLEAVED}),
            ("(2x2)x1x1 HSDP", {"dp_replicate": 2, "dp_shard": 2}),
            ("1x2x2 zero bubble V", {"tp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
            ("(2x2)x2x1 HSDP", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
            ("2x1x2 interleaved", {"dp_shard": 2, "pp": 2, **INTERLEAVED}),
        ],
    ),
    "experts": (
        EXPERTS,
        [
            ("4x1x1, experts over 4", {"dp_shard": 4}),
            ("2x1x2 interleaved, experts over 2", {"dp_shard": 2, "pp": 2, **INTERLEAVED}),
            ("(2x2)x1x1 HSDP, experts over 2", {"dp_replicate": 2, "dp_shard": 2}),
            ("1x1x1", {}),
            ("4x1x1, experts over 4", {"dp_shard": 4}),
        ],
    ),
    "tied": (
        {**EXPERTS, "tied_embeddings": True, "qk_norm": True, "qkv_bias": True, "shared_ffn": 32},
        [
            ("2x2x2, tied, experts over 2", dense(2, 2, 2)),
            ("1x1x1", {}),
            ("1x2x2 zero bubble V", {"tp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
            ("4x1x1, experts over 4", {"dp_shard": 4}),
        ],
    ),
    "context": (
        {},
        [
            ("2x1x1, rows over 2", {"dp_shard": 2, "cp": 2}),
            ("1x1x1", {}),
            ("1x2x2, rows over 2", {"dp_shard": 1, "cp": 2, "tp": 2, "pp": 2}),
            ("2x1x1 DDP, rows over 2", {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "data_parallel": "ddp"}),
            ("1x1x1, rows over 4", {"dp_shard": 1, "cp": 4}),
            ("2x2x1", dense(2, 2, 1)),
        ],
    ),
}


def world_of(parallel: dict[str, Any]) -> int:
    size = 1
    for dimension in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        size *= parallel.get(dimension, 1)
    return size


# -- one leg, in each rank


def gathered(trainer: Any) -> dict[str, str]:
    """Return a digest of each whole tensor of this rank's stages: parameters and optimizer state. Collective."""
    digests = {}
    states = {parameter: state for optimizer in trainer.optimizers for parameter, state in optimizer.state.items()}
    for part in trainer.parallel.bare_parts():  # names without DDP's
        for name, parameter in part.named_parameters():
            state = states.get(parameter, {})
            for kind, value in (("", parameter), *sorted(state.items())):
                whole = value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()
                data = whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                digests[f"{name}.{kind}"] = hashlib.sha256(data).hexdigest()[:16]
    return digests


def local_bytes(trainer: Any) -> int:
    """Return the bytes of this rank's parameters and optimizer state."""
    from flashckpt.trainer.parallel.apply import local_tensor

    tensors = list(trainer.parallel.parameters())
    tensors += [
        value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def note_reports() -> list[Any]:
    """Return a list that receives the report of each restore of this process."""
    from flashckpt.session.checkpointer import Checkpointer

    restore, reports = Checkpointer.restore, []

    def noting(self: Any, *args: Any, **options: Any) -> Any:
        reports.append(restore(self, *args, **options))
        return reports[-1]

    Checkpointer.restore = noting  # type: ignore[method-assign]  # on purpose, in a process of its own
    return reports


def run_leg(rank: int, values: dict[str, Any], steps: int, beyond: int) -> dict[str, Any]:
    """Restore and train `steps` steps, then `beyond` more that nobody records: what a run that stays would do.

    It ends without closing, as if killed: what lies in memory stays there.
    """
    from flashckpt.trainer.parallel.distributed import process_group
    from flashckpt.trainer.train.loop import Trainer, prepare

    config, reports = from_values(values), note_reports()
    layout = prepare(config, torch.distributed.get_world_size())
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer._restore()
        (report,) = reports
        result: dict[str, Any] = {
            "restored": trainer.done,
            "dataset": len(trainer.data.dataset.samples),
            "state": gathered(trainer) if trainer.done else {},
            "held": local_bytes(trainer),
            "needed": dict(report.tier_bytes) if report else {},
            "read": dict(report.read_bytes) if report else {},
        }
        leads = trainer.parallel.coordinate("pp") == trainer.parallel.coordinate("tp") == 0
        leads = leads and (trainer.parallel.context is None or trainer.parallel.context.rank == 0)
        trained = [(trainer.data.next().ids.tolist(), trainer.one_step().loss) for _ in range(steps)]
        result["samples"] = [sample for ids, _ in trained if leads for sample in ids]
        result["losses"] = [loss for _, loss in trained]
        if trainer.ckpt is not None and steps:
            trainer.ckpt.wait(100)
        result["end"] = gathered(trainer)
        trainer.ckpt = None
        result["stayed"] = [trainer.one_step().loss for _ in range(beyond)]
        return result


# -- a journey


@dataclass
class Leg:
    """What the ranks of one layout reported: after a restore from storage (nothing trained), and of the leg itself."""

    layout: str
    ranks: list[dict[str, Any]]
    from_storage: list[dict[str, Any]] = field(default_factory=list)


def merged(ranks: list[dict[str, Any]], key: str) -> dict[str, str]:
    """Return the digests of the whole model; every rank that holds a tensor must give the same one."""
    whole: dict[str, str] = {}
    for rank in ranks:
        for name, digest in rank[key].items():
            assert whole.setdefault(name, digest) == digest, name
    return whole


def total(ranks: list[dict[str, Any]], key: str) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for rank in ranks:
        for tier, count in rank[key].items():
            tiers[tier] = tiers.get(tier, 0) + count
    return {tier: count for tier, count in tiers.items() if count}


def make_journey(folder: Path, name: str) -> list[Leg]:
    model, layouts = JOURNEYS[name]
    source = write_corpus(folder / "text")

    def launch(parallel: Any, steps: int, beyond: int, env: Any = None) -> list[dict[str, Any]]:
        sections: dict[str, Any] = {
            "model": {"kv_heads": 4, **model},
            "parallel": parallel,
            "train": {"steps": 1000, "global_batch": BATCH, "micro_batch": 1, "seed": SEED},
            "optim": {"schedule": "constant"},
            "data": {"source": source},
            "checkpoint": {
                "root": str(folder / "root"), "job": f"layouts-{name}", "snapshot_every": 5, "persist_every": 10,
            },
        }  # fmt: skip
        config = to_values(run_config(folder, **sections))
        return values(run_ranks(run_leg, world_of(parallel), config, steps, beyond, timeout_s=400, env=env))

    legs = [Leg(layouts[0][0], launch(layouts[0][1], FIRST_STEPS, STEPS))]
    for layout, parallel in layouts[1:]:
        with tempfile.TemporaryDirectory() as elsewhere:  # another memory tier: nothing in it, and no daemon is started
            env = {"FLASHCKPT_SHM_DIR": elsewhere, "FLASHCKPT_AGENT_DIR": pretend_agent(Path(elsewhere))}
            from_storage = launch(parallel, 0, 0, env)
        legs.append(Leg(layout, launch(parallel, STEPS, STEPS), from_storage))
    return legs


@pytest.fixture(scope="module", params=JOURNEYS)
def legs(request: Any, tmp_path_factory: Any, table: list[str]) -> Iterator[list[Leg]]:
    name, memory = request.param, pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp(name)
    with tempfile.TemporaryDirectory(prefix="flashckpt-layouts-", dir="/dev/shm") as tier:
        memory.setenv("FLASHCKPT_SHM_DIR", tier)
        try:
            made = make_journey(folder, name)
            table += [row(before, leg) for before, leg in itertools.pairwise(made)]
            yield made
        finally:
            memory.setenv("FLASHCKPT_SHM_DIR", tier)
            stop_daemon(JobDirectory.open(f"layouts-{name}"))
            memory.undo()


@pytest.fixture(scope="module")
def table(request: Any) -> Iterator[list[str]]:
    """The rows of the table in docs/resharding.md, printed at the end."""
    rows: list[str] = []
    yield rows
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(rows))


def row(before: Leg, leg: Leg) -> str:
    """Return a move's row of the table in docs/resharding.md: bytes over all ranks."""
    needed, memory = total(leg.ranks, "needed")["memory"], total(leg.ranks, "read")["memory"]
    storage = total(leg.from_storage, "read")["storage"]
    pairs = zip(leg.ranks[0]["losses"], before.ranks[0]["stayed"], strict=True)
    largest = max(abs(moved - stayed) for moved, stayed in pairs)
    return f"| {before.layout} to {leg.layout} | {needed:,} | {memory:,} | {storage:,} | {largest:.0e} |"


def test_state_is_the_same_to_the_bit_on_both_sides_of_each_move(legs: list[Leg]) -> None:
    for number, (before, leg) in enumerate(itertools.pairwise(legs)):
        left = merged(before.ranks, "end")
        assert len(left) > 4 * 9 * 4  # four blocks of nine tensors, each with two moments and a step
        for ranks in (leg.ranks, leg.from_storage):
            assert {rank["restored"] for rank in ranks} == {FIRST_STEPS + STEPS * number}, leg.layout
            assert merged(ranks, "state") == left, leg.layout


def test_each_rank_restores_what_it_holds_all_from_memory_or_all_from_storage(legs: list[Leg]) -> None:
    for leg in legs[1:]:
        for ranks, tier in ((leg.ranks, "memory"), (leg.from_storage, "storage")):
            for rank in ranks:
                assert rank["needed"] == {tier: rank["held"]}, leg.layout
                assert set(rank["read"]) == {tier}, leg.layout
                assert rank["read"][tier] >= rank["needed"][tier], leg.layout


def test_losses_after_a_move_are_those_of_ranks_that_stay(legs: list[Leg]) -> None:
    for before, leg in itertools.pairwise(legs):
        for rank in leg.ranks:  # every rank knows the loss of the step
            assert rank["losses"] == pytest.approx(before.ranks[0]["stayed"], abs=TOLERANCE), leg.layout


def test_each_sample_is_trained_exactly_once_over_the_whole_journey(legs: list[Leg]) -> None:
    count = BATCH * (FIRST_STEPS + STEPS * (len(legs) - 1))
    order = ElasticSampler(legs[0].ranks[0]["dataset"], dp_rank=0, dp_size=1, seed=SEED, global_batch_size=count)
    samples = [sample for leg in legs for rank in leg.ranks for sample in rank["samples"]]
    assert sorted(samples) == sorted(order.next_ids().tolist())  # none twice, and none of the first `count` left out
