"""A c10d store in which every value is signed with the job secret: a value that a stranger wrote counts as absent.

Anybody who can reach a rendezvous store can write to it. All that agents leave there for each other, torch's own values
included, passes through here: it is verified before it is decoded or acted upon. A signature holds for one key, of one
round, of one job.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from flashckpt.daemon.launcher.job_secret import Seal, UnsealedError

_log = logging.getLogger("flashckpt.dlrun")
_POLL_S = 0.05
MOST_BYTES = 1 << 20
"""Longest value of an agent that is looked at."""


class SealedStore:
    """The methods of a c10d store that agents use; torch's agent takes it for one.

    Args:
        inner: Holds the values; others can write to it.
        secret: The job's secret; with b"" values are not signed, and signed ones are refused.
        purpose: The values' purpose: the job, and the round where they belong to one.

    Attributes:
        timeout: How long `get`, `wait` and `add` wait.
    """

    def __init__(self, inner: Store, secret: bytes, purpose: str) -> None:
        self._inner, self._secret, self._purpose = inner, secret, purpose
        self._refused: set[str] = set()
        self.timeout: timedelta = inner.timeout  # type: ignore[attr-defined]  # a property that torch's stub lacks

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get`, `wait` and `add` wait."""
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._inner.set(key, self._close(key, _text(value)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether nodes of this job have set all these keys."""
        return all(self._read(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Return a key's value; waits until a node of this job has set it. DistStoreError after the time-out."""
        return self._await(key, time.monotonic() + self.timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, as `get`."""
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when nodes of this job have set all these keys. DistStoreError after the time-out."""
        until = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        for key in keys:
            self._await(key, until)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. One that a stranger wrote begins again at 0: it never counts too many.

        Raises:
            DistStoreError: somebody changed it all the time until the time-out.
        """
        until = time.monotonic() + self.timeout.total_seconds()
        while True:
            found = bytes(self._inner.get(key)) if self._inner.check([key]) else b""
            count = _number(self._open(key, found)) if found else 0
            if not amount:
                return count
            # a random part: else two that count at once write the same, and each takes the other's value for its own
            wanted = self._close(key, f"{count + amount} {secrets.token_hex(8)}")
            swapped = self._inner.compare_set(key, found, wanted)  # type: ignore[arg-type]  # torch takes bytes too
            if bytes(swapped) == wanted.encode():
                return count + amount
            if time.monotonic() > until:
                raise DistStoreError(f"the counter {key} could not be changed in time")

    def _await(self, key: str, until: float) -> bytes:
        while (text := self._read(key)) is None:
            if (left := until - time.monotonic()) <= 0:
                raise DistStoreError(f"no node of this job has set {key} in time")
            if self._inner.check([key]):  # a stranger's: a node of the job may still replace it
                time.sleep(min(_POLL_S, left))
            else:
                self._inner.wait([key], timedelta(seconds=left))
        return text.encode("latin-1")

    def _read(self, key: str) -> str | None:
        return self._open(key, bytes(self._inner.get(key))) if self._inner.check([key]) else None

    def _open(self, key: str, data: bytes) -> str | None:
        try:
            return self._seal(key).open(data, MOST_BYTES)
        except UnsealedError as error:
            if key not in self._refused:
                _log.warning("%s in the rendezvous store is ignored, as if it were not there: %s", key, error)
            self._refused.add(key)
            return None

    def _close(self, key: str, text: str) -> str:
        return self._seal(key).close(text).decode()

    def _seal(self, key: str) -> Seal:
        return Seal(self._secret, f"{self._purpose}\0{key}")


def _text(value: str | bytes) -> str:
    """Return a value as text with one letter per byte: a seal is of text."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _number(text: str | None) -> int:
    with contextlib.suppress(ValueError):
        return int((text or "0").partition(" ")[0])
    return 0
