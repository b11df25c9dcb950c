"""What the machines of nfs.py are asked to do."""

from __future__ import annotations

import subprocess


def shell(command: str) -> tuple[int, str]:
    """Run a command; return its code and what it says."""
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr)[-10_000:]
