"""Facts about the machine a figure was measured on, and putting files out of its page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from flashckpt.shm.block import cgroup_capacities

LIBRARIES = ("flashckpt", "torch", "numpy", "fsspec", "s3fs", "obstore", "zstandard", "xxhash", "safetensors")


def host_facts(paths: Sequence[Path] = ()) -> dict[str, Any]:
    """Return machine, kernel, library versions, and the file system under each of `paths`. Imports no library."""
    memory = _meminfo()
    return {
        "name": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.get("MemTotal", 0) * 1024,
        "memory_available_bytes": memory.get("MemAvailable", 0) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "file_systems": [file_system(path) for path in paths],
    }


def file_system(path: Path) -> dict[str, str]:
    """Return type, device and mount options of the file system that holds `path` (it need not exist yet)."""
    real = Path(os.path.realpath(path))
    best: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split(" ", 2)
        mount = Path(fields[4].encode().decode("unicode_escape"))
        # Later lines are mounted on top of earlier ones, so an equal mount point replaces.
        if real.is_relative_to(mount) and len(str(mount)) >= len(best.get("mount", "")):
            options = sorted(set(fields[5].split(",")) | set(tail[2].split(",")))
            best = {"mount": str(mount), "type": tail[0], "device": tail[1], "options": ",".join(options)}
    return best


def available_bytes() -> int:
    """Return the private memory that can be had, by /proc/meminfo and every cgroup of this process."""
    rooms = [room.nbytes for room in cgroup_capacities()]
    return min([_meminfo().get("MemAvailable", 0) * 1024, *rooms])


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "CPU part"}:
            return value.strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def evict(path: Path) -> float:
    """Write a file out, ask the kernel to drop its pages, and return the share (0..1) that is still cached.

    Needs no root. The share is read back by mincore, because the advice is only advice: tmpfs ignores it, and so
    do pages that another process has mapped.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return resident_share(file.fileno())


def resident_share(fd: int) -> float:
    """Return the share (0..1) of a file's pages that are in the page cache."""
    nbytes = os.fstat(fd).st_size
    if not nbytes:
        return 0.0
    pages = -(-nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), vector):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return sum(value & 1 for value in vector) / pages


def drop_caches() -> bool:
    """Drop the page cache of the whole machine; False where that is not allowed (it needs root)."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the private memory of a process; shared mappings (slots) and cached files are not in it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def proportional_bytes(pid: int) -> int:
    """Return private and shared memory of a process, without files; a page that others have mapped too counts in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@dataclass(slots=True)
class PeakMemory:
    """Memory at the start and at the end of a time, and by how much its largest was above that at the start."""

    start_bytes: int
    end_bytes: int = 0
    extra_bytes: int = 0


@contextmanager
def peak_memory(now: Callable[[], int] = anonymous_bytes, interval_s: float = 0.005) -> Iterator[PeakMemory]:
    """Sample memory beside the body of the `with`, and read the result afterwards. It costs CPU: not for what is timed.

    Args:
        now: Returns the bytes; by default the private memory of this process.
        interval_s: Seconds between two samples.
    """
    peak, stop = PeakMemory(now()), threading.Event()

    def look() -> None:
        peak.end_bytes = now()
        peak.extra_bytes = max(peak.extra_bytes, peak.end_bytes - peak.start_bytes)

    def sample() -> None:
        while not stop.wait(interval_s):
            look()

    thread = threading.Thread(target=sample, name="bench-peak-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        look()


def peak_memory_of(pids: Callable[[], Sequence[int]], interval_s: float = 0.005) -> AbstractContextManager[PeakMemory]:
    """Do the same for a family of processes, each shared page counted once."""
    return peak_memory(lambda: sum(map(proportional_bytes, pids())), interval_s)
