"""Where a job that fails at one step can go back to: the checkpoints on its root that are older than that step. Torch-free."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from flashckpt.checkpoint.catalog import list_checkpoints, open_root
from flashckpt.daemon.launcher.budget import RestartDecision
from flashckpt.errors import FlashckptError
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobConfig, JobDirectory

_LIMIT_S = 20.0
_SHOWN = 8
FIX = "fix the script; its traceback is above"


class WayBack:
    """How far back the next start goes, and the steps whose samples it leaves out: until some start has done so, however it ends."""

    def __init__(self) -> None:
        self.back, self.leave_out = 0, (0, 0)
        self._since, self._job = 0, ""

    def follow(self, decided: RestartDecision | None, job: JobDirectory | None) -> None:
        """Take up a decision; one that goes nowhere leaves what is still to be done: no generation began so, no snapshot has it."""
        name = "" if job is None else str(job.path)
        if name != self._job:  # numbers and steps of another root say nothing of this one
            self._job, self._since, self.back, self.leave_out = name, 0, 0, (0, 0)
        began, snapshot = _newest(job)
        if began > self._since:
            self.back = 0
        if snapshot > self._since:
            self.leave_out = (0, 0)
        if decided is not None and decided.back:
            self.back, self.leave_out, self._since = decided.back, decided.leave_out, began


def _newest(job: JobDirectory | None) -> tuple[int, int]:
    """Return the numbers of the generation that began last on this node, and of the last that memory here has a snapshot of."""
    with contextlib.suppress(FlashckptError, OSError):
        record = None if job is None else job.read_generation()
        if job is not None and record is not None:
            return record.number, max((one.generation for one in scan(job, []).complete()), default=0)
    return 0, 0


def way_back(job: JobDirectory | None, step: int, fix: str = FIX) -> str:
    """Return what to do about what fails again at `step`: `fix`, or to go back to a state that is left, with the command for each."""
    root, steps = _older(job, step)
    held = _in_memory(job, step)
    if not steps and not held:
        return fix
    left = [(one, "in memory") for one in held] + [(one, f"on {root}") for one in steps if one not in held]
    left.sort(reverse=True)
    lines = [f"\n    dlrun --restore-step {one} ...   ({place})" for one, place in left[:_SHOWN]]
    lines += ["\n    ..."] * (len(left) > _SHOWN)
    keep = f"\n  flashckpt keep {root} {steps[0]} keeps that checkpoint" if steps else ""
    return f"{fix}{'. ' if fix else ''}If it is the state that is bad, start once more from one that is left:{''.join(lines)}{keep}"


def _in_memory(job: JobDirectory | None, step: int) -> list[int]:
    """Return the steps before `step` that this node's memory holds and that are not suspect, newest first."""
    with contextlib.suppress(FlashckptError, OSError):
        record = None if job is None else job.read_generation()
        if job is not None:
            view = scan(job, [record] if record is not None else [])
            clean = set(view.complete()).difference(view.suspect())
            return sorted({one.step for one in clean if one.step < step}, reverse=True)
    return []


def has_older(job: JobDirectory | None) -> bool:
    """Return whether memory here, or the root, holds a state older than the one that the present generation began with."""
    with contextlib.suppress(FlashckptError, OSError):
        record = None if job is None else job.read_generation()
        if job is None or record is None or record.parent is None:
            return False
        parent = record.parent
        if any(identity < parent for identity in scan(job, [record]).complete()):
            return True
        config = job.read_config()
        return config is not None and any(step < parent.step for step in steps_on_root(config, _LIMIT_S))
    return False


def _older(job: JobDirectory | None, step: int) -> tuple[str, Sequence[int]]:
    """Return the root, and the steps before `step` that are committed on it and not suspect, newest first; none where it does not answer in time."""
    config = None
    with contextlib.suppress(FlashckptError, OSError):
        config = None if job is None else job.read_config()
    if config is None:
        return "", []
    clean = steps_on_root(config, _LIMIT_S, is_clean=True)
    return config.root, sorted((one for one in clean if one < step), reverse=True)


def steps_on_root(config: JobConfig, limit_s: float, *, is_clean: bool = False) -> set[int]:
    """Return the steps that are committed on a root, or of those the ones that are not suspect; none where it does not answer within `limit_s` seconds."""
    found: set[int] = set()

    def look() -> None:
        with contextlib.suppress(Exception), open_root(config.root, config.storage_options) as store:
            found.update([info.step for info in list_checkpoints(store) if not (is_clean and info.suspects)])

    thread = threading.Thread(target=look, name="flashckpt-look", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found.copy()
