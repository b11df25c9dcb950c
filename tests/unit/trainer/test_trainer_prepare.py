"""`data prepare`: every kind of text, any tokenizer, killed anywhere and continued, one clear error each."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from flashckpt import faults
from flashckpt.errors import ConfigError, DataError
from flashckpt.faults import CRASH_POINTS
from flashckpt.trainer.config.data import DataConfig, SourceConfig
from flashckpt.trainer.data.prepared import index_name, read_prepared
from flashckpt.trainer.prepare.documents import documents_of, parts_of
from flashckpt.trainer.prepare.shards import prepare

TEXTS = [f"document {i}: " + "lorem ipsum dolor sit amet " * (i % 7) + "\u00e9\u4e2d" * (i % 3) for i in range(60)]


def text_files(folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return (f"{folder}/*.txt",)


def json_lines(folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40]))
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in TEXTS[40:])
    )  # no newline at the end
    return (f"{folder}/a.jsonl", f"{folder}/b.jsonl")


def parquet(folder: Path) -> tuple[str, ...]:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    folder.mkdir()
    pyarrow.parquet.write_table(
        pa.table({"text": TEXTS, "n": list(range(60))}), folder / "a.parquet", row_group_size=17
    )
    return (f"{folder}/a.parquet",)


def data_set(folder: Path) -> tuple[str, ...]:
    """A folder as `save_to_disk` of Hugging Face's datasets writes it: Arrow streams and state.json."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    names = []
    for number in range(2):
        names.append({"filename": f"data-{number:05}-of-00002.arrow"})
        table = pa.table({"text": TEXTS[number * 30 : number * 30 + 30]})
        with pa.OSFile(str(folder / names[-1]["filename"]), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    return (str(folder),)


HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None
NOT_INSTALLED = "the tokenizers library is not installed; `make test-hub` installs it and runs this"
KINDS = {"text": text_files, "jsonl": json_lines, "parquet": parquet, "datasets": data_set}


def decoded(folder: Path, index: dict[str, Any], source: int = 0) -> list[str]:
    """Return the documents of byte tokens, of both splits, in no particular order."""
    tokens = b""
    for record in index["sources"][source]:
        for split in ("train", "held"):
            tokens += np.fromfile(folder / f"{record['name']}.{split}.bin", index["dtype"]).astype(np.uint8).tobytes()
    return [part.decode() for part in tokens.split(b"\0")[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_comes_once_wherever_the_files_are_cut(kind: str, tmp_path: Path) -> None:
    source = SourceConfig(kind=kind, urls=KINDS[kind](tmp_path / "raw"))
    for split_bytes in (100, 1009, 1 << 20):
        folder = tmp_path / f"tokens{split_bytes}"
        index = prepare(DataConfig(sources=(source,), folder=str(folder)), split_bytes=split_bytes)
        assert sorted(decoded(folder, index)) == sorted(TEXTS)
        assert sum(record[s]["documents"] for record in index["sources"][0] for s in ("train", "held")) == len(TEXTS)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "datasets"])
def test_urls_of_fsspec_give_what_local_files_give(kind: str, tmp_path: Path) -> None:
    local = KINDS[kind](tmp_path / "raw")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "raw"), f"/{tmp_path.name}", recursive=True)
    remote = tuple(url.replace(str(tmp_path / "raw"), f"memory://{tmp_path.name}") for url in local)
    try:
        here, there = (
            [list(documents_of(p)) for p in parts_of(SourceConfig(kind=kind, urls=u))] for u in (local, remote)
        )
    finally:
        memory.rm(f"/{tmp_path.name}", recursive=True)
    assert here == there
    assert sum(map(len, here)) == len(TEXTS)


def bpe_run(tmp_path: Path) -> DataConfig:
    if not (tmp_path / "raw").exists():
        json_lines(tmp_path / "raw")
    source = SourceConfig(kind="jsonl", urls=(f"{tmp_path}/raw/*.jsonl",))
    return DataConfig(sources=(source,), folder=str(tmp_path / "tokens"), bpe=300)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx", ".json")}


@pytest.mark.parametrize("point", [point for point in CRASH_POINTS if point.startswith("prepare.")])
def test_killed_anywhere_the_same_command_ends_with_the_same_bytes(point: str, tmp_path: Path) -> None:
    if not HAS_TOKENIZERS and point == "prepare.before-tokenizer":
        pytest.skip(NOT_INSTALLED)
    data = replace(bpe_run(tmp_path), bpe=300 if HAS_TOKENIZERS else 0)
    wanted = prepare(replace(data, folder=str(tmp_path / "unbroken")), split_bytes=1500)
    pid = os.fork()
    if pid == 0:
        faults.arm(point)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has none of the threads of the library
        prepare(data, split_bytes=1500)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not list((tmp_path / "tokens").glob("index*.json"))
    assert prepare(data, split_bytes=1500) == wanted
    assert shards(tmp_path / "tokens") == shards(tmp_path / "unbroken")
    assert not [path for path in (tmp_path / "tokens").iterdir() if path.suffix == ".tmp"]


