"""Blocks of host memory that segments are made of, and how much of it there is: `multiprocessing.shared_memory` in /dev/shm, else a file on tmpfs.

A block in /dev/shm has two names. Its durable name is a hard link in the job directory (`r00003-<layout>.seg`): the
segment exists as long as that link. Its POSIX name, `flashckpt-<uid>-<job>-r00003-<layout>`, lets any Python
process attach with the standard library alone, and may vanish at any time: before Python 3.13 a process that attaches
registers the block with its resource tracker, which unlinks that name when the process ends. Nothing is lost then, and
the next writer of the segment restores it. For the same reason our own processes never register a block: registering
and undoing it would leave a moment in which SIGKILL makes the tracker remove it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import sys
import threading
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashckpt.core.records import digest
from flashckpt.core.snapshot_id import MIN_SLOTS
from flashckpt.errors import SharedMemoryError

SHM = Path("/dev/shm")  # noqa: S108 -- where `SharedMemory` keeps its blocks on Linux
SEGMENT_NAME = re.compile(r"r(\d+)-([0-9a-f]{16})\.seg")
TEMPORARY = ".tmp"
_LONGEST_JOB = 120
_LOCK = threading.Lock()


class MappedBlock(Protocol):
    """A writable mapping of a whole segment."""

    @property
    def buf(self) -> memoryview:
        """All its bytes."""

    def close(self) -> None:
        """Unmap it; buffers still in use keep the mapping until they are freed."""


class _NoTracker:
    """Stands in for the module `resource_tracker` while a block is opened: nothing is registered, no tracker starts."""

    register = unregister = staticmethod(lambda name, rtype: None)  # noqa: ARG005 -- the module's signature


class SharedBlock(shared_memory.SharedMemory):
    """A `SharedMemory` unknown to every resource tracker, whose buffers may outlive `close()`."""

    def __init__(self, name: str, *, create: bool = False, size: int = 0) -> None:
        if sys.version_info >= (3, 13):
            super().__init__(name, create=create, size=size, track=False)
            return
        with _LOCK:  # replaces the tracker inside the module `shared_memory` only, while the block is opened
            module: Any = shared_memory
            tracker, module.resource_tracker = module.resource_tracker, _NoTracker
            try:
                super().__init__(name, create=create, size=size)
            finally:
                module.resource_tracker = tracker

    _fd: int

    if TYPE_CHECKING:  # the parent's may be None, which this one is only once it is closed

        @property
        def buf(self) -> memoryview:
            """All its bytes; invalid once it is closed."""

    @property
    def inode(self) -> int:
        """Of the open block."""
        return os.fstat(self._fd).st_ino

    def close(self) -> None:
        """Unmap it, or leave that to the last buffer in use."""
        try:
            super().close()
        except BufferError:  # an array over a slot is still in use
            self._buf = self._mmap = None
            os.close(self._fd)
            self._fd = -1


class FileBlock:
    """The same for a file on another tmpfs."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self.buf = memoryview(self._map)

    def close(self) -> None:
        """Unmap it, or leave that to the last buffer in use."""
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()


def name_of(path: Path) -> str | None:
    """Return the POSIX name of a segment's block; None for a plain file, outside /dev/shm.

    Args:
        path: Its durable name, <memory root>/<job id>/r<rank>-<layout>.seg.
    """
    job, base = path.parent.name, path.parent.parent
    if base != SHM / f"flashckpt-{os.getuid()}" or not SEGMENT_NAME.fullmatch(path.name):
        return None
    if len(job) > _LONGEST_JOB:
        job = f"{job[:_LONGEST_JOB]}~{int(digest(job.encode())):016x}"
    return f"flashckpt-{os.getuid()}-{job}-{path.stem}"


def new(path: Path, nbytes: int) -> tuple[Path, MappedBlock | None]:
    """Make the memory of a new segment under a temporary name.

    No pages are reserved yet.

    Returns:
        Its temporary path, and its mapping (None: `mapped` makes it).
    """
    name, unique = name_of(path), f"{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    if name is not None:
        with contextlib.suppress(PermissionError):  # no POSIX shared memory on this machine: a plain file
            return SHM / f"{name}.{unique}", SharedBlock(f"{name}.{unique}", create=True, size=nbytes)
    file = path.with_name(f".{path.name}.{unique}")
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    return file, None


def mapped(path: Path, fd: int, nbytes: int) -> MappedBlock:
    """Map an existing segment for writing: as a shared-memory block under its POSIX name if it can have one."""
    name = name_of(path)
    if name is not None and publish(path):
        with contextlib.suppress(OSError):  # another process's tracker removed the name in between
            block = SharedBlock(name)
            if block.inode == os.fstat(fd).st_ino and block.size >= nbytes:
                return block
            block.close()
    return FileBlock(fd, nbytes)


