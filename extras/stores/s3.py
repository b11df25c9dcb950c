"""s3:// through s3fs: its session, credentials and event loop; our own bounded, retried transfers.

Not used of s3fs: `pipe_file` (needs bytes of the whole object), barrier batches (the slowest of N
parts holds up the next N), `get_file` (a failed one leaves a right-sized file with holes). Uploads
keep at most PARTS_IN_FLIGHT parts in memory and start the next as soon as one is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from flashckpt.errors import FlashckptError, ObjectMissingError, RootError, StoreError
from flashckpt.storage.conditional import (
    PROBE,
    UnknownRequestError,
    delete_each,
    raise_undeleted,
    require_restartable,
    truncated,
)
from flashckpt.storage.direct_io import extents
from flashckpt.storage.store import (
    DELETE_BATCH,
    PART_BYTES,
    PARTS_IN_FLIGHT,
    SWEEP_AGE_S,
    Names,
    ObjectInfo,
    Objects,
    check_key,
)
from flashckpt.stores.s3_errors import (
    MISSING_KEY,
    error_code,
    has_no_batch_delete,
    http_status,
    is_transient_code,
    undeleted,
)
from flashckpt.stores.s3_session import S3Session, say_once

FIRST_PAUSE_S = 0.2
"""Seconds before keys of a batch that failed are sent again; each pause is twice the one before."""
_log = logging.getLogger(__name__)
_Parts: TypeAlias = list[dict[str, Any]]


class S3Store(S3Session):
    """Objects of one bucket under one key prefix, through s3fs."""

    def check(self, *, write: bool = True) -> None:
        """Raise RootError unless the bucket is there, the credentials hold and, with `write`, writing works."""
        self._run("", lambda s3: s3.list_objects_v2(Bucket=self.bucket, Prefix=self._key(""), MaxKeys=1))
        if write:
            key = f"{PROBE}/{secrets.token_hex(8)}"
            self.put(key, b"flashckpt")
            self.delete(key)

    def put(self, key: str, data: bytes) -> None:
        """Publish a small object by one PUT."""
        self._run(key, lambda s3: self._put(s3, self._key(check_key(key)), bytes(data)))

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Upload a large object in parts of 16 MiB, four in flight; a failed upload is aborted."""
        del nbytes
        parts = require_restartable(parts)
        self._call(key, lambda s3: self._upload(s3, self._key(check_key(key)), parts))

    def get(self, key: str) -> bytes:
        """Return a whole small object."""
        data: bytes = self._run(key, lambda s3: self._get(s3, self._key(check_key(key))))
        return data

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` by ranged reads of 16 MiB, four in flight, each retried with its body."""
        with self._shown_the_end(key, start + out.nbytes):
            self._call(key, lambda s3: self._download(s3, key, start, out.cast("B") if out.format != "B" else out))

    @contextlib.contextmanager
    def _shown_the_end(self, key: str, needed: int) -> Iterator[None]:
        """Distinguish a range past the end, to which not every server answers 416, from a failed request."""
        try:
            yield
        except ObjectMissingError:
            raise
        except (RootError, StoreError) as error:
            try:
                info = self.head(key)
            except FlashckptError:
                raise error from None
            if info is None or info.nbytes >= needed:
                raise
            raise truncated(self.url, key, found=f"{info.nbytes} bytes", needed=needed) from error

    def list(self, prefix: str = "") -> Objects:
        """Return the objects under a prefix."""

        async def pages(s3: Any) -> Objects:
            found: Objects = []
            async for page in s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            ):
                found += [
                    self._info(entry["Key"], entry["Size"], entry["LastModified"])
                    for entry in page.get("Contents", ())
                    if not entry["Key"].endswith("/")  # marks a folder: consoles and gateways make such objects
                ]
            return found

        return sorted(self._run(prefix, pages, is_paged=True), key=lambda info: str(info.key))

    def folders(self, prefix: str = "") -> Names:
        """Return the common prefixes directly under `prefix`."""
        start = self._key(prefix)

        async def pages(s3: Any) -> Names:
            found: Names = []
            paginator = s3.get_paginator("list_objects_v2")
            async for page in paginator.paginate(Bucket=self.bucket, Prefix=start, Delimiter="/"):
                found += [entry["Prefix"][len(start) :].strip("/") for entry in page.get("CommonPrefixes", ())]
            return found

        return self._not_empty(prefix, sorted(self._run(prefix, pages, is_paged=True)))

    def _not_empty(self, prefix: str, names: Names) -> Names:
        """Leave out what some servers continue to list after its last object is gone. `probe/`, which is emptied, shows it."""
        if not prefix and PROBE in names:
            self._keeps_folders = not self.list(f"{PROBE}/")
        if not self._keeps_folders:
            return names

        async def ask(s3: Any) -> Names:
            gate = asyncio.Semaphore(PARTS_IN_FLIGHT)

            async def holds(name: str) -> bool:
                start = self._key(f"{prefix}{name}/")
                async with gate:  # two: the first may be the folder's own mark
                    page = await s3.list_objects_v2(Bucket=self.bucket, Prefix=start, MaxKeys=2)
                return any(entry["Key"] != start for entry in page.get("Contents", ()))

            found = await asyncio.gather(*map(holds, names))
            return list(itertools.compress(names, found))

        left: Names = self._run(prefix, ask, is_paged=True)
        return left

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of an object."""

        async def ask(s3: Any) -> ObjectInfo | None:
            try:
                answer = await s3.head_object(Bucket=self.bucket, Key=self._key(check_key(key)))
            except Exception as error:
                if error_code(error) in MISSING_KEY:
                    return None
                raise
            return ObjectInfo(key=key, nbytes=answer["ContentLength"], mtime=answer["LastModified"].timestamp())

        info: ObjectInfo | None = self._run(key, ask)
        return info

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._run(key, lambda s3: s3.delete_object(Bucket=self.bucket, Key=self._key(check_key(key))))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, 1,000 per request; each key that the server could not delete is retried or reported."""
        if not self._has_batch_delete:
            return delete_each(self.url, keys, self.delete)
        failed: dict[str, RootError | StoreError] = {}
        for start in range(0, len(keys), DELETE_BATCH):
            batch = [check_key(key) for key in keys[start : start + DELETE_BATCH]]
            answers = self._call(batch[0], functools.partial(self._delete_batch, batch))
            if answers is None:
                say_once("%s has no batch delete: objects are deleted one by one", self.url)
                self._has_batch_delete = False
                delete_each(self.url, keys[start:], self.delete)
                break
            for full, (code, message) in answers.items():
                key = full[len(self._key("")) :]
                if (error := undeleted(self.url, self.bucket, key, code, message)) is not None:
                    failed[key] = error
        return raise_undeleted(self.url, failed)

    async def _delete_batch(self, keys: Sequence[str], s3: Any) -> dict[str, tuple[str, str]] | None:
        """Delete one batch; return code and message by full key of what failed, None where the server cannot do it."""

        async def send(left: Sequence[str]) -> Any:
            return await self._retry(keys[0], lambda: delete_batch(s3, self.bucket, left))

        try:
            return await delete_batch_retried(send, [self._key(key) for key in keys], attempts=self._retries)
        except Exception as error:
            if has_no_batch_delete(error):
                return None
            raise

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        """Abort multipart uploads under the root that began more than `older_than_s` ago."""

        async def abort(s3: Any) -> Names:
            swept = []
            async for page in s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._key("")
            ):
                for upload in page.get("Uploads") or ():
                    if time.time() - upload["Initiated"].timestamp() >= older_than_s:
                        await s3.abort_multipart_upload(
                            Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        swept.append(f"{upload['Key']} (upload {upload['UploadId']})")
            return swept

        try:
            swept: Names = self._run("", abort, is_paged=True)
        except UnknownRequestError:
            say_once("%s cannot list unfinished uploads: they are left to a lifecycle rule of the bucket", self.url)
            return []
        return swept

    # -- one operation ---------------------------------------------------------------------------

    def _create(self, key: str, data: bytes) -> bool:
        async def create(s3: Any) -> bool:
            try:
                await self._put(s3, self._key(check_key(key)), bytes(data), IfNoneMatch="*")
            except Exception as error:
                if http_status(error) == 412 or error_code(error) in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

        created: bool = self._run(key, create)
        return created

    async def _put(self, s3: Any, key: str, body: bytes, **condition: str) -> None:
        """One PUT; if the server's tag raises doubt the object is read back."""
        answer = await s3.put_object(Bucket=self.bucket, Key=key, Body=body, **condition)
        if self._tags.doubt(tag := answer.get("ETag"), body):
            name = key[len(self._key("")) :]
            self._tags.settle(self.url, name, tag=tag, body=body, stored=await self._get(s3, key))

    async def _get(self, s3: Any, key: str) -> bytes:
        body = (await s3.get_object(Bucket=self.bucket, Key=key))["Body"]
        async with body:
            return bytes(await body.read())

    async def _upload(self, s3: Any, key: str, parts: Iterable[memoryview]) -> None:
        await self._abort_earlier(s3)
        pieces = _pieces_of(parts)
        head = list(itertools.islice(pieces, 2))
        if len(head) < 2:
            await self._retry(key, lambda: self._put(s3, key, b"".join(head)))
            return
        created = await self._retry(key, lambda: s3.create_multipart_upload(Bucket=self.bucket, Key=key))
        upload = {"Bucket": self.bucket, "Key": key, "UploadId": created["UploadId"]}
        try:
            done = await self._send_parts(s3, upload, _drain(head, pieces))
            answer = await self._retry(
                key, lambda: s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
            )
            tags = [part["ETag"] for part in done]  # of each part the server has checked it: they are what it was given
            self._tags.check_parts(self.url, key, tag=answer.get("ETag"), parts=tags)
        except BaseException:
            await self._abort(s3, upload)
            raise

    async def _send_parts(self, s3: Any, upload: dict[str, Any], pieces: Iterator[bytes]) -> _Parts:
        done: _Parts = []

        async def send(number: int, body: bytes) -> None:
            answer = await self._retry(upload["Key"], lambda: s3.upload_part(**upload, PartNumber=number, Body=body))
            done.append({"PartNumber": number, "ETag": answer["ETag"]})

        pending: set[asyncio.Task[None]] = set()
        try:
            for number, body in enumerate(pieces, start=1):
                pending.add(asyncio.ensure_future(send(number, body)))
                del body
                if len(pending) >= PARTS_IN_FLIGHT:
                    finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in finished:
                        task.result()
            await asyncio.gather(*pending)
        except BaseException:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            raise
        return sorted(done, key=lambda part: part["PartNumber"])

    async def _abort(self, s3: Any, upload: dict[str, Any]) -> None:
        try:
            await s3.abort_multipart_upload(**upload)
        except Exception as error:  # noqa: BLE001 -- the first error is the one to report
            _log.debug("could not abort the upload of %s", upload["Key"], exc_info=True)
            if error_code(error) != "NoSuchUpload":
                self._unaborted.append(upload)

    async def _abort_earlier(self, s3: Any) -> None:
        """Abort failed uploads that could not be aborted then: the keys had expired, or nobody answered."""
        for _ in range(len(self._unaborted)):
            await self._abort(s3, self._unaborted.popleft())

    async def _download(self, s3: Any, key: str, start: int, out: memoryview) -> None:
        gate = asyncio.Semaphore(PARTS_IN_FLIGHT)

        async def fetch(begin: int, view: memoryview) -> None:
            async with gate:
                await self._retry(key, lambda: self._fetch(s3, key, start + begin, view))

        await asyncio.gather(*(fetch(begin, view) for begin, view in extents([out], PART_BYTES)))

    async def _fetch(self, s3: Any, key: str, start: int, view: memoryview) -> None:
        span = f"bytes={start}-{start + len(view) - 1}"
        try:
            answer = await s3.get_object(Bucket=self.bucket, Key=self._key(check_key(key)), Range=span)
        except Exception as error:
            if error_code(error) in ("InvalidRange", "416") or http_status(error) == 416:
                raise truncated(self.url, key, found=f"less than {start} bytes", needed=start + len(view)) from error
            raise
        filled, body = 0, answer["Body"]
        async with body:  # not what this gives: before aiobotocore 3 it is another object, which reads no part
            while filled < len(view) and (block := await body.read(min(1 << 20, len(view) - filled))):
                view[filled : filled + len(block)] = block
                filled += len(block)
        if filled != len(view):
            whole = int((answer.get("ContentRange") or "/0").rpartition("/")[2] or 0)
            if whole >= start + len(view):
                raise ConnectionError(f"the connection ended {len(view) - filled} bytes early")  # retried
            raise truncated(self.url, key, found=f"{start + filled} bytes", needed=start + len(view))

    def _info(self, key: str, nbytes: int, modified: Any) -> ObjectInfo:
        return ObjectInfo(key=key[len(self._key("")) :], nbytes=nbytes, mtime=modified.timestamp())


def _pieces_of(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """Cut and join parts into bytes of PART_BYTES: S3 wants every part but the last at 5 MiB or more."""
    buffer = bytearray()
    for _, view in extents(parts, PART_BYTES):
        if not buffer and len(view) == PART_BYTES:
            yield bytes(view)
            continue
        buffer += view
        while len(buffer) >= PART_BYTES:
            yield bytes(memoryview(buffer)[:PART_BYTES])
            del buffer[:PART_BYTES]
    if buffer:
        yield bytes(buffer)


def _drain(head: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces read ahead, letting go of each, then the rest: memory stays bounded."""
    while head:
        yield head.pop(0)
    yield from rest


async def delete_batch(s3: Any, bucket: str, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Send one request; return (code, message) of each key that was not deleted."""
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    answer = await s3.delete_objects(Bucket=bucket, Delete=wanted)
    return {
        str(one.get("Key", "")): (str(one.get("Code", "")), str(one.get("Message", "")))
        for one in answer.get("Errors") or ()
    }


async def delete_batch_retried(
    send: Callable[[Sequence[str]], Any], keys: Sequence[str], *, attempts: int
) -> dict[str, tuple[str, str]]:
    """Send a batch, and again those of its keys whose failure may pass; return what failed in the end.

    Args:
        send: Sends one request, and is retried as a whole inside.
        keys: At most 1,000.
        attempts: Requests in all.
    """
    failed: dict[str, tuple[str, str]] = {}
    left = list(keys)
    for attempt in range(attempts):
        answer = await send(left)
        missing = {key for key, (code, _) in answer.items() if code in MISSING_KEY}
        again = [key for key, (code, _) in answer.items() if key not in missing and is_transient_code(code)]
        failed |= {key: answer[key] for key in answer.keys() - missing - {*again}}
        if not again:
            return failed
        left = again
        if attempt + 1 < attempts:
            _log.debug("%d keys of a batch delete are tried again: %s", len(again), answer[again[0]])
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, 10.0))
    return failed | {key: answer[key] for key in left}
