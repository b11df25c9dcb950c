"""The last samples that loaders prepared, in shared memory: a restart has its next batches without preparing them again.

Each sample is a separate file beside the segments, named by its index: another layout deals the same samples to other
ranks. Loader workers write it where they have prepared it, so that training waits for nothing, and what was ready but not
yet trained is there as well. It is a cache: what is missing, damaged, cut short or too old is prepared as usual.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from flashckpt.core.records import digest, digest_of
from flashckpt.environment import env
from flashckpt.errors import DamagedError
from flashckpt.faults import crash_point
from flashckpt.kept_samples.sample_bytes import sample_bytes, sample_of
from flashckpt.report import guarded
from flashckpt.shm.private import open_file, read_file

if TYPE_CHECKING:
    from flashckpt.session.session import Session

_log = guarded(logging.getLogger("flashckpt"))
FOLDER = "samples"
_WORTH_S = 1e-3
"""What takes less time to prepare is prepared again."""
_OLD_NS = 3600 * 10**9
"""Nobody restarts a job an hour later and expects what was prepared then."""
_DEPTH, _LARGEST = 8, 1 << 30
_NO_SAMPLE = (OSError, DamagedError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError)
_NOT_KEPT = (TypeError, ValueError, OverflowError, RecursionError)


class SampleRing:
    """Samples in a folder: those of earlier processes to take from, and those of this one, of which the oldest go.

    Args:
        folder: Of one data set, below that of the job.
        began_ns: When this process began, in nanoseconds since the epoch.
        most_bytes: Of the samples that this process keeps.
        left_bytes: Of those of all processes before this one.
    """

    def __init__(self, folder: Path, began_ns: int, *, most_bytes: int, left_bytes: int) -> None:
        self._folder, self._began_ns = folder, began_ns
        self._most, self._nbytes = most_bytes, 0
        self._mine: dict[Path, os.stat_result] = {}
        self._earlier: dict[int, Path] = {}
        if folder.is_dir():
            self._earlier = self._found(left_bytes)

    def _found(self, left_bytes: int) -> dict[int, Path]:
        """Return what earlier processes left; of all that is here the oldest beyond `left_bytes` is removed."""
        found, now = [], time.time_ns()
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        earlier: dict[int, Path] = {}
        for at_ns, nbytes, path in sorted(found, reverse=True):
            left_bytes -= nbytes
            is_earlier, is_whole = at_ns < self._began_ns, path.name.isdecimal()
            if left_bytes < 0 or (is_earlier and (now - at_ns > _OLD_NS or not is_whole)):
                path.unlink(missing_ok=True)
            elif is_earlier:
                earlier[int(path.name)] = path
        return earlier

    def take(self, key: int) -> list[Any]:
        """Return the sample that an earlier process kept, alone, if it is there and whole; each once."""
        if (path := self._earlier.pop(key, None)) is not None:
            with contextlib.suppress(*_NO_SAMPLE):
                raw = memoryview(read_file(path, most=_LARGEST))
                if int.from_bytes(raw[:8], "little") == digest_of(_name(key), raw[8:]):
                    return [sample_of(raw[8:])]
        return []

    def keep(self, key: int, sample: Any) -> None:
        """Keep a sample; the oldest ones make room.

        Raises:
            TypeError, ValueError, OverflowError, RecursionError: It holds what has no bytes.
            OSError: There is no room, or the job's memory was removed.
        """
        raw = sample_bytes(sample)
        path, nbytes = self._folder / str(key), len(raw) + 8
        if nbytes > min(self._most, _LARGEST):
            return
        self._forget(path)  # of the epoch before
        while self._nbytes + nbytes > self._most:
            self._forget_earlier()
            self._forget(next(iter(self._mine)))
        if not self._mine:
            self._make()
        temporary = self._folder / f".{key}.{os.getpid()}"
        with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(digest_of(_name(key), raw).to_bytes(8, "little"))
            file.write(raw)
            file.flush()
            self._mine[path] = os.fstat(file.fileno())
            self._nbytes += nbytes
        crash_point("sample.before-rename")
        temporary.rename(path)  # one move: nobody finds half a sample

    def _make(self) -> None:
        for folder in (self._folder.parent, self._folder):  # not the job's own: it may have been removed
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)

    def _forget_earlier(self) -> None:
        for path in self._earlier.values():  # the start is long over
            path.unlink(missing_ok=True)
        self._earlier.clear()

    def _forget(self, path: Path) -> None:
        """Remove a sample of this process, if it has kept that one and no other process has since."""
        if (mine := self._mine.pop(path, None)) is not None:
            self._nbytes -= mine.st_size
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_ino == mine.st_ino:
                    path.unlink()

    def say_once(self, text: str) -> None:
        """Log a warning that no process of the job has logged yet."""
        with contextlib.suppress(OSError, DamagedError):
            self._make()
            os.close(open_file(self._folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            _log.warning("samples are not kept for a restart: %s", text)


def _name(key: int) -> bytes:
    return str(key).encode()


class KeptSamples(Dataset[Any]):
    """A map-style data set whose last samples stay in shared memory when its process dies; `Checkpointer.keep_samples`.

    Samples that draw from the default generators are kept by loader workers alone: what the training process draws
    belongs to its state.

    Args:
        dataset: A map-style data set.
        session: Returns what the rank has open; None before its restore, and after its end.
        began_ns: When this process began, in nanoseconds since the epoch.
        most_bytes: For the samples of one rank.
    """

    def __init__(self, dataset: Any, session: Callable[[], Session | None], *, began_ns: int, most_bytes: int) -> None:
        self.dataset, self._began_ns, self._most_bytes = dataset, began_ns, most_bytes
        self._job: Callable[[], Path | None] = lambda: None if (now := session()) is None else now.directory.path
        self._ring: SampleRing | None = None
        self._pid, self._is_slow, self._is_on = 0, False, True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_job": _Known(self._job()), "_ring": None, "_pid": 0}  # of a worker that is not forked

    @property
    def fingerprint(self) -> Any:
        """The fingerprint of the data set."""
        return getattr(self.dataset, "fingerprint", None) or getattr(self.dataset, "_fingerprint", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        return self._taken([key], self._one)[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if callable(together):
            return self._taken(keys, together)
        return [self._taken([key], self._one)[0] for key in keys]

    def _one(self, keys: Sequence[Any]) -> list[Any]:
        return [self.dataset[keys[0]]]

    def _taken(self, keys: Sequence[Any], prepare: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        ring = self._open() if self._is_on else None
        if ring is None:
            return list(prepare(keys))
        found = [ring.take(_number(key)) for key in keys]
        missing = [key for key, one in zip(keys, found, strict=True) if not one]
        fresh = iter(self._prepared(ring, missing, prepare) if missing else ())
        return [one[0] if one else next(fresh) for one in found]

    def _prepared(
        self, ring: SampleRing, keys: Sequence[Any], prepare: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> Any:
        """Return samples, and keep them where that is worth it and takes no draw from the training process."""
        is_loop = get_worker_info() is None and threading.current_thread() is threading.main_thread()
        before, began = _generators() if is_loop and self._is_slow else None, time.perf_counter()
        samples = prepare(keys)
        self._is_slow = time.perf_counter() - began > _WORTH_S * len(keys)
        if is_loop and before is not None and _generators() != before:
            ring.say_once(
                "the data set draws at random in the training process; SeededSamples or loader workers do not"
            )
        elif self._is_slow and (before is not None or not is_loop):
            self._keep(ring, keys, samples)
        return samples

    def _keep(self, ring: SampleRing, keys: Sequence[Any], samples: Sequence[Any]) -> None:
        try:
            for key, sample in zip(keys, samples, strict=True):
                if (number := _number(key)) >= 0:
                    ring.keep(number, sample)
        except _NOT_KEPT as error:
            self._is_on = False
            ring.say_once(f"{error}; tensors, arrays, numbers, text, bytes, dicts, lists and tuples are")
        except (OSError, DamagedError) as error:
            self._is_on = False
            ring.say_once(str(error))

    def _open(self) -> SampleRing | None:
        """Return the ring of this process, None as long as there is none."""
        if self._pid == os.getpid():
            return self._ring
        if (job := self._job()) is None:
            return None
        self._pid, self._ring, worker = os.getpid(), None, get_worker_info()
        with contextlib.suppress(OSError):
            self._ring = SampleRing(
                job / FOLDER / f"{_identity(self.dataset):016x}",
                self._began_ns,
                most_bytes=self._most_bytes // (worker.num_workers if worker else 1),
                left_bytes=self._most_bytes * env.LOCAL_WORLD_SIZE,
            )
        return self._ring


class _Known(NamedTuple):
    """Stands for the question after the job in a process that has no checkpointer."""

    folder: Path | None

    def __call__(self) -> Path | None:
        return self.folder


def _generators() -> Any:
    """Return the state of the default generators."""
    words: Any = np.random.get_state()  # noqa: NPY002 -- the global one is what data sets draw from
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words[1].tobytes(), words[2:]


def _number(key: Any) -> int:
    """Return the index of a sample; -1 for another kind of key."""
    try:
        return operator.index(key)
    except TypeError:
        return -1


def _identity(dataset: Any) -> int:
    """Return a digest of what is known of how samples are made: data, seeds, epoch, and the files with the code."""
    facts: list[Any] = [_file_of("__main__")]
    for _ in range(_DEPTH):
        kind = type(dataset)
        named = [getattr(dataset, name, None) for name in ("fingerprint", "_fingerprint", "seed", "epoch")]
        facts += [kind.__module__, kind.__qualname__, _file_of(kind.__module__), len(dataset)]
        facts += [one if isinstance(one, (int, str, bytes)) else None for one in named]
        if (dataset := getattr(dataset, "dataset", None)) is None or not hasattr(dataset, "__len__"):
            break
    return digest(repr(facts).encode())


def _file_of(module: str) -> Any:
    file = getattr(sys.modules.get(module), "__file__", None)
    with contextlib.suppress(OSError, TypeError):
        status = Path(file).stat()  # type: ignore[arg-type]  # None is a TypeError
        return file, status.st_size, status.st_mtime_ns
    return file
