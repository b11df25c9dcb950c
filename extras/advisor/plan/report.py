"""From a layout and costs, measured or assumed, to the document that `flashckpt plan` prints. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashckpt.bench.layouts import BYTES_PER_PARAMETER, ModelLayout, held_bytes, rank_shards
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.plan.coordination import REQUESTS_PER_S, AtSize, Coordination, coordination, plain, walls
from flashckpt.plan.model import Costs, Failures, Intervals, best, daly, forecast, wrong_intervals, young

SIZES = (8, 1_024, 16_384, 100_000)
WALL_SIZES = tuple(8 * 2**n for n in range(15))
"""GPUs at which walls are looked for: 8 to 131,072."""
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast bytes move, and what happens besides; assumed values until a benchmark gives measured ones.

    Attributes:
        copy_bytes_per_s: One rank's staging into host memory, and its restore from there.
        slowdown: Share of the copy's time by which the steps beside it get longer.
        call_s: Time the training thread spends in the call that takes a snapshot.
        write_bytes_per_s: One node's durable writes.
        read_bytes_per_s: One node's reads.
        storage_bytes_per_s: What the shared storage moves for all nodes together, at most.
        persist_uplift: Share by which steps get longer while a persist runs.
        request_s: A small request to the shared storage.
        requests_per_s: Requests that it answers per second, of all nodes together.
        sources: Where each figure is from, by field name; "assumed" where it is missing.
    """

    copy_bytes_per_s: float = 10e9
    slowdown: float = 0.2
    call_s: float = 0.3e-3
    write_bytes_per_s: float = 1e9
    read_bytes_per_s: float = 1e9
    storage_bytes_per_s: float = math.inf
    persist_uplift: float = 0.02
    request_s: float = 20e-3
    requests_per_s: float = REQUESTS_PER_S
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What was asked: the job, its failures, and the times that no benchmark of storage can know.

    `rows` are the tensors of a rank; None: those of the layout.
    """

    layout: ModelLayout
    gpus: int
    gpus_per_node: int = 8
    gpu_mtbf_s: float
    storage_share: float
    relaunch_s: float = 60.0
    replace_s: float = 600.0
    step_s: float = 0.0
    slots: int = 3
    keep_last: int = 3
    rows: int | None = None


def measured_rates(document: Mapping[str, Any], base: Rates) -> Rates:
    """Return the rates of a `flashckpt bench` result, what it did not measure taken from `base`.

    Raises:
        ConfigError: The result holds no figure that a plan needs.
    """
    found: dict[str, float] = {
        name: float(document["results"]["rates"][name])
        for name in asdict(base)
        if name != "sources" and document["results"].get("rates", {}).get(name) is not None
    }
    if not found:
        raise ConfigError(
            "this result holds no rates that a plan could use",
            found=f"kind {document.get('kind')!r}",
            expected="the JSON of `flashckpt bench job`, `store` or `shm`",
        )
    loaded = ", under load" if document.get("load", {}).get("loaded") else ""
    source = f"measured by bench {document.get('kind')} on {document.get('time', 'an unknown day')}{loaded}"
    return replace(base, **found, sources={**base.sources, **dict.fromkeys(found, source)})


def fitted(layout: ModelLayout, gpus: int) -> ModelLayout:
    """Return the layout with as many data-parallel ranks as `gpus` allow.

    Raises:
        LayoutError: `gpus` is not a multiple of tp x pp.
    """
    group = layout.tp * layout.pp
    if gpus % group:
        raise LayoutError(
            f"{layout.model.name} at tp {layout.tp} x pp {layout.pp} does not fit {gpus:,} GPUs",
            found=f"{gpus:,} GPUs",
            expected=f"a multiple of {group}",
            remedy="give another --gpus, or other --tp and --pp",
        )
    return replace(layout, dp=gpus // group)


def costs_from(
    held: float, total: float, *, gpus: int, gpus_per_node: int, rates: Rates, relaunch_s: float, replace_s: float
) -> Costs:
    """Return the costs in seconds of checkpoints of `total` bytes, of which the fullest rank holds `held`."""
    nodes = -(-gpus // gpus_per_node)
    copy_s = held / rates.copy_bytes_per_s
    limit = rates.storage_bytes_per_s
    persist_s = total / min(limit, nodes * rates.write_bytes_per_s)
    # Every rank reads what it holds: replicas are written once, but read by each of their ranks.
    read_s = held * gpus / min(limit, nodes * rates.read_bytes_per_s)
    return Costs(
        stall_s=rates.call_s + rates.slowdown * copy_s,
        staged_s=copy_s,
        persist_stall_s=rates.persist_uplift * persist_s,
        persist_s=persist_s,
        restart_memory_s=relaunch_s + copy_s,
        restart_storage_s=replace_s + read_s,
    )


def costs_of(request: PlanRequest, rates: Rates) -> tuple[Costs, dict[str, float]]:
    """Return the costs in seconds at the asked size, and the bytes they come from."""
    layout = fitted(request.layout, request.gpus)
    held = max(
        held_bytes(rank_shards(layout, stage * layout.tp * layout.dp)) for stage in {0, layout.pp // 2, layout.pp - 1}
    )
    nodes = -(-request.gpus // request.gpus_per_node)
    costs = costs_from(
        held, layout.total_bytes, gpus=request.gpus, gpus_per_node=request.gpus_per_node, rates=rates,
        relaunch_s=request.relaunch_s, replace_s=request.replace_s,
    )  # fmt: skip
    sizes: dict[str, float] = {
        "rank_rows": request.rows or len(rank_shards(layout, 0)),
        "parameters": layout.model.parameters,
        "checkpoint_bytes": layout.total_bytes,
        "rank_bytes": held,
        "nodes": nodes,
        "dp": layout.dp,
    }
    return costs, sizes


def plan_document(
    request: PlanRequest, rates: Rates, overrides: Mapping[str, float], sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Return everything `flashckpt plan` knows, as JSON.

    Args:
        request: The job.
        rates: Assumed or measured.
        overrides: Fields of `Costs` that the user gave in seconds.
        sizes: Numbers of GPUs of the table.
    """
    costs, state = costs_of(request, rates)
    data_s = costs.persist_s
    asked = _coordination(request, state, rates, request.gpus)
    costs = replace(costs, persist_s=data_s + asked.seconds)
    costs = replace(costs, **overrides)
    if "persist_s" in overrides:
        costs = replace(costs, persist_stall_s=rates.persist_uplift * costs.persist_s)
    failures = Failures(gpus=request.gpus, gpu_mtbf_s=request.gpu_mtbf_s, storage_share=request.storage_share)
    chosen = best(failures, costs, step_s=request.step_s, persist_floor_s=asked.least_s)

    def at(size: int) -> tuple[Coordination, Costs]:
        """Return the costs with as many bytes per rank on another number of GPUs."""
        own = _coordination(request, state, rates, size)
        return own, costs if "persist_s" in overrides else replace(costs, persist_s=data_s + own.seconds)

    def best_at(size: int) -> Intervals:
        own, there = at(size)
        return best(replace(failures, gpus=size), there, step_s=request.step_s, persist_floor_s=own.least_s)

    return {
        "schema": SCHEMA,
        "kind": "plan",
        "model": request.layout.model.name,
        "layout": {key: getattr(request.layout, key) for key in ("tp", "pp", "zero")} | {"dp": state["dp"]},
        "gpus": request.gpus,
        "mtbf_s": failures.mtbf_s,
        "gpu_mtbf_s": request.gpu_mtbf_s,
        "storage_share": request.storage_share,
        "costs": asdict(costs),
        "given": sorted(overrides),
        "rates": asdict(rates),
        "state": state,
        "intervals": _choice(chosen, request.step_s),
        "rules": _rules(failures, costs, request.step_s, asked.least_s),
        "needs": _needs(request, state, chosen),
        "sizes": [
            {
                "gpus": size,
                "mtbf_s": request.gpu_mtbf_s / size,
                "coordination_s": at(size)[0].seconds,
                **_choice(best_at(size), request.step_s),
            }
            for size in sizes
        ],
        "coordination": plain(asked),
        "walls": walls([_at_size(failures, size, rates, *at(size)) for size in WALL_SIZES]),
        "wrong_interval": [
            {"factor": factor, "snapshot_goodput": snapshot, "persist_goodput": persist}
            for factor, snapshot, persist in wrong_intervals(failures, costs, chosen, persist_floor_s=asked.least_s)
        ],
        "lost_gpu_hours_per_day": (1 - chosen.forecast.goodput) * request.gpus * 24,
        "curve": curve(failures, costs, chosen),
    }


