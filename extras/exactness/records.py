"""What the probe writes and the command reads: one file per rank and trace, a line per instant. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MADE, RESTORED, BEGINS, ENDS, ENDED = "made", "restored", "begins", "ends", "ended"
"""Instants: a Checkpointer was made; restore() has ended; a step gives the model its first input; step() has ended; the script has."""


class Recorded(NamedTuple):
    """One leaf as it was written; the fields are those of `leaves.Leaf`."""

    kind: str
    owner: str
    of: str
    digest: str
    shown: str


@dataclass(kw_only=True)
class RunTrace:
    """What one rank saw in one start.

    Attributes:
        restored: The step of the restore; 0 on a fresh start, None where none was made.
        leaves: By instant (kind, step), then path.
        inputs: By step, what the tracked models were given.
        added: By step, the tracked models whose gradients from before it were added to; None where nobody can tell.
        rng: Whether the global generators are tracked.
        has_ended: Whether the script ran to its end.
    """

    restored: int | None = None
    leaves: dict[tuple[str, int], Mapping[str, Recorded]] = field(default_factory=dict)
    inputs: dict[int, list[str]] = field(default_factory=dict)
    added: dict[int, list[str] | None] = field(default_factory=dict)
    rng: bool = False
    is_made: bool = False
    has_ended: bool = False

    @property
    def steps(self) -> list[int]:
        """The steps that ended."""
        return list(self.inputs)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line in."""
        kind, step = line["at"]
        self.is_made |= kind == MADE
        self.has_ended |= kind == ENDED
        if kind == RESTORED:
            self.restored, self.rng = step, line["rng"]
        if kind == ENDS:
            self.inputs[step], self.added[step] = line["inputs"], line["added"]
        if "leaves" in line:
            self.leaves[kind, step] = {path: Recorded(*leaf) for path, leaf in line["leaves"].items()}


def record_file(folder: Path, rank: int, trace: int) -> Path:
    """Return the file of one start of a rank."""
    return folder / f"{rank}.{trace}.jsonl"


def done_file(folder: Path, rank: int) -> Path:
    """Return the file that a rank makes behind its last step."""
    return folder / f"{rank}.done"


def read_trace(folder: Path, rank: int, trace: int) -> RunTrace:
    """Return what a rank saw; a line that its kill cut short is left out."""
    found, path = RunTrace(), record_file(folder, rank, trace)
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.add(json.loads(line))
        except ValueError:
            break
    return found
