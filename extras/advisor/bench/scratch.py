"""Room to measure in: everything a benchmark writes lies in one marked folder and one marked directory in memory.

The marker is the first thing written and the last thing removed. A run that was killed leaves it behind; the next
run on the same place finds that its owner is dead and removes that folder, and nothing else, before it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from flashckpt.errors import ConfigError, FlashckptError, JobInUseError, RootError
from flashckpt.shm.block import require_capacity
from flashckpt.shm.job_directory import memory_root
from flashckpt.shm.private import create_file, private_directories, private_directory, remove_tree
from flashckpt.shm.segment_file import boot_id
from flashckpt.storage.factory import is_process_local, open_store
from flashckpt.storage.store import Store

FOLDER = "flashckpt-bench-"
HIDDEN = f".{FOLDER}"
"""Prefix in the memory tier, where names without a dot are jobs."""
MARKER = "owner.json"
FORGOTTEN_S = 24 * 3600.0
"""A marker of another machine is believed to be alive this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """A place on storage that is the benchmark's own.

    Attributes:
        url: Of the marked folder; open it with `open_store(url, **options)`, in any process.
        options: Storage options.
        directory: The same as a directory where the storage is a file system, else None.
        token: Name of this run.
        swept: Folders of dead runs that were removed before this one.
    """

    url: str
    options: Mapping[str, Any]
    directory: Path | None
    token: str
    swept: tuple[str, ...]

    def open(self) -> Store:
        """Return a new connection to the folder."""
        return open_store(self.url, **self.options)


def owner() -> dict[str, Any]:
    """Return what tells this process from any other, on this machine or another."""
    return {"pid": os.getpid(), "start": _start_of(os.getpid()), "boot": boot_id().hex(), "time": time.time()}


def is_alive(marker: Mapping[str, Any]) -> bool:
    """Return whether the run that wrote a marker is still running; one of another machine counts as running for a day."""
    if marker.get("boot") != boot_id().hex():
        return time.time() - float(marker.get("time", 0)) < FORGOTTEN_S
    return _start_of(int(marker.get("pid", 0))) == marker.get("start") is not None