def _coordination(request: PlanRequest, state: Mapping[str, float], rates: Rates, gpus: int) -> Coordination:
    """Return what agreement and commit cost at a size, with as many bytes and tensors per rank as at the asked one."""
    return coordination(
        ranks=gpus,
        nodes=-(-gpus // request.gpus_per_node),
        checkpoint_bytes=state["checkpoint_bytes"] / request.gpus * gpus,
        rows=int(state["rank_rows"]),
        request_s=rates.request_s,
        requests_per_s=rates.requests_per_s,
    )


def _at_size(failures: Failures, gpus: int, rates: Rates, own: Coordination, costs: Costs) -> AtSize:
    failures = replace(failures, gpus=gpus)
    wanted_s = young(costs.persist_stall_s, 1 / failures.storage_rate) if failures.storage_rate > 0 else math.inf
    return AtSize(
        gpus=gpus, costs=own, persist_s=costs.persist_s, wanted_s=wanted_s, requests_per_s=rates.requests_per_s
    )


def _rules(failures: Failures, costs: Costs, step_s: float, least_s: float) -> dict[str, float]:
    """Return what rules of thumb say, and the bounds below which no interval makes sense; seconds."""
    never_s = failures.mtbf_s * 1e9  # a tier that never fails
    memory_mtbf_s = min(1 / failures.memory_rate if failures.memory_rate > 0 else float("inf"), never_s)
    storage_mtbf_s = min(1 / failures.storage_rate if failures.storage_rate > 0 else float("inf"), never_s)
    return {
        "young_snapshot_s": young(costs.stall_s, memory_mtbf_s),
        "daly_snapshot_s": daly(costs.stall_s, memory_mtbf_s),
        "young_persist_s": young(costs.persist_stall_s, storage_mtbf_s),
        "shortest_snapshot_s": max(costs.staged_s, step_s),
        "shortest_persist_s": max(costs.persist_s, least_s),
    }


def curve(failures: Failures, costs: Costs, chosen: Intervals) -> list[tuple[float, float]]:
    """Return (snapshot interval in seconds, goodput) around the choice, persists kept at their interval."""
    points = []
    for exponent in range(-20, 21):
        seconds = chosen.snapshot_s * 10 ** (exponent / 10)
        every = max(1, round(chosen.persist_s / seconds))
        points.append((seconds, forecast(failures, costs, snapshot_s=seconds, persist_every=every).goodput))
    return points


def _choice(choice: Intervals, step_s: float) -> dict[str, Any]:
    return {
        "snapshot_s": choice.snapshot_s,
        "snapshot_steps": round(choice.snapshot_s / step_s) if step_s > 0 else None,
        "persist_every": choice.persist_every,
        "persist_s": choice.persist_s,
        **asdict(choice.forecast),
    }


def _needs(request: PlanRequest, state: Mapping[str, float], chosen: Intervals) -> dict[str, float]:
    """Return bytes of memory and storage, and the bandwidth below which persists fall behind."""
    return {
        "host_memory_node_bytes": request.slots * state["rank_bytes"] * min(request.gpus_per_node, request.gpus),
        # one more than is kept: the new one is written before the oldest is pruned
        "storage_bytes": (request.keep_last + 1) * state["checkpoint_bytes"],
        "storage_bytes_per_s": state["checkpoint_bytes"] / chosen.persist_s,
        "bytes_per_parameter": BYTES_PER_PARAMETER,
    }
