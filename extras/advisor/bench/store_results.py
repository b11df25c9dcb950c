"""From the seconds that `bench store` noted to the document: rates, summaries, publishes per second. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.bench.measure import median, summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasurement:
    """What a run brought.

    Attributes:
        object_bytes: Bytes of one object.
        seconds: Values by name, one per round (small publishes: one each).
        parts: Seconds of each part written and read.
        cold: How caches were emptied before reads, and the largest share that was still cached.
        capabilities: What the place can do, see `probe.capabilities`.
        backend: Class of the store.
        warnings: What the stores said; retries: how often they tried again.
    """

    object_bytes: int
    seconds: Mapping[str, Sequence[float]]
    parts: Mapping[str, Sequence[float]]
    cold: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    backend: str
    warnings: Sequence[str]
    retries: int


def results(run: StoreMeasurement) -> dict[str, Any]:
    """Return the document of a run."""
    seconds, size = run.seconds, run.object_bytes
    rates = {
        name: summarise([size / value for value in seconds[key]])
        for name, key in (
            ("floor write", "floor_write_s"),
            ("raw write", "raw_write_s"),
            ("flashckpt durable", "durable_s"),
            ("floor read", "floor_read_s"),
            ("raw read", "raw_read_s"),
            ("flashckpt restore", "restored_s"),
        )
        if key in seconds
    }
    return {
        "object_bytes": size,
        "bytes_per_s": rates,
        "summary_s": {name: summarise(values) for name, values in seconds.items() if name.endswith("_s")},
        "publishes_per_s": 1 / median(seconds["publish_s"]),
        "parts_ms": {
            name: summarise([1e3 * value for value in values]) for name, values in run.parts.items() if values
        },
        "parts_s": run.parts,
        "write_cpu_s_per_gb": summarise([1e9 * value / size for value in seconds["write_cpu_s"]]),
        "read_cpu_s_per_gb": summarise([1e9 * value / size for value in seconds["read_cpu_s"]]),
        "peak_extra_bytes": max(seconds["peak_extra_bytes"]),
        "cold": dict(run.cold),
        "capabilities": dict(run.capabilities),
        "backend": run.backend,
        "warnings": list(run.warnings),
        # obstore tries again inside its own library and does not say how often
        "retries": None if run.backend == "ObstoreStore" else run.retries,
        "rates": {
            "write_bytes_per_s": size / median(seconds["durable_s"]),
            "read_bytes_per_s": size / median(seconds["restored_s"]),
        },
    }
