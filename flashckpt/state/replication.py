"""Declared replicas are compared once, at a fresh start: what is declared equal on several ranks must be equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashckpt import collectives
from flashckpt.core.records import digest
from flashckpt.core.shard import joined
from flashckpt.errors import ReplicaMismatchError
from flashckpt.state.structure import Entry, Structure


def verify(structure: Structure) -> None:
    """Compare the digests of parameters that several ranks hold. Collective; about 0.1 s per GB of such parameters.

    Raises:
        ReplicaMismatchError: On every rank; names the tensor and the ranks.
    """
    if collectives.is_alone():
        return
    repeated = (e for e in structure.entries if e.replicas > 1 and isinstance(e.tensor, torch.nn.Parameter))
    mine = [_described(e) for e in repeated if e.local.numel()]  # nothing of it is equal to any other nothing
    seen: dict[tuple[str, Any], tuple[int, int, dict[Any, int]]] = {}
    for rank, rows in enumerate(collectives.all_gather(mine)):
        for fqn, whole, value, pieces in rows:
            writers = {(tuple(offsets), tuple(lengths)): 0 for offsets, lengths, _ in pieces}
            key = fqn, tuple(tuple(map(tuple, box)) for box in whole)
            first, expected, written = seen.setdefault(key, (rank, value, writers))
            if value != expected:
                raise _differs(fqn, first, expected, rank, value)
            if written.keys() != writers.keys():
                raise _cut_otherwise(fqn, first, rank)
            for offsets, lengths, replica in pieces:
                written[tuple(offsets), tuple(lengths)] += replica == 0
    for (fqn, _), (first, _, written) in seen.items():
        if any(writers != 1 for writers in written.values()):
            raise _cut_otherwise(fqn, first, None)


def _described(entry: Entry) -> list[Any]:
    """Return name, what this rank holds of it, digest of its bytes, and its pieces with their replica numbers."""
    whole = joined([(box.offsets, box.lengths) for box in entry.boxes])
    return [entry.fqn, whole, _digest(entry.local), [[b.offsets, b.lengths, b.replica] for b in entry.boxes]]


def _digest(tensor: torch.Tensor) -> int:
    array: np.ndarray = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return digest(array)


def _differs(fqn: str, first: int, expected: int, rank: int, found: int) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"{fqn!r} differs between ranks that are declared to hold the same tensor",
        found=f"digest {found:016x} on rank {rank}",
        expected=f"digest {expected:016x} as on rank {first}",
        state="Nothing was trained.",
        remedy="give all ranks the same initial weights (one seed, or a broadcast), or leave replicated_over= / mesh= out",
    )


def _cut_otherwise(fqn: str, first: int, rank: int | None) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"the ranks that are declared to hold {fqn!r} alike do not agree who persists which part of it",
        found="parts with no writer or several" if rank is None else f"other parts on rank {rank} than on rank {first}",
        expected="the same tensors, frozen parameters and optimizers on all of them",
        state="Nothing was trained.",
        remedy="build the same model and optimizer on every replica, or leave replicated_over= / mesh= out; to split "
        "optimizer state over the ranks, use FSDP2 (fully_shard) and not the inside of ZeroRedundancyOptimizer",
    )
