"""How long a persister stays."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashckpt.environment import env


@dataclass(frozen=True, kw_only=True)
class DaemonTimeouts:
    """How long the daemon stays, in seconds, by default as the environment says.

    Args:
        linger_s: After the last rank and agent, once its work is done (FLASHCKPT_DAEMON_LINGER).
        patience_s: After the last rank and agent, while storage keeps failing (FLASHCKPT_DAEMON_PATIENCE); also
            after SIGTERM while a flush is running without a failure.
        grace_s: After SIGTERM, while a flush is pending and storage keeps failing (FLASHCKPT_DAEMON_GRACE).
    """

    linger_s: float = field(default_factory=lambda: env.FLASHCKPT_DAEMON_LINGER)
    patience_s: float = field(default_factory=lambda: env.FLASHCKPT_DAEMON_PATIENCE)
    grace_s: float = field(default_factory=lambda: env.FLASHCKPT_DAEMON_GRACE)
