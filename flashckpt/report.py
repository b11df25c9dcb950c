"""The report of a restore: one object, one line. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of `Checkpointer.restore()`.

    Attributes:
        step: The optimizer step that was restored; training continues with the next one.
        generation: The generation that took the snapshot.
        life: The generation that begins now.
        tier_bytes: Bytes that went into live state, by tier: "memory", "peer", "storage".
        seconds: Seconds per phase: inventory, root, decide, structure, open, requirements, plan, names, allocate, read,
            values, report, lineage, total.
        missing: Names that were wanted and are in no source (only with strict=False).
        unexpected: Names of parameters, buffers and optimizer state in the source that no rank has: left behind (only with
            strict=False or `only`).
        overruled: In words, settings of optimizers that the program has changed since, and that are those of the snapshot again.
        damaged: One sentence per range that came from another source than planned.
        read_bytes: Bytes that were read for them, by tier: rounded out to 1 MiB chunks.
        manifest_bytes: Bytes of MANIFEST, which rank 0 read from storage and sent to the others; 0 without storage.
        nodes: Bytes that went into the live state of each node's ranks: host -> tier -> bytes.
        reseeded: State of this rank alone that no reachable snapshot holds: its generators were seeded from (step, rank).
        passed_over: One sentence per newer snapshot or checkpoint that could not be restored: which, and why.
        is_same_layout: Whether this rank's shards are those of the snapshot ("exact") or were resharded
            ("state-exact").
    """

    step: int
    generation: int
    life: int
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    overruled: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    manifest_bytes: int = 0
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reseeded: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    is_same_layout: bool = True

    @property
    def tier(self) -> str:
        """The tier that most bytes came from."""
        return max(self.tier_bytes, key=lambda t: self.tier_bytes[t], default="none")

    def __str__(self) -> str:
        parts = _amounts(self.tier_bytes)
        promise = "same layout" if self.is_same_layout else "another layout"
        total = self.seconds.get("total", 0.0)
        line = f"restored step {self.step} of generation {self.generation}: {parts} in {total:.3f} s ({promise})"
        if self.damaged:
            line += f"; {len(self.damaged)} damaged ranges were read elsewhere"
        if self.missing:
            line += f"; {len(self.missing)} names were missing"
        if self.unexpected:
            line += f"; {len(self.unexpected)} names that the program lacks were not restored"
        if self.reseeded:
            line += f"; {', '.join(self.reseeded)} is in no snapshot: reseeded from (step, rank)"
        line += "".join(f"\n  {sentence}" for sentence in self.overruled)
        if len(self.nodes) > 1:
            line += "".join(f"\n  {host}: {_amounts(tiers)}" for host, tiers in self.nodes.items())
        if self.passed_over:
            line += "".join(f"\n  passed over: {sentence}" for sentence in self.passed_over)
        return line


def _amounts(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{n / 1e6:.1f} MB from {tier}" for tier, n in tiers.items() if n) or "no bytes"
