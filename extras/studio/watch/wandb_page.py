"""A run's page at Weights & Biases: the same values as TensorBoard's. Whatever fails costs points, never the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashckpt.environment import env
from flashckpt.trainer.config.log import LogConfig
from flashckpt.trainer.train.metrics import ABANDONED
from flashckpt.trainer.train.nonfatal import Nonfatal

logger = logging.getLogger(__name__)
RUN_ID = "wandb-run"
"""File of the log folder that holds the id of the page."""
PATIENCE = 100
"""After a failure the page is opened again once every so many steps: an attempt may wait for a server."""
_INIT_S = 60.0


class WandbPage:
    """Sends points to the page whose id is recorded in the log folder; every start of the run continues it.

    A page has no point taken back: steps that are trained again after a restart are not sent a second time.

    Args:
        config: The resolved run as plain values, shown with the page.
        after: Step that was restored.
    """

    def __init__(self, log: LogConfig, config: Mapping[str, Any], after: int) -> None:
        self._log, self._config, self._after = log, config, after
        self._run: Any = None
        self._writing = Nonfatal("wandb")
        self._calls = 0  # since sending failed
        self._is_installed = True

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Send one point of each named curve; a step that the page has already is left out."""
        if self._is_installed and not self._writing.attempt(lambda: self._send(values, step), lines=len(values)):
            self._give_up()

    def note(self, text: str, step: int) -> None:
        """Nothing: a page there has no place for texts at a step."""

    def say(self, texts: Mapping[str, str], step: int) -> None:
        """Nothing, as `note`: samples are in samples.jsonl."""

    def close(self) -> None:
        """Send what waits, and end this part of the run."""
        if self._run is not None and not self._writing.attempt(lambda: _guarded(self._run.finish), lines=0):
            self._writing.lost += 1
        self._run = None
        self._writing.report()

    def _send(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            self._calls += 1
            if self._writing.lost and self._calls % PATIENCE:
                raise OSError("not sending for now")
            self._open()
        if self._run is not None and step > self._after:
            _guarded(lambda: self._run.log(dict(values), step=step))
            self._after = step

    def _open(self) -> None:
        try:
            import wandb
        except ImportError:
            logger.warning("log.wandb is set, but wandb is not installed: pip install 'flashckpt[wandb]'")
            self._is_installed = False
            return
        folder = Path(self._log.folder)
        # silent: it neither asks for a key on the terminal nor prints beside the display
        settings = wandb.Settings(console="off", silent=True, init_timeout=_INIT_S)
        _guarded(lambda: wandb.setup(settings=settings))
        self._run = _guarded(
            lambda: wandb.init(
                project=self._log.wandb,
                name=self._log.wandb_run or None,
                mode=self._log.wandb_mode or None,
                id=run_id(folder, is_fresh=not self._after),
                resume="allow",
                dir=str(folder),
                config=dict(self._config),
                settings=settings,
            )
        )
        known = last_step(folder / ABANDONED) if self._run.offline else self._run.step - 1  # the server's count, if any
        self._after = max(self._after, known)
        logger.info("wandb: %s", self._run.url or f"offline; wandb sync {self._run.dir}")

    def _give_up(self) -> None:
        if self._run is not None:
            with contextlib.suppress(OSError):
                _guarded(self._run.finish)
        self._run = None


def _guarded(call: Callable[[], Any]) -> Any:
    """Make every error of the library one that `Nonfatal` counts."""
    try:
        return call()
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def run_id(folder: Path, *, is_fresh: bool) -> str:
    """Return the id of the page that this run continues: the recorded one, or a new one, which is recorded.

    Args:
        folder: The log folder.
        is_fresh: Nothing was restored: another run begins here, unless dlrun has only restarted this one.
    """
    path, restarted = folder / RUN_ID, env.FLASHCKPT_RESTART > 0
    if restarted or not is_fresh:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = path.read_text().strip()
            if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found):
                return found
    new = secrets.token_hex(4)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{RUN_ID}.{os.getpid()}")
        temporary.write_text(new + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): a restart will begin another page", path, error.strerror)
    return new


def last_step(path: Path) -> int:
    """Return the highest step of a file of lines, 0 if there is none: what was sent before steps were rolled back."""
    highest = 0
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                highest = max(highest, int(json.loads(line)["step"]))
    return highest
