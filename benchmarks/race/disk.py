"""A separate file system for a run: its bytes are counted, it can be full, and it can lose what was not synced. Root; else a folder."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

_SHUTDOWN, _NOLOGFLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN: as if the power had gone
_NBYTES = 3 << 30


class Disk:
    """An ext4 in a sparse file, mounted; or a plain folder, where nothing can be mounted.

    Args:
        folder: Where the file and the mount point are made.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._image = folder / "disk", folder / "image"
        self.path.mkdir()
        self._device, self._before = "", 0
        if os.geteuid() == 0:
            with self._image.open("wb") as file:
                file.truncate(_NBYTES)
            if _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image)):
                self._mount()

    @property
    def is_own(self) -> bool:
        """Whether it is a separate file system."""
        return bool(self._device)

    def written_bytes(self) -> int | None:
        """Return what reached the device since it was mounted first; None for a plain folder."""
        if not self._device:
            return None
        fd = os.open(self.path, os.O_RDONLY)
        try:
            ctypes.CDLL(None).syncfs(fd)
        finally:
            os.close(fd)
        return self._sectors() * 512

    def _sectors(self) -> int:
        """Return the sectors written since it was mounted: the counter of a loop device outlasts its file."""
        words = Path(f"/sys/block/{Path(self._device).name}/stat").read_text().split()
        return int(words[6]) - self._before

    def fill(self) -> None:
        """Take all room that is left."""
        left = os.statvfs(self.path)
        fd = os.open(self.path / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            for nbytes in (left.f_bavail * left.f_frsize, 1 << 20, 4096):
                while True:
                    try:
                        os.posix_fallocate(fd, os.fstat(fd).st_size, nbytes)
                    except OSError:
                        break
        finally:
            os.close(fd)

    def free(self) -> None:
        """Give the room back."""
        (self.path / "filler").unlink(missing_ok=True)

    def lose_power(self) -> None:
        """Lose what is not on the device, and come back as after a reboot: every process that used it is dead."""
        if self._device:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.ioctl(fd, _SHUTDOWN, ctypes.c_uint32(_NOLOGFLUSH))
            finally:
                os.close(fd)
            device = self._device
            _run("umount", str(self.path))
            _run("mount", "-o", "noinit_itable", device, str(self.path))

    def close(self) -> None:
        """Unmount and remove."""
        if self._device:
            _run("umount", "-l", str(self.path))
            _run("losetup", "-d", self._device)
        self._image.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _mount(self) -> None:
        found = subprocess.run(
            ["losetup", "-f", "--show", str(self._image)], check=False, capture_output=True, text=True
        )
        if found.returncode:
            return
        device = found.stdout.strip()
        if _run("mount", "-o", "noinit_itable", device, str(self.path)):
            self._device = device
            self._before = self._sectors()
        else:
            _run("losetup", "-d", device)


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, check=False, capture_output=True).returncode == 0
    except OSError:
        return False