def test_parts_that_are_recorded_are_not_tokenised_again_and_a_changed_file_is(tmp_path: Path) -> None:
    data = DataConfig(
        sources=(SourceConfig(kind="jsonl", urls=json_lines(tmp_path / "raw")),), folder=str(tmp_path / "t")
    )
    seen: list[Any] = []
    first = prepare(data, seen.append, split_bytes=1500)
    assert [(one.done, one.reused) for one in seen] == [(i + 1, 0) for i in range(seen[-1].parts)]
    assert seen[-1].parts > 2
    assert prepare(data, seen.append, split_bytes=1500) == first
    assert seen[-1].reused == seen[-1].parts
    with (tmp_path / "raw/b.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}) + "\n")
    second = prepare(data, seen.append, split_bytes=1500)
    assert second["fingerprint"] != first["fingerprint"]
    assert 0 < seen[-1].reused < seen[-1].parts
    assert sorted(decoded(tmp_path / "t", second)) == sorted([*TEXTS, "one more"])


def test_a_tokenizer_of_more_than_65536_tokens_takes_four_bytes_and_decodes_to_the_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason=NOT_INSTALLED)
    data = bpe_run(tmp_path)
    small = prepare(data)
    made = json.loads((tmp_path / "tokens" / small["tokenizer"]).read_text())
    made["model"]["vocab"]["rare"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    large = prepare(
        DataConfig(sources=data.sources, folder=str(tmp_path / "large"), tokenizer=str(tmp_path / "tokenizer.json"))
    )
    assert (small["dtype"], large["dtype"]) == ("<u2", "<u4")
    assert (small["vocab"], large["vocab"]) == (300, 70_001)
    name = large["sources"][0][0]["name"]
    tokens = np.fromfile(tmp_path / "large" / f"{name}.train.bin", "<u4")
    end = tokenizers.Tokenizer.from_str(json.dumps(made)).token_to_id("<|endoftext|>")
    pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
    whole = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert {whole.decode(piece[:-1].tolist()) for piece in pieces} <= set(TEXTS)


def test_files_of_earlier_preparations_go_and_those_of_other_people_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    theirs = {"train.bin", "notes.json", "a.idx", "b.tmp", "tokenizer.json", "index.html"}
    for name in theirs:
        (folder / name).write_text("theirs")
    source = SourceConfig(kind="jsonl", urls=json_lines(tmp_path / "raw"))
    first = prepare(DataConfig(sources=(source,), folder=str(folder)))
    before = {path.name for path in folder.iterdir()} - theirs
    (folder / f".{first['sources'][0][0]['name']}.train.idx.0a1b2c3d4e5f.tmp").write_text("of a killed one")
    with (tmp_path / "raw/b.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}) + "\n")
    prepare(DataConfig(sources=(source,), folder=str(folder)))
    after = {path.name for path in folder.iterdir()} - theirs
    assert len(after) == len(before) > 10
    assert len(after & before) < len(before)
    assert all((folder / name).read_text() == "theirs" for name in theirs)


def test_runs_of_other_settings_share_a_folder_and_what_is_the_same(tmp_path: Path) -> None:
    """Before, the second removed what the first had prepared."""
    folder = tmp_path / "tokens"
    urls = json_lines(tmp_path / "raw")
    one = DataConfig(sources=(SourceConfig(kind="jsonl", urls=urls),), folder=str(folder))
    other = replace(one, sources=(SourceConfig(kind="jsonl", urls=urls[:1]),))
    third = replace(one, holdout_every=2)
    indexes = [prepare(data) for data in (one, other, third)]
    assert [read_prepared(data) for data in (one, other, third)] == indexes
    assert indexes[1]["sources"][0] == indexes[0]["sources"][0][:1]
    with pytest.raises(DataError, match="is not that of this run"):
        read_prepared(replace(one, holdout_every=3))
    (folder / index_name(third)).unlink()  # how its parts are given up: the next preparation removes them
    prepare(one)
    parts = {path.name.partition(".")[0] for path in folder.glob("*.bin")}
    assert parts == {record["name"] for record in indexes[0]["sources"][0]}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"urls": ("{}/none/*.jsonl",)}, DataError, "no file matches"),
        ({"urls": ("{}/raw/a.jsonl",), "key": "body"}, DataError, "the line at byte 0 of"),
        ({"kind": "datasets", "urls": ("{}/raw",)}, DataError, "is no data set on disk"),
        ({"kind": "parquet", "urls": ("{}/raw/a.jsonl",)}, DataError, "cannot be read"),
        ({"urls": ("{}/raw/a.jsonl",), "tokenizer": "{}/raw/a.jsonl.json"}, DataError, "cannot be read"),
        ({"urls": ("{}/raw/a.jsonl",), "tokenizer": "{}/bad.json"}, ConfigError, "is no tokenizer"),
        ({"kind": "text", "urls": ("{}/blank.txt",)}, DataError, "has nothing to train on"),
    ],
)
def test_bad_input_is_one_clear_error(
    settings: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    if words == "is no tokenizer":
        pytest.importorskip("tokenizers", reason=NOT_INSTALLED)
    pytest.importorskip("pyarrow")
    json_lines(tmp_path / "raw")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    (tmp_path / "blank.txt").write_text(" \n")
    given: dict[str, Any] = {
        key: tuple(one.format(tmp_path) for one in value) if isinstance(value, tuple) else value.format(tmp_path)
        for key, value in {"kind": "jsonl", **settings}.items()
    }
    with pytest.raises(error, match=words):
        prepare(DataConfig(sources=(SourceConfig(**given),), folder=str(tmp_path / "tokens")))
    assert not list((tmp_path / "tokens").glob("index*.json"))
