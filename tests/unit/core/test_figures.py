"""The record of what numbers are: optional, carried along with the rows, refused where it does not fit them."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from support.slots import make_pin, shard

from flashckpt.core.manifest import Manifest, by_design, decode_manifest, encode_manifest, merge
from flashckpt.core.schema import HEADER, TensorFigures, decode_manifest_header, figures_from
from flashckpt.core.values import NO_RANGES
from flashckpt.planning.packs import index_manifest, plan_packs
from flashckpt.planning.peer_index import part_of


def figures(*largest: float, suspect: tuple[int, ...] = ()) -> TensorFigures:
    found = TensorFigures.unknown(len(largest))
    found.largest[:] = largest
    found.norm[:] = np.arange(len(largest))
    found.suspect[list(suspect)] = True
    return found


def slot(rank: int, names: str, noted: TensorFigures | None) -> Manifest:
    made = make_pin([shard(name, (8,)) for name in names], rank=rank, world_size=2).manifest_
    return replace(made, figures=noted, ranged=NO_RANGES)


def noted(manifest: Manifest) -> dict[str, tuple[float, float, bool]]:
    """Return largest, norm and suspect by tensor."""
    assert manifest.figures is not None
    rows = zip(*(column.tolist() for column in manifest.figures), strict=True)
    return {manifest.table.fqn(row): one for row, one in enumerate(rows)}


def test_figures_stay_with_their_rows_through_index_part_and_merger() -> None:
    first = slot(0, "ab", figures(1.5, np.inf, suspect=(1,)))
    again = decode_manifest(encode_manifest(first))
    assert noted(again) == noted(first) == {"a": (1.5, 0.0, False), "b": (np.inf, 1.0, True)}
    assert again.suspects == ["b"]
    assert noted(part_of(first, [1], values=False)) == {"b": (np.inf, 1.0, True)}
    indexes = [
        index_manifest(
            one, packs := plan_packs(one.table, 1 << 20, 1 << 20), [f"r{one.rank}.{n}" for n in range(len(packs))]
        )
        for one in (first, slot(1, "bc", None))
    ]
    whole = merge(indexes)
    assert noted(whole) == {"a": (1.5, 0.0, False), "b": (np.inf, 1.0, True), "c": (-1.0, 0.0, False)}
    raw = encode_manifest(whole)
    header = decode_manifest_header(raw, len(raw))
    assert header is not None
    assert header.suspects == 1


def test_a_manifest_without_figures_is_the_bytes_that_it_was() -> None:
    raw = encode_manifest(slot(0, "a", None))
    assert not {"figures"} & msgpack.unpackb(raw[HEADER.size :]).keys()
    assert decode_manifest(raw).figures is None
    assert decode_manifest(raw).suspects == []


def test_what_is_not_finite_and_not_suspect_is_so_by_design() -> None:
    one = slot(0, "abc", figures(np.inf, np.inf, 1.0, suspect=(1,)))
    assert by_design([one, slot(1, "d", None)]) == {"a"}
    assert by_design([slot(1, "d", None)]) is None


@pytest.mark.parametrize(
    "wrong", [{"largest": b""}, {"norm": bytes(12)}, {"suspect": [2]}, {"suspect": [-1]}, {"suspect": [True]}]
)
def test_figures_that_do_not_fit_the_rows_are_refused(wrong: dict[str, object]) -> None:
    good = figures(1.0, 2.0, suspect=(1,)).packed()
    assert figures_from(good, 2).suspect.tolist() == [False, True]
    with pytest.raises((ValueError, TypeError)):
        figures_from(good | wrong, 2)
