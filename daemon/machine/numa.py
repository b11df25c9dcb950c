"""Binding a worker to processors and to the memory beside them (torch-free; nothing here may fail a job).

Affinity alone does not keep memory near: pages that another thread touched first, or the kernel's page cache, may
be on any node. The policy is "preferred": if the near node is full, memory comes from another one instead of an OOM kill.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

SYSFS = Path("/sys/devices/system/node")
_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
PREFERRED, PREFERRED_MANY = 1, 5
_BITS = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def parse_ranges(text: str) -> set[int]:
    """Return the numbers of a kernel list: "0-2,5" is {0, 1, 2, 5}.

    Raises:
        ValueError: it is not such a list.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def nodes_with_memory(sysfs: Path = SYSFS) -> dict[int, set[int]]:
    """Return node -> its processors, for the nodes that have memory; {} if the kernel does not report them."""
    try:
        with_memory = parse_ranges((sysfs / "has_memory").read_text())
        names = [path.name for path in sysfs.iterdir() if re.fullmatch(r"node\d+", path.name)]
        found = {int(name[4:]): parse_ranges((sysfs / name / "cpulist").read_text()) for name in names}
    except (OSError, ValueError):
        return {}
    return {node: cpus for node, cpus in sorted(found.items()) if node in with_memory}


def near(cpus: Collection[int], nodes: dict[int, set[int]]) -> list[int]:
    """Return the nodes whose processors are among `cpus`; [] where there is nothing to choose."""
    chosen = [node for node, own in nodes.items() if own & set(cpus)]
    return chosen if 0 < len(chosen) < len(nodes) else []


def bind(cpus: Collection[int], *, sysfs: Path = SYSFS) -> str:
    """Bind this process to `cpus` and prefer the memory of their nodes; return what the system refused, "" if nothing.

    Both outlast an exec. Containers often forbid the memory policy (it needs SYS_NICE under Docker's default profile).
    """
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        return f"cannot bind to processors {sorted(cpus)}: {error}"
    nodes = near(cpus, nodes_with_memory(sysfs))
    if not nodes:
        return ""
    error_number = prefer(nodes)
    return f"cannot prefer the memory of NUMA node {nodes}: {os.strerror(error_number)}" if error_number else ""


def prefer(nodes: Collection[int]) -> int:
    """Prefer the memory of these nodes for this process; return 0 or an errno. Before Linux 5.15 only the lowest one."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    error = _set(numbers[0], PREFERRED_MANY, nodes)
    return _set(numbers[0], PREFERRED, [min(nodes)]) if error == errno.EINVAL else error  # an older kernel


def _set(number: int, mode: int, nodes: Collection[int]) -> int:
    mask = (ctypes.c_ulong * (_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    result = _libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, ctypes.c_ulong(_BITS))
    return ctypes.get_errno() if result else 0


def policy() -> tuple[int, list[int]]:
    """Return mode and nodes of this process's memory policy; (0, []) is the default.

    Raises:
        OSError: the kernel does not report it.
    """
    numbers = _NUMBERS.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_BITS // 64))()
    number = ctypes.c_long(numbers[1] if numbers else -1)
    if _libc.syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(_BITS), None, ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mode.value, [node for node in range(_BITS) if mask[node // 64] >> node % 64 & 1]
