"""`flashckpt bench compare`: ratios of two results, and which of them exceed the spread. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import ConfigError

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of two results.

    Attributes:
        name: Where it stands in the documents.
        a, b: Medians.
        ratio: b over a.
        verdict: "beyond the spread", "within the spread", or "too few rounds".
    """

    name: str
    a: float
    b: float
    ratio: float
    verdict: str


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return every summarised figure that both documents hold, in the order of the first.

    A difference is beyond the spread where the medians are further apart than the interquartile ranges of both
    together: half of the runs of each lie on their own side.

    Raises:
        ConfigError: They are of different kinds, or have no figure in common.
    """
    if a.get("kind") != b.get("kind"):
        raise ConfigError("these results cannot be compared", found=f"bench {a.get('kind')} and bench {b.get('kind')}")
    others = dict(_summaries(b["results"]))
    rows = [_difference(name, one, others[name]) for name, one in _summaries(a["results"]) if name in others]
    if not rows:
        raise ConfigError("these results have no figure in common", found=f"two results of bench {a.get('kind')}")
    return rows


def caveats(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return why the two may not be comparable: load, other arguments, another machine or other versions."""
    said = [
        f"{name} was measured under load: {'; '.join(doc['load']['reasons'])}"
        for name, doc in (("the first", a), ("the second", b))
        if doc.get("load", {}).get("loaded")
    ]
    for key in sorted({*a.get("arguments", {}), *b.get("arguments", {})}):
        left, right = a.get("arguments", {}).get(key), b.get("arguments", {}).get(key)
        if left != right and key not in {"url", "json", "plot"}:
            said.append(f"{key} differs: {left} and {right}")
    for key in ("cpu", "cores", "kernel", "libraries", "file_systems"):
        left, right = a.get("host", {}).get(key), b.get("host", {}).get(key)
        if left != right:
            said.append(f"{key.replace('_', ' ')} differ: {left} and {right}")
    return said


def _summaries(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    if not isinstance(value, Mapping):
        return
    if {"median", "spread", "n"} <= set(value):
        yield path, value
        return
    for key, item in value.items():
        yield from _summaries(item, f"{path}.{key}" if path else str(key))


def _difference(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    first, second = float(a["median"]), float(b["median"])
    apart = abs(second - first)
    room = abs(first) * float(a["spread"]) + abs(second) * float(b["spread"])
    verdict = "beyond the spread" if apart > room else "within the spread"
    if min(a["n"], b["n"]) < LEAST_ROUNDS:
        verdict = "too few rounds"
    ratio = second / first if first else float("inf")
    return Difference(name=name, a=first, b=second, ratio=ratio, verdict=verdict)
