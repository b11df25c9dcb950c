"""Where a job that fails at one step can go back to: the checkpoints on its root that are older than that step. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.root_summary import open_root
from flashckpt.errors import FlashckptError
from flashckpt.shm.job_directory import JobDirectory

_LIMIT_S = 20.0
_SHOWN = 8


def way_back(job: JobDirectory | None, step: int) -> str:
    """Return what to do about an error that comes again at `step`: to fix the script, or an older state where there is one."""
    fix = "fix the script; its traceback is above"
    root, steps = _older(job, step)
    if not steps:
        return fix
    more = ", ..." if len(steps) > _SHOWN else ""
    older = ", ".join(map(str, steps[:_SHOWN]))
    return (
        f"{fix}. If it is the state that is bad, {root} holds older checkpoints (steps {older}{more}):"
        f" ckpt.restore(step={steps[0]}) in the script, for one start, goes back; flashckpt keep {root} {steps[0]} keeps it"
    )


def _older(job: JobDirectory | None, step: int) -> tuple[str, Sequence[int]]:
    """Return the root, and the steps before `step` that are committed on it, newest first; none where it does not answer in time."""
    found: list[tuple[str, list[int]]] = []

    def look() -> None:
        try:
            if job is not None and (config := job.read_config()) is not None:
                with open_root(config.root, config.storage_options) as store:
                    steps = {info.step for info in list_checkpoints(store)}
                found.append((config.root, sorted((one for one in steps if one < step), reverse=True)))
        except (FlashckptError, OSError):
            return

    thread = threading.Thread(target=look, name="way-back", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return found[0] if found else ("", [])
