"""Incidents that a job has reported: in its memory, on its root, in its output."""

from __future__ import annotations

import re
from pathlib import Path

from flashckpt.checkpoint.history import INCIDENTS
from flashckpt.core.incident import Incident, decode


def in_memory(memory: Path) -> list[Incident]:
    """Return the incidents of the jobs below a memory tier, oldest first."""
    return _read(memory.glob("flashckpt-*/*/incidents/[0-9]*.json"))


def on_root(root: Path) -> list[Incident]:
    return _read(root.glob(f"{INCIDENTS}*.json"))


def said(output: str) -> list[str]:
    """Return the verdicts in the output of dlrun."""
    return re.findall(r"^\[dlrun\] incident [0-9a-f-]{22}: (.+)$", output, re.MULTILINE)


def _read(paths: object) -> list[Incident]:
    found = [decode(path.read_bytes()) for path in sorted(paths, key=lambda path: path.name)]  # type: ignore[call-overload]
    return [one for one in found if one is not None]
