"""Files in folders of a root, for a library that writes files and renames their folder: found damaged or whole, committed or not there.

    data/FOLDER/NAME.TOKEN.N   64 MiB of a file, written once, never changed; FOLDER is quoted
    FOLDER/NAME.file           the record of a file that is written: its parts, and a digest for every 4 MiB of them
    FOLDER/MANIFEST            all records of a folder, by one conditional write: from then on it is there, and does not change
    data/FOLDER/of.OTHER       the manifest of OTHER needs parts that are here, once it is there

A renamed folder keeps its parts where they are: no store but a file system can rename.
"""

from __future__ import annotations

import errno
import io
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from typing_extensions import Buffer

from flashckpt.core.records import Record, digest, pack, seal, unpack, unseal
from flashckpt.environment import env
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.conditional import PROBE
from flashckpt.storage.store import SWEEP_AGE_S, Store

PART_BYTES = 64 << 20
"""Bytes of an object: what a writer holds in memory of a file, whatever its size."""
BLOCK_BYTES = 4 << 20
"""Bytes per digest: the least that is read."""
_RECORD, _MANIFEST, _DATA, _OF = ".file", "MANIFEST", "data", "of."


@dataclass(frozen=True)
class _File:
    world: str = ""
    """Ranks of the job that wrote it."""
    parts: tuple[list[Any], ...] = ()
    """Key, bytes and digests of each."""


@dataclass(frozen=True)
class _Folder:
    token: str
    files: dict[str, Any]


