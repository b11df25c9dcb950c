"""HDFS through fsspec's webhdfs:// client: objects are files that are renamed to their names when they are whole.

HDFS shows a file from its first byte on, so CREATE alone publishes nothing atomically. A rename does: the NameNode either
refuses it where the target exists, or replaces the target in the same step. Where its answer is lost, the number of the
file (`fileId`, which a rename does not change) says whether it was done.

The client repeats no request, waits for an answer forever, hands out the text of a DataNode's error as data, and puts
delegation tokens into the text of its errors: all of this is met here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashckpt.errors import ConfigError, FlashckptError, RootError, StoreError, is_passing_status
from flashckpt.faults import crash_point
from flashckpt.storage.conditional import delete_each, require_restartable, truncated
from flashckpt.storage.direct_io import extents
from flashckpt.storage.store import (
    PART_BYTES,
    SWEEP_AGE_S,
    TEMPORARY,
    Names,
    ObjectInfo,
    Objects,
    check_key,
    is_orphan,
    temporary_name,
)
from flashckpt.stores.fsspec_store import FsspecStore, discard

_REFUSED = ("AccessControlException", "SecurityException", "AuthorizationException", "InvalidToken", "401", "403")
_FINAL = (
    "Directory",
    "InvalidPath",
    "AlreadyExists",
    "IllegalArgument",
    "Unsupported",
    "TooLong",
)
_TOKEN = re.compile(r"(delegation|token|password)=[^&\s'\")]+")
FIRST_PAUSE_S = 0.2
WEBHDFS_OPTIONS = frozenset({
    "user", "password", "token", "kerberos", "kerb_kwargs", "proxy_to", "data_proxy", "use_https", "session_cert",
    "session_verify", "conditional", "retries", "timeout_s",
})  # fmt: skip
"""Storage options of webhdfs://: those of fsspec (which silently accepts any other name), and ours."""
_log = logging.getLogger(__name__)


