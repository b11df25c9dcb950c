"""From the log of a run to its line on the scoreboard. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a log says.

    Attributes:
        done: The highest step that was trained.
        seconds: From the log of the first step to that of the last: all restarts are in it, the first start is not.
        again: Steps that were trained more than once, each as often as it was again.
        lost: Samples that the weights have seen less often than they should.
        doubled: Samples that they have seen more often.
        sha256: Of the last weights; "" where the run did not come to its end.
    """

    done: int
    seconds: float
    again: int
    lost: int
    doubled: int
    sha256: str


def lines_of(text: str) -> list[Line]:
    """Return the whole lines of a log."""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def score(lines: Iterable[Line], samples: int, epochs: int) -> Score:
    """Count.

    The weights continued from the last attempt that trained a step; within it, from the last line of each rank.

    Args:
        lines: Of the log, in order.
        samples: How many there are, numbered from 0.
        epochs: How often each is to be trained.
    """
    steps: dict[int, dict[int, dict[int, Line]]] = {}
    sha256 = ""
    for line in lines:
        if line["event"] == "step":
            steps.setdefault(line["s"], {}).setdefault(line["a"], {})[line["r"]] = line
        elif line["event"] == "end":
            sha256 = line["sha256"]
    if not steps:
        return Score(done=0, seconds=0.0, again=0, lost=samples * epochs, doubled=0, sha256=sha256)
    seen: Counter[int] = Counter()
    for attempts in steps.values():
        for line in attempts[max(attempts)].values():
            seen.update(line["ids"])
    first = min(line["t"] for line in _all(steps[min(steps)]))
    last = max(line["t"] for line in steps[max(steps)][max(steps[max(steps)])].values())
    return Score(
        done=max(steps),
        seconds=last - first,
        again=sum(len(attempts) - 1 for attempts in steps.values()),
        lost=sum(max(0, epochs - seen[number]) for number in range(samples)),
        doubled=sum(max(0, count - epochs) for count in seen.values()),
        sha256=sha256,
    )


def ideal_s(lines: Sequence[Line], steps: int) -> float:
    """Return what a run would take that changes its number of ranks for nothing: each step at the pace of its attempt."""
    paces: dict[int, float] = {}
    for attempt in {line["a"] for line in lines if line["event"] == "step"}:
        mine = sorted(line["t"] for line in lines if line["event"] == "step" and line["a"] == attempt and not line["r"])
        gaps = sorted(after - before for before, after in pairwise(mine))
        paces[attempt] = gaps[len(gaps) // 2] if gaps else 0.0
    trained: dict[int, int] = {}
    for line in lines:
        if line["event"] == "step":
            trained[line["s"]] = max(line["a"], trained.get(line["s"], 0))
    return sum(paces[attempt] for step, attempt in trained.items() if 1 < step <= steps)


def _all(attempts: Mapping[int, Mapping[int, Line]]) -> list[Line]:
    return [line for lines in attempts.values() for line in lines.values()]
