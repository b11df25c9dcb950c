"""One root of s3:// as s3fs' client sees it: where it is, its session and event loop, retries, errors."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from flashckpt.errors import ConfigError, FlashckptError, StoreError
from flashckpt.storage.conditional import ProbedStore
from flashckpt.stores.s3_address import S3Address, address_of
from flashckpt.stores.s3_errors import (
    STALE,
    elsewhere,
    error_code,
    is_network,
    is_transient,
    translate,
    unknown_place,
    wants_checksum,
)

_log = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{32}")
_OF_PARTS = re.compile(r"[0-9a-f]{32}-\d+")


def split_s3(url: str) -> tuple[str, str]:
    """Return (bucket, key prefix without slashes around it) of an s3:// URL."""
    parts = urlsplit(url)
    if not parts.netloc:
        raise ConfigError(f"{url} names no bucket", expected="s3://bucket/path")
    return parts.netloc, parts.path.strip("/")


class S3Session(ProbedStore):
    """The requests of a store, without what they say."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._options = dict(options)
        super().__init__(url.rstrip("/"), self._options.pop("conditional", None))
        self.bucket, self.prefix = split_s3(url)
        self._retries = int(self._options.pop("retries", 8))
        self._timeout_s = float(self._options.pop("timeout_s", 60.0))
        self._tags = Tags()
        self._unaborted: deque[dict[str, Any]] = deque(maxlen=64)  # failed uploads; what it forgets, the sweep finds
        self._has_batch_delete = True
        self._keeps_folders = False
        self._checksums = "when_required"
        self._fs: Any = None
        self._pid = 0

    @functools.cached_property
    def address(self) -> S3Address:
        """Where the bucket is."""
        try:
            return address_of(self.bucket, self._options)
        except ValueError as error:
            raise unknown_place(self.url, error) from error
        except Exception as error:
            raise translate(error, self.url, self.bucket, "") from error

    def close(self) -> None:
        """Forget the session; the next call opens another."""
        fs, self._fs = self._fs, None
        if fs is not None and self._pid == os.getpid():
            from fsspec.asyn import sync

            async def close_client() -> None:
                client = await fs.get_s3(self.bucket)
                await client.close()

            try:
                sync(fs.loop, close_client, timeout=10)
            except Exception:  # noqa: BLE001 -- the connections die with the process at the latest
                _log.debug("closing the S3 session failed", exc_info=True)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _run(self, key: str, ask: Callable[[Any], Awaitable[Any]], *, is_paged: bool = False) -> Any:
        """Run one small request, or one paged listing, with retries."""
        return self._call(key, lambda s3: self._retry(key, lambda: ask(s3), is_paged=is_paged))

    def _call(self, key: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `work(client)` on the event loop of s3fs and translate its errors."""
        from fsspec.asyn import sync

        fs = self._open()
        complete = functools.partial(_with_additional, {**fs.s3_additional_kwargs, **fs.req_kw})

        async def whole() -> Any:
            try:
                await fs.set_session()
            except ValueError as error:
                raise unknown_place(self.url, error) from error
            client = await fs.get_s3(self.bucket)
            client.meta.events.register("provide-client-params.s3", complete, unique_id="flashckpt")  # once per client
            return await work(client)

        try:
            return sync(fs.loop, whole)
        except FlashckptError:
            raise
        except RecursionError as error:  # botocore asks where the bucket is, is redirected, asks again, ...
            raise elsewhere(self.url, self.bucket, f"{self.address} redirects every request") from error
        except Exception as error:
            if not (error_code(error) or is_network(error)):
                raise
            if wants_checksum(error_code(error), str(error)) and self._checksums == "when_required":
                self._checksums, self._fs = "when_supported", None
                return self._call(key, work)
            if error_code(error) in STALE:
                self._fs = None  # the next request asks for credentials again
            raise translate(error, self.url, self.bucket, key) from error

    def _open(self) -> Any:
        if self._fs is None or self._pid != os.getpid():
            import s3fs

            options = dict(self._options)
            config = {
                "request_checksum_calculation": self._checksums,
                "response_checksum_validation": "when_required",
                "max_pool_connections": 64,
                "connect_timeout": min(10.0, self._timeout_s),
                "read_timeout": self._timeout_s,
                "retries": {"mode": "standard", "total_max_attempts": 1},  # ours below cover the body too
            }
            options["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
            try:
                self._fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **options)
            except TypeError as error:
                raise ConfigError(f"unknown storage option for {self.url}", found=str(error)) from error
            self._fs.retries = 1
            self._pid = os.getpid()
        return self._fs

    async def _retry(self, key: str, ask: Callable[[], Awaitable[Any]], *, is_paged: bool = False) -> Any:
        limit_s = None if is_paged else 2 * self._timeout_s  # pages are GETs, each under read_timeout
        for attempt in range(self._retries):
            try:
                # aiohttp waits for "100 Continue" without a limit: a server that stalls there would block us forever
                return await asyncio.wait_for(_as_coroutine(ask), limit_s)
            except FlashckptError:
                raise
            except Exception as error:
                if attempt + 1 >= self._retries or not is_transient(error):
                    raise
                _log.debug("%s/%s: attempt %d failed: %s", self.url, key, attempt + 1, error)
                await asyncio.sleep(min(0.2 * 2**attempt, 10.0))
        raise AssertionError  # pragma: no cover -- retries is at least 1


