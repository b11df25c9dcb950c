"""Data that cannot be reached now, and data that is wrong: the one is waited for and restartable, the other is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.http_server import Server

from flashckpt.errors import FINAL_CODES, DataError, StoreError
from flashckpt.sampler import (
    ArrowRows,
    JsonLines,
    MegatronFile,
    PackedWindows,
    ParquetRows,
    TextLines,
    TokenFile,
    build_line_index,
    build_packing,
)
from flashckpt.sampler.datasets import reaching
from flashckpt.sampler.datasets.remote_file import RemoteFile
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.data import SourceConfig
from flashckpt.trainer.data.files import matching_files
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.prepare.documents import documents_of, parts_of
from flashckpt.trainer.prepare.vocabulary import read_vocabulary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    served = Server(tmp_path)
    yield served
    served.close()


class Clock:
    """Time that passes by waiting alone; something may happen at the `after`-th wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.after = 0
        self.happens: Callable[[], Any] = bool

    def monotonic(self) -> float:
        return sum(self.waits)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.after or len(self.waits) == self.after:
            self.happens()


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    found = Clock()
    monkeypatch.setattr(reaching, "time", found)
    return found


def come_back(server: Server) -> None:
    server.away = ""


KINDS = ["503", "500", "429", "cut", "closed", "reset"]


@pytest.mark.parametrize("away", KINDS)
def test_a_server_that_is_away_for_a_while_gives_the_same_bytes_then(
    away: str, server: Server, clock: Clock, monkeypatch: Any
) -> None:
    tokens = np.arange(5000, dtype="<u2")
    tokens.tofile(server.folder / "t.bin")
    file = TokenFile(f"{server.url}/t.bin", window=100, block_bytes=1000, cache_blocks=2)
    paused: list[str] = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        paused.append("begin")
        yield
        paused.append("end")

    monkeypatch.setattr(reaching, "waiting", waiting)
    server.away = away
    clock.after, clock.happens = 4, lambda: come_back(server)
    found = np.concatenate([file[number][:100] for number in range(len(file))])
    assert np.array_equal(found, tokens[: len(found)])
    assert clock.waits == [0.5, 1.0, 2.0, 4.0]
    assert paused == ["begin", "end"]


@pytest.mark.parametrize("away", KINDS)
@pytest.mark.parametrize("door", ["size", "bytes", "pattern", "tokenizer"])
def test_a_server_that_stays_away_can_be_tried_again_by_a_restart(
    away: str, door: str, server: Server, clock: Clock
) -> None:
    (server.folder / "t.json").write_bytes(b"{}" * 100)
    url = f"{server.url}/t.json"
    if away in ("cut", "reset") and door in ("size", "pattern"):
        return  # no body
    blob = RemoteFile(url)
    assert blob.nbytes == 200
    server.away = away
    doors: dict[str, Callable[[], Any]] = {
        "size": lambda: RemoteFile(url).nbytes,
        "bytes": lambda: blob.read(0, 100),
        "pattern": lambda: matching_files(url, {}),
        "tokenizer": lambda: read_vocabulary(url, ""),
    }
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        doors[door]()
    assert caught.value.exit_code == 41
    assert caught.value.exit_code not in FINAL_CODES
    assert 0.8 * reaching.PATIENCE_S < sum(clock.waits) <= reaching.PATIENCE_S
    assert clock.waits == sorted(clock.waits)


@pytest.mark.parametrize("status", ["404", "403", "401", "400"])
def test_what_the_server_refuses_is_refused_at_once(status: str, server: Server, clock: Clock) -> None:
    (server.folder / "t.bin").write_bytes(bytes(10))
    server.away = status
    with pytest.raises(DataError, match="cannot be read"):
        RemoteFile(f"{server.url}/t.bin").read(0, 10)
    server.away = ""
    with pytest.raises(DataError):
        RemoteFile(f"{server.url}/nothing.bin").read(0, 0)
    assert clock.waits == []


def answer(code: int) -> BaseException:
    botocore = pytest.importorskip("botocore.exceptions")
    error: BaseException = botocore.ClientError(
        {"ResponseMetadata": {"HTTPStatusCode": code}, "Error": {}}, "GetObject"
    )
    return error


def response(code: int) -> BaseException:
    aiohttp = pytest.importorskip("aiohttp")
    error: BaseException = aiohttp.ClientResponseError(SimpleNamespace(real_url="http://h"), (), status=code)
    return error


