"""User callbacks: an exception in one is logged and counted, and never ends training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flashckpt.logs import guarded

_log = guarded(logging.getLogger("flashckpt"))


def call(
    name: str,
    function: Callable[..., object] | None,
    *arguments: Any,
    count: Callable[[], None],
    may_exit: bool = False,
) -> None:
    """Call one of `on_snapshot`, `on_commit`, `on_restore` and `on_failure`, if there is one.

    Args:
        name: The callback's name, for the log.
        function: The callback, or None.
        arguments: Passed to it.
        count: Called when it raised.
        may_exit: Let SystemExit and KeyboardInterrupt propagate: in the training thread they are intended. The copy
            thread must survive them, since training waits for it.
    """
    if function is None:
        return
    try:
        function(*arguments)
    except BaseException as error:
        if may_exit and not isinstance(error, Exception):
            raise
        count()
        _log.exception("the callback %s failed; training continues", name)