def publish(path: Path) -> bool:
    """Give a segment its POSIX name, so that other programs can find it; return whether it has it.

    It has none if another user owns a file of that name in /dev/shm.
    """
    name = name_of(path)
    if name is None:
        return False
    with contextlib.suppress(OSError):
        if (SHM / name).stat().st_ino == path.stat().st_ino:
            return True
    temporary = SHM / f"{name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    try:
        os.link(path, temporary)
        temporary.replace(SHM / name)  # the name was left by a segment that is gone
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def withdraw(path: Path) -> None:
    """Remove a segment's POSIX name before its durable one: otherwise the memory would stay in use."""
    name = name_of(path)
    if name is None:
        return
    with contextlib.suppress(OSError):
        if (SHM / name).stat().st_ino == path.stat().st_ino:
            (SHM / name).unlink()


def withdraw_all(directory: Path) -> None:
    """Remove the POSIX names of all segments in a job directory that is about to be removed."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            withdraw(path)


def sweep_temporary(path: Path) -> None:
    """Remove temporary files of processes that were killed while creating this segment."""
    name = name_of(path)
    places = [path.parent.glob(f".{path.name}.*{TEMPORARY}")]
    if name is not None:
        places.append(SHM.glob(f"{name}.*{TEMPORARY}"))
    for left in (file for place in places for file in place):
        if not is_creator_running(left.name):
            with contextlib.suppress(OSError):
                left.unlink()


def is_creator_running(name: str) -> bool:
    """Whether a temporary name carries the pid of a running process."""
    if not name.endswith(TEMPORARY):
        return False
    pid = name.removesuffix(TEMPORARY).split(".")[-2]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


# -- How much host memory may still be reserved on a tmpfs: limits of the file system, the machine and every ancestor cgroup


_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bytes that may still be used, and what limits them."""

    nbytes: int
    limit: str


def capacities(path: Path, *, proc: Path = Path("/proc")) -> list[Capacity]:
    """Return every limit on new pages of a file under `path` (an existing folder), the tightest first."""
    fs = os.statvfs(path)
    found = [Capacity(nbytes=fs.f_bavail * fs.f_frsize, limit=f"free space of the file system of {path}")]
    found += _machine(proc)
    found += cgroup_capacities(proc=proc)
    return sorted(found, key=lambda room: room.nbytes)


def require_capacity(path: Path, need: int, *, what: str, slots: int = 0, proc: Path = Path("/proc")) -> None:
    """Raise SharedMemoryError if `need` bytes, of `slots` slots where it is of slots, do not fit under `path`; reserves nothing.

    The error names need, free space, what limits it, and the remedies.
    """
    refuse_file_limit(need, what=what)
    least = capacities(path, proc=proc)[0]
    if need > least.nbytes:
        raise insufficient_memory(path, need, least, what=what, slots=slots)