def errors() -> dict[str, tuple[BaseException, bool]]:
    """Return errors of file systems and their clients, and whether a moment later it may work."""
    aiohttp, botocore = pytest.importorskip("aiohttp"), pytest.importorskip("botocore.exceptions")
    place = "http://127.0.0.1:1"
    found: dict[str, tuple[BaseException, bool]] = {
        f"{name}": (OSError(getattr(errno, name), name), True)
        for name in (
            "EIO",
            "ESTALE",
            "ETIMEDOUT",
            "ECONNREFUSED",
            "ECONNRESET",
            "EHOSTUNREACH",
            "ENETUNREACH",
            "EAGAIN",
            "EBUSY",
        )
    }
    found |= {
        name: (OSError(getattr(errno, name), name), False)
        for name in ("ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "EINVAL", "ELOOP", "ENAMETOOLONG")
    }
    found |= {
        f"answer {code}": (answer(code), code >= 500 or code in (408, 429))
        for code in (400, 403, 404, 408, 416, 429, 500, 503)
    }
    found |= {
        f"http {code}": (response(code), code >= 500 or code in (408, 429))
        for code in (400, 401, 403, 404, 408, 429, 500, 502, 503, 504)
    }
    return found | {
        "endpoint": (botocore.EndpointConnectionError(endpoint_url=place), True),
        "read timeout": (botocore.ReadTimeoutError(endpoint_url=place), True),
        "connect timeout": (botocore.ConnectTimeoutError(endpoint_url=place), True),
        "no credentials": (botocore.NoCredentialsError(), False),
        "no profile": (botocore.ProfileNotFound(profile="x"), False),
        "server left": (aiohttp.ServerDisconnectedError(), True),
        "payload": (aiohttp.ClientPayloadError("cut"), True),
        "time": (asyncio.TimeoutError(), True),
        "no address": (aiohttp.InvalidURL("x"), False),
        "value": (ValueError("no such protocol"), False),
        "type": (TypeError("an option"), False),
        "key": (KeyError("x"), False),
    }


def test_each_error_of_a_file_system_is_passing_or_lasting(clock: Clock) -> None:
    for name, (error, passing) in errors().items():
        for wrapped in (error, caused(OSError("failed"), error)):
            assert reaching.may_pass(wrapped) == passing, name

            def fail(wrapped: BaseException = wrapped) -> None:
                raise wrapped

            with pytest.raises(StoreError if passing else DataError, match="x:y cannot be"):
                reaching.reach("x:y", fail)
    assert reaching.may_pass(caused(FileNotFoundError("what fsspec makes of it"), TimeoutError()))
    assert not reaching.may_pass(caused(FileNotFoundError("no such file"), KeyError("not listed")))
    assert clock.waits


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("away", ["503", "closed"])
def test_training_goes_on_with_the_same_samples(
    ahead: int, away: str, server: Server, clock: Clock, monkeypatch: Any
) -> None:
    np.random.default_rng(3).integers(0, 250, 4000).astype("<u2").tofile(server.folder / "t.bin")

    def batches(*, trouble: bool) -> list[bytes]:
        source = {"kind": "tokens", "urls": [f"{server.url}/t.bin"]}
        config = from_values({"train": {"seq_len": 16}, "data": {"sources": [source]}})
        data = TrainingData(MixedDataset(config, "train"), dp_rank=0, dp_size=1, global_batch=2, seed=1, ahead=ahead)
        found = []
        for step in range(7):
            if trouble and step % 3 == 1:
                server.away = away
            found.append(data.next().tokens.numpy().tobytes())
            data.sampler.commit()
        data.close()
        return found

    plain = batches(trouble=False)
    monkeypatch.setattr(
        RemoteFile,
        "_block",
        lambda self, block: self._fetch(block * self._block_bytes, min((block + 1) * self._block_bytes, self.nbytes)),
    )
    clock.happens = lambda: come_back(server)
    assert batches(trouble=True) == plain
    assert clock.waits


def test_rows_of_parquet_are_waited_for(server: Server, clock: Clock, monkeypatch: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": list(range(4000))}), server.folder / "a.parquet", row_group_size=500)
    rows = ParquetRows(f"{server.url}/a.parquet", cache_groups=1)
    server.away = "503"
    clock.after, clock.happens = 2, lambda: come_back(server)
    assert [rows[number]["n"] for number in (0, 1999, 3999)] == [0, 1999, 3999]
    assert clock.waits == [0.5, 1.0]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_data_set_that_breaks_off_at_any_request_is_read_to_its_end(kind: str, server: Server, clock: Clock) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [
        np.random.default_rng(number).bytes(2 << 20).hex() for number in range(6)
    ]  # several requests for each file
    table = pa.table({"text": texts})
    if kind == "parquet":
        pq.write_table(table, server.folder / "a.parquet", row_group_size=4)
    else:
        with pa.OSFile(str(server.folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=2)
        (server.folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    source = SourceConfig(kind=kind, urls=(f"{server.url}/a.parquet" if kind == "parquet" else server.url,))

    def come_back_for_good() -> None:
        server.away, server.away_after = "", 0

    def read() -> list[str]:
        return [text for part in parts_of(source) for text in documents_of(part)]

    assert read() == texts
    requests = server.asked
    clock.happens = come_back_for_good
    for after in range(1, requests):
        server.asked, server.away_after = 0, after
        assert read() == texts, f"away after {after} of {requests} requests"
    assert len(clock.waits) == requests - 1 >= 6
    server.away = "503"
    clock.happens = bool
    with pytest.raises(StoreError, match="cannot be reached"):
        read()


def files_of(kind: str, folder: Path) -> Callable[[str], Any]:
    """Write data of a kind; return what opens it at a URL."""
    tokens = np.arange(900, dtype="<u2")
    lengths = [200, 300, 400]
    if kind in ("tokens", "megatron", "packed"):
        tokens.tofile(folder / "a.bin")
        write_index(folder / "a.idx", lengths)
        build_packing(lengths, 64, folder / "a.packed")
    elif kind in ("text", "json"):
        (folder / "a.txt").write_text("".join(f'{{"n": {number}}}\n' for number in range(200)))
        build_line_index(folder / "a.txt")
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pa.table({"n": list(range(200))})
        pq.write_table(table, folder / "a.parquet", row_group_size=60)
        with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=60)
    small: dict[str, Any] = {"block_bytes": 500, "cache_blocks": 1}
    opened: dict[str, Callable[[str], Any]] = {
        "tokens": lambda url: TokenFile(f"{url}/a.bin", window=64, **small),
        "megatron": lambda url: MegatronFile(f"{url}/a", window=64, **small),
        "packed": lambda url: PackedWindows(MegatronFile(f"{url}/a", **small), window=64, index=f"{url}/a.packed"),
        "text": lambda url: TextLines(f"{url}/a.txt", **small),
        "json": lambda url: JsonLines(f"{url}/a.txt", key="n", **small),
        "parquet": lambda url: ParquetRows(f"{url}/a.parquet", cache_groups=1),
        "arrow": lambda url: ArrowRows(f"{url}/a.arrow", cache_groups=1),
    }
    return opened[kind]


def write_index(path: Path, lengths: list[int]) -> None:
    """Write the index of a Megatron file of documents of uint16."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    starts = np.cumsum([0, *lengths[:-1]]) * 2
    parts = np.asarray(lengths, "<i4"), starts.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
    path.write_bytes(head + b"".join(part.tobytes() for part in parts))


@pytest.mark.matrix
@pytest.mark.parametrize("away", ["503", "closed", "cut", "reset"])
@pytest.mark.parametrize("kind", ["tokens", "megatron", "packed", "text", "json", "parquet", "arrow"])
def test_every_kind_of_data_that_breaks_off_at_any_request_gives_the_same_samples(
    kind: str, away: str, server: Server, clock: Clock
) -> None:
    """Opened and read from the first sample to the last, with the server gone after each number of requests."""
    opened = files_of(kind, server.folder)

    def read() -> list[str]:
        server.asked = 0
        data = opened(server.url)
        return [repr(data[number]) for number in range(len(data))]

    def come_back_for_good() -> None:
        server.away, server.away_after = "", 0

    whole, requests = read(), server.asked
    assert len(whole) > 3
    clock.happens = come_back_for_good
    server.away_with = away
    for after in range(1, requests):
        server.away_after = after
        assert read() == whole, f"away after {after} of {requests} requests"
        come_back_for_good()  # half an answer of no bytes is a whole one
    assert len(clock.waits) >= 3
