"""What a run records of itself in every snapshot, and why a step is undone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashckpt.environment import env
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import compare, recorded_values, refuse_changes

FIRST, LARGEST = 2.0**12, 2.0**24
GROW_AFTER = 200
"""Steps without overflow after which the factor doubles."""


class LossScaler:
    """Halves the factor when gradients overflow, and doubles it after `GROW_AFTER` steps without.

    Every rank holds the same norm, so every rank has the same factor. It is part of each snapshot.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._steps = enabled, 0
        self.scale = FIRST if enabled else 1.0

    def overflowed(self, loss: float, norm: float) -> bool:
        """Note a step's totals; return whether the gradients overflowed for the factor's sake, so the step is skipped.

        At a factor of 1 nothing is left to halve: what is not finite then is for the guard to judge, as is the loss.
        """
        if not self._enabled or not math.isfinite(loss):
            return False
        if math.isfinite(norm):
            self._steps += 1
            if self._steps >= GROW_AFTER:
                self.scale, self._steps = min(2 * self.scale, LARGEST), 0
            return False
        if self.scale <= 1.0:
            return False
        self.scale, self._steps = self.scale / 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; {} where nothing is scaled."""
        return {"scale": self.scale, "steps": self._steps} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from recorded values, if both runs scale."""
        if self._enabled and state:
            self.scale, self._steps = float(state["scale"]), int(state["steps"])


logger = logging.getLogger(__name__)
_JUDGED = ("model.", "optim.", "data.", "guard.", "train.global_batch", "train.precision")
"""Settings that losses and gradient norms depend on, or how they are judged."""


def say_once(level: int, text: str) -> None:
    """Log on rank 0 what all ranks know."""
    if env.RANK == 0:
        logger.log(level, "%s", text)


class RunRecord:
    """The resolved configuration and the token count, recorded with every snapshot and compared on resume."""

    flashckpt_replicated = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._recorded = recorded_values(config)  # once: it is read with every snapshot
        self._cwd = str(Path.cwd())  # relative paths of the configuration are of it
        self.phase = config  # as it is in the phase that runs
        self.scaler = LossScaler(enabled=config.train.precision == "float16")
        self.tokens = 0
        self.before: dict[str, Any] | None = None
        self.settings_changed = False  # since what was restored: its first loss may be another level

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        state: dict[str, Any] = {"config": self._recorded, "tokens": self.tokens, "cwd": self._cwd}
        if scaler := self.scaler.state_dict():
            state["scaler"] = scaler
        if self.config.phase.each:
            phase = self.phase
            state["phase"] = {"model": {"rope_base": phase.model.rope_base}, "train": {"seq_len": phase.train.seq_len}}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the recorded values; reject a run that cannot continue them.

        Raises:
            ConfigError: a dimension of the model, the sequence length or the seed differs.
        """
        self.before, self.tokens = dict(state["config"]), int(state["tokens"])
        self.scaler.load_state_dict(state.get("scaler", {}))
        changes = compare(self.before, self.config)
        refuse_changes(changes)
        self.settings_changed = any(change.key.startswith(_JUDGED) for change in changes)
        for change in changes:
            level = logging.WARNING if change.severity == "warning" else logging.INFO
            say_once(level, f"{change.key} changed since the checkpoint: {change.before!r} -> {change.now!r}")


class SpikeError(Exception):
    """The loss spiked at `step`, or the state was bad there, and the run is to be rolled back; `blames_samples`: without them."""

    def __init__(self, step: int, *, blames_samples: bool = True) -> None:
        super().__init__(f"a loss spike, or a bad state, at step {step}")
        self.step, self.blames_samples = step, blames_samples