class WebHdfsStore(FsspecStore):
    """Objects as files below a folder of HDFS, which is created by the first write."""

    OPTIONS = WEBHDFS_OPTIONS

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(url, options)
        self._retries = int(str(options.get("retries", 8)))
        self._timeout_s = float(str(options.get("timeout_s", 60.0)))

    @staticmethod
    def check_url(url: str) -> None:
        """Raise ConfigError for a root with a password in it."""
        user = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
        name, colon, _ = user.partition(":")
        if colon:
            raise ConfigError(
                f"the root {url.replace(user, name)} has a password in it, which logs and errors would show",
                remedy="give it as the storage option password",
            )

    def check(self, *, write: bool = True) -> None:
        """Raise RootError unless the folder can be listed and, with `write`, created and written."""
        status: dict[str, Any] | None = self._do("", lambda fs: _status(fs, self._path("")))
        if status is not None and status["type"] != "directory":
            raise RootError(f"the checkpoint root {self.url} is a file", expected="a folder")
        if status is None and not write:
            raise RootError(f"the checkpoint root {self.url} does not exist", remedy="check the path")
        self.folders()
        if write:
            self._probe()

    def put(self, key: str, data: bytes) -> None:
        """Publish a small object by a rename that replaces."""
        self.put_object(key, [memoryview(data)])

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Stream a large object, appended by 16 MiB, and publish it by a rename that replaces."""
        del nbytes
        parts = require_restartable(parts)
        self._put(key, parts, "OVERWRITE")

    def _create(self, key: str, data: bytes) -> bool:
        """Publish a small object by a rename that refuses to replace."""
        return self._put(key, [memoryview(data)], "NONE")

    def _put(self, key: str, parts: Iterable[memoryview], options: str) -> bool:
        """Write a temporary file beside the object and rename it; return whether it is the object then."""
        path, number = self._do(key, lambda fs: _write(fs, self._path(temporary_name(check_key(key))), parts))
        crash_point("store.before-publish")
        is_there: bool = False
        try:
            is_there = self._do(key, lambda fs: _publish(fs, path, self._path(key), number, options))
        finally:
            if not is_there:
                with contextlib.suppress(FlashckptError):
                    self._do(key, lambda fs: fs.rm_file(path))
        crash_point("store.after-publish")
        return is_there

    def get(self, key: str) -> bytes:
        """Return a whole small object."""
        return bytes(self._do(key, lambda fs: self._read(fs, key, 0, None)))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` by ranged reads of 16 MiB."""
        check_key(key)
        for begin, view in extents([out], PART_BYTES):
            view[:] = self._do(key, functools.partial(self._read, key=key, start=start + begin, nbytes=len(view)))

    def list(self, prefix: str = "") -> Objects:
        """Return the objects under a prefix."""
        return [info for info in super().list(prefix) if not info.key.endswith(TEMPORARY)]

    def delete(self, key: str) -> None:
        """Remove a file, and its folder when that became empty."""
        super().delete(key)
        self._do(key, lambda fs: self._remove_empty(fs, {key}))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove files, and folders that became empty."""
        delete_each(self.url, keys, super().delete)
        self._do("", lambda fs: self._remove_empty(fs, keys))

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        """Remove temporary files whose writer died on this machine, or which are older than `older_than_s`."""
        now = time.time()
        orphans = [
            info.key
            for info in super().list()
            if info.key.endswith(TEMPORARY) and is_orphan(info.key, now - info.mtime, older_than_s)
        ]
        self.delete_many(orphans)
        return orphans

    def _read(self, fs: Any, key: str, start: int, nbytes: int | None) -> bytes:
        with fs.open(self._path(check_key(key)), "rb", block_size=1) as file:  # block_size: what is read ahead
            wanted = file.size - start if nbytes is None else nbytes
            if start + wanted > file.size:
                raise truncated(self.url, key, found=f"{file.size} bytes", needed=start + wanted)
            file.seek(start)
            data: bytes = file.read(wanted)
        if len(data) != wanted:
            raise OSError(f"the answer has {len(data)} bytes in place of {wanted}")
        return data

    def _remove_empty(self, fs: Any, keys: Iterable[str]) -> None:
        """Remove the folders of these keys that are empty, and their parents that are empty then; never the root."""
        for key in {key.rpartition("/")[0] for key in keys}:
            parts = key.split("/")
            with contextlib.suppress(OSError, HdfsError):  # not empty, or somebody else was faster
                for count in range(len(parts) if key else 0, 0, -1):
                    fs.rm(self._path("/".join(parts[:count])), recursive=False)

    def _is_bucket_root(self, path: str) -> bool:
        del path
        return False

    def _path(self, key: str) -> str:
        return super()._path(key) or "/"

    def _info(self, entry: dict[str, Any]) -> ObjectInfo:
        return super()._info({**entry, "mtime": entry["modificationTime"] / 1000})

    def _open(self) -> Any:
        fs = super()._open()
        if fs.session.hooks["response"] != [_raise_refusal]:
            fs.session.request = functools.partial(fs.session.request, timeout=self._timeout_s)
            fs.session.hooks["response"] = [_raise_refusal]
        return fs

    def _do(self, key: str, work: Callable[[Any], Any]) -> Any:
        for attempt in range(self._retries):
            try:
                return super()._do(key, work)
            except StoreError as error:
                if not _may_pass(error.__cause__):
                    if isinstance(error.__cause__, HdfsError) and not error.__cause__.is_of_room:
                        raise RootError(error.problem, found=error.found) from None
                    raise
                if attempt + 1 >= self._retries:
                    raise error from None  # the text of its cause may show a token
                _log.debug("%s/%s: attempt %d failed: %s", self.url, key, attempt + 1, error)
            time.sleep(min(FIRST_PAUSE_S * 2**attempt, 10.0))
        raise AssertionError  # pragma: no cover -- retries is at least 1

    def _words(self, error: Exception) -> str:
        words = str(error) if isinstance(error, HdfsError) else super()._words(error)
        return _TOKEN.sub(r"\1=...", words)


class HdfsError(Exception):
    """An error that a NameNode or DataNode answers in place of a result, by the name of its Java class."""

    def __init__(self, name: str, message: str, *, is_final: bool = False) -> None:
        super().__init__(f"{name}: {message}")
        self.is_of_room = "QuotaExceeded" in name
        self.is_final = is_final or self.is_of_room or any(part in name for part in _FINAL)


def _raise_refusal(response: Any, *_: Any, **__: Any) -> None:
    """Raise the error that an answer is: fsspec looks at those of a NameNode only, and takes those of others for data."""
    if response.status_code < 400:
        return
    try:
        remote = response.json()["RemoteException"]
        name, message = str(remote["exception"]), str(remote["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        name, message = str(response.status_code), str(response.reason)
    if name == "FileNotFoundException":
        raise FileNotFoundError(message)
    if name in _REFUSED:
        raise PermissionError(f"{name}: {message}")
    # a gateway's own answer: what the NameNode says has the status 403 also where it may pass
    raise HdfsError(name, message, is_final=name.isdecimal() and not is_passing_status(response.status_code))


def _may_pass(error: BaseException | None) -> bool:
    """Return whether a request that failed may succeed later: requests' errors are OSError."""
    if isinstance(error, HdfsError):
        return not error.is_final
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _write(fs: Any, path: str, parts: Iterable[memoryview]) -> tuple[str, int]:
    """Write a new file; return its path and number."""
    file, nbytes = fs.open(path, "wb", block_size=PART_BYTES), 0
    try:
        for _, view in extents(parts, PART_BYTES):
            nbytes += file.write(bytes(view))
        file.close()
        status = fs.info(path)
    except BaseException:
        discard(file)
        raise
    if status["size"] != nbytes:
        discard(file)
        raise HdfsError("CREATE", f"{status['size']} of {nbytes} bytes arrived")
    return path, int(status.get("fileId") or 0)


def _publish(fs: Any, path: str, final: str, number: int, options: str) -> bool:
    """Rename a file, also one whose rename was tried before; return whether the target is this file then."""
    refused: Exception = HdfsError("RENAME", f"the server ignores renameoptions={options}", is_final=True)
    try:
        # `mv` takes no options and drops the answer
        answer = fs._call("RENAME", "put", path=path, destination=final, renameoptions=options)  # noqa: SLF001
        if not answer.content or answer.json()["boolean"]:
            return True
    except PermissionError:
        raise
    except Exception as error:  # noqa: BLE001 -- it may have been done: the target tells
        refused = error
    there = _status(fs, final)
    if there is not None and (number and there.get("fileId") == number):
        return True
    if there is not None and options == "NONE":
        return False
    if isinstance(refused, FileNotFoundError):
        raise HdfsError("RENAME", f"the temporary file was removed before: {refused}", is_final=True)
    raise refused


def _status(fs: Any, path: str) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = fs.info(path)
    except FileNotFoundError:
        return None
    return status
