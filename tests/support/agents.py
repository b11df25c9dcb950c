"""An agent that is not there: its folder, with the lock by which ranks know that it runs, so that they start no persister."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from flashckpt.shm.agent_folder import LOCK
from flashckpt.shm.lease import Lease

_HELD: deque[Lease] = deque(maxlen=32)


def pretend_agent(folder: Path) -> str:
    """Hold the lock of an agent's folder in this process; return what the environment says of it."""
    lease = Lease(folder / LOCK, create=True)
    assert lease.exclusive(0)
    _HELD.append(lease)
    return str(folder)