def _with_additional(additional: dict[str, Any], params: dict[str, Any], model: Any, **_: object) -> dict[str, Any]:
    """Return the parameters of a request with those of `s3_additional_kwargs` and `requester_pays` that it takes."""
    return {**{name: value for name, value in additional.items() if name in model.input_shape.members}, **params}


@functools.cache
def say_once(text: str, url: str) -> None:
    """Log what a server lacks, once per process: stores are opened again and again."""
    _log.warning(text, url)


async def _as_coroutine(ask: Callable[[], Awaitable[Any]]) -> Any:
    return await ask()


class Tags:
    """The knowledge about one server's tags; None: nothing yet, True: they are MD5 digests, False: they are not."""

    def __init__(self) -> None:
        self.are_digests: bool | None = None

    def doubt(self, tag: str | None, body: bytes) -> bool:
        """Return whether an object must be read back: its tag is not the digest of `body`, and tags may be digests here."""
        text = (tag or "").strip('"').lower()
        if self.are_digests is False or not _DIGEST.fullmatch(text):
            return False
        if text != _md5(body).hexdigest():
            return True
        self.are_digests = True
        return False

    def settle(self, url: str, key: str, *, tag: str | None, body: bytes, stored: bytes) -> None:
        """Resolve a doubt with the bytes that were read back.

        Raises:
            StoreError: They differ.
        """
        if stored == body:
            if self.are_digests is None:
                self.are_digests = False
            return
        raise StoreError(
            f"the server of {url} holds other bytes under {key} than were sent",
            found=f"{len(stored)} bytes, ETag {tag}",
            expected=f"{len(body)} bytes, MD5 {_md5(body).hexdigest()}",
            state="The object counts as not written.",
            remedy="persisting is retried; if this persists, check the server and the network path to it",
        )

    def check_parts(self, url: str, key: str, *, tag: str | None, parts: Sequence[str]) -> None:
        """Check the tag of an object that was assembled from parts with these tags.

        Raises:
            StoreError: It belongs to other parts.
        """
        text, digests = (tag or "").strip('"').lower(), [part.strip('"').lower() for part in parts]
        if self.are_digests is not True or not _OF_PARTS.fullmatch(text) or not all(map(_DIGEST.fullmatch, digests)):
            return
        expected = f"{_md5(b''.join(map(bytes.fromhex, digests))).hexdigest()}-{len(parts)}"
        if text != expected:
            raise StoreError(
                f"the server of {url} assembled {key} from other parts than were sent",
                found=f"ETag {text}",
                expected=f"ETag {expected}",
                state="The object counts as not written.",
                remedy="persisting is retried; if this persists, check the server",
            )


def _md5(data: bytes) -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)
