"""Which of two sources is faster, where other nodes' memory and storage hold the same: by the bytes per second that each has shown."""

from __future__ import annotations

from dataclasses import dataclass, field

SAMPLE_JOBS = 2
"""Jobs that are read from storage to see how fast it is."""
WORTH_S = 0.5
"""Seconds that the rest must still take from other nodes for storage to be tried at all."""


@dataclass(kw_only=True)
class Lane:
    """What one source has brought so far.

    Attributes:
        is_only: It has what no other source has: there is no choice.
    """

    nbytes: int = 0
    seconds: float = 0.0
    is_only: bool = False

    def add(self, nbytes: int, seconds: float) -> None:
        """Count what was brought, and how long that took."""
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """Bytes per second; 0 where nothing came."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True)
class Lanes:
    """Memory of other nodes (far) and storage (near): one rank's view, waiting for others included."""

    far: Lane = field(default_factory=Lane)
    near: Lane = field(default_factory=Lane)

    def is_choice_due(self, left: int) -> bool:
        """Whether the rest, in bytes, takes so long from other nodes that storage may be worth a look, or was looked at."""
        if not left or self.far.is_only or not self.far.seconds:
            return False
        return self.near.seconds > 0 or left > WORTH_S * self.far.rate

    def is_near_faster(self) -> bool:
        """Whether storage has been faster so far."""
        return self.near.rate > self.far.rate
