"""Data formats: real files, read at random, resumed, cut, damaged, over s3:// and in loader workers."""

from __future__ import annotations

import inspect
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.megatron import write_megatron
from support.s3 import Server, moto_server
from torch.utils.data import DataLoader

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler import (
    ArrowRows,
    ElasticSampler,
    JsonLines,
    MegatronFile,
    Mixture,
    Order,
    PackedWindows,
    ParquetRows,
    TextLines,
    TokenFile,
    build_line_index,
    build_packing,
)
from flashckpt.sampler.datasets.packing import pack
from flashckpt.sampler.datasets.remote_file import RemoteFile

TEXT = inspect.getsource(random) + "ünïcödé\r\n\nlast line without an end"
LINES = TEXT.replace("\r\n", "\n").split("\n")


@pytest.fixture
def documents() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 60_000, size=n) for n in (5, 300, 0, 17, 64, 1000, 1, 31)]


def rows(count: int) -> Any:
    import pyarrow as pa  # its allocator starts a thread: not while the suite is collected

    return pa.table({"id": list(range(count)), "text": [f"row {i}" for i in range(count)]})


def write_parquet(table: Any, path: Path, group_rows: int) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path, row_group_size=group_rows)


def ids(batch: Any) -> Any:
    return batch


def read_in_two_runs(dataset: Any, workers: int, **options: Any) -> list[Any]:
    """One epoch through a DataLoader, broken off and resumed in the middle with other batch sizes."""
    read: list[Any] = []
    state = None
    for batch, steps in ((4, 2), (3, 10**9)):
        sampler = ElasticSampler(dataset, global_batch_size=batch, tail="short", **options)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(dataset, batch, sampler=sampler, num_workers=workers, collate_fn=ids)
        for step, samples in enumerate(loader):
            if step == steps:
                break
            read += samples
            sampler.commit()
        state = sampler.state_dict()
    return read


# -- bytes


def test_a_blob_reads_any_range_with_a_bounded_cache(tmp_path: Any) -> None:
    data = random.Random(1).randbytes(10_000)
    (tmp_path / "a").write_bytes(data)
    import fsspec

    fsspec.filesystem("memory").pipe_file("/blob/a", data)
    local, remote = RemoteFile(tmp_path / "a"), RemoteFile("memory://blob/a", block_bytes=512, cache_blocks=3)
    generator = random.Random(2)
    for _ in range(200):
        start = generator.randrange(10_001)
        stop = generator.randrange(start, min(start + 2000, 10_000) + 1)
        assert local.read(start, stop) == remote.read(start, stop) == data[start:stop]
        assert len(remote._blocks) <= 3
    assert local.identity() == remote.identity()
    before = remote.fetches
    for start in range(0, 512 * 4, 64):  # sequential small reads: one fetch per block
        remote.read(start, start + 64)
    assert remote.fetches - before <= 4
    copy = pickle.loads(pickle.dumps(remote))
    assert copy.read(0, 5) == data[:5]
    assert copy.fetches == 1


def test_reads_outside_a_file_and_missing_files_are_named(tmp_path: Any) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(DataError, match="goes beyond the end"):
        RemoteFile(tmp_path / "a").read(3, 6)
    with pytest.raises(DataError, match="nowhere"):
        RemoteFile(tmp_path / "nowhere").read(0, 1)
    (tmp_path / "empty").write_bytes(b"")
    assert RemoteFile(tmp_path / "empty").read(0, 0) == b""


# -- tokens


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_flat_tokens_are_cut_into_windows_with_their_targets(tmp_path: Any, dtype: Any) -> None:
    tokens = np.arange(1003) % 250
    (tmp_path / "t.bin").write_bytes(b"HEAD" * 8 + tokens.astype(dtype).tobytes())
    data = TokenFile(tmp_path / "t.bin", window=100, dtype=dtype, header_bytes=32)
    assert len(data) == 10
    assert data.tokens == 1003
    for i in range(10):
        assert data[i].tolist() == tokens[i * 100 : i * 100 + 101].tolist()
    assert len(TokenFile(tmp_path / "t.bin", window=100, dtype=dtype, header_bytes=32, extra=4)) == 9
    with pytest.raises(IndexError):
        data[10]


