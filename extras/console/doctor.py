"""`flashckpt doctor`: whether this machine, and a root, will hold a job; what to do where not."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Group
from rich.text import Text

from flashckpt import __version__
from flashckpt.checkpoint.history import HISTORY
from flashckpt.cli.common import Command, human_bytes, json_option, parse_options, show
from flashckpt.commands.quantity import SIZE
from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.native import implementation
from flashckpt.printable import printable
from flashckpt.shm.block import capacities
from flashckpt.storage.factory import is_process_local, open_store
from flashckpt.storage.store import Store

OK, WARNING, FAILED = "ok", "warning", "failed"
MOST_SKEW_S = 60.0
"""Readers' leases allow for 600 s between clocks; a machine that is a minute off is wrong already."""
LEAST_FILES = 1024
_TMPFS = ("tmpfs", "ramfs")


class DoctorCheck(NamedTuple):
    """One thing that was looked at: OK, WARNING or FAILED, what was found, and what to do."""

    check: str
    state: str
    found: str
    remedy: str = ""


@click.command(cls=Command)
@click.argument("root", required=False, type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--state", "state_bytes", type=SIZE, help="State of all ranks of this node, e.g. 40GB.")
@click.option("--slots", type=click.IntRange(2, 8), default=3, show_default=True, help="Snapshots in memory.")
@json_option
def doctor(root: str | None, options: tuple[str, ...], state_bytes: int | None, slots: int, *, as_json: bool) -> int:
    """Look for what would stop a job on this machine: memory, limits, versions, ports, cores; with ROOT also the root.

    A root is written to: a small object, which is removed again. --state asks whether the snapshots of a node fit.
    Exit code 10 if something failed, 13 or 41 if it was the root; warnings do not count.

    Examples:
      flashckpt doctor
      flashckpt doctor s3://bucket/run7 --state 40GB
    """
    found = [*memory(None if state_bytes is None else state_bytes * slots), *limits(), *versions(), *ports(), cores()]
    code = ConfigError.exit_code if any(one.state == FAILED for one in found) else 0
    if root is not None:
        about, root_code = of_root(root, options)
        found, code = [*found, *about], root_code or code
    document = {"checks": [one._asdict() for one in found], "exit_code": code}
    show(document, as_json=as_json, table=lambda: _page(found))
    return code


def memory(need: int | None) -> Iterator[DoctorCheck]:
    """Look at the file system of the snapshots, and at the room on it."""
    path = Path(env.FLASHCKPT_SHM_DIR)
    if not path.is_dir():
        yield DoctorCheck(
            "shared memory", FAILED, f"{path} is no folder", "mount a tmpfs there, or set FLASHCKPT_SHM_DIR"
        )
        return
    kind = _file_system(path)
    if kind not in _TMPFS:
        remedy = "snapshots there are as slow as that disk: unset FLASHCKPT_SHM_DIR, or mount a tmpfs"
        yield DoctorCheck("shared memory", WARNING, f"{path} is {kind or 'no tmpfs'}", remedy)
    room = capacities(path)[0]
    text = f"{human_bytes(room.nbytes)} free ({room.limit})"
    if need is not None and need > room.nbytes:
        remedy = f"docker: --shm-size; Kubernetes: a memory emptyDir on {path}; or fewer slots (docs/memory.md)"
        yield DoctorCheck("shared memory", FAILED, f"{text}, {human_bytes(need)} needed", remedy)
    else:
        yield DoctorCheck("shared memory", OK, text + ("" if need is None else f", {human_bytes(need)} needed"))


def limits() -> Iterator[DoctorCheck]:
    """Look at the limits of this process, which a job that is started here inherits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_low = 0 <= files < LEAST_FILES
    yield DoctorCheck(
        "open files", WARNING if is_low else OK, f"ulimit -n: {files}", "ulimit -n 65536" if is_low else ""
    )
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    found = "unlimited" if size < 0 else human_bytes(size)
    remedy = "ulimit -f unlimited: a rank's snapshots are one file" if size >= 0 else ""
    yield DoctorCheck("file size", WARNING if size >= 0 else OK, f"ulimit -f: {found}", remedy)


def versions() -> Iterator[DoctorCheck]:
    """Look at what is installed, without importing torch."""
    yield DoctorCheck(
        "flashckpt", OK, f"{__version__}, Python {platform.python_version()}, copies by {implementation()}"
    )
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield DoctorCheck("torch", FAILED, "not installed", "pip install 'torch>=2.11'")
        return
    numbers = tuple(int(part) if part.isdigit() else 0 for part in torch.split("+")[0].split(".")[:2])
    remedy = "" if numbers >= (2, 11) else "pip install 'torch>=2.11'"
    yield DoctorCheck("torch", OK if numbers >= (2, 11) else FAILED, torch, remedy)


def ports() -> Iterator[DoctorCheck]:
    """Look whether the port of the metrics can be listened on, where one is asked for."""
    if env.FLASHCKPT_METRICS_PORT is None:
        yield DoctorCheck("metrics", OK, "not asked for (FLASHCKPT_METRICS_PORT)")
        return
    host, port = env.FLASHCKPT_METRICS_HOST, env.FLASHCKPT_METRICS_PORT
    try:
        with socket.create_server((host, port)):
            yield DoctorCheck("metrics", OK, f"port {port} on {host} is free")
    except OSError as error:
        remedy = "ss -ltnp shows who listens there; a running job's persister does, too"
        yield DoctorCheck("metrics", WARNING, f"port {port} on {host}: {error.strerror}", remedy)


def cores() -> DoctorCheck:
    """Look whether a core is left for the copy thread and the persister."""
    number = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # of the own cgroup alone: as a container sees it
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        number = min(number, int(quota) // int(period)) if quota != "max" else number
    remedy = "one rank per core leaves none to the copies: they are then made inside ckpt.step()"
    return DoctorCheck("cores", OK if number > 1 else WARNING, str(number), "" if number > 1 else remedy)


def of_root(root: str, options: tuple[str, ...]) -> tuple[list[DoctorCheck], int]:
    """Look at a root by writing to it; return also the exit code of what failed, 0 if nothing did."""
    try:
        if is_process_local(root):
            raise ConfigError(f"{root} is private to one process", remedy="use a directory or a URL")
        with contextlib.closing(open_store(root, **parse_options(options))) as store:
            store.check(write=True)
            found = [DoctorCheck("root", OK, f"{store.url} can be read and written")]
            is_exact = store.is_conditional
            remedy = (
                "" if is_exact else "never let two runs share it: one could commit over the other (docs/storage.md)"
            )
            text = "conditional writes" if is_exact else "no conditional writes"
            return [*found, DoctorCheck("commits", OK if is_exact else WARNING, text, remedy), clock(store)], 0
    except FlashckptError as error:
        return [
            DoctorCheck("root", FAILED, f"{error.problem}: {error.found}".rstrip(": "), error.remedy)
        ], error.exit_code


def clock(store: Store, now: Callable[[], float] = time.time) -> DoctorCheck:
    """Compare this machine's clock with that of the storage, by the time that an object gets."""
    key = f"{HISTORY}.doctor-{secrets.token_hex(4)}"
    store.put(key, b"flashckpt doctor")
    try:
        info, now_s = store.head(key), now()
    finally:
        store.delete(key)
    skew_s = abs(info.mtime - now_s) if info is not None else 0.0
    remedy = "" if skew_s <= MOST_SKEW_S else "start chrony or ntpd: leases of readers are dated by the storage"
    return DoctorCheck("clock", OK if skew_s <= MOST_SKEW_S else WARNING, f"{skew_s:.0f} s off the storage's", remedy)


def _file_system(path: Path) -> str:
    """Return the type of the file system of a path; "" where it is not known."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, found, *_ = line.split(" ")
            if len(place) >= best and path.resolve().is_relative_to(place):
                best, kind = len(place), found
    return kind


def _page(found: list[DoctorCheck]) -> Group:
    lines = []
    for one in found:
        mark = {OK: "ok     ", WARNING: "WARNING", FAILED: "FAILED "}[one.state]
        lines.append(f"{mark}  {one.check:<14} {one.found}")
        if one.remedy:
            lines.append(f"{'':24} -> {one.remedy}")
    return Group(*(Text(printable(line), overflow="fold") for line in lines))
