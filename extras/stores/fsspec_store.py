"""Every other fsspec protocol (gs://, az://, memory://, ...) by its common file system calls.

`mode="create"` is how fsspec spells a conditional write; if an implementation does not know or
does not honour it, the probe notices and the single-writer rule of `conditional` applies.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flashckpt.errors import (
    ConfigError,
    FlashckptError,
    ObjectMissingError,
    RootError,
    StoreError,
    http_status,
    may_pass,
)
from flashckpt.storage.conditional import ProbedStore, require_restartable, truncated
from flashckpt.storage.direct_io import extents
from flashckpt.storage.store import PART_BYTES, SWEEP_AGE_S, Names, ObjectInfo, Objects, check_key

_OF_GCSFS = ("Forbidden", "Bad Request")
"""How gcsfs begins its errors for 403 and 400, which are an OSError and a ValueError without a number."""


class FsspecStore(ProbedStore):
    """Objects under one fsspec URL; the file system is opened by the first call in each process."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._options = dict(options)
        super().__init__(url.rstrip("/"), self._options.pop("conditional", None))
        for name in ("retries", "timeout_s"):  # s3:// only: these file systems have their own settings
            self._options.pop(name, None)
        self._fs: Any = None
        self._root = ""
        self._pid = 0

    def check(self, *, write: bool = True) -> None:
        """Raise RootError unless the root can be listed and, with `write`, written."""
        if not self.folders():
            self._do("", self._require_bucket)
        if write:
            self._probe()

    def put(self, key: str, data: bytes) -> None:
        """Publish a small object."""
        self._do(key, lambda fs: self._pipe(fs, key, data))

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Stream a large object through the file system's own buffered writer, 16 MiB at a time."""
        del nbytes
        parts = require_restartable(parts)

        def send(fs: Any) -> None:
            self._make_parent(fs, key)
            if self._in_memory():  # shows a file from its first byte and has no way to take it back
                fs.pipe_file(self._path(key), b"".join(view for _, view in extents(parts, PART_BYTES)))
                return
            file = fs.open(self._path(key), "wb", block_size=PART_BYTES)
            try:
                for _, view in extents(parts, PART_BYTES):
                    file.write(bytes(view))
            except BaseException:
                discard(file)
                raise
            file.close()

        self._do(key, send)

    def get(self, key: str) -> bytes:
        """Return a whole small object."""
        return bytes(self._do(key, lambda fs: fs.cat_file(self._path(key))))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` by ranged reads of 16 MiB."""
        for begin, view in extents([out], PART_BYTES):
            at = start + begin
            try:
                data = self._do(key, functools.partial(_cat, self._path(key), at, at + len(view)))
            except (RootError, StoreError):  # a range past the end: each service reports it differently
                info = self.head(key)
                if info is None or info.nbytes >= at + len(view):
                    raise
                raise truncated(self.url, key, found=f"{info.nbytes} bytes", needed=start + len(out)) from None
            if len(data) != len(view):
                raise truncated(self.url, key, found=f"{at + len(data)} bytes", needed=start + len(out))
            view[:] = data

    def list(self, prefix: str = "") -> Objects:
        """Return the objects under a prefix."""

        def find(fs: Any) -> Objects:
            fs.invalidate_cache()
            base = self._path(prefix.rpartition("/")[0])
            found = [self._info(entry) for entry in self._files(fs, base)]
            return sorted((info for info in found if info.key.startswith(prefix)), key=lambda info: info.key)

        infos: Objects = self._do(prefix, find)
        return infos

    def folders(self, prefix: str = "") -> Names:
        """Return the folders directly under `prefix`."""

        def names(fs: Any) -> Names:
            fs.invalidate_cache()
            base = self._path(prefix.rstrip("/"))
            try:
                entries = fs.ls(base, detail=True)
            except FileNotFoundError:
                if self._is_bucket_root(base):
                    raise
                return []
            return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory")

        if self._in_memory():  # keeps empty directories, which no object store has
            inside = (info.key[len(prefix) :] for info in self.list(prefix))
            return sorted({key.partition("/")[0] for key in inside if "/" in key})
        found: Names = self._do(prefix, names)
        return found

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of an object."""

        def ask(fs: Any) -> ObjectInfo | None:
            fs.invalidate_cache()
            try:
                entry = fs.info(self._path(check_key(key)))
            except FileNotFoundError:
                return None
            return self._info(entry) if entry["type"] == "file" else None

        info: ObjectInfo | None = self._do(key, ask)
        return info

    def delete(self, key: str) -> None:
        """Remove an object."""

        def remove(fs: Any) -> None:
            try:
                fs.rm_file(self._path(check_key(key)))
            except FileNotFoundError:
                pass

        self._do(key, remove)

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        """Nothing: fsspec has no common call for unfinished uploads (use a lifecycle rule, see docs/storage.md)."""
        del older_than_s
        return []

    def close(self) -> None:
        """Forget the file system; the next call opens another."""
        self._fs = None

    def _create(self, key: str, data: bytes) -> bool:
        def create(fs: Any) -> bool:
            self._make_parent(fs, key)
            try:
                fs.pipe_file(self._path(key), bytes(data), mode="create")
            except FileExistsError:
                return False
            except TypeError:  # an implementation that does not know the mode
                fs.pipe_file(self._path(key), bytes(data))
            return True

        created: bool = self._do(key, create)
        return created

    def _pipe(self, fs: Any, key: str, data: bytes) -> None:
        self._make_parent(fs, key)
        fs.pipe_file(self._path(key), bytes(data))

    def _require_bucket(self, fs: Any) -> None:
        """Raise FileNotFoundError if the bucket is known not to exist: otherwise it looks like an empty root."""
        if _is_object_store(fs):
            bucket = self._root.partition("/")[0]
            try:
                there = fs.exists(bucket)
            except Exception:  # noqa: BLE001 -- the right to look at the bucket itself is not needed for anything else
                return
            if not there:
                raise FileNotFoundError(f"no bucket or container {bucket}")

    def _make_parent(self, fs: Any, key: str) -> None:
        if _is_object_store(fs):  # has no folders; some implementations would make a missing bucket instead
            return
        parent = self._path(check_key(key)).rpartition("/")[0]
        if not self._is_bucket_root(parent):
            fs.makedirs(parent, exist_ok=True)

    def _files(self, fs: Any, base: str) -> Iterable[dict[str, Any]]:
        if not _is_object_store(fs):
            return _walk(fs, base)
        found: dict[str, Any] = fs.find(base, detail=True) if fs.exists(base) or self._is_bucket_root(base) else {}
        return found.values()

    def _in_memory(self) -> bool:
        return self.url.startswith("memory:")

    def _is_bucket_root(self, path: str) -> bool:
        return "/" not in path.strip("/") and not self._in_memory()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _info(self, entry: dict[str, Any]) -> ObjectInfo:
        name = entry["name"].removeprefix("/") if not self._root.startswith("/") else entry["name"]
        modified = next((entry[k] for k in ("mtime", "updated", "last_modified", "created") if entry.get(k)), 0.0)
        stamp = modified.timestamp() if hasattr(modified, "timestamp") else modified
        mtime = float(stamp) if isinstance(stamp, (int, float)) else 0.0
        return ObjectInfo(key=name[len(self._root) :].lstrip("/"), nbytes=int(entry["size"]), mtime=mtime)

    def _open(self) -> Any:
        if self._fs is None or self._pid != os.getpid():
            import fsspec

            try:
                options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
                self._fs, path = fsspec.url_to_fs(self.url, **options)
            except (ImportError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"the root {self.url} cannot be opened", found=str(error), remedy="install the package it names"
                ) from error
            self._root, self._pid = path.rstrip("/"), os.getpid()
        return self._fs

    def _words(self, error: Exception) -> str:
        """Return what is shown of an error of the file system."""
        return f"{type(error).__name__}: {error}"

    def _do(self, key: str, work: Callable[[Any], Any]) -> Any:
        fs = self._open()
        try:
            return work(fs)
        except FlashckptError:
            raise
        except FileNotFoundError as error:
            if not key:
                raise RootError(f"the root {self.url} does not exist", found=str(error)) from error
            raise ObjectMissingError(f"the object {key} of {self.url} is missing", found=str(error)) from error
        except PermissionError as error:
            raise RootError(
                f"access to {self.url} was refused", found=str(error), remedy="renew or correct the credentials"
            ) from error
        except Exception as error:
            is_final = (http_status(error) or str(error).startswith(_OF_GCSFS)) and not may_pass(error)
            kind: type[FlashckptError] = RootError if is_final else StoreError
            raise kind(f"the request for {key or 'the root'} of {self.url} failed", found=self._words(error)) from error


def _cat(path: str, start: int, end: int, fs: Any) -> bytes:
    return bytes(fs.cat_file(path, start=start, end=end))


def _walk(fs: Any, folder: str) -> Iterator[dict[str, Any]]:
    """Find files as `fs.find` does, which takes folders that cannot be read for empty ones."""
    try:
        entries = fs.ls(folder, detail=True)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry["type"] == "directory":
            yield from _walk(fs, entry["name"])
        else:
            yield entry


def _is_object_store(fs: Any) -> bool:
    names = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    return bool(names & {"gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2"})


def discard(file: Any) -> None:
    """Drop a file that is being written without publishing what it holds."""
    with contextlib.suppress(Exception):  # many implementations have no discard; then only the local state is dropped
        file.discard()
    file.closed = True  # else its destructor would publish what is in it
