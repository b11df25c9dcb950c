"""Which tokens each rank of a context-parallel group holds, and that its attention is a part of the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor

from flashckpt.trainer.config import from_values
from flashckpt.trainer.model import context
from flashckpt.trainer.model.context import ContextAttention, ContextSlice
from flashckpt.trainer.model.flex import FlexMasks
from flashckpt.trainer.model.ring import Sight
from flashckpt.trainer.parallel.layout import resolve_layout

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
RANKS, TOKENS = 3, 24


def slices() -> list[ContextSlice]:
    return [ContextSlice(rank, RANKS) for rank in range(RANKS)]


def test_chunks_cover_each_row_once_and_are_cut_where_the_index_says() -> None:
    row = torch.arange(TOKENS)
    cut = [held.cut(row[None])[0] for held in slices()]
    for held, part in zip(slices(), cut, strict=True):
        torch.testing.assert_close(part, held.index(TOKENS // RANKS))
    assert sorted(torch.cat(cut).tolist()) == row.tolist()
    assert cut[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]


def test_every_rank_looks_at_equally_many_keys() -> None:
    seen = {int((held.index(TOKENS // RANKS) + 1).sum()) for held in slices()}
    assert len(seen) == 1


def test_the_last_column_of_targets_is_of_the_row() -> None:
    targets = torch.arange(2 * (TOKENS + 1)).view(2, TOKENS + 1)
    for held in slices():
        part = held.cut_targets(targets)
        assert part.shape == (2, TOKENS // RANKS + 1)
        assert part[:, -1].tolist() == targets[:, -1].tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_of_a_part_is_a_part_of_attention(
    window: int, has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, TOKENS, 8), torch.randn(2, 2, TOKENS, 8), torch.randn(2, 2, TOKENS, 8)
    documents = torch.tensor([[0] * 7 + [1] * 17, [0] * 12 + [1] * 2 + [2] * 10]) if has_documents else None
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if window:
        mask = mask.triu(1 - window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def part(values: Tensor, held: ContextSlice) -> Tensor:  # the tokens are the third dimension
        return values[:, :, held.index(TOKENS // RANKS)]

    everyone = torch.cat([torch.stack([part(k, held), part(v, held)])[None] for held in slices()])
    monkeypatch.setattr(context, "_all_gather", lambda *_: everyone)
    for rank in range(RANKS):
        held = ContextSlice(rank, RANKS, object())  # type: ignore[arg-type]  # a group that nothing is sent over
        attention = ContextAttention(held, window=window, documents=documents)
        flex = FlexMasks(2, window=window, documents=documents, device=q.device, held=held)
        for way in (attention, flex):
            found = way.attend(part(q, held), part(k, held), part(v, held), has_window=window > 0)
            torch.testing.assert_close(found, part(whole, held))


@pytest.mark.parametrize("documents", [None, [[0] * 7 + [1] * 17]])
@pytest.mark.parametrize("window", [0, 3, 4, 5, 9])
def test_pairs_of_chunks_in_a_ring_are_the_whole_mask_and_equally_many_in_each_round(
    window: int, documents: list[list[int]] | None
) -> None:
    rows = None if documents is None else torch.tensor(documents)
    wanted = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    wanted = wanted.triu(1 - window) if window else wanted
    if rows is not None:
        wanted = wanted & (rows[0][:, None] == rows[0])
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    length, counts = TOKENS // (2 * RANKS), set()
    for held in slices():
        sight = Sight(held, window, rows)
        for source in range(RANKS):
            pairs = list(sight.pairs(source, torch.empty(1, 1, 2 * length, 8)))
            counts.add((len(pairs), source == held.rank))
            for mine, theirs, mask, is_causal in pairs:
                query, key = held.chunks[mine] * length, ContextSlice(source, RANKS).chunks[theirs] * length
                part = seen[query : query + length, key : key + length]
                assert not part.any()
                part |= torch.ones(length, length, dtype=torch.bool).tril() if is_causal else mask is None
                if mask is not None:
                    assert torch.isfinite(mask).all()
                    part |= mask.view(length, length) == 0
    torch.testing.assert_close(seen, wanted)
    if not window:
        assert counts == {(3, True), (2, False)}


def test_masks_are_made_only_where_a_chunk_is_seen_in_part() -> None:
    q = torch.empty(1, 1, 2 * 4, 8)
    masks = [mask for source in range(RANKS) for *_, mask, _ in Sight(slices()[1]).pairs(source, q)]
    assert masks == [None] * 7
    windowed = [
        mask is None for source in range(RANKS) for *_, mask, _ in Sight(slices()[1], window=8).pairs(source, q)
    ]
    assert windowed.count(True) == 4  # two on the diagonal, and two all of whose keys are near
    assert len(windowed) == 5  # of seven pairs, the others lie behind the window


@pytest.mark.parametrize(
    ("parallel", "degrees"),
    [
        ({"cp": 2, "dp_shard": 2}, (1, 4)),
        ({"cp": 2, "dp_replicate": 2, "dp_shard": 1}, (2, 2)),
        ({"cp": 2, "zero": 0}, (4, 1)),
        ({"cp": 2, "dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, (4, 1)),
    ],
)
def test_state_lies_over_data_and_context_ranks_and_samples_over_data_ranks(
    parallel: dict[str, object], degrees: tuple[int, int]
) -> None:
    layout = resolve_layout(from_values({"parallel": parallel, "train": {"global_batch": 8}}), 4)
    assert (layout.dp_replicate, layout.dp_shard) == degrees
    assert (layout.dp, layout.cp, layout.world) == (2, 2, 4)
    assert layout.local_batch == 4
    assert "with CP 2 in it" in layout.describe()