class CommittedFiles:
    """Files of a root by their paths below it, "" for the root itself.

    Args:
        store: The root.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._manifests: dict[str, tuple[Any, dict[str, _File]]] = {}

    def find(self, path: str) -> _File:
        """Return the record of a file; FileNotFoundError where there is none."""
        try:
            return self._record(f"{path}{_RECORD}")
        except ObjectMissingError:
            place = PurePosixPath(path)
        for folder in place.parents:
            if (file := self._manifest(str(folder)).get(str(place.relative_to(folder)))) is not None:
                return file
        raise FileNotFoundError(errno.ENOENT, "no such file in a committed folder", f"{self.store.url}/{path}")

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder of this path."""
        try:
            self.find(path)
        except FileNotFoundError:
            return self.is_folder(path)
        return True

    def is_folder(self, path: str) -> bool:
        """Return whether a folder has something in it; the root is always there."""
        return path in ("", ".") or bool(self.names(path))

    def names(self, path: str) -> list[str]:
        """Return the names of files and folders directly in a folder."""
        if path in ("", "."):
            return [name for name in self.store.folders() if name not in (_DATA, PROBE) and self.names(name)]
        keys = [info.key[len(path) + 1 :] for info in self._records(f"{path}/", _MANIFEST)]
        found = {key.partition("/")[0].removesuffix(_RECORD) for key in keys}
        place = PurePosixPath(path)
        for folder in (place, *place.parents):
            inner = "" if folder == place else f"{place.relative_to(folder)}/"
            below = (name[len(inner) :] for name in self._manifest(str(folder)) if name.startswith(inner))
            found |= {name.partition("/")[0] for name in below}
        return sorted(found - {_MANIFEST})

    def write(self, path: str) -> FileWriter:
        """Return a stream; at the end of its `with` block the file is there, and replaces one of a folder that is not committed."""
        return FileWriter(self, path)

    def read(self, path: str) -> FileReader:
        """Return a stream over a file."""
        return FileReader(self.store, path, self.find(path))

    def delete(self, path: str) -> None:
        """Remove a file from a folder that is not committed."""
        self._refuse_committed(path)
        file = self.find(path)
        self.store.delete(f"{path}{_RECORD}")
        self._drop(path, file)

    def rename_file(self, path: str, to: str) -> None:
        """Give a file another name in its folder, in place of what has it."""
        if PurePosixPath(path).parent != PurePosixPath(to).parent:
            raise OSError(errno.EXDEV, "a file can be renamed within its folder only", path, None, to)
        if self.is_folder(to):
            raise IsADirectoryError(errno.EISDIR, "a folder has this name", to)
        self._refuse_committed(path)
        self.publish(to, self.find(path))
        if path != to:
            self.store.delete(f"{path}{_RECORD}")

    def publish(self, path: str, file: _File) -> None:
        """Write the record of a file whose parts are durable."""
        self._refuse_committed(path)
        try:
            before = self._record(f"{path}{_RECORD}")
        except ObjectMissingError:
            before = _File()
        self.store.put(f"{path}{_RECORD}", seal(pack(file)))
        self._drop(path, before)

    def _drop(self, path: str, file: _File) -> None:
        """Remove the parts of a file that was replaced or deleted, but for those that are another's.

        Whoever renamed it, or committed its folder, may have died before this name was gone.
        """
        if file.parts:
            folder = path[: path.rfind("/") + 1]
            others = map(self._record, (info.key for info in self._records(folder)))
            needed = {key for other in others for key in _keys(other)}
            for place in _places([file]):
                needed |= self._committed(place, self.store.list(f"{place}/{_OF}"))
            self.store.delete_many([key for key in _keys(file) if key not in needed])

    def commit(self, folder: str, to: str) -> None:
        """Rename a folder, by one conditional write.

        Raises:
            OSError: There is a file or a folder of this name, with its errno; or nothing to rename.
        """
        infos = self._records(f"{folder}/")
        files = {info.key[len(folder) + 1 :].removesuffix(_RECORD): self._record(info.key) for info in infos}
        # of an attempt by another number of ranks that died: this one has not written them
        files = {name: file for name, file in files.items() if file.world == _world()}
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no such folder", f"{self.store.url}/{folder}")
        if self.exists(to):
            raise _occupied(to)
        packed = {name: pack(file) for name, file in files.items()}
        manifest = seal(pack(_Folder(secrets.token_hex(8), packed)))
        for place in _places(files.values()):
            self.store.put(f"{place}/{_OF}{quote(to, safe='')}", manifest)
        crash_point("folder.before-commit")
        created = self.store.put_if_absent(f"{to}/{_MANIFEST}", manifest)
        if not created and self.store.get(f"{to}/{_MANIFEST}") != manifest:  # else the answer to ours was lost
            raise _occupied(to)
        crash_point("folder.after-commit")
        self.store.delete_many([info.key for info in infos])
        for place in {*_places(files.values()), f"{_DATA}/{quote(folder, safe='')}"}:
            self._clean(place, older_than_s=0.0)

    def remove(self, folder: str) -> None:
        """Remove a folder with all below it: first what makes it one. Also what was left by earlier ones that died."""
        infos = self._records(f"{folder}/", _MANIFEST)
        manifests = [info.key for info in infos if not info.key.endswith(_RECORD)]
        files = [file for key in manifests for file in self._manifest(key.rpartition("/")[0]).values()]
        files += [self._record(info.key) for info in infos if info.key.endswith(_RECORD)]
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no such folder", f"{self.store.url}/{folder}")
        mine = _places(files)
        for place in mine:  # who committed it may have died before its temporary name was gone
            self._clean(place, older_than_s=SWEEP_AGE_S)
        self.store.delete_many(manifests)
        crash_point("folder.during-removal")
        self.store.delete_many([info.key for info in infos if info.key.endswith(_RECORD)])
        for name in self.store.folders(f"{_DATA}/"):
            place = f"{_DATA}/{name}"
            self._clean(place, older_than_s=0.0 if place in mine else SWEEP_AGE_S)

    def _clean(self, place: str, *, older_than_s: float) -> None:
        """Remove parts that neither a committed folder needs nor a record names."""
        infos = self.store.list(f"{place}/")
        needed = self._committed(place, infos)
        folder = unquote(place.removeprefix(f"{_DATA}/"))
        for info in self._records(f"{folder}/"):
            keys = _keys(self._record(info.key))
            if keys <= needed:  # committed, and who did it died before it removed this
                self.store.delete(info.key)
            needed |= keys
        left = [info for info in infos if info.key not in needed]
        if not older_than_s or all(info.mtime < time.time() - older_than_s for info in infos):  # else: is being written
            self.store.delete_many([info.key for info in left])

    def _committed(self, place: str, infos: Iterable[Any]) -> set[str]:
        """Return the keys of data that committed folders need, of all that lies in a place."""
        needed = set[str]()
        for info in infos:
            name = info.key[len(place) + 1 :]
            owner = unquote(name.removeprefix(_OF))
            if name.startswith(_OF) and (files := self._manifest(owner)):
                needed |= {info.key, *(key for file in files.values() for key in _keys(file))}
        return needed

    def _refuse_committed(self, path: str) -> None:
        for folder in PurePosixPath(path).parents:
            if str(PurePosixPath(path).relative_to(folder)) in self._manifest(str(folder)):
                raise PermissionError(errno.EROFS, "a file of a committed folder does not change", path)

    def _records(self, prefix: str, *others: str) -> list[Any]:
        """Return the objects under a prefix that are records, or have one of the other names."""
        infos = [info for info in self.store.list(prefix) if not info.key.startswith(f"{_DATA}/")]
        return [one for one in infos if one.key.endswith(_RECORD) or one.key.rpartition("/")[2] in others]

    def _record(self, key: str) -> _File:
        return self._unpacked(_File, self._fields(key), key)

    def _fields(self, key: str) -> dict[str, Any]:
        return unseal(self.store.get(key), f"{self.store.url}/{key}")

    def _unpacked(self, kind: type[Record], fields: dict[str, Any], key: str) -> Record:
        try:
            return unpack(kind, fields)
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{self.store.url}/{key} is damaged", found=str(error)) from error

    def _manifest(self, folder: str) -> dict[str, _File]:
        """Return the files of a committed folder by their names; {} for another one."""
        if folder in ("", ".") or (info := self.store.head(key := f"{folder}/{_MANIFEST}")) is None:
            return {}
        if self._manifests.get(folder, (None,))[0] != info:
            found = self._unpacked(_Folder, self._fields(key), key).files
            self._manifests = {folder: (info, {name: self._unpacked(_File, file, key) for name, file in found.items()})}
        return self._manifests[folder][1]


