"""Which ranks of a layout hold differently large parts. Pure and torch-free.

Pipeline ranks differ by their stages. Within one, tensor-parallel ranks and replicas hold parts of one size (what does
not divide was refused), and the ranks that share a tensor of n rows hold ceil(n / ranks) rows each, until none are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.held import local_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKind:
    """Ranks that hold parts of the same sizes.

    Attributes:
        pp_ranks: Their coordinates along "pp".
        shards: Their coordinates along "dp_shard".
    """

    pp_ranks: tuple[int, ...]
    shards: tuple[int, ...]

    def count(self, layout: Layout) -> int:
        """Return how many ranks are of this kind."""
        return len(self.pp_ranks) * len(self.shards) * layout.dp_replicate * layout.tp

    def example(self, layout: Layout) -> int:
        """Return one of them: of the last stages, whose tensors have the longest names."""
        return ((self.pp_ranks[-1] * layout.dp_replicate) * layout.dp_shard + self.shards[0]) * layout.tp


def rank_kinds(config: RunConfig, layout: Layout) -> list[RankKind]:
    """Return the kinds of ranks of a layout, in order of their first rank."""
    found = []
    for pp_ranks in _alike([_stages(layout, rank) for rank in range(layout.pp)]):
        shards = [local_lengths(config, layout, pp_ranks[0], index) for index in range(layout.dp_shard)]
        found += [RankKind(pp_ranks=pp_ranks, shards=alike) for alike in _alike(shards)]
    return found


def kinds_by_rank(kinds: Sequence[RankKind], layout: Layout) -> list[int]:
    """Return for every rank of the world the index of its kind."""
    of_place = {
        (pp, shard): number for number, kind in enumerate(kinds) for pp in kind.pp_ranks for shard in kind.shards
    }
    places = (
        (pp, shard)
        for pp in range(layout.pp)
        for _ in range(layout.dp_replicate)
        for shard in range(layout.dp_shard)
        for _ in range(layout.tp)
    )
    return [of_place[place] for place in places]


def _alike(values: Sequence[tuple[object, ...]]) -> list[tuple[int, ...]]:
    """Return the indices of equal values together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return [tuple(group) for group in groups.values()]


def _stages(layout: Layout, pp_rank: int) -> tuple[object, ...]:
    last = layout.stages - 1
    return tuple((stage == 0, stage == last, len(layout.stage_layers[stage])) for stage in layout.stages_of(pp_rank))
