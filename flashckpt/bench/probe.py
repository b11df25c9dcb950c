"""What an S3 server does with requests that flashckpt does not rely on, so that a user knows whom they could trust."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flashckpt.bench.scratch import Scratch
from flashckpt.errors import FlashckptError

NOT_S3 = "not tried: no S3 server"


def s3_capabilities(scratch: Scratch) -> tuple[Mapping[str, bool | None], Mapping[str, str]]:
    """Return what was found out, and for what could not be, why.

    `conditional_multipart`: a multipart upload completed with If-None-Match is refused where the name exists.
    `server_checksums`: an object sent with a wrong CRC32 is refused. Both False on servers that ignore the request.
    """
    names = ("conditional_multipart", "server_checksums")
    if not scratch.url.startswith(("s3://", "s3a://")):
        return dict.fromkeys(names), dict.fromkeys(names, NOT_S3)
    from flashckpt.storage.s3 import S3Store

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
