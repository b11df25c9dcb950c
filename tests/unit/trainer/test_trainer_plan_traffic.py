"""`plan`: bubbles against the orders that torch's schedules run, and what moves on which link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.paths import ROOT
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from flashckpt.trainer.config import RunConfig, from_values, read_config
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.parallel.switches import idle_forwards
from flashckpt.trainer.plan.gpus import GPUS
from flashckpt.trainer.plan.held import held
from flashckpt.trainer.plan.wire import CARRIED, traffic

CONFIGS = ROOT / "configs"
H100 = GPUS["h100"]


def finish(orders: list[list[list[Any]]], stages: int) -> int:
    """Run the orders of all ranks and return how long the longest idles; forwards take 1, halves of a backward 1 each."""
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    clocks, places, busy = [0] * len(orders), [0] * len(orders), [0] * len(orders)

    def ready(kind: str, stage: int, micro: int) -> int | None:
        if kind == "F":
            return 0 if stage == 0 else forward.get((stage - 1, micro))
        if kind == "W":
            return 0
        return forward.get((stage, micro)) if stage == stages - 1 else backward.get((stage + 1, micro))

    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                now = clocks[rank]
                for kind, stage, micro in order[places[rank]]:
                    at = ready(kind, stage, micro)
                    if at is None:
                        break
                    cost = 2 if kind == "B" else 1
                    now = max(now, at) + cost
                    busy[rank] += cost
                    if kind == "F":
                        forward[stage, micro] = now
                    elif kind in "BI":
                        backward[stage, micro] = now
                else:
                    clocks[rank] = now
                    places[rank] += 1
                    continue
                break
        assert places != before, "the orders wait for each other"
    return max(clocks) - busy[0]


def torch_orders(schedule: str, pp: int, micro_batches: int, per_rank: int) -> list[list[list[Any]]]:
    if schedule == "1F1B":  # torch's drawing of it numbers micro-batches in another way
        orders = []
        for rank in range(pp):
            ahead = min(micro_batches, pp - rank)
            one = [[("F", rank, n)] for n in range(ahead)]
            for n in range(micro_batches):
                one.append([("B", rank, n)])
                one += [[("F", rank, n + ahead)]] if n + ahead < micro_batches else []
            orders.append(one)
        return orders
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for actions in get_schedule_ops(schedule, pp, micro_batches, None if per_rank == 1 else per_rank):
        order: list[Any] = []
        for action in actions:
            group = [action] if action is None or not action.sub_actions else list(action.sub_actions)
            steps: list[Any] = [
                (kinds[one.computation_type.name], one.stage_index, one.microbatch_index)
                for one in group
                if one is not None and one.computation_type.name in kinds
            ]
            order += [steps] if steps else []
        found.append(order)
    return found


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    ],
)  # fmt: skip
def test_a_bubble_is_that_of_the_order_that_torch_runs(schedule: str, per_rank: int) -> None:
    for pp in (2, 4):
        for micro_batches in sorted({1, pp - 1, pp, pp + 1, 4 * pp}):
            needs = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
            if micro_batches < needs or (
                schedule.startswith("Interleaved") and micro_batches % max(1, micro_batches // pp)
            ):
                continue  # refused, see `resolve_layout`
            found = finish(torch_orders(schedule, pp, micro_batches, per_rank), pp * per_rank)
            planned = idle_forwards(schedule, pp, per_rank, micro_batches)
            if schedule == "InterleavedZeroBubble" and micro_batches < pp:
                assert found <= planned
            else:
                assert found == planned, (pp, micro_batches)


def moved(config: RunConfig, world: int, *, ranks_per_node: int = 8, pp_rank: int = 0) -> dict[str, Any]:
    layout = resolve_layout(config, world)
    found = traffic(config, layout, pp_rank, held(config, layout, pp_rank), gpu=H100, ranks_per_node=ranks_per_node)
    return {one.dimension: one for one in found}


def wired(**parallel: Any) -> RunConfig:
    return from_values({
        "model": {"layers": 4, "vocab": 256, "dim": 64},
        "parallel": parallel, "train": {"seq_len": 64, "global_batch": 32, "micro_batch": 2},
    })  # fmt: skip


def test_a_rank_sends_what_the_collectives_of_its_dimension_move() -> None:
    tensor = moved(wired(tp=2, dp_shard=1), 2)["tp"]
    stream = 2 * 64 * 64 * 4 // 2  # b s h in bytes, of which a ring of two sends half
    micro_batches = 16
    assert tensor.sent == micro_batches * ((4 * 8 + 2 + 4) * stream + 2 * 64 * 256 * 4 // 2)
    again = moved(wired(tp=2, dp_shard=1, activation_checkpoint="full"), 2)["tp"]
    assert again.sent - tensor.sent == micro_batches * 4 * 4 * stream
    whole = held(wired(), resolve_layout(wired(), 4), 0).whole
    shards = moved(wired(), 4)["dp_shard"]
    assert shards.sent == whole * 3 * (2 * 4 * 4 + 4) // 4  # gathered twice for each of 4 micro-batches, scattered once
    pipeline = moved(wired(pp=2), 2, pp_rank=1)["pp"]
    assert pipeline.sent == 16 * 2 * (2 * 64 * 64) * 4
    replicas = moved(wired(dp_replicate=2, dp_shard=2), 4)
    assert set(replicas) == {"dp_shard", "dp_replicate"}
    apart = moved(wired(dp_replicate=2, dp_shard=2, sync_every=4), 4)
    assert apart["dp_replicate"].sent * 4 == replicas["dp_replicate"].sent  # as many parameters, every fourth step
    assert apart["dp_shard"].sent == replicas["dp_shard"].sent
    assert moved(wired(), 1) == {}
    halved = moved(wired(dp_replicate=2, dp_shard=2, reduce_dtype="bfloat16"), 4)
    assert halved["dp_replicate"].sent * 2 == replicas["dp_replicate"].sent
    assert replicas["dp_shard"].sent - halved["dp_shard"].sent == whole * 2 // 2


def test_a_ring_sends_keys_once_more_and_their_gradients_in_float32() -> None:
    def bytes_of(precision: str, **parallel: Any) -> int:
        config = wired(cp=2, dp_shard=1, **parallel)
        found = moved(replace(config, train=replace(config.train, precision=precision)), 2)["cp"]
        return int(found.sent)

    width = wired().model.kv_heads * wired().model.head_size
    keys = (
        16 * 4 * (2 * 2 * 64 * width) // 2
    )  # micro-batches, layers, keys and values of two rows; a ring of two sends half
    assert bytes_of("float32") == keys * 2 * 4
    assert bytes_of("float32", cp_exchange="ring") == keys * 3 * 4
    assert bytes_of("bfloat16", cp_exchange="ring") == keys * (2 + 2 + 4)
    assert bytes_of("bfloat16", cp_exchange="ring", activation_checkpoint="full") == keys * (2 + 2 + 2 + 4)


def test_tokens_go_to_the_ranks_that_share_experts_and_weights_to_those_with_the_same() -> None:
    def sparse(**parallel: Any) -> RunConfig:
        config = wired()
        model = replace(config.model, experts=4, ffn=96)
        return replace(config, model=model, parallel=replace(config.parallel, **parallel))

    shared, cut, alone = moved(sparse(), 4), moved(sparse(ep=2), 4), moved(sparse(ep=1), 4)
    assert set(shared) == {"ep", "dp_shard"}
    assert set(cut) == {"ep", "edp", "dp_shard"}
    assert set(alone) == {"edp", "dp_shard"}
    assert shared["dp_shard"].sent == cut["dp_shard"].sent == alone["dp_shard"].sent  # the rest of the weights
    rows = 4 * 4 * 4 * 2 * (2 * 64) * 64 * 4  # layers, ways, micro-batches, choices, tokens, dim, bytes
    assert (shared["ep"].sent, cut["ep"].sent) == (rows * 3 // 4, rows // 2)
    experts = 4 * 3 * 4 * 96 * 64  # layers, weights, experts, their sizes
    passes = 2 * 4 * 4 + 4  # gathered twice for each of 4 micro-batches, scattered once
    assert alone["edp"].sent == experts * passes * 3 // 4
    assert cut["edp"].sent == experts // 2 * passes // 2
    apart = moved(sparse(ep=2), 4, ranks_per_node=2)
    assert (apart["ep"].link, apart["edp"].link) == ("node", "network")  # tokens stay inside a node


def test_a_dimension_within_a_node_uses_its_links_and_others_the_network() -> None:
    config = read_config(CONFIGS / "llama3-405b.toml")
    found = moved(config, 16384)
    assert {name: one.link for name, one in found.items()} == {"tp": "node", "dp_shard": "network", "pp": "network"}
    assert found["tp"].rate == H100.node_link
    assert found["dp_shard"].rate == found["pp"].rate == H100.network
    flat = moved(from_values({"train": {"global_batch": 16}}), 16)["dp_shard"]
    assert flat.rate == min(H100.node_link, 8 * H100.network)  # all adapters of a node carry one ring
    assert flat.seconds == flat.sent / (CARRIED * flat.rate) + flat.latency_s
    # 4 blocks, gathered twice and scattered once: to start, 14 hops inside of nodes, one between them
    assert flat.latency_s == pytest.approx(4 * 3 * (8.4e-6 + 14 * 3.4e-6 + 14e-6))
