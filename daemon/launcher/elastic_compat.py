"""Helpers for torch.distributed.elastic: temporary monkeypatching, re-raising its signals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import SignalException


def raise_signal(number: int) -> NoReturn:
    """Raise what torch's own signal handler raises."""
    name = signal.Signals(number)
    msg = f"Process {os.getpid()} got signal: {name}"
    raise SignalException(msg, sigval=name)


@contextlib.contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Put `value` in place of a name of a module."""
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)
