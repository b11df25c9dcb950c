"""What a run would hold, on ranks that do not exist.

In: a configuration and a number of ranks. Out: bytes per rank, as a table or JSON; nothing gets memory.
"""

from __future__ import annotations

from collections.abc import Callable

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.dry_run.options import take_options


def take_dry_run(words: list[str]) -> Callable[[RunConfig], int] | None:
    """Return what makes the dry run that a command line asks for, and returns its exit code; arguments as `take_options`."""
    if (options := take_options(words)) is None:
        return None

    def run(config: RunConfig) -> int:
        from flashckpt.trainer.dry_run.command import dry_run

        return dry_run(config, options)

    return run
