"""Where the time of each rank's steps goes: what the first agent knows of all ranks, for metrics and pages. Pure; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.core.records import pack, seal, unpack, unseal
from flashckpt.errors import DamagedError, FormatVersionError

PROCESSOR = "processor"
"""Beside the phases of a loop: time that its thread ran, or was ready to run and had no core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """One rank over its last steps.

    Attributes:
        rank, pid, step: The rank, and the last step that it did.
        seconds: Of each step, by phase (`shm.control.PHASES`, PROCESSOR): those that are known.
        slow: The phase in which it is named as slow; "" for none.
    """

    rank: int
    pid: int = 0
    step: int = field(default=-1, metadata={"least": -1})
    stage: int = 0
    node: int = 0
    host: str = ""
    step_s: float = 0.0
    seconds: dict[str, Any] = field(default_factory=dict)
    slow: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    updated_s: float = 0.0
    ranks: tuple[dict[str, Any], ...] = ()


def encode_table(ranks: Iterable[RankTimes], updated_s: float) -> bytes:
    """Return the record of a table."""
    return seal(pack(_Table(updated_s=updated_s, ranks=tuple(map(pack, ranks)))))


def decode_table(raw: bytes) -> tuple[list[RankTimes], float]:
    """Return the ranks of a table, and when it was made; nothing where it cannot be read."""
    try:
        table = unpack(_Table, unseal(raw, "the table of ranks"), partial=True)
        return [times_of(one) for one in table.ranks], table.updated_s
    except (DamagedError, FormatVersionError, ValueError, KeyError):
        return [], 0.0


def times_of(found: Mapping[str, Any]) -> RankTimes:
    """Return the times in a map. ValueError, KeyError: It holds none."""
    times = unpack(RankTimes, found, partial=True)
    if not all(type(name) is str and type(spent) in (int, float) for name, spent in times.seconds.items()):
        raise ValueError("seconds: not numbers by name")
    return times
