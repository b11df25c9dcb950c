"""What the rounds of a job brought, and the document made of it: summaries, rates, what `flashckpt plan` needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt.bench.measure import median, summarise


@dataclass
class Gathered:
    """What the rounds brought, by name; one value per round, or per rank and round."""

    values: dict[str, list[float]] = field(default_factory=dict)
    ranks: dict[str, list[list[float]]] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=lambda: {"write": []})

    def add(self, name: str, *values: float) -> None:
        """Keep values of the round."""
        self.values.setdefault(name, []).extend(values)

    def add_ranks(self, name: str, values: Sequence[float]) -> None:
        """Keep the value of each rank, and the slowest as the value of the round."""
        self.ranks.setdefault(name, []).append(list(values))
        self.add(name, max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasurement:
    """A run whose processes have answered everything.

    Attributes:
        found: What the measured rounds brought; first: what the round before them did.
        sizes: Each rank's `held_bytes` and `tensors`.
        written: Bytes of tensors that each rank's slot brought to storage; empty where nothing was persisted.
        touch: Each rank's `bytes` and `seconds` of the first touch of memory like its segment's.
        persists: Whether the rounds included storage; cold: how its caches were emptied.
        uplift: By how much steps got longer beside a persist (share).
        peers: Summaries of the other libraries, by name.
    """

    found: Gathered
    first: Gathered
    sizes: Sequence[Mapping[str, Any]]
    written: Sequence[int]
    touch: Sequence[Mapping[str, Any]]
    persists: bool
    cold: Mapping[str, Any]
    uplift: float | None
    peers: Mapping[str, Any]


def results(run: JobMeasurement) -> dict[str, Any]:
    """Return the document of a run."""
    found, sizes = run.found, run.sizes
    held = [size["held_bytes"] for size in sizes]
    made: dict[str, Any] = {
        "ranks": len(sizes),
        "tensors": sum(size["tensors"] for size in sizes),
        "state_bytes": sum(held),
        "rank_bytes": max(held),
        "verified": True,
        "first": {name: values[0] for name, values in run.first.values.items()},
        "first_touch_bytes_per_s": min(one["bytes"] / one["seconds"] for one in run.touch),
        "first_touch_s": max(one["seconds"] for one in run.touch),
        # round by round: the machine drifts
        "x_memcpy": {
            name: summarise([a / b for a, b in zip(found.values[name], found.values["memcpy_s"], strict=True)])
            for name in ("call_s", "stall_s", "restorable_s", "restored_memory_s")
        },
        "stall_ms": summarise([1e3 * value for value in _flat(found, "stall_s")]),
        "call_ms": summarise([1e3 * value for value in _flat(found, "call_s")]),
        "summary_s": {name: summarise(values) for name, values in found.values.items() if name.endswith("_s")},
        "slowest_over_median": {name: _skew(rounds) for name, rounds in found.ranks.items() if len(held) > 1},
        "rank_bytes_per_s": {
            "snapshot": _per_rank(found, "restorable_s", held),
            "restore from memory": _per_rank(found, "restored_memory_s", held),
        },
        "bytes_per_s": {
            "snapshot": _rates(found.values["restorable_s"], sum(held)),
            "restore from memory": _rates(found.values["restored_memory_s"], sum(held)),
        },
        "rates": {
            # what one rank gets while all of them copy, from the slowest: with the hash, so a little less than a copy
            "copy_bytes_per_s": max(held) / median(found.values["copied_s"]),
            "slowdown": median(found.values["beside_s"]) / max(median(found.values["copied_s"]), 1e-9),
            "call_s": median(found.values["call_s"]),
        },
        "parts_s": found.parts,
        "peers": dict(run.peers),
    }
    if run.persists:
        _add_storage(made, found, held, run.written)
        made["cold"] = dict(run.cold)
        made["rates"]["persist_uplift"] = made["step_uplift"] = run.uplift
    return made


def _add_storage(made: dict[str, Any], found: Gathered, held: Sequence[int], written: Sequence[int]) -> None:
    total = sum(written)
    made["persisted_bytes"] = total
    made["rank_bytes_per_s"]["persist"] = _per_rank(found, "persist_s", written)
    made["rank_bytes_per_s"]["restore from storage"] = _per_rank(found, "restored_storage_s", held)
    made["bytes_per_s"]["durable"] = _rates(found.values["node_durable_s"], total)
    made["bytes_per_s"]["restore from storage"] = _rates(found.values["restored_storage_s"], sum(held))
    made["rates"]["write_bytes_per_s"] = total / median(found.values["node_durable_s"])
    made["rates"]["read_bytes_per_s"] = sum(held) / median(found.values["restored_storage_s"])
    made["persist_cpu_s_per_gb"] = summarise([1e9 * value / total for value in found.values["node_cpu_s"]])
    made["persist_peak_extra_bytes"] = max(found.values["node_peak_extra_bytes"])
    made["parts_ms"] = {
        name: summarise([1e3 * value for value in values]) for name, values in found.parts.items() if values
    }


def _flat(found: Gathered, name: str) -> list[float]:
    return [value for one in found.ranks[name] for value in one]


def _per_rank(found: Gathered, name: str, sizes: Sequence[int]) -> list[float]:
    """Return each rank's bytes per second, the median over rounds."""
    return [size / median([one[rank] for one in found.ranks[name]]) for rank, size in enumerate(sizes)]


def _rates(seconds: Sequence[float], nbytes: int) -> Any:
    return summarise([nbytes / value for value in seconds])


def _skew(rounds: Sequence[Sequence[float]]) -> float:
    """Return the slowest rank over the median rank, the median over rounds."""
    return median([max(one) / max(median(one), 1e-12) for one in rounds])