def _start_of(pid: int) -> int | None:
    """Return the start time of a process (clock ticks since boot), None for none: pids are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


@contextlib.contextmanager
def storage(
    url: str, need_bytes: int, *, options: Mapping[str, Any], keep: bool, processes: int = 1
) -> Iterator[Scratch]:
    """Hold a new folder under `url` while the body runs, and remove it afterwards.

    Args:
        url: Any root flashckpt takes; may not exist yet, and must be empty but for our own folders.
        need_bytes: Most bytes that lie there at any time.
        options: Storage options.
        keep: Leave the folder (its marker says so) instead of removing it.
        processes: Of the run; memory:// works with one only.

    Raises:
        RootError: Not empty, no room, no rights. Nothing was written, or what was is removed.
        JobInUseError: Another benchmark is running there.
    """
    if processes > 1 and is_process_local(url):
        raise ConfigError(f"{url} is process-local", expected="storage that several processes see")
    outer = open_store(url, **options)
    made = _missing(outer)
    swept = _sweep(outer, options)
    _refuse_full(outer, need_bytes)
    token = secrets.token_hex(6)
    name = FOLDER + token
    with _stops:
        try:
            outer.check()
            outer.put(f"{name}/{MARKER}", json.dumps({**owner(), "kept": keep}).encode())
            directory = root / name if (root := directory_of(outer)) else None
            inner = f"{url.rstrip('/')}/{name}"
            yield Scratch(url=inner, options=options, directory=directory, token=token, swept=tuple(swept))
        finally:
            if not keep:
                _remove(outer, name, options)
                _remove_directories(made)
            outer.close()


def _sweep(outer: Store, options: Mapping[str, Any]) -> list[str]:
    """Remove folders of dead runs; refuse what is not ours, kept, or in use. Reads before it removes anything."""
    if (root := directory_of(outer)) and not root.exists():
        return []
    found = outer.list()
    names = {info.key.partition("/")[0] for info in found}
    foreign = sorted(name for name in names if not name.startswith(FOLDER))
    if foreign:
        raise RootError(
            f"{outer.url} is not empty",
            found=", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""),
            expected="an empty or new directory or prefix, so that the figures and the clean-up touch nothing of yours",
            state="Nothing was written.",
            remedy=f"flashckpt bench ... {outer.url.rstrip('/')}/bench",
        )
    markers = {name: _marker(outer, name) for name in sorted(names)}
    for name, marker in markers.items():
        if marker.get("kept"):
            raise RootError(
                f"{outer.url} holds what an earlier run kept (--keep)",
                found=name,
                state="Nothing was written.",
                remedy=f"remove {name}, or name another place",
            )
        if marker and is_alive(marker):
            raise JobInUseError(
                f"another benchmark is running on {outer.url}",
                found=f"pid {marker.get('pid')}",
                expected="one benchmark per place, since they would measure each other",
                state="Nothing was written.",
            )
    for name in markers:
        _remove(outer, name, options)
    return sorted(markers)


def _marker(outer: Store, name: str) -> dict[str, Any]:
    """Return the marker of a folder; {} where a clean-up was killed right behind removing it, or before it was there."""
    try:
        loaded = json.loads(outer.get(f"{name}/{MARKER}"))
    except (FlashckptError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _remove(outer: Store, name: str, options: Mapping[str, Any]) -> None:
    """Remove a folder, its marker last, so that a clean-up that dies is taken up again."""
    keys = [info.key for info in outer.list(f"{name}/")]
    for key in sorted(keys, key=lambda key: key.endswith(f"/{MARKER}")):
        outer.delete(key)
    if root := directory_of(outer):
        shutil.rmtree(root / name, ignore_errors=True)  # temporary files and empty directories are not listed
    else:
        inner = open_store(f"{outer.url.rstrip('/')}/{name}", **options)
        # only below our folder: somebody's run may have begun its first upload beside it. The server's clock may be ahead.
        inner.sweep(older_than_s=-FORGOTTEN_S)
        inner.close()


def directory_of(store: Store) -> Path | None:
    """Return the directory behind a store, None where it is not a file system."""
    root = getattr(store, "root", None)
    return root if isinstance(root, Path) else None


def _missing(outer: Store) -> list[Path]:
    """Return the directories that will be made for the root, innermost first."""
    made = []
    root = directory_of(outer)
    while root is not None and not root.exists():
        made.append(root)
        root = root.parent
    return made


def _remove_directories(made: list[Path]) -> None:
    for path in made:
        with contextlib.suppress(OSError):  # somebody put something there meanwhile
            path.rmdir()


def _refuse_full(outer: Store, need_bytes: int) -> None:
    """Raise RootError where a file system lacks room for the run; object stores cannot be asked."""
    root = directory_of(outer)
    if root is None:
        return
    while not root.exists():
        root = root.parent
    status = os.statvfs(root)
    free = status.f_bavail * status.f_frsize
    if free < need_bytes:
        raise RootError(
            f"{outer.url} has too little space for this run",
            found=f"{free / 1e9:.2f} GB free",
            expected=f"{need_bytes / 1e9:.2f} GB",
            state="Nothing was written.",
            remedy="a smaller --size or --scale, fewer --ranks, or other storage",
        )


@contextlib.contextmanager
def memory(need_bytes: int, *, what: str) -> Iterator[Path]:
    """Hold a directory in the memory tier while the body runs; directories of dead runs are removed first.

    Raises:
        SharedMemoryError: Too little room, or no such directory can be made; nothing was written.
        ConfigError: This user's directory there is a link, another user's, or open to others.
    """
    root = memory_root()
    path = root / f"{HIDDEN}{secrets.token_hex(6)}"
    with private_directory(root, create=True) as base:
        _sweep_memory(root, base)
        require_capacity(root, need_bytes, what=what)
        with _stops:
            try:
                with private_directory(path, create=True, within=base):
                    os.write(marked := create_file(path / MARKER), json.dumps(owner()).encode())
                    os.close(marked)
                yield path
            finally:
                remove_tree(path.name, base)


def _sweep_memory(root: Path, base: int) -> None:
    """Remove the directories of dead runs in the memory tier, whose checked descriptor is `base`."""
    for left in private_directories(root)[0]:
        if not left.name.startswith(HIDDEN):
            continue
        try:
            marker = json.loads((left / MARKER).read_text())
        except (OSError, ValueError):
            # between the two lines of `memory` that make a directory and mark it
            marker = {"boot": "", "time": left.stat().st_mtime + 60 - FORGOTTEN_S}
        if not is_alive(marker):
            remove_tree(left.name, base)


class _Stops:
    """Signals that end a run: the first one raises KeyboardInterrupt, its echoes do not disturb the clean-up.

    Ctrl-C reaches a whole process group and `timeout` passes SIGTERM on, so one stop often comes twice. Later than
    PATIENCE_S after the first, a stop is meant: it ends a clean-up that hangs, which the next run takes up again.
    """

    PATIENCE_S = 5.0
    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._depth = 0
        self._first_s: float | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            if self._depth == 1:
                self._first_s = None
                self._old = {number: signal.signal(number, self._stop) for number in self.NUMBERS}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                for number, handler in self._old.items():
                    signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- the signature of handlers
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s < self.PATIENCE_S:
            return
        raise KeyboardInterrupt


_stops = _Stops()
