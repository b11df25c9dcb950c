"""What the demo shows: comparison of traces, the table of the recovery, the picture. Reads files, runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from flashckpt.trainer.train.metrics import ABANDONED, TRACE, read_trace

COMPARED = ("loss", "norm", "samples")
PHASES = {
    "detect": "notice that the rank died",
    "stop": "end the other ranks",
    "rendezvous": "fresh store, new generation",
    "fork": "fork the ranks from the zygote",
    "init": "process group, model, mesh",
    "restore": "restore",
    "first_step": "the next step itself",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two traces, step by step, bit for bit: `equal` of `steps` agree; `first` is the first difference."""

    steps: int
    equal: int
    first: str = ""

    @property
    def identical(self) -> bool:
        """Whether every step agrees."""
        return self.steps > 0 and self.equal == self.steps


def compare_traces(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], steps: int) -> Comparison:
    """Compare loss and gradient norm (as `float.hex()`) and the samples of steps 1 to `steps`."""
    left, right = ({line["step"]: line for line in lines} for lines in (one, other))
    equal, first = 0, ""
    for step in range(1, steps + 1):
        a, b = left.get(step), right.get(step)
        if a is not None and b is not None and all(a[key] == b[key] for key in COMPARED):
            equal += 1
        elif not first:
            first = f"step {step}: " + (
                "missing"
                if a is None or b is None
                else ", ".join(f"{k} {a[k]} / {b[k]}" for k in COMPARED if a[k] != b[k])
            )
    return Comparison(steps=steps, equal=equal, first=first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What all ranks read in one restore: bytes per tier, and the slowest rank's seconds."""

    step: int
    ranks: int
    seconds: float
    tiers: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return e.g. "1.9 MB from memory"."""
        parts = [f"{size / 1e6:.2f} MB from {tier}" for tier, size in sorted(self.tiers.items()) if size]
        return ", ".join(parts) or "nothing"


def read_restores(folder: Path) -> list[Restored]:
    """Return the restores of a run in order, from the lines that every rank wrote."""
    # Without storage or surviving memory generations start at 1 again: the launch distinguishes them.
    generations: dict[tuple[str, int], list[dict[str, Any]]] = {}
    try:
        lines = (folder / "restores.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # truncated by a full disk
            continue
        generations.setdefault((record["launch"], record["generation"]), []).append(record)
    return [_sum(records) for records in generations.values()]


def _sum(records: Sequence[Mapping[str, Any]]) -> Restored:
    tiers: dict[str, int] = {}
    for record in records:
        for tier, size in record["bytes"].items():
            tiers[tier] = tiers.get(tier, 0) + size
    return Restored(
        step=records[0]["step"], ranks=len(records), seconds=max(r["seconds"] for r in records), tiers=tiers
    )


def recovery_table(seconds: Mapping[str, float], measured_s: float) -> Table:
    """Return the table of one recovery.

    Args:
        seconds: Seconds per phase, from the ledger.
        measured_s: Seconds from the kill to the end of the next trained step, by the demo's own clock.
    """
    table = Table(title="From the kill to the next trained step", title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for name, text in PHASES.items():
        if name in seconds:
            table.add_row(text, f"{seconds[name]:.3f}")
    table.add_section()
    table.add_row("in all, by the demo's own clock", f"{measured_s:.3f}", style="bold")
    return table


def recovery_facts(failure: Mapping[str, Any], restored: Restored | None, lost: int) -> list[str]:
    """Return readable lines: which rank died, what it cost, where the state came from."""
    facts = [f"steps lost {lost}"]
    if failure:
        cause = str(failure.get("cause", "?")).partition(":")[0]
        facts.insert(0, f"died       rank {failure.get('rank', '?')}: {cause}")
    if restored is not None:
        facts.append(f"restored   step {restored.step} by {restored.ranks} ranks: {restored.text()}")
    return facts


def draw(folder: Path, picture: Path, marks: Sequence[tuple[int, int, str]]) -> None:
    """Draw both loss curves and the crashes to a PNG.

    Args:
        folder: Holds `unbroken/` and `crash/`.
        picture: The PNG to write.
        marks: (last step before the crash, step restored, label) of each crash.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5), dpi=120)
    unbroken, crash = _curve(folder / "unbroken" / TRACE), _curve(folder / "crash" / TRACE)
    lost = _curve(folder / "crash" / ABANDONED)
    axes.plot(*unbroken, color="#9ecae1", linewidth=7, solid_capstyle="round", label="unbroken run")
    axes.plot(*crash, color="#08306b", linewidth=1.6, marker="o", markersize=3, label="run that was killed twice")
    axes.plot(*lost, linestyle="none", marker="x", color="#cb181d", markersize=8, label="steps lost and trained again")
    top = max([*unbroken[1], *crash[1]], default=1.0)
    for number, (died, restored, label) in enumerate(marks):
        axes.axvline(died + 0.5, color="#cb181d", linewidth=1.2, linestyle="--")
        height = top - 0.12 * number
        axes.annotate(
            f"{label}\nback to step {restored}",
            xy=(died + 0.5, height), xytext=(died + 0.9, height), color="#cb181d", fontsize=9, va="top",
        )  # fmt: skip
        axes.axvspan(restored, died + 0.5, color="#cb181d", alpha=0.07)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title("Killed twice, same loss curve: 8 ranks, DP 2 x TP 2 x PP 2")
    axes.legend(loc="lower left", frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def _curve(path: Path) -> tuple[list[int], list[float]]:
    lines = read_trace(path)
    return [line["step"] for line in lines], [float.fromhex(line["loss"]) for line in lines]
