"""How long a pipeline idles, by schedule: of the orders that torch's schedules have. Pure; imports nothing.

Times are in forwards of one stage for one micro-batch; a backward takes two of them, one for gradients of activations
and one for those of weights. The tests run torch's orders and find the same.
"""

from __future__ import annotations

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules whose backward has two halves, of which the second fills gaps."""


def bubble(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the share of a step, 0 to 1, in which a rank of a pipeline has nothing to do; 0 without a pipeline.

    Exact for stages that take equally long; of InterleavedZeroBubble with fewer micro-batches than ranks at most that.

    Args:
        schedule: A name that `resolve_layout` knows.
        pp: Ranks.
        stages_per_rank: Stages that each holds.
        micro_batches: Of each data-parallel rank and step.
    """
    idle = idle_forwards(schedule, pp, stages_per_rank, micro_batches)
    return idle / (3 * stages_per_rank * micro_batches + idle)


def idle_forwards(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> int:
    """Return how long a rank idles in a step, in forwards of a stage; arguments as `bubble`."""
    ends = pp - 1
    if schedule == "ZBVZeroBubble":
        return max(ends, 4 * ends - 2 * (micro_batches - 1))
    each = ends if schedule in SPLIT_BACKWARD else 3 * ends
    missing = max(0, pp - micro_batches)  # of a round: a rank then waits between the rounds of its stages
    return each + 3 * (stages_per_rank - 1) * missing
