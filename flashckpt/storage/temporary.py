"""Names of temporary files, which say whose they are: a sweep removes those of dead writers."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

TEMPORARY = ".tmp"


def temporary_name(name: str) -> str:
    """Return the name under which this process writes the object `name` before it is published."""
    return f"{name}.{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}"


def is_orphan(name: str, age_s: float, older_than_s: float) -> bool:
    """Return whether a temporary file is old enough to be removed, or its writer died on this machine."""
    if age_s > older_than_s:
        return True
    machine, _, rest = name.removesuffix(TEMPORARY).rpartition(".")[2].partition("-")
    pid = rest.partition("-")[0]
    if machine != machine_tag() or not pid.isdigit():
        return False
    return not Path(f"/proc/{pid}").exists()


def machine_tag() -> str:
    """Return 8 hex digits that name this boot and process id space: a pid means something only inside it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return "00000000"
    return hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:8]
