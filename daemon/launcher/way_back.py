"""Where a job that fails at one step can go back to: the checkpoints on its root that are older than that step. Torch-free."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from flashckpt.checkpoint.catalog import list_checkpoints, open_root
from flashckpt.errors import FlashckptError
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobConfig, JobDirectory

_LIMIT_S = 20.0
_SHOWN = 8


def way_back(job: JobDirectory | None, step: int) -> str:
    """Return what to do about an error that comes again at `step`: to fix the script, or an older state where there is one."""
    fix = "fix the script; its traceback is above"
    root, steps = _older(job, step)
    held = _in_memory(job, step)
    if not steps and not held:
        return fix
    places = [f"memory holds steps {_listed(held)}"] * bool(held)
    places += [f"{root} holds older checkpoints (steps {_listed(steps)})"] * bool(steps)
    first = max([*held, *steps])
    keep = f"; flashckpt keep {root} {steps[0]} keeps that checkpoint" if steps else ""
    return (
        f"{fix}. If it is the state that is bad, {' and '.join(places)}:"
        f" ckpt.restore(step={first}) in the script, for one start, goes back to that one, or to any of them{keep}"
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:_SHOWN])) + (", ..." if len(steps) > _SHOWN else "")


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
