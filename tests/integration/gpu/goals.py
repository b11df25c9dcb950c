"""The goals for a GPU beside what a run of `make gpu` found; unknown where it found nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Results = Mapping[str, Any]
"""What one part wrote, by the part's name."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal and what was found.

    Attributes:
        what: In words, with its limit.
        found: In words.
        state: "met", "missed" or "unknown".
    """

    what: str
    found: str
    state: str

    @property
    def row(self) -> str:
        """The line of the table."""
        return f"{self.state:8} {self.what}: {self.found}"


def call_ms(parts: Mapping[str, Results]) -> float | None:
    """Return the slowest median of step() over all sizes of state, in ms."""
    series = [one.get("series", {}).get("flashckpt", []) for name, one in parts.items() if name.endswith(" GB")]
    return max((median(r["call_s"] for r in (rounds[1:] or rounds)) * 1e3 for rounds in series if rounds), default=None)


def slowed_percent(parts: Mapping[str, Results]) -> float | None:
    """Return by how much steps with a snapshot each 5 steps are longer than those without."""
    steps = parts.get("numbers: every 1, 5, 20", {}).get("step_s", {})
    if not steps.get("5") or not steps.get("0"):
        return None
    return float(median(steps["5"]) / median(steps["0"]) - 1) * 100


def bus_percent(parts: Mapping[str, Results]) -> float | None:
    """Return the rate into page-locked slots as a share of the best rate of the run."""
    found = parts.get("numbers: bus", {})
    rate = found.get("rates_gb_per_s", {}).get("tmpfs, registered")
    return None if rate is None else float(rate["median"] / found["limit_gb_per_s"] * 100)


def restart_s(parts: Mapping[str, Results]) -> float | None:
    """Return the median from the kill to the next step."""
    kills = parts.get("numbers: restart", {}).get("kills", [])
    return median(kill["kill to step"] for kill in kills) if kills else None


_GOALS: Sequence[tuple[str, Callable[[Mapping[str, Results]], float | None], Callable[[float], bool], str]] = (
    ("step() with 1,000 tensors at most 2 ms", call_ms, lambda ms: ms <= 2, "{:.2f} ms"),
    ("steps of 0.5 s at most 1 % longer with a snapshot each 5", slowed_percent, lambda share: share <= 1, "{:+.2f} %"),
    ("device to slot at least 90 % of the bus", bus_percent, lambda share: share >= 90, "{:.0f} %"),
    ("kill to step at most 3 s with 16 GB (a billion parameters)", restart_s, lambda s: s <= 3, "{:.2f} s"),
)


def goals(results: Sequence[Mapping[str, Any]], *, device: str) -> list[Goal]:
    """Return every goal with what the parts found.

    Args:
        results: Of the parts, as `run_part` returns them.
        device: Figures of anything but "cuda" say nothing about a GPU.
    """
    parts = {one["name"]: one["results"].get("results", {}) for one in results if "results" in one}
    found = []
    for what, figure, holds, form in _GOALS:
        value = figure(parts) if device == "cuda" else None
        if value is None:
            why = "not measured: no GPU" if device != "cuda" else "its part gave no figure"
            found.append(Goal(what=what, found=why, state="unknown"))
        else:
            found.append(Goal(what=what, found=form.format(value), state="met" if holds(value) else "missed"))
    return found


def as_values(found: Sequence[Goal]) -> list[dict[str, str]]:
    """Return goals as the JSON has them."""
    return [asdict(goal) for goal in found]
