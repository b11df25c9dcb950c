"""Bytes between ranks: any length on any rank, in two exchanges at most."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import run_ranks, values

HEAD = 1024 - 8
"""Bytes of a message that travel with its length."""
LENGTHS = {
    "short": [0, 1, HEAD],
    "one is longer": [0, HEAD + 1, 7],
    "all are longer": [5000, HEAD + 1, 100_000],
    "nothing": [0, 0, 0],
}


def gathered(rank: int, lengths: list[int]) -> tuple[list[bool], int]:
    """Return which messages arrived as they were said, and how many exchanges that took."""
    import torch.distributed as dist

    from flashckpt import collectives

    gather: Any = dist.gather
    gathers: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> None:
        gathers.append(1)
        gather(*args, **kwargs)

    vars(dist)["gather"] = counting
    said = [bytes((7 * at + r) % 256 for at in range(n)) for r, n in enumerate(lengths)]
    heard = collectives.all_gather_bytes(said[rank])
    return [one == other for one, other in zip(heard, said, strict=True)], len(gathers)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_rank_hears_every_rank(lengths: list[int]) -> None:
    exchanges = 1 + (max(lengths) > HEAD)
    assert values(run_ranks(gathered, 3, lengths)) == [[[True] * 3, exchanges]] * 3


def highest(rank: int, size: int) -> bool:
    import numpy as np

    from flashckpt import collectives

    tables = [np.random.default_rng(r).integers(0, 256, size, dtype=np.uint8) for r in range(3)]
    return collectives.maximum(tables[rank]) == bytes(np.maximum.reduce(tables))


@pytest.mark.parametrize("size", [1, 1000, 500_000], ids=["a byte", "gathered", "reduced"])
def test_maximum_of_each_byte_however_many_there_are(size: int) -> None:
    assert values(run_ranks(highest, 3, size)) == [True] * 3
