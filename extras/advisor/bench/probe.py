"""What a place can do, tried out: conditional writes, ranges, O_DIRECT, and whether its fsync can be true.

Of an S3 server also what flashckpt does not rely on, so that a user knows whom they could trust.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashckpt.bench.host import file_system
from flashckpt.bench.measure import median
from flashckpt.bench.scratch import Scratch
from flashckpt.errors import FlashckptError
from flashckpt.storage.store import Store


@dataclass(frozen=True, slots=True)
class _TimedParts:
    parts: Iterable[memoryview]
    times: list[float]

    def __iter__(self) -> Iterator[memoryview]:
        asked = time.perf_counter()
        for part in self.parts:
            yield part
            now = time.perf_counter()
            self.times.append(now - asked)
            asked = now


class TimedStore:
    """Everything of the store behind it, with the seconds per part noted.

    Attributes:
        written_s: Between one part of an object being handed out and the next being asked for. Backends with parts in
            flight ask ahead, so single values may be near zero; a slow part holds up the one behind it.
        read_s: Of each ranged read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.written_s: list[float] = []
        self.read_s: list[float] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """See Store."""
        times: list[float] = []
        self._store.put_object(key, _TimedParts(parts, times), nbytes)
        with self._lock:
            self.written_s += times

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """See Store."""
        started = time.perf_counter()
        self._store.get_range(key, start, out)
        taken = time.perf_counter() - started
        with self._lock:
            self.read_s.append(taken)


def timed(store: Store) -> tuple[Store, TimedStore]:
    """Return the store as the rest of the program takes it, and the same object with its times."""
    wrapped = TimedStore(store)
    return cast("Store", wrapped), wrapped


NOT_S3 = "not tried: no S3 server"
_TOO_FAST = 0.8  # of a plain copy in memory: no device is that fast and durable
_TOO_QUICK_S = 30e-6  # nothing is durable in less


def capabilities(store: Store, scratch: Scratch) -> dict[str, Any]:
    """Find out what the place can do; None where it was not tried, with the reason in `notes`."""
    body = os.urandom(10_007)
    store.put("probe", body)
    out = memoryview(bytearray(1_000))
    store.get_range("probe", 9_001, out)
    store.delete("probe")
    directory = scratch.directory
    asked, why = s3_capabilities(scratch)
    return {
        "conditional_put": store.is_conditional,
        "ranges": bytes(out) == body[9_001:10_001],
        "o_direct": None if directory is None else _takes_o_direct(directory),
        **asked,
        "notes": why,
    }


def _takes_o_direct(directory: Path) -> bool:
    path = directory / "o_direct"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def fsync_verdict(directory: Path | None, seconds: Mapping[str, list[float]], size: int) -> str:
    """Return what the rates say about durability: a device cannot be as fast as memory."""
    if directory is None:
        return "the server's: it answers when it has stored"
    kind = file_system(directory).get("type", "")
    if kind in {"tmpfs", "ramfs"}:
        return f"no-op: {kind} keeps nothing over a reboot"
    block, into = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)  # touched: page faults are slower than disks
    copy_bytes_per_s = max(block.nbytes / _seconds(partial(np.copyto, into, block)) for _ in range(5))
    if size >= 64 << 20 and size / min(seconds["raw_write_s"]) > _TOO_FAST * copy_bytes_per_s:
        return "suspicious: durable writes as fast as copies in memory; fsync is probably not honoured"
    if median(seconds["publish_s"]) < _TOO_QUICK_S:
        return "suspicious: a durable publish took less than 30 us; fsync is probably not honoured"
    return (
        "no impossible rates (a cache with its own power, or one behind a virtual disk, cannot be detected from here)"
    )


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def s3_capabilities(scratch: Scratch) -> tuple[Mapping[str, bool | None], Mapping[str, str]]:
    """Return what was found out, and for what could not be, why.

    `conditional_multipart`: a multipart upload completed with If-None-Match is refused where the name exists.
    `server_checksums`: an object sent with a wrong CRC32 is refused. Both False on servers that ignore the request.
    """
    names = ("conditional_multipart", "server_checksums")
    if not scratch.url.startswith(("s3://", "s3a://")):
        return dict.fromkeys(names), dict.fromkeys(names, NOT_S3)
    from flashckpt.stores.s3 import S3Store

    store = S3Store(scratch.url, dict(scratch.options))
    found: dict[str, bool | None] = {}
    why: dict[str, str] = {}
    for name, ask in zip(names, (_conditional_multipart, _server_checksums), strict=True):
        where = {"Bucket": store.bucket, "Key": f"{store.prefix}/{name}"}
        try:
            found[name] = store._call(name, partial(ask, where=where))  # noqa: SLF001 -- a client with the store's own credentials
        except FlashckptError as error:
            found[name], why[name] = None, f"failed: {error.problem} {error.found}"
        store.delete(name)
    store.close()
    return found, why


async def _conditional_multipart(s3: Any, where: Mapping[str, str]) -> bool:
    await s3.put_object(**where, Body=b"first")
    upload = {**where, "UploadId": (await s3.create_multipart_upload(**where))["UploadId"]}
    try:
        part = await s3.upload_part(**upload, PartNumber=1, Body=b"second")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        try:
            await s3.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
        except Exception as error:
            if _status(error) not in (409, 412):
                raise
            await s3.abort_multipart_upload(**upload)
            return True
    except BaseException:
        await s3.abort_multipart_upload(**upload)
        raise
    return False


async def _server_checksums(s3: Any, where: Mapping[str, str]) -> bool:
    try:
        await s3.put_object(**where, Body=b"flashckpt", ChecksumCRC32="AAAAAA==")
    except Exception as error:
        if _status(error) != 400:
            raise
        return True
    return False


def _status(error: BaseException) -> int:
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