class FileWriter(io.IOBase):
    """A file that is written. Nothing of it is there before the end of the `with` block, nor if that raises."""

    def __init__(self, files: CommittedFiles, path: str) -> None:
        self._files, self._path = files, path
        folder, _, name = path.rpartition("/")
        self._stem = f"{_DATA}/{quote(folder, safe='')}/{name}.{secrets.token_hex(8)}"
        self._parts: list[list[Any]] = []
        self._held = bytearray()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Buffer) -> int:
        """Take bytes: they are copied."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            self._held += view[start : start + PART_BYTES]
            if len(self._held) >= PART_BYTES:
                self._send(PART_BYTES)
        return len(view)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish the file, unless something was raised."""
        if kind is None:
            if self._held:
                self._send(len(self._held))
            self._files.publish(self._path, _File(_world(), tuple(self._parts)))

    def _send(self, nbytes: int) -> None:
        part, key = bytes(memoryview(self._held)[:nbytes]), f"{self._stem}.{len(self._parts)}"
        del self._held[:nbytes]
        view = memoryview(part)
        digests = [digest(view[start : start + BLOCK_BYTES]) for start in range(0, nbytes, BLOCK_BYTES)]
        self._files.store.put_object(key, [view], nbytes)
        self._parts.append([key, nbytes, digests])
        crash_point("folder.after-part")


class FileReader(io.RawIOBase):
    """A file that is read, from any position: every byte that it returns was verified.

    Args:
        store: The root.
        path: Of the file, for people.
        file: Its record.
    """

    def __init__(self, store: Store, path: str, file: _File) -> None:
        self._store, self._path, self._parts = store, path, file.parts
        self.nbytes: int = sum(nbytes for _, nbytes, _ in self._parts)
        self._at = 0
        self._held: tuple[int, int, bytearray] = (-1, 0, bytearray())  # part, where it begins there, blocks

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence])
        return self._at

    def readall(self) -> bytes:
        """Return what follows."""
        out = bytearray(max(0, self.nbytes - self._at))
        view = memoryview(out)
        while view and (filled := self.readinto(view)):
            view = view[filled:]
        return bytes(out)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, to the end of a part at most."""
        with memoryview(buffer) as given:
            wanted = given.nbytes
        found = self._next(wanted)  # an error must keep no view of the buffer: its owner could not close it
        with memoryview(buffer) as given, given.cast("B") as out:
            out[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _next(self, nbytes: int) -> memoryview:
        """Return so many bytes from the position on, or those to the end of a part."""
        start, number = self._at, 0
        while number < len(self._parts) and start >= self._parts[number][1]:
            start -= self._parts[number][1]
            number += 1
        if number == len(self._parts) or not nbytes:
            return memoryview(b"")
        stop = min(start + nbytes, self._parts[number][1])
        first = start // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._parts[number][1])
        if self._held[0] != number or not self._held[1] <= first < end <= self._held[1] + len(self._held[2]):
            data = bytearray(end - first)
            self._read(number, first, memoryview(data))
            self._held = (number, first, data)
        return memoryview(self._held[2])[start - self._held[1] : stop - self._held[1]]

    def _read(self, number: int, start: int, out: memoryview) -> None:
        """Fill `out` with whole blocks of a part, verified."""
        key, _, digests = self._parts[number]
        self._store.get_range(key, start, out)
        for at in range(0, len(out), BLOCK_BYTES):
            expected = digests[(start + at) // BLOCK_BYTES]
            if (found := digest(out[at : at + BLOCK_BYTES])) != expected:
                raise DamagedError(
                    f"{self._path} of {self._store.url} is damaged",
                    found=f"digest {found:016x} at byte {start + at} of {key}",
                    expected=f"digest {expected:016x}",
                    state="Nothing was taken from it.",
                    remedy="load an older step",
                )


def _places(files: Iterable[_File]) -> set[str]:
    """Return the folders of data that files have parts in."""
    return {key.rpartition("/")[0] for file in files for key in _keys(file)}


def _keys(file: _File) -> set[str]:
    return {key for key, *_ in file.parts}


def _world() -> str:
    return str(env.WORLD_SIZE) if env.is_set("WORLD_SIZE") else ""


def _occupied(to: str) -> FileExistsError:
    return FileExistsError(errno.ENOTEMPTY, "a folder or file of this name is there; it stays as it is", to)
