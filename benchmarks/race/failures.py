"""Which failure strikes when: drawn from one seed, the same for every entrant. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = {
    "none": "nothing happens",
    "rank": "SIGKILL of one rank",
    "ranks": "SIGKILL of all ranks",
    "machine": "SIGKILL of every process; shared memory and what was not synced are gone",
    "hang": "SIGSTOP of one rank",
    "disk": "the disk is full for ten seconds",
    "resize": "SIGTERM, then a start on one rank instead of two",
}
RESTARTED = ("machine", "resize")
"""After these a scheduler starts the job again, whoever the entrant is: that is nobody's intervention."""
DISK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure.

    Attributes:
        kind: One of `KINDS`.
        step: It strikes when the log has a step as high as this,
        later: and so many ordinary steps later (a share of one: an instant inside the step),
        rank: at this rank, where it is one rank's.
        sleep_s: What a step waits in this run: a full disk of ten seconds needs a run that is longer than that.
    """

    kind: str
    step: int
    later: float
    rank: int
    sleep_s: float = 0.0


def draw(seed: int, steps: int, ranks: int, step_s: float) -> dict[str, Failure]:
    """Return the failure of each kind: one seed gives one list, and each kind has its own generator.

    Args:
        seed: Of the race.
        steps: Of the run.
        ranks: Of the run.
        step_s: What an ordinary step takes, for the run with the full disk.
    """
    found = {}
    for kind in KINDS:
        rng = random.Random(f"{seed} {kind}")
        low, high = (0.15, 0.25) if kind == "disk" else (0.35, 0.75)
        sleep_s = max(0.0, 1.7 * DISK_S / steps - step_s) if kind == "disk" else 0.0
        found[kind] = Failure(
            kind=kind,
            step=round(steps * rng.uniform(low, high)),
            later=rng.random(),
            rank=rng.randrange(ranks),
            sleep_s=sleep_s,
        )
    return found
