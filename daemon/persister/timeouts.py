"""How long a persister stays, by the environment."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass

from flashckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DaemonTimeouts:
    """How long the daemon stays, in seconds, from the environment.

    Args:
        linger_s: After the last rank and agent, once its work is done (FLASHCKPT_DAEMON_LINGER).
        patience_s: After the last rank and agent, while storage keeps failing (FLASHCKPT_DAEMON_PATIENCE); also
            after SIGTERM while a flush is running without a failure.
        grace_s: After SIGTERM, while a flush is pending and storage keeps failing (FLASHCKPT_DAEMON_GRACE).
    """

    linger_s: float = 30.0
    patience_s: float = 600.0
    grace_s: float = 60.0

    @classmethod
    def from_environment(cls) -> DaemonTimeouts:
        """Read the variables.

        Raises:
            ConfigError: One of them is not a number of seconds.
        """
        return cls(
            linger_s=_seconds("FLASHCKPT_DAEMON_LINGER", cls.linger_s),
            patience_s=_seconds("FLASHCKPT_DAEMON_PATIENCE", cls.patience_s),
            grace_s=_seconds("FLASHCKPT_DAEMON_GRACE", cls.grace_s),
        )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise ConfigError(
        f"{name} is no number of seconds",
        found=repr(text),
        expected="a number of at least 0, such as 30",
        state="The persister has not started.",
        remedy=f"correct {name}, or unset it",
    )
