"""A run's sources as one mixture: windows know their documents, and what cannot be read is known at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from support.megatron import write_megatron

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.data.prepared import check_prepared, check_sources
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.prepare.shards import prepare


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
    check_sources(config)
    long = replace(config, train=replace(config.train, seq_len=1 << 16))
    with pytest.raises(DataError, match=r"sources\[0\] has no sample in the train split"):
        check_sources(long)
    with pytest.raises(DataError, match="is not that of this run"):
        check_prepared(run_of(tmp_path, holdout_every=7))
    with pytest.raises(ConfigError, match=r"sources\[0\].kind is unknown"):
        from_values({"data": {"sources": [{"kind": "csv", "urls": ["a"]}]}})


def token_files(folder: Path) -> dict[str, Any]:
    """Two flat files of documents that end with 7, and two Megatron data sets of documents of other tokens."""
    documents = [np.full(10 + number, 100 + number) for number in range(40)]
    for part in range(2):
        few = documents[part::2]
        np.concatenate([np.append(document, 7) for document in few]).astype("<u2").tofile(folder / f"flat{part}.bin")
        write_megatron(folder / f"m{part}", few, 8, "<u2")
    return {
        "sources": [
            {"kind": "tokens", "urls": [f"{folder}/flat*.bin"], "channel": "flat", "dtype": "uint16", "end": 7},
            {"kind": "megatron", "urls": [f"{folder}/m?"], "channel": "megatron"},
        ],
        "holdout_every": 4,
    }


@pytest.mark.parametrize("place", ["local", "memory"])
def test_files_of_tokens_and_patterns_give_windows_whose_documents_are_whole(place: str, tmp_path: Path) -> None:
    data = token_files(tmp_path)
    if place == "memory":
        fsspec.filesystem("memory").put(f"{tmp_path}/", f"/{tmp_path.name}/", recursive=True)
        for source in data["sources"]:
            source["urls"] = [url.replace(str(tmp_path), f"memory://{tmp_path.name}") for url in source["urls"]]
    config = from_values({"train": {"seq_len": 32}, "data": data})
    check_sources(config)
    seen, kept = 0, {}
    for split in ("train", "held"):
        windows = MixedDataset(config, split)
        batch = windows.batch(range(len(windows.samples)))
        kept[split] = len(batch.ids)
        assert batch.documents is not None
        for tokens, targets, documents in zip(batch.tokens, batch.targets[:, :-1], batch.documents, strict=True):
            for number in set(documents.tolist()):
                inside = tokens[documents == number]
                assert len(set(inside[inside != 7].tolist())) <= 1  # the tokens of one document are alike
            assert torch.equal(targets[:-1] == -100, documents[1:] != documents[:-1])
            seen += len(set(documents.tolist()))
        assert set(batch.targets[:, -1].tolist()) == {0, 1}
        assert windows.channels == ["flat", "megatron"]
    assert seen > kept["train"] + kept["held"]  # windows of several documents
    assert 3 <= kept["train"] / kept["held"] < 5


def test_megatron_documents_are_packed_whole_and_padding_is_no_target(tmp_path: Path) -> None:
    data = {**token_files(tmp_path), "packing": "best-fit"}
    with pytest.raises(ConfigError, match="token files cannot be packed"):
        from_values({"data": data})
    config = from_values({"train": {"seq_len": 63}, "data": {**data, "sources": data["sources"][1:]}})
    check_sources(config)
    windows = MixedDataset(config, "train")
    batch = windows.batch(range(len(windows.samples)))
    assert batch.documents is not None
    for tokens, targets, documents in zip(batch.tokens, batch.targets[:, :-1], batch.documents, strict=True):
        for number in set(documents.tolist()):
            inside = tokens[documents == number].tolist()
            assert number == -1 or inside == [inside[0]] * (inside[0] - 90) or documents[-1] == number
        assert (targets[documents < 0] == -100).all()
    assert (batch.documents < 0).any()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"kind": "tokens", "urls": ["{}/none.bin"]}, "none.bin cannot be read"),
        ({"kind": "tokens", "urls": ["{}/none*.bin"]}, "no file matches"),
        ({"kind": "tokens", "urls": ["{}/odd.bin"]}, "is cut inside a token"),
        ({"kind": "megatron", "urls": ["{}/flat0"]}, "flat0.idx cannot be read"),
        ({"kind": "tokens", "urls": ["nosuch://x/y"]}, "cannot be read"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_read_is_known_at_the_start(
    source: dict[str, Any], words: str, tmp_path: Path
) -> None:
    token_files(tmp_path)
    (tmp_path / "odd.bin").write_bytes(b"x" * 101)
    urls = [url.format(tmp_path) for url in source["urls"]]
    config = from_values({"train": {"seq_len": 16}, "data": {"sources": [{**source, "urls": urls}]}})
    with pytest.raises(DataError, match=words):
        check_sources(config)


def test_a_tokenizer_that_changed_since_the_data_was_prepared_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed; `make test-hub` runs this")
    prepare(run_of(tmp_path, bpe=275).data)
    (made,) = (tmp_path / "tokens").glob("bpe-*.json")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(made.read_bytes())
    config = run_of(tmp_path, tokenizer=str(tokenizer))
    prepare(config.data)
    with pytest.raises(ConfigError, match="the tokenizer has more tokens than the model"):
        check_prepared(config)
    config = replace(config, model=replace(config.model, vocab=275))
    check_prepared(config)
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(DataError, match="is not the one that the data in"):
        check_prepared(config)
    tokenizer.unlink()  # on another machine, perhaps
    check_prepared(config)
