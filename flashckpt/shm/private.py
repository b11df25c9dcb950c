"""Our directories in shared memory: owned by this user, mode 0700, no links. Created and checked only here. Torch-free.

`/dev/shm` is open to every user of the machine: a file there under our name may be another user's, or a link to
anywhere. A directory is therefore opened first, without following a link, and checked by its descriptor; operations
relative to the descriptor (`dir_fd`) then act on the checked directory, even if the path is swapped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashckpt.errors import ConfigError, SharedMemoryError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that is not our directory and was left untouched."""

    path: Path
    reason: str


@contextlib.contextmanager
def private_directory(path: Path, *, create: bool = False, within: int | None = None) -> Iterator[int]:
    """Open one of our directories for the duration of the body; yields its descriptor.

    Args:
        path: The directory.
        create: Create it and missing parents.
        within: Descriptor of its parent, itself checked; then only the last part of `path` is looked up.

    Raises:
        FileNotFoundError: It does not exist and `create` is False, or it was removed in this instant.
        ConfigError: It is a link or no directory, another user's, or open to other users.
        SharedMemoryError: The system refuses to create or open it.
    """
    name = path if within is None else Path(path.name)
    try:
        if create:
            _make(name, within)
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refusal(path, reason) if (reason := _why_not(path)) else _impossible(path, error) from error
    try:
        if reason := _reason(os.fstat(fd)):
            raise _refusal(path, reason)
        yield fd
    finally:
        os.close(fd)


def private_directories(base: Path) -> tuple[list[Path], list[Skipped]]:
    """Return our directories directly in `base`, by name, and the foreign entries there, which are not opened.

    A missing `base` is empty; a `base` that is not ours is itself the foreign entry.
    """
    found: list[Path] = []
    skipped: list[Skipped] = []
    try:
        with private_directory(base) as fd:
            for name in sorted(os.listdir(fd)):  # noqa: PTH208 -- by the descriptor, not by the path
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if reason := _reason(status):
                        skipped.append(Skipped(path=base / name, reason=reason))
                    else:
                        found.append(base / name)
    except FileNotFoundError:
        return [], []
    except (ConfigError, SharedMemoryError) as error:
        return [], [Skipped(path=base, reason=error.found)]
    return found, skipped


def create_file(path: Path, *, flags: int = os.O_WRONLY) -> int:
    """Return a descriptor of a new empty file, mode 0600, in one of our directories; replaces a file of that name.

    Raises:
        ConfigError: The directory is not ours.
        OSError: The file cannot be created, or another process created one in the same instant.
    """
    with private_directory(path.parent) as fd:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=fd)
        return os.open(path.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)


def remove_tree(name: str, within: int) -> bool:
    """Remove the directory `name` below a checked descriptor, following no link; returns whether it is gone."""
    if not shutil.rmtree.avoids_symlink_attacks:
        raise SharedMemoryError(f"{name} cannot be removed safely", found="a platform without openat")
    place = Path(f"/proc/self/fd/{within}", name)  # rmtree takes no dir_fd before Python 3.11
    shutil.rmtree(place, ignore_errors=True)
    return not os.path.lexists(place)


def _make(name: Path, within: int | None) -> None:
    if within is None:
        try:
            name.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # $FLASHCKPT_SHM_DIR, which may be for all users
        except FileNotFoundError as error:  # such as in /proc: waiting would not help
            raise _impossible(name, error) from error
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=within)


def _reason(status: os.stat_result) -> str:
    """Return why this is not our directory, "" if it is."""
    if stat.S_ISLNK(status.st_mode):
        return f"a symbolic link, uid {status.st_uid}"
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return ""
    return f"mode {stat.filemode(status.st_mode)}, uid {status.st_uid}"


def _why_not(path: Path) -> str:
    """Return why `path` could not be opened as our directory; "" if the reason is unknown."""
    try:
        return _reason(path.lstat())
    except OSError:
        return ""


def _impossible(path: Path, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"{path} cannot be made or opened",
        found=error.strerror or str(error),
        expected="a directory on a tmpfs in which this user may write",
        state="Nothing was written.",
        remedy="mount it writable, or set FLASHCKPT_SHM_DIR to another tmpfs",
    )


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a private directory of this user",
        found=reason,
        expected=f"a directory of uid {os.getuid()} with mode drwx------",
        state="Nothing was written.",
        remedy="remove it, or set FLASHCKPT_SHM_DIR to another tmpfs",
    )
