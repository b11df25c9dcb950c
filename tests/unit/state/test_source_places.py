"""A loader whose library has a place only on as many ranks and workers takes no other one's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import TensorDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.errors import SamplerStateError
from flashckpt.sampler import ElasticSampler
from flashckpt.state.data_sources import refuse_other_ranks, refuse_other_workers
from flashckpt.state.placement import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata


def loader(workers: int = 0, **options: Any) -> Any:
    return StatefulDataLoader(range(8), batch_size=2, num_workers=workers, **options)


def meshed(size: int, **dims: int) -> World:
    """Return the first rank of a mesh."""
    mesh: Any = SimpleNamespace(mesh_dim_names=tuple(dims), size=list(dims.values()).__getitem__)
    return World(rank=0, size=size, mesh=mesh)


RANKS = {
    "as many": (["rank0", "rank1"], 2, World(rank=0, size=2), 0),
    "fewer": (["rank0", "rank1"], 2, World(rank=0, size=1), 2),
    "more": (["rank0"], 1, World(rank=1, size=2), 1),
    "only one is known": (["rank0"], 2, World(rank=0, size=1), 2),
    "as many replicas in another layout": (["dp0.tp0", "dp1.tp0"], 2, meshed(4, dp=2, tp=2), 0),
    "pipeline stages instead": (["dp0.tp0", "dp0.tp1"], 2, meshed(2, pp=2, dp=1), 0),
    "replicas instead of tensor parallelism": (["dp0.tp0", "dp0.tp1"], 2, meshed(2, dp=2, tp=1), 1),
    "fewer replicas": (["dp0", "dp1", "dp2", "dp3"], 4, meshed(2, dp=2), 4),
    "two dimensions": (["dp_replicate0.dp_shard1.tp0"], 1, meshed(4, dp_replicate=2, dp_shard=2), 1),
}


@pytest.mark.parametrize("name", RANKS)
def test_a_loader_dealt_to_another_number_of_ranks_is_refused(name: str) -> None:
    owners, ranks, world, before = RANKS[name]
    if not before:
        refuse_other_ranks("data", loader(), owners, ranks, world)
        return
    with pytest.raises(SamplerStateError, match="'data', a StatefulDataLoader, has no position on another") as caught:
        refuse_other_ranks("data", loader(), owners, ranks, world)
    assert caught.value.found == f"a position on {before} data-parallel ranks"
    assert caught.value.remedy.startswith(f"start on {before}; an indexed data set with an ElasticSampler")


def test_what_continues_on_any_number_of_ranks_is_left_alone() -> None:
    data = TensorDataset()
    sampler = ElasticSampler(range(8), dp_rank=0, dp_size=1, global_batch_size=2, seed=0)
    for thing in (sampler, loader(sampler=sampler), data, object()):
        refuse_other_ranks("data", thing, ["rank0"], 1, World(rank=0, size=2))


@pytest.mark.parametrize(("before", "now"), [(0, 0), (1, 1), (0, 1), (1, 0), (1, 2)])
def test_a_state_of_another_number_of_workers_is_refused(before: int, now: int) -> None:
    """The state is torchdata's own: its names are what this depends on."""
    recorded = loader(before)
    begun = iter(recorded)
    next(begun)
    state = recorded.state_dict()
    del begun, recorded
    if before == now:
        refuse_other_workers("data", loader(now), state)
        return
    with pytest.raises(SamplerStateError, match="no position with another number of workers") as caught:
        refuse_other_workers("data", loader(now), state)
    assert (caught.value.found, caught.value.expected) == (f"num_workers={now}", f"num_workers={before}, as recorded")
    refuse_other_workers("data", object(), state)


def pipeline(workers: int, **options: Any) -> Any:
    """Two mappers: the second has no workers."""
    first = ParallelMapper(IterableWrapper(range(16)), abs, workers, **options)
    return Loader(Prefetcher(Batcher(ParallelMapper(first, int, 0), 2), 2))


@pytest.mark.parametrize("options", [{}, {"prebatch": 2}])
@pytest.mark.parametrize(("before", "now"), [(0, 0), (1, 1), (2, 1), (0, 1), (1, 0)])
def test_a_pipeline_takes_no_state_that_its_library_could_not_read(
    before: int, now: int, options: dict[str, int]
) -> None:
    """torchdata's own error for it is a KeyError of the first batch. The number of workers does not matter to it."""
    recorded = pipeline(before, **options)
    begun = iter(recorded)
    next(begun)
    state = recorded.state_dict()
    following = next(begun)
    live = pipeline(now, **options)
    if (before > 0) == (now > 0):
        refuse_other_workers("data", live, state)
        live.load_state_dict(state)
        assert next(iter(live)) == following
        return
    with pytest.raises(
        SamplerStateError, match="'data', a Loader, has no position with another number of workers"
    ) as caught:
        refuse_other_workers("data", live, state)
    assert caught.value.found == f"num_workers=0, {now}"
    assert caught.value.expected == (
        "num_workers=1 or more in 1 of 2 mappers, as recorded" if before else "num_workers=0, as recorded"
    )
    live.load_state_dict(state)
    with pytest.raises(KeyError):
        next(iter(live))