def test_cut_or_tiny_token_files_are_refused(tmp_path: Any) -> None:
    (tmp_path / "t.bin").write_bytes(b"x" * 101)
    with pytest.raises(DataError, match="cut inside a token"):
        TokenFile(tmp_path / "t.bin", window=10)
    (tmp_path / "t.bin").write_bytes(b"x" * 20)
    with pytest.raises(DataError, match="shorter than one window"):
        TokenFile(tmp_path / "t.bin", window=10)
    with pytest.raises(ConfigError):
        TokenFile(tmp_path / "t.bin", window=10, dtype="float32")
    with pytest.raises(DataError, match="nowhere"):
        TokenFile(tmp_path / "nowhere.bin", window=10)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_files_give_documents_and_windows(tmp_path: Any, documents: Any, code: Any, dtype: Any) -> None:
    write_megatron(tmp_path / "m", documents, code, dtype)
    whole = MegatronFile(tmp_path / "m")
    assert len(whole) == 8
    for i, document in enumerate(documents):
        assert whole[i].tolist() == document.tolist()
    stream, windows = np.concatenate(documents), MegatronFile(tmp_path / "m", window=64)
    assert len(windows) == (len(stream) - 1) // 64
    starts = set(np.cumsum([0] + [len(d) for d in documents]).tolist())
    for i in range(len(windows)):
        assert windows[i].tolist() == stream[i * 64 : i * 64 + 65].tolist()
        assert set(windows.document_starts(i).tolist()) == {s - i * 64 for s in starts if 0 < s - i * 64 < 65}


DAMAGES: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "index cut": lambda idx, data: (idx[:-1], data),
    "index empty": lambda idx, data: (b"", data),
    "magic": lambda idx, data: (b"X" + idx[1:], data),
    "version": lambda idx, data: (idx[:9] + b"\x02" + idx[10:], data),
    "type code": lambda idx, data: (idx[:17] + b"\x09" + idx[18:], data),
    "float type": lambda idx, data: (idx[:17] + b"\x07" + idx[18:], data),
    "a length": lambda idx, data: (idx[:34] + b"\x06" + idx[35:], data),
    "a pointer": lambda idx, data: (idx[: 34 + 32 + 8] + b"\x07" + idx[34 + 32 + 9 :], data),
    "a document": lambda idx, data: (idx[:-8] + b"\x09" + idx[-7:], data),
    "data cut": lambda idx, data: (idx, data[:-2]),
    "data longer": lambda idx, data: (idx, data + b"xx"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_megatron_index_that_does_not_fit_is_refused(tmp_path: Any, documents: Any, damage: Any) -> None:
    write_megatron(tmp_path / "m", documents, 8, "<u2")
    idx, data = DAMAGES[damage]((tmp_path / "m.idx").read_bytes(), (tmp_path / "m.bin").read_bytes())
    (tmp_path / "m.idx").write_bytes(idx)
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(DataError, match="damaged or does not fit"):
        MegatronFile(tmp_path / "m", window=8)


# -- text and JSON lines


def test_lines_are_read_by_an_index_built_once(tmp_path: Any) -> None:
    path = tmp_path / "random.py"
    path.write_bytes(TEXT.encode())
    data = TextLines(path)
    assert [data[i] for i in range(len(data))] == LINES
    index = path.with_name("random.py.fckidx")
    written = index.stat().st_mtime_ns
    assert len(TextLines(path)) == len(LINES)
    assert index.stat().st_mtime_ns == written, "built again"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []
    assert sorted(read_in_two_runs(data, 0)) == sorted(LINES)


@pytest.mark.parametrize("damage", ["other data", "cut", "flipped", "another kind", "empty"])
def test_an_index_that_does_not_fit_its_lines_is_refused(tmp_path: Any, damage: Any) -> None:
    path, index = tmp_path / "a.txt", tmp_path / "a.idx"
    path.write_text("one\ntwo\n")
    build_line_index(path, index)
    good = index.read_bytes()
    if damage == "other data":
        path.write_text("one\ntwo\nthree\n")
    elif damage == "another kind":
        build_packing([3, 4], 8, index)
    else:
        index.write_bytes({"cut": good[:-3], "flipped": good[:-1] + b"\xff", "empty": b""}[damage])
    with pytest.raises(DataError, match="does not fit its data" if damage == "other data" else "cannot be used"):
        TextLines(path, index=index)


def test_json_lines_and_damaged_lines(tmp_path: Any) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"text": f"sample {i}", "n": i} for i in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = JsonLines(path)
    assert [data[i] for i in range(20)] == records
    assert JsonLines(path, key="n")[7] == 7
    path.write_bytes(b'{"text": "good"}\n{"text": "bad\n\xff\xfe\n{"n": 1}\n')
    path.with_name("a.jsonl.fckidx").unlink()
    broken = JsonLines(path, key="text")
    assert broken[0] == "good"
    for line in (1, 2, 3):
        with pytest.raises(DataError, match=f"line {line + 1} of .*a.jsonl is damaged"):
            broken[line]
    path.write_bytes(b"")
    path.with_name("a.jsonl.fckidx").unlink()
    with pytest.raises(DataError, match="holds no lines"):
        JsonLines(path)


