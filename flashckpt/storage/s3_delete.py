"""Batch deletion on S3: up to 1,000 keys in one request, whose answer reports each key that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from flashckpt.errors import ObjectMissingError, RootError, StoreError
from flashckpt.storage.s3_errors import error_code, http_status, is_transient_code, request_error

FIRST_PAUSE_S = 0.2
"""Seconds before keys that failed are sent again; each pause is twice the one before."""
_log = logging.getLogger(__name__)
_REFUSED_BATCH = ("NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML")
"""Answers of servers that have no batch delete, or want other checksums for it than the client sends."""


def has_no_batch_delete(error: BaseException) -> bool:
    """Return whether a server refused the request as such, so that keys have to be deleted one by one."""
    return error_code(error) in _REFUSED_BATCH or http_status(error) in (405, 501)


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
        missing = {key for key, (code, _) in answer.items() if code in ("NoSuchKey", "404", "NotFound")}
        again = [key for key, (code, _) in answer.items() if key not in missing and is_transient_code(code)]
        failed |= {key: answer[key] for key in answer.keys() - missing - {*again}}
        if not again:
            return failed
        left = again
        if attempt + 1 < attempts:
            _log.debug("%d keys of a batch delete are tried again: %s", len(again), answer[again[0]])
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, 10.0))
    return failed | {key: answer[key] for key in left}


def undeleted(url: str, bucket: str, key: str, code: str, message: str) -> RootError | StoreError | None:
    """Return the error of one key; None where it was not there."""
    error = request_error(url, bucket, key, code=code, status=500, found=f"{code}: {message}")
    if isinstance(error, ObjectMissingError):
        return None
    assert isinstance(error, (RootError, StoreError))
    return error
