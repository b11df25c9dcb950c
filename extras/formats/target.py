"""Where an export goes, or one checkpoint: a temporary name beside it, made durable, then renamed. Nothing is overwritten unasked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, StoreError
from flashckpt.faults import crash_point
from flashckpt.storage.posix import rename
from flashckpt.storage.store import machine_tag

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SMALLER = "free some room, choose another disk, or take less with --only or --dtype"


@contextlib.contextmanager
def replacing(
    path: Path, *, nbytes: int, force: bool, is_ours: Callable[[Path], bool], remedy: str = _SMALLER
) -> Iterator[Path]:
    """Give a temporary path to write to (a file or a folder); afterwards it is durable and called `path`.

    Args:
        path: The final name.
        nbytes: Bytes that will be written; refused at once where the disk has less room.
        force: Replace what is there.
        is_ours: Tells whether something inside an existing folder may be deleted with it.
        remedy: What to do where the disk is full.

    Raises:
        ConfigError: Something is there already, or a folder holds what no export wrote.
        StoreError: The disk is full or refuses; the temporary is removed.
    """
    _refuse_existing(path, force=force, is_ours=is_ours)
    with _explained(path, nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise _full(path, nbytes, free, remedy)
    with _explained(path, nbytes, remedy):
        sweep(path.parent, _ours(path))
    temporary = _temporary(path)
    try:
        with _explained(path, nbytes, remedy):
            yield temporary
            for one in sorted(temporary.rglob("*")) if temporary.is_dir() else []:
                _sync(one)
            _sync(temporary)
            crash_point("export.before-rename")
            _publish(temporary, path)
            _sync(path.parent)
    finally:
        _remove(temporary)


def _ours(path: Path) -> str:
    return f".{path.name}.{machine_tag()}."  # host names may be equal: containers that share a file system


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_ours(path)}{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sweep(folder: Path, prefix: str = "") -> None:
    """Remove what killed processes left in a folder: temporaries of this machine whose process is gone.

    Args:
        folder: Where to look.
        prefix: What their names begin with, all but process and number; "": of every path.
    """
    begin = re.escape(prefix) or r"\..+" + re.escape(f".{machine_tag()}.")
    for one in folder.iterdir():
        pid = re.fullmatch(begin + r"(\d+)-[0-9a-f]{8}\.tmp", one.name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            _remove(one)


def remove_whole(path: Path) -> None:
    """Remove a file or a folder of which no part must ever be seen under its name; nothing where there is none.

    Raises:
        StoreError: It cannot be removed.
    """
    if not os.path.lexists(path):
        return
    aside = _temporary(path)
    try:
        rename(path, aside)
        _sync(path.parent)
        crash_point("removal.renamed")
        _remove(aside)
    except OSError as error:
        raise StoreError(f"{path} cannot be removed", found=str(error), remedy="check its permissions") from error


def _refuse_existing(path: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> None:
    if not path.exists():
        return
    if not force:
        raise ConfigError(
            f"{path} is there already",
            state="It was left unchanged.",
            remedy="choose another name, or replace it with --force",
        )
    foreign = [one.name for one in sorted(path.iterdir()) if not is_ours(one)] if path.is_dir() else []
    if foreign:
        raise ConfigError(
            f"the folder {path} holds files that no export wrote, and --force would remove them",
            found=", ".join(foreign[:5]),
            state="It was left unchanged.",
            remedy="choose a separate folder",
        )


def _publish(temporary: Path, path: Path) -> None:
    """Rename; where one of the two is a folder they change names, and the old one is removed under the temporary's.

    Where the file system cannot do that in one step (NFS) it goes aside first: who is killed between the two renames
    leaves it as `.NAME.*.old`.
    """
    if not os.path.lexists(path) or not (path.is_dir() or temporary.is_dir()):
        rename(temporary, path)
        return
    if _exchange(temporary, path):
        crash_point("export.exchanged")
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    rename(path, aside)
    try:
        crash_point("export.between-renames")
        rename(temporary, path)
    except OSError:
        rename(aside, path)
        raise
    _remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the kernel, the C library or the file system cannot."""
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(path: Path, nbytes: int, remedy: str = _SMALLER) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(path, nbytes, shutil.disk_usage(path.parent).free, remedy) from error
        raise StoreError(
            f"{path} cannot be written", found=str(error), state="Nothing of it is left.", remedy="check the path"
        ) from error


def _full(path: Path, nbytes: int, free: int, remedy: str) -> StoreError:
    return StoreError(
        f"the disk of {path} is full",
        found=f"{free / 1e9:.3f} GB free",
        expected=f"{nbytes / 1e9:.3f} GB",
        state="Nothing of it is left.",
        remedy=remedy,
    )