def refuse_file_limit(need: int, *, what: str) -> None:
    """Raise SharedMemoryError where this process may not make a file of `need` bytes, which a segment is (RLIMIT_FSIZE)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= limit < need:
        raise SharedMemoryError(
            f"the limit on the size of files is too low for the snapshots of {what}",
            found=f"ulimit -f: {limit} bytes",
            expected=f"at least {need} bytes: the snapshots of a rank are one file in shared memory",
            state="Nothing of this job was kept in memory; snapshots of other jobs are untouched.",
            remedy="ulimit -f unlimited, before the job is started",
        )


def insufficient_memory(path: Path, need: int, least: Capacity, *, what: str, slots: int = 0) -> SharedMemoryError:
    """Return the error for `need` bytes that do not fit into `least`; of `slots` slots, where it is of slots."""
    gib = -(-need // (1 << 30)) + 1
    return SharedMemoryError(
        f"too little host memory for the snapshots of {what}",
        found=f"room for {least.nbytes} bytes ({least.nbytes / 2**30:.2f} GiB): {least.limit}",
        expected=f"{need} bytes ({need / 2**30:.2f} GiB) under {path}",
        state="Nothing of this job was kept in memory; snapshots of other jobs are untouched.",
        remedy=(
            "list the jobs in memory: flashckpt status; free the memory of a dead one: flashckpt gc --job NAME --apply; "
            f"{_what_fits(need, least.nbytes, slots)}or enlarge the file system: "
            f"mount -o remount,size={gib}G {path.anchor}dev/shm (docker: --shm-size={gib}g, Kubernetes: a memory "
            "emptyDir on /dev/shm and a higher memory limit)"
        ),
    )  # fmt: skip


def _what_fits(need: int, room: int, slots: int) -> str:
    """Say how many slots would fit in place of `slots`, and what that costs."""
    if not slots:
        return ""
    gib, fit = need / slots / 2**30, min(room * slots // need, slots - 1)
    if fit < MIN_SLOTS:
        return (
            f"{MIN_SLOTS} slots of {gib:.2f} GiB are the least, one whole while the next is written: fewer bytes per node fit,"
            " with the state cut over more nodes; "
        )
    cost = "" if fit > MIN_SLOTS else ", snapshots pause until the bytes of a checkpoint are on storage"
    return f"or take what fits: Checkpointer(..., slots={fit}), {fit * gib:.2f} GiB{cost}; "


def cgroup_capacities(*, proc: Path = Path("/proc")) -> list[Capacity]:
    """Return the room under every limited memory cgroup that this process is in, v1 and v2, ancestors included."""
    found = []
    for folder, top, version in _cgroup_folders(proc):
        while True:
            room = _room_v2(folder) if version == 2 else _room_v1(folder)
            if room is not None:
                found.append(room)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent  # noqa: PLW2901 -- the walk up is what the loop is for
    return found


def _cgroup_folders(proc: Path) -> list[tuple[Path, Path, int]]:
    """Return (own folder, mount point, version) of the memory hierarchies."""
    lines = _read(proc / "self" / "cgroup").splitlines()
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for root, mount in _mounts(proc, version):
            relative = path if root == "/" else path.removeprefix(root)
            folder = Path(mount + "/" + relative.lstrip("/")) if relative != "/" else Path(mount)
            # inside a container the path may name the host's hierarchy: then the mount point is our own group
            found.append(
                (folder if folder.is_dir() and ".." not in folder.parts else Path(mount), Path(mount), version)
            )
    return found


def _mounts(proc: Path, version: int) -> list[tuple[str, str]]:
    found = []
    for line in _read(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        fields = left.split()
        if len(fields) < 5:
            continue
        if (version == 2 and kind == "cgroup2") or (version == 1 and kind == "cgroup" and "memory" in options):
            found.append((fields[3], fields[4].replace("\\040", " ")))
    return found


def huge_pages(path: Path, *, proc: Path = Path("/proc")) -> str:
    """Return when the tmpfs of a folder gives huge pages, as its mount says: "never", "always", "within_size" or "advise"."""
    found, longest = "never", -1
    for line in _read(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, options = left.split(), right.split()[-1:]
        mount = Path(fields[4].replace("\\040", " ")) if len(fields) > 4 else None
        if mount is not None and len(mount.parts) >= longest and (mount == path or mount in path.parents):
            longest = len(mount.parts)
            asked = [
                one.removeprefix("huge=") for part in options for one in part.split(",") if one.startswith("huge=")
            ]
            found = asked[0] if asked and right.startswith("tmpfs ") else "never"
    return found


def _room_v2(folder: Path) -> Capacity | None:
    limit = _read(folder / "memory.max").strip()
    if not limit or limit == "max":
        return None
    used = int(_read(folder / "memory.current") or 0) - _reclaimable(folder, "inactive_file", "active_file")
    return Capacity(nbytes=max(0, int(limit) - used), limit=f"memory.max of cgroup {folder}")


def _room_v1(folder: Path) -> Capacity | None:
    limit = int(_read(folder / "memory.limit_in_bytes") or _NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    used = int(_read(folder / "memory.usage_in_bytes") or 0)
    used -= _reclaimable(folder, "total_inactive_file", "total_active_file")
    return Capacity(nbytes=max(0, limit - used), limit=f"memory.limit_in_bytes of cgroup {folder}")


def _reclaimable(folder: Path, *names: str) -> int:
    """Bytes of file cache that the kernel reclaims before it kills; tmpfs pages do not count."""
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def _machine(proc: Path) -> list[Capacity]:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return [Capacity(nbytes=int(line.split()[1]) * 1024, limit="MemAvailable of the machine")]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def slots_for(need_bytes: int, free_bytes: int, wanted: int | None, *, replica_bytes: int | None = None) -> int:
    """Return how many slots per rank this node has room for: `wanted`, or 3, or 2; with replicas 4, or 3.

    Args:
        need_bytes: Sum over the node's ranks of the bytes of one slot that are not yet reserved.
        free_bytes: Room on the node, before anybody reserves.
        wanted: The user's number, or None.
        replica_bytes: What the replicas of other nodes will take here beside that; None without replication.

    Raises:
        SharedMemoryError: Not even the least number (or `wanted`) fit.
    """
    replicas = replica_bytes or 0
    counts = [wanted] if wanted else [3, 2] if replica_bytes is None else [4, 3]
    for count in counts:
        if need_bytes * count + replicas <= free_bytes:
            return count
    least = counts[-1]
    if replicas:
        raise too_little_for_replicas(need_bytes * least, replicas, free_bytes, slots=least)
    raise insufficient_memory(
        Path("/dev/shm"),  # noqa: S108 -- only named in the remedy
        need_bytes * least,
        Capacity(nbytes=free_bytes, limit="the tmpfs, the machine or a cgroup"),
        what=f"{least} slots per rank",
        slots=least,
    )


def too_little_for_replicas(own_bytes: int, replica_bytes: int, free_bytes: int, *, slots: int) -> SharedMemoryError:
    """Return the error of a node that has no room for its own snapshots and those of the nodes whose partner it is."""
    return SharedMemoryError(
        "too little host memory for snapshots and for the replicas of other nodes",
        found=f"room for {free_bytes} bytes ({free_bytes / 2**30:.2f} GiB) on this node",
        expected=(
            f"{own_bytes} bytes for {slots} slots of each rank here, and {replica_bytes} bytes for replicas:"
            f" {(own_bytes + replica_bytes) / 2**30:.2f} GiB"
        ),
        state="Nothing of this job was kept in memory; snapshots of other jobs are untouched.",
        remedy="replicate=1 in place of 2, or replicate=0; or enlarge /dev/shm: mount -o remount,size=... /dev/shm",
    )