def test_a_read_only_folder_gets_no_index_and_works(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("flashckpt.sampler.datasets.index_file.write", refuse)
    assert TextLines(tmp_path / "a.txt")[1] == "two"


# -- columns


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_come_by_row_group(tmp_path: Any, kind: Any) -> None:
    import pyarrow as pa

    table = rows(250)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, part in zip(paths, (table.slice(0, 130), table.slice(130)), strict=True):
        if kind == "parquet":
            write_parquet(part, path, 50)
        else:
            with pa.ipc.new_file(path, part.schema) as writer:
                writer.write_table(part, max_chunksize=50)
    data = (ParquetRows if kind == "parquet" else ArrowRows)(paths, cache_groups=2)
    assert len(data) == 250
    assert data.block_size == 50
    assert [data[i] for i in (0, 49, 50, 129, 130, 249)] == [table.to_pylist()[i] for i in (0, 49, 50, 129, 130, 249)]
    assert len(data._tables) == 2
    assert (ParquetRows if kind == "parquet" else ArrowRows)(paths[0], columns=["id"])[3] == {"id": 3}
    with pytest.raises(DataError, match="b has no column 'idd'"):  # pyarrow would leave it out
        (ParquetRows if kind == "parquet" else ArrowRows)(paths[1], columns=["id", "idd"])
    order = Order(kind="block", block_size=50, window_blocks=2)
    assert sorted(row["id"] for row in read_in_two_runs(data, 0, order=order)) == list(range(250))
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    with pytest.raises(DataError, match="b cannot be read"):
        (ParquetRows if kind == "parquet" else ArrowRows)(paths)


def test_block_order_reads_each_row_group_about_once(tmp_path: Any) -> None:
    write_parquet(rows(1000), tmp_path / "a", 50)
    data = ParquetRows(tmp_path / "a", cache_groups=5)
    reads = 0
    inner = data._read

    def counted(reader: Any, group: int) -> Any:
        nonlocal reads
        reads += 1
        return inner(reader, group)

    data._read = counted  # type: ignore[method-assign]
    order = Order(kind="block", block_size=data.block_size, window_blocks=4)
    assert len([data[i] for i in ElasticSampler(data, order=order)]) == 1000
    assert reads == 20


# -- packing


def test_packing_keeps_every_token_once_and_fills_the_windows() -> None:
    generator = random.Random(0)
    lengths = [generator.choice([0, 1, 7, 60, 300, generator.randrange(1, 200)]) for _ in range(2000)]
    index = pack(lengths, 128)
    pieces = list(zip(index["document"].tolist(), index["start"].tolist(), index["length"].tolist(), strict=True))
    covered = [(d, s + k) for d, s, n in pieces for k in range(n)]
    assert sorted(covered) == [(d, k) for d, n in enumerate(lengths) for k in range(n)]
    per_bin = np.add.reduceat(index["length"], index["bins"][:-1])
    assert per_bin.max() <= 128
    assert len(per_bin) <= -(-sum(lengths) // 128) * 1.03, "windows are not filled"
    again = pack(lengths, 128)
    assert all(np.array_equal(index[name], again[name]) for name in index)
    assert len(pack([], 8)["bins"]) == 1
    with pytest.raises(ConfigError):
        pack([1], 0)


def test_packed_windows_mark_their_documents_and_resume(tmp_path: Any, documents: Any) -> None:
    write_megatron(tmp_path / "m", documents, 8, "<u2")
    source = MegatronFile(tmp_path / "m")
    build_packing(source.lengths, 128, tmp_path / "m.pack")
    data = PackedWindows(source, window=128, index=tmp_path / "m.pack", pad=-7)
    assert data.fill > 0.9
    tokens = []
    for i in range(len(data)):
        sample = data[i]
        assert (sample["tokens"][sample["document"] < 0] == -7).all()
        tokens += sample["tokens"][sample["document"] >= 0].tolist()
        for number in range(sample["document"].max() + 1):  # each document of the window is one of the originals
            piece = sample["tokens"][sample["document"] == number].tolist()
            assert any(piece == d[k : k + len(piece)].tolist() for d in documents for k in range(0, len(d), 128))
    assert sorted(tokens) == sorted(np.concatenate(documents).tolist())
    assert len(read_in_two_runs(data, 0)) == len(data)
    for window, lengths in ((64, source.lengths), (128, source.lengths[:-1])):
        with pytest.raises(DataError, match="does not fit its data"):
            PackedWindows(source, window=window, lengths=lengths, index=tmp_path / "m.pack")


# -- identity


def test_the_sampler_refuses_files_that_were_exchanged(tmp_path: Any) -> None:
    (tmp_path / "t.bin").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    state = ElasticSampler(TokenFile(tmp_path / "t.bin", window=10)).state_dict()
    (tmp_path / "copy.bin").write_bytes((tmp_path / "t.bin").read_bytes())
    ElasticSampler(TokenFile(tmp_path / "copy.bin", window=10)).load_state_dict(state)
    (tmp_path / "t.bin").write_bytes(np.arange(1, 1001, dtype="<u2").tobytes())
    from flashckpt.errors import SamplerStateError

    with pytest.raises(SamplerStateError, match="fingerprint"):
        ElasticSampler(TokenFile(tmp_path / "t.bin", window=10)).load_state_dict(state)


# -- s3:// and loader workers


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with moto_server() as server:
        yield server


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_every_format_is_read_from_s3_in_loader_workers(s3: Any, tmp_path: Any, documents: Any, workers: Any) -> None:
    """Opened in the parent for their sizes, then read in forked workers, which open their own."""
    options = {
        "key": s3.key, "secret": s3.secret, "endpoint_url": s3.endpoint, "client_kwargs": {"region_name": "us-east-1"},
    }  # fmt: skip
    client, base = s3.client(), f"s3://{s3.bucket}/{workers}"
    write_megatron(tmp_path / "m", documents, 8, "<u2")
    write_parquet(rows(40), tmp_path / "p", 8)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": i}) + "\n" for i in range(30)))
    for name in ("m.bin", "m.idx", "p", "a.jsonl"):
        client.upload_file(str(tmp_path / name), s3.bucket, f"{workers}/{name}")
    with pytest.raises(DataError, match=r"has no index|cannot be read"):
        JsonLines(f"{base}/a.jsonl", storage_options=options)
    build_line_index(f"{base}/a.jsonl", storage_options=options)
    small: dict[str, Any] = {"storage_options": options, "block_bytes": 512, "cache_blocks": 2}
    tokens = TokenFile(f"{base}/m.bin", window=50, **small)
    data = Mixture(
        {
            "tokens": (tokens, 3),
            "megatron": (MegatronFile(f"{base}/m", window=50, **small), 1),
            "lines": (JsonLines(f"{base}/a.jsonl", **small), 1),
            "rows": (ParquetRows(f"{base}/p", storage_options=options), 1),
        },
        epoch_length=36,
    )
    remote = read_in_two_runs(data, workers)
    local = Mixture(
        {
            "tokens": (TokenFile(tmp_path / "m.bin", window=50), 3),
            "megatron": (MegatronFile(tmp_path / "m", window=50), 1),
            "lines": (JsonLines(tmp_path / "a.jsonl"), 1),
            "rows": (ParquetRows(tmp_path / "p"), 1),
        },
        epoch_length=36,
    )
    assert local.fingerprint == data.fingerprint
    assert [str(sample) for sample in remote] == [str(sample) for sample in read_in_two_runs(local, 0)]
    assert len(tokens._blob._blocks) <= 2
