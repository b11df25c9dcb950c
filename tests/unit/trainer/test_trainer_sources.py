"""A run's sources as one mixture: windows know their documents, and the thread that reads ahead moves no position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.data.prepare import prepare
from flashckpt.trainer.data.prepared import check_prepared
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.model_config import ModelConfig


def run_of(folder: Path, **data: Any) -> RunConfig:
    """Return a run over two prepared sources of byte tokens."""
    values: dict[str, Any] = {"folder": str(folder / "tokens"), "sources": [], **data}
    for name, weight in (("one", 3), ("two", 1)):
        (folder / name).mkdir(exist_ok=True)
        for number in range(20):
            (folder / name / f"{number}.txt").write_text(f"{name} {number} " * (5 + number))
        values["sources"].append(
            {"kind": "text", "urls": [f"{folder}/{name}/*.txt"], "channel": name, "weight": weight}
        )
    return from_values({"train": {"seq_len": 16}, "data": values})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: Any) -> MixedDataset:
    config = run_of(tmp_path_factory.mktemp("sources"))
    prepare(config.data)
    return MixedDataset(config, "train")


def test_a_document_in_a_row_of_several_has_the_logits_that_it_has_alone() -> None:
    torch.manual_seed(1)
    model = Transformer(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, window=4, window_from=1), 12).eval()
    first, second = torch.randint(0, 256, (1, 5)), torch.randint(0, 256, (1, 7))
    row = torch.cat([first, second], 1)
    with torch.no_grad():
        both = model(row, torch.tensor([[0] * 5 + [1] * 7]))
        assert torch.allclose(both, torch.cat([model(first), model(second)], 1), atol=1e-5)
        assert not torch.allclose(both, model(row), atol=1e-3)


RUNS = st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 3)), min_size=2, max_size=4)


@settings(max_examples=10, deadline=None)
@given(runs=RUNS)
def test_crashes_and_resizes_of_a_reading_loader_lose_and_repeat_nothing(
    dataset: MixedDataset, runs: list[tuple[int, int, int]]
) -> None:
    """Each run: replicas, steps that survive, batches read ahead; it ends with a batch in flight that is lost."""
    whole = TrainingData(dataset, dp_rank=0, dp_size=1, global_batch=4, seed=1)
    state, trained = whole.sampler.state_dict(), []
    for replicas, steps, ahead in runs:
        ranks = [
            TrainingData(dataset, dp_rank=rank, dp_size=replicas, global_batch=4, seed=1, ahead=ahead)
            for rank in range(replicas)
        ]
        for rank in ranks:
            rank.sampler.load_state_dict(state)
        for _ in range(steps):
            ids = [rank.next().ids.tolist() for rank in ranks]
            trained += [number for row in zip(*ids, strict=True) for number in row]
            assert trained[-4:] == ranks[0].global_ids()
            for rank in ranks:
                rank.sampler.commit()
        state = ranks[0].sampler.state_dict()
        for rank in ranks:
            rank.next()
            rank.close()
    unbroken: list[int] = []
    while len(unbroken) < len(trained):
        unbroken += whole.next().ids.tolist()
        whole.sampler.commit()
    assert trained == unbroken


def test_targets_stop_at_the_end_of_a_document_and_sources_come_by_weight(dataset: MixedDataset) -> None:
    batch = dataset.batch(range(8))
    assert batch.documents is not None
    ends = batch.documents[:, 1:] != batch.documents[:, :-1]
    assert ends.any()
    assert torch.equal(batch.targets[:, :-2] == -100, ends)
    loader = TrainingData(dataset, dp_rank=0, dp_size=1, global_batch=8, seed=1)
    loader.sampler.commit()
    assert list(loader.sampler.source_counts().values()) == [6, 2]


def test_data_that_is_not_prepared_and_too_small_a_model_are_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    with pytest.raises(DataError, match="no prepared data"):
        check_prepared(config)
    prepare(config.data)
    check_prepared(config)
    with pytest.raises(DataError, match="is not that of this run"):
        check_prepared(run_of(tmp_path, holdout_every=7))
    with pytest.raises(ConfigError, match=r"sources\[0\].kind is unknown"):
        from_values({"data": {"sources": [{"kind": "csv", "urls": ["a"]}]}})
