"""Directories as a store: local disks and shared POSIX file systems (NFS, Lustre, GPFS).

Publishing is always the same four steps: write a temporary file in the same directory, fsync it,
rename or link it to its name, fsync the directory. `link` fails where the name exists, which makes
`put_if_absent` atomic; a file system without hard links is detected at the first conditional write.

What NFS does differently is met here: it repeats requests whose answer was lost, remembers for half a minute which names
were not there, keeps deleted files that are open as `.nfs*`, and calls a folder that another machine removed stale.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from flashckpt.errors import DamagedError, ObjectMissingError, RootError, StoreError
from flashckpt.faults import crash_point
from flashckpt.shm import private
from flashckpt.storage.conditional import (
    publish_unconditional,
    raise_undeleted,
    require_restartable,
    warn_unconditional,
)
from flashckpt.storage.direct_io import PAGE_BYTES, read_direct, read_file, write_durable
from flashckpt.storage.store import (
    SWEEP_AGE_S,
    TEMPORARY,
    Names,
    ObjectInfo,
    Objects,
    check_key,
    is_orphan,
    temporary_name,
)

_T = TypeVar("_T")
_DELETED_OPEN = ".nfs"
_LARGEST = 4 << 30  # of an object that is read whole: nothing that we write is as large
_ATTEMPTS = 2
_SMALL_BYTES = 256 << 10
"""Up to this size (indexes, manifests, intents) one buffered write costs less CPU than threads and aligned memory."""
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class PosixStore:
    """Objects as files under `root`, which is created by the first write or by `check`.

    Attributes:
        page_bytes: Ranges that begin at a multiple of it, and memory that does, are read without a copy on the way.
        past_cache: Whether large ranges are read from the disk although the page cache has them.
    """

    page_bytes: ClassVar = PAGE_BYTES

    def __init__(self, root: Path) -> None:
        self.root = root
        self.past_cache = False
        self.url = str(root)
        self._can_link: bool | None = None

    @property
    def is_conditional(self) -> bool:
        """Whether hard links work here, so that exactly one of several committers wins."""
        if self._can_link is None:
            self._can_link = self._probe_link()
            if not self._can_link:
                warn_unconditional(self.url)
        return self._can_link

    def check(self, *, write: bool = True) -> None:
        """Raise RootError unless the directory can be read and, with `write`, created and written."""
        if not write:
            with self._named("", "read"):
                if self.root.is_file():
                    raise RootError(f"the checkpoint root {self.url} is a file", expected="a directory")
                if not self.root.is_dir():
                    raise RootError(f"the checkpoint root {self.url} does not exist", remedy="check the path")
                next(self.root.iterdir(), None)
            return
        with self._named("", "create"):
            _make_directories(self.root)
        with self._named("", "write to"):
            path = self._temporary(self.root / "probe")
            try:
                write_durable(path, [memoryview(b"flashckpt")], None)
            finally:
                path.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        """Publish a small object by rename."""
        self._publish(key, [memoryview(data)], len(data), rename)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Publish a small object by link; False where the name exists."""
        if not self.is_conditional:
            return publish_unconditional(self, key, data)
        if (self.root / check_key(key)).exists():
            return False
        return self._publish(key, [memoryview(data)], len(data), _link)

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Stream a large object through O_DIRECT and publish it by rename."""
        self._publish(key, require_restartable(parts), nbytes, rename)

    def get(self, key: str) -> bytes:
        """Return a whole small object."""
        with self._named(key, "read"):
            path = self.root / check_key(key)
            return self._found(path.parent, lambda: private.read_file(path, most=_LARGEST, follow=True))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out`; what is not in the page cache bypasses it if the range is large."""
        with self._named(key, "read"):
            path, read = self.root / check_key(key), read_direct if self.past_cache else read_file
            count = self._found(path.parent, lambda: read(path, start, out))
        if count != len(out):
            raise DamagedError(
                f"the object {key} of {self.url} is truncated",
                found=f"{start + count} bytes",
                expected=f"at least {start + len(out)} bytes",
                remedy=f"flashckpt verify {self.url}",
            )

    def list(self, prefix: str = "") -> Objects:
        """Return the files under the root whose key starts with `prefix`."""
        with self._named(prefix, "list"):
            start = self.root / prefix.rpartition("/")[0]
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._ask_again(start.parent if start != self.root else start)
            found = list(self._walk(start, prefix))
        return sorted(found, key=lambda info: info.key)

    def folders(self, prefix: str = "") -> Names:
        """Return the directories directly under `prefix`."""
        with self._named(prefix, "list"):
            try:
                with os.scandir(self.root / prefix) as it:
                    return sorted(entry.name for entry in it if entry.is_dir())
            except OSError as error:
                _unless_missing(error)
        return []

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of a file."""
        with self._named(key, "read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path = self.root / check_key(key)
            status = self._found(path.parent, path.stat)
            return ObjectInfo(key=key, nbytes=status.st_size, mtime=status.st_mtime)
        return None

    def delete(self, key: str) -> None:
        """Remove a file, and its directory when that became empty."""
        path = self.root / check_key(key)
        with self._named(key, "delete"):
            path.unlink(missing_ok=True)
            self._remove_empty(path.parent)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove files folder by folder, each folder synced once, and folders that became empty."""
        folders: dict[Path, list[str]] = {}
        for key in keys:
            folders.setdefault((self.root / check_key(key)).parent, []).append(key)
        failed: dict[str, RootError | StoreError] = {}
        for folder, inside in folders.items():
            for key in inside:
                with _failing(failed, key), self._named(key, "delete"):
                    (self.root / key).unlink(missing_ok=True)
            with _failing(failed, inside[0]), self._named(inside[0], "delete"):
                left = self._remove_empty(folder)
                with contextlib.suppress(FileNotFoundError):
                    _sync_directory(left)
        raise_undeleted(self.url, failed)

    def _remove_empty(self, folder: Path) -> Path:
        """Remove a folder if it is empty, and its parents that are empty then; return the first that stays."""
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                break  # not empty, or somebody else was faster
            folder = folder.parent
        return folder

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        """Remove temporary files whose writer died on this machine, or which are older than `older_than_s`."""
        swept = []
        with self._named("", "sweep"):
            for folder, _, names in os.walk(self.root, onerror=_unless_missing):
                for name in names:
                    path = Path(folder) / name
                    if name.endswith(TEMPORARY) and _is_orphan(path, older_than_s):
                        with contextlib.suppress(FileNotFoundError):  # published since, by a writer that then ended
                            path.unlink()
                            swept.append(str(path.relative_to(self.root)))
        return swept

    def close(self) -> None:
        """Nothing is kept open."""

    def _found(self, folder: Path, look: Callable[[], _T]) -> _T:
        """Look, and where nothing is there look again with what the server says of the folder now."""
        try:
            return look()
        except FileNotFoundError:
            self._ask_again(folder)
            return look()

    def _ask_again(self, folder: Path) -> None:
        """Open the folders from the root down: NFS asks the server then, and else answers for 30 s from what it knew."""
        depth = len(folder.relative_to(self.root).parts)
        for name in reversed([folder, *folder.parents][: depth + 1]):
            _open_folder(name)

    def _publish(
        self, key: str, parts: Iterable[memoryview], nbytes: int | None, publish: Callable[[Path, Path], bool | None]
    ) -> bool:
        final = self.root / check_key(key)
        with self._named(key, "write"):
            for attempt in range(_ATTEMPTS):
                _make_directories(final.parent)
                path = self._temporary(final)
                try:
                    if nbytes is not None and nbytes <= _SMALL_BYTES:
                        private.write_durably(path, parts)
                    else:
                        write_durable(path, parts, nbytes)
                    crash_point("store.before-publish")
                    published = publish(path, final) is not False
                except FileNotFoundError:
                    if attempt + 1 == _ATTEMPTS:  # a sweep removed the empty directory under us: once more
                        raise
                except OSError as error:
                    if error.errno != errno.EIO or attempt + 1 == _ATTEMPTS:
                        raise  # after EIO from fsync the pages may be gone: the whole file is written again
                else:
                    crash_point("store.after-publish")
                    _sync_directory(final.parent)
                    return published
                finally:
                    path.unlink(missing_ok=True)
        raise AssertionError  # pragma: no cover -- the last attempt returned or raised

    def _temporary(self, final: Path) -> Path:
        return final.with_name(temporary_name(final.name))

    def _probe_link(self) -> bool:
        with self._named("", "write to"):
            _make_directories(self.root)
            source, target = self._temporary(self.root / "probe"), self._temporary(self.root / "probe")
            try:
                source.touch(exist_ok=False)
                os.link(source, target)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                return False
            else:
                return True
            finally:
                source.unlink(missing_ok=True)
                target.unlink(missing_ok=True)

    def _walk(self, start: Path, prefix: str) -> Iterator[ObjectInfo]:
        for folder, _, names in os.walk(start, onerror=_unless_missing):
            inside = Path(folder).relative_to(self.root).as_posix()
            for name in names:
                key = name if inside == "." else f"{inside}/{name}"
                # before it is looked at: a commit of many ranks lists one folder once for each thousand of them
                if not key.startswith(prefix) or name.endswith(TEMPORARY) or name.startswith(_DELETED_OPEN):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted while we walk
                    status = _status(f"{folder}/{name}")
                    yield ObjectInfo(key=key, nbytes=status.st_size, mtime=status.st_mtime)

    @contextlib.contextmanager
    def _named(self, key: str, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._raise(error, key, verb)

    def _raise(self, error: OSError, key: str, verb: str) -> NoReturn:
        name = f"{self.url}/{key}" if key else self.url
        found = error.strerror or str(error)
        is_gone = verb != "write" and bool(key) and _is_gone(error, self.root / key)  # who writes is not looking for it
        if isinstance(error, FileNotFoundError) or is_gone:
            raise ObjectMissingError(f"the object {key} of {self.url} is missing", found=found) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise RootError(
                f"cannot {verb} {name}",
                found=found,
                expected="a directory this user can read and write",
                remedy="check owner, mode and mount options of the checkpoint root",
            ) from error
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            expected = "a path of at most 4095 bytes, each part at most 255, through at most 40 links"
            raise RootError(f"cannot {verb} {name}", found=found, expected=expected, remedy="check the path") from error
        remedy = "check the file system of the checkpoint root"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space on it; persisting then resumes automatically"
        if error.errno == errno.EFBIG:
            remedy = "raise the limit on the size of files (ulimit -f unlimited) and start the job again"
        raise StoreError(f"cannot {verb} {name}", found=found, remedy=remedy) from error


def _status(path: str) -> os.stat_result:
    """Return what a file is; of a link to nothing, which holds its name too, the link."""
    try:
        return os.stat(path)  # noqa: PTH116 -- a directory of many ranks has 20,000 of them
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return os.lstat(path)


@contextlib.contextmanager
def _failing(failed: dict[str, RootError | StoreError], key: str) -> Iterator[None]:
    """Note the error under the key it is about."""
    try:
        yield
    except (RootError, StoreError) as error:
        failed[key] = error


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS repeats a request whose answer was lost: if the target is our file, our link succeeded. The count of links
        # would not tell: it comes out of the client's memory
        _open_folder(target.parent)
        with contextlib.suppress(FileNotFoundError):
            return source.samefile(target)
        return False
    return True


def rename(source: Path, target: Path) -> None:
    """Rename; where NFS repeats a request whose answer was lost, the source is gone and the target is our file."""
    number = source.lstat().st_ino
    try:
        source.rename(target)
    except FileNotFoundError:
        _open_folder(target.parent)
        if not os.path.lexists(target) or target.lstat().st_ino != number:
            raise


def _open_folder(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _unless_missing(error: OSError) -> None:
    """Raise errors that os.walk would swallow: an unreadable folder must not look empty."""
    if not isinstance(error, FileNotFoundError) and not _is_gone(error, Path(error.filename or "")):
        raise error


def _is_gone(error: OSError, path: Path) -> bool:
    """Return whether a file or folder of NFS fails because another machine removed it while it was open here."""
    if error.errno not in (errno.ESTALE, errno.EIO, errno.EBADF):  # the last: its server has ended since
        return False
    try:
        _open_folder(path.parent)  # or NFS answers the next call from what it kept of the folder
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # the whole export is stale
        return False
    return False


def _make_directories(path: Path) -> None:
    """Create `path` and make each new directory durable in its parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_directory(folder.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # FUSE and some network file systems have no such thing
            raise
    finally:
        os.close(fd)


def _is_orphan(path: Path, older_than_s: float) -> bool:
    try:
        return is_orphan(path.name, time.time() - path.stat().st_mtime, older_than_s)
    except FileNotFoundError:
        return False
