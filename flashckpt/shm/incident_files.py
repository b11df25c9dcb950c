"""Incidents in the job directory, one file each, until the persister has taken them to the root. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from flashckpt.core.incident import MOST_BYTES, Incident, decode, encode
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.faults import crash_point
from flashckpt.shm.private import private_directory, read_file

FOLDER = "incidents"
MOST_FILES = 50
"""Incidents that a job directory keeps; the oldest go."""
_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}\.json")


def write_incident(job: Path, incident: Incident) -> Path:
    """Write an incident into a job directory, in one move, and return its file.

    Raises:
        OSError: There is no room, or the directory has gone.
        FlashckptError: The folder is a link, or another user's.
    """
    folder = job / FOLDER
    with private_directory(job) as above, private_directory(folder, create=True, within=above) as inside:
        name = f"{incident.id}.json"
        part = f".{name}"  # one that dies here leaves it; it goes with the job directory
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=inside)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(encode(incident))
            crash_point("incident.before-rename")
            os.rename(part, name, src_dir_fd=inside, dst_dir_fd=inside)
        except OSError:  # no room
            os.unlink(part, dir_fd=inside)
            raise
        for old in incident_names(job)[:-MOST_FILES]:
            os.unlink(old, dir_fd=inside)
    return folder / name


def incident_names(job: Path) -> list[str]:
    """Return the names of the incidents of a job directory, oldest first."""
    try:
        return sorted(name for name in os.listdir(job / FOLDER) if _NAME.fullmatch(name))  # noqa: PTH208 -- names
    except OSError:
        return []


def read_raw(job: Path, name: str) -> bytes:
    """Return the JSON of one incident; b"" where it cannot be read."""
    with contextlib.suppress(OSError, DamagedError, FlashckptError):
        return read_file(job / FOLDER / name, most=MOST_BYTES)
    return b""


def incidents_in(job: Path, most: int = MOST_FILES) -> list[Incident]:
    """Return the newest incidents of a job directory, oldest first; what cannot be read is left out."""
    found = (decode(read_raw(job, name)) for name in incident_names(job)[-most:])
    return [one for one in found if one is not None]
