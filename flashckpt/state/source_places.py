"""A source of data whose library has a place only on as many ranks and loader workers: refused before it takes another one's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flashckpt.errors import SamplerStateError
from flashckpt.state.data_sources import PAGE, is_of_its_ranks, workers_of
from flashckpt.state.placement import World

_ELASTIC = f"an indexed data set with an ElasticSampler continues on any number ({PAGE})"


def refuse_other_ranks(name: str, thing: Any, owners: Iterable[str], recorded_ranks: int, world: World) -> None:
    """Compare to how many ranks a source was dealt, and is.

    Args:
        name: Its track name.
        thing: The source.
        owners: Marks of the ranks that recorded it.
        recorded_ranks: All ranks of that run.
        world: The ranks now.

    Raises:
        SamplerStateError: It is another number.
    """
    if not is_of_its_ranks(thing):
        return
    before, now = _dealt_before(owners) or recorded_ranks, _dealt_to(world)
    if before != now:
        raise SamplerStateError(
            f"{name!r}, a {type(thing).__qualname__}, has no position on another number of ranks",
            found=f"a position on {before} data-parallel ranks",
            expected=f"one on {now}",
            state="Nothing was trained; every snapshot and checkpoint is intact.",
            remedy=f"start on {before}; {_ELASTIC}. Left out of track(), the data begins again",
        )


def refuse_other_workers(name: str, thing: Any, state: Any) -> None:
    """Compare the workers of a loader with those that its state was taken with.

    Raises:
        SamplerStateError: It is another number.
    """
    found = workers_of(thing, state)
    if found is not None and found[0] != found[1]:
        raise SamplerStateError(
            f"{name!r}, a {type(thing).__qualname__}, has no position with another number of workers",
            found=f"num_workers={found[0]}",
            expected=f"num_workers={found[1]}, as recorded",
            state="Nothing was trained; every snapshot and checkpoint is intact.",
            remedy=f"num_workers={found[1]}; {_ELASTIC}",
        )


def _dealt_before(owners: Iterable[str]) -> int:
    """Return to how many ranks marks such as `pp0.dp1.tp0` say that data was dealt; 0: as many as there were."""
    parts = [owner.split(".") for owner in owners]
    places = {tuple(part for part in parts_of_one if part.startswith("dp")) for parts_of_one in parts}
    has_others = any(not part.startswith("dp") for parts_of_one in parts for part in parts_of_one)
    return len(places) if has_others and () not in places else 0


def _dealt_to(world: World) -> int:
    if (mesh := world.mesh) is None:
        return world.size
    names = enumerate(mesh.mesh_dim_names or ())
    sizes = [mesh.size(number) for number, name in names if name.startswith("dp")]
    return math.prod(sizes) if sizes else world.size
