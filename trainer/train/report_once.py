"""Reports an error of all ranks once, and tells dlrun if it is permanent. Torch-free."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from flashckpt.environment import env
from flashckpt.errors import FINAL_CODES, ConfigError, FlashckptError
from flashckpt.shm.agent_folder import agent_folder, has_display, write_permanent_error
from flashckpt.trainer.train.nonfatal import nonfatal_stream

_PATIENCE_S = 5.0


def report_once(error: FlashckptError) -> None:
    """Write `error` to standard error if this rank is the first to raise it; else wait until it is written.

    The first, not rank 0: dlrun ends all ranks as soon as one of them has failed. For the same reason the
    others wait: if they ended, the first one's message would be cut off.
    """
    error.settle()
    folder = agent_folder()
    if folder is None:
        with contextlib.suppress(ConfigError):  # of RANK itself
            if env.RANK and error.exit_code in FINAL_CODES:
                return
        _write(error)
        return
    marker = folder / f"reported-{env.FLASHCKPT_RESTART}-{error.exit_code}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        _wait(marker)
        return
    except OSError:  # no space, no folder: better reported twice than not at all
        _write(error)
        return
    _write(error)
    with contextlib.suppress(OSError):  # a full disk must not hide the exit code
        write_permanent_error(folder, error.exit_code)
        marker.write_text("reported")


def _write(error: FlashckptError) -> None:
    folder = agent_folder()
    stream = nonfatal_stream(sys.stderr, "standard error", over_display=folder is not None and has_display(folder))
    stream.write(f"{type(error).__name__}: {error}\n")


def _wait(marker: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        try:
            if marker.stat().st_size:
                return
        except OSError:
            return
        time.sleep(0.01)
