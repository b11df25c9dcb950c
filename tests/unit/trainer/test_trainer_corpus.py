"""Real text as byte tokens: three channels, held-out files, the same on every call, nothing half-prepared."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from support.training import write_corpus

from flashckpt import faults
from flashckpt.errors import DataError
from flashckpt.trainer.data.prepared import read_index
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.data.windows import TokenDataset, ids_digest
from flashckpt.trainer.prepare.corpus import prepare_corpus


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("stdlib")
    return folder, prepare_corpus(folder, ["stdlib"], 20)


@pytest.mark.matrix
def test_the_python_library_gives_three_channels_in_two_splits(stdlib: Any) -> None:
    folder, index = stdlib
    tokens = {(e["split"], e["channel"]): e["tokens"] for e in index["sets"].values()}
    assert {channel for _, channel in tokens} == {"code", "doc", "prose"}
    assert all(tokens["train", channel] > 100_000 for channel in ("code", "doc", "prose"))
    assert all(1_000 < tokens["held", channel] < tokens["train", channel] / 3 for channel in ("code", "doc", "prose"))
    assert TokenDataset(folder, "train", 64).channels == ["code", "doc", "prose"]


def test_preparing_twice_gives_the_same_fingerprint_and_another_source_another(tmp_path: Any) -> None:
    source = write_corpus(tmp_path / "text")
    first = prepare_corpus(tmp_path / "one", source, 5)
    stamp = (tmp_path / "one" / "index.json").stat().st_mtime_ns
    assert prepare_corpus(tmp_path / "one", source, 5) == first
    assert (tmp_path / "one" / "index.json").stat().st_mtime_ns == stamp  # not prepared again
    assert prepare_corpus(tmp_path / "two", source, 5)["fingerprint"] == first["fingerprint"]
    assert prepare_corpus(tmp_path / "one", source[:1], 5)["fingerprint"] != first["fingerprint"]


def test_killed_before_the_index_nothing_is_prepared_and_the_next_call_finishes(tmp_path: Any) -> None:
    source = write_corpus(tmp_path / "text")
    pid = os.fork()
    if pid == 0:
        faults.arm("corpus.before-index")
        prepare_corpus(tmp_path / "tokens", source, 5)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    with pytest.raises(DataError, match="no prepared corpus"):
        read_index(tmp_path / "tokens")
    prepare_corpus(tmp_path / "tokens", source, 5)
    assert read_index(tmp_path / "tokens")["sets"]


def test_a_token_file_that_was_cut_short_is_prepared_again(tmp_path: Any) -> None:
    source = write_corpus(tmp_path / "text")
    index = prepare_corpus(tmp_path / "tokens", source, 5)
    name = next(iter(index["sets"]))
    os.truncate(tmp_path / "tokens" / name, 10)
    with pytest.raises(DataError):
        read_index(tmp_path / "tokens")
    assert prepare_corpus(tmp_path / "tokens", source, 5) == index


def test_missing_and_empty_text_are_refused(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="no file matches"):
        prepare_corpus(tmp_path / "tokens", [f"{tmp_path}/none/*.txt"], 5)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare_corpus(tmp_path / "tokens", [f"{tmp_path}/*.txt"], 5)
    (tmp_path / "blank.txt").write_text("short")
    prepare_corpus(tmp_path / "tokens", [f"{tmp_path}/*.txt"], 10**6)
    with pytest.raises(DataError, match="has no sample"):
        TokenDataset(tmp_path / "tokens", "train", 64)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        prepare_corpus(tmp_path / "file" / "tokens", ["stdlib"], 5)


def test_a_sample_is_its_window_of_the_text_with_its_channel(tmp_path: Any) -> None:
    source = write_corpus(tmp_path / "text")
    index = prepare_corpus(tmp_path / "tokens", source, 5)
    data = TokenDataset(tmp_path / "tokens", "train", 16)
    raw = {
        e["channel"]: (tmp_path / "tokens" / n).read_bytes() for n, e in index["sets"].items() if e["split"] == "train"
    }
    first_odd = int(data.starts[1])
    batch = data.batch([3, first_odd + 2])
    for row, (channel, window) in enumerate((("even", 3), ("odd", 2))):
        expected = list(raw[channel][window * 16 : window * 16 + 17])
        assert batch.tokens[row].tolist() == expected[:-1]
        assert batch.targets[row].tolist() == [*expected[1:], data.channels.index(channel)]


def test_replicas_read_the_same_global_batch_in_any_number(tmp_path: Any) -> None:
    prepare_corpus(tmp_path / "tokens", write_corpus(tmp_path / "text"), 5)
    dataset = TokenDataset(tmp_path / "tokens", "train", 16)
    for _ in range(2):
        whole = TrainingData(dataset, dp_rank=0, dp_size=1, global_batch=12, seed=3)
        parts = [TrainingData(dataset, dp_rank=r, dp_size=3, global_batch=12, seed=3) for r in range(3)]
        for _step in range(3):
            ids = np.concatenate([part.next().ids for part in parts])
            assert sorted(ids) == sorted(whole.next().ids)
            assert parts[1].global_ids() == whole.global_ids() == whole.next().ids.tolist()
            for part in (whole, *parts):
                part.sampler.commit()
    assert ids_digest([1, 2]) != ids_digest([2, 1])


def test_the_index_is_plain_json(stdlib: Any) -> None:
    folder, index = stdlib
    assert json.loads((folder / "index.json").read_text()) == index
