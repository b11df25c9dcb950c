"""Global batches, ramp-up, replicas from meshes, block order, the size of the state, skipped spans."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from support.ranks import run_ranks
from support.sampling import Job, unbroken, world

from flashckpt.errors import (
    ConfigError,
    DataError,
    FlashckptError,
    LayoutError,
    ReplicaMismatchError,
    SamplerStateError,
)
from flashckpt.sampler import (
    BlockPermutation,
    ElasticBatchSampler,
    ElasticSampler,
    check_same_samples,
)


def test_micro_batches_and_accumulation_do_not_change_the_global_batch() -> None:
    def first_steps(ranks: int, micro: int, accumulation: int) -> list[set[int]]:
        batches = [ElasticBatchSampler(sampler, micro, accumulation) for sampler in world(500, ranks, None)]
        iterators = [iter(batch) for batch in batches]
        steps = []
        for _ in range(10):
            steps.append({s for iterator in iterators for _ in range(accumulation) for s in next(iterator)})
            for batch in batches:
                batch.commit()
        return steps

    assert first_steps(1, 24, 1) == first_steps(2, 12, 1) == first_steps(4, 2, 3) == first_steps(3, 4, 2)


def test_ramp_up_changes_the_batch_at_its_position_and_survives_a_resume() -> None:
    ramp = [(40, 8), (100, 20)]
    job = Job(world(1000, 2, 4, ramp_up=ramp))
    sizes = [len(job.step()) for _ in range(20)]
    assert sizes == [4] * 10 + [8] * 8 + [20] * 2  # the batch that crosses 100 begins before it
    state = job.state()
    assert [s for s in state["segments"] if s[0] == "batch"] == [["batch", 0, 4], ["batch", 40, 8], ["batch", 100, 20]]
    resumed = ElasticSampler(1000, dp_rank=0, dp_size=2)  # no size of its own: takes the recorded schedule
    resumed.load_state_dict(state)
    assert resumed.global_batch_size == 20
    assert ElasticBatchSampler(ElasticSampler(1000, global_batch_size=4, ramp_up=ramp), 2).accumulation == 2


def test_contradictory_sizes_are_refused() -> None:
    with pytest.raises(LayoutError, match="accumulation does not fit") as caught:
        ElasticBatchSampler(ElasticSampler(100, 2, 0, global_batch_size=8), 3, accumulation=1)
    assert "2 micro-batches" in caught.value.expected
    with pytest.raises(LayoutError):
        ElasticBatchSampler(ElasticSampler(100, global_batch_size=4, ramp_up=[(8, 6)]), 4, accumulation=1)
    with pytest.raises(ConfigError):
        ElasticSampler(100, global_batch_size=4, ramp_up=[(8, 4), (8, 8)])
    with pytest.raises(ConfigError, match="no weights"):
        _ = ElasticSampler(100, 3, 0, global_batch_size=8, tail="short").weights
    with pytest.raises(SamplerStateError, match="size of the step is unknown"):
        _ = ElasticSampler(100, 3, 0).weights


def test_wrong_arguments_are_refused() -> None:
    calls: list[tuple[type[FlashckptError], dict[str, Any]]] = [
        (DataError, {"dataset": []}),
        (DataError, {"dataset": 0}),
        (ConfigError, {"dataset": 5, "tail": "wrap"}),
        (ConfigError, {"dataset": 5, "order": "random"}),
        (LayoutError, {"dataset": 5, "num_replicas": 2}),
        (LayoutError, {"dataset": 5, "rank": 2, "num_replicas": 2}),
        (LayoutError, {"dataset": 5, "rank": 0, "dp_rank": 1, "dp_size": 2}),
    ]
    for error, arguments in calls:
        with pytest.raises(error):
            ElasticSampler(**arguments)


class Mesh:
    """The three questions the sampler asks of a DeviceMesh."""

    def __init__(self, **dimensions: tuple[int, int]) -> None:
        self.mesh_dim_names = tuple(dimensions)
        self._values = list(dimensions.values())

    def get_local_rank(self, dimension: int) -> int:
        return self._values[dimension][0]

    def size(self, dimension: int) -> int:
        return self._values[dimension][1]


def test_mesh_gives_the_replica_whatever_tp_and_pp_are() -> None:
    for tp in range(2):
        mesh = Mesh(pp=(1, 2), dp_replicate=(1, 2), dp_shard=(2, 3), tp=(tp, 2))
        sampler = ElasticSampler(100, mesh=mesh)
        assert (sampler.dp_rank, sampler.dp_size) == (5, 6)
    with pytest.raises(LayoutError):
        ElasticSampler(100, mesh=Mesh(tp=(0, 2)))
    with pytest.raises(LayoutError):
        ElasticSampler(100, mesh=mesh, dp_rank=0)


def _check_on_ranks(rank: int) -> list[str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    caught = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshed = ElasticSampler(100, mesh=mesh, global_batch_size=8)
    assert (meshed.dp_rank, meshed.dp_size) == (rank // 2, 2)
    check_same_samples(meshed.next_ids(), mesh.get_group("tp"))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sampler = ElasticSampler(100, dp_rank=rank // 2, dp_size=2, global_batch_size=8)
    check_same_samples(sampler.next_ids(), groups[rank // 2])
    wrong = ElasticSampler(100, dp_rank=rank, dp_size=4, global_batch_size=8)  # the global rank by mistake
    try:
        check_same_samples(wrong.next_ids(), groups[rank // 2])
    except ReplicaMismatchError as error:
        caught.append(error.found)
    try:
        iter(ElasticSampler(100))
    except LayoutError as error:
        caught.append(error.found)
    return caught


def test_ranks_of_one_replica_with_other_samples_are_named() -> None:
    for result in run_ranks(_check_on_ranks, 4):
        assert result.ok, result.error
        assert "ranks [1] of the group differ" in result.value[0]
        assert "world of 4 ranks" in result.value[1]


# -- orders and state size


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 1000, 4096, 5001])
@pytest.mark.parametrize(("block", "window"), [(1, 1), (7, 3), (64, 4), (10_000, 2)])
def test_block_order_is_a_bijection_that_stays_inside_its_windows(n: Any, block: Any, window: Any) -> None:
    permutation = BlockPermutation(n, 3, 1, block_size=block, window_blocks=window)
    values = permutation[:]
    assert np.array_equal(np.sort(values), np.arange(n))
    assert np.array_equal(permutation.index_of(values), np.arange(n))
    assert [permutation[i] for i in range(min(n, 20))] == values[:20].tolist()
    for start in range(0, n, block * window):
        opened = np.unique(values[start : start + block * window] // block)
        assert len(opened) <= window + 1, "a reader would have to open more blocks"
    if n > block * window and block > 1:
        assert not np.array_equal(values, np.sort(values))


def test_huge_block_order_is_random_access() -> None:
    permutation = BlockPermutation(10**12 + 7, 1, block_size=4096, window_blocks=8)
    places = np.array([0, 10**11, 10**12 + 6], np.int64)
    assert np.array_equal(permutation.index_of(permutation.take(places)), places)
    with pytest.raises(ConfigError):
        BlockPermutation(10, block_size=0)


def test_state_is_under_200_bytes_at_any_scale() -> None:
    sampler = ElasticSampler(2**61, seed=2**63, fingerprint="x" * 1000, global_batch_size=2**40, order="block")
    for _ in range(5):
        sampler.commit()
    assert len(msgpack.packb(sampler.state_dict())) < 200


def test_skipping_what_is_trained_or_handed_out_is_refused() -> None:
    sampler = ElasticSampler(100, global_batch_size=10)
    sampler.commit()
    with pytest.raises(SamplerStateError, match="already trained"):
        sampler.skip(5, 20)
    with pytest.raises(ConfigError):
        sampler.skip(20, 20)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(SamplerStateError, match="while an iterator is running"):
        sampler.skip(50, 60)
    with pytest.raises(SamplerStateError, match="while an iterator is running"):
        sampler.set_global_batch_size(20)


def test_a_skipped_span_is_never_handed_out_and_everything_else_is() -> None:
    samplers = world(100, 2, 10)
    for sampler in samplers:
        sampler.skip(30, 50)
        sampler.skip(195, 205)
    job = Job(samplers)
    dealt = [s for _ in range(18) for s in job.step()]
    reference = unbroken(100, 0, 300)
    assert dealt == (reference[:30] + reference[50:195] + reference[205:])[:180]
