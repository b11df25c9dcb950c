"""The parts that several backends share: restartable streams, deletion key by key, and the rule for stores without conditional writes."""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from flashckpt.errors import DamagedError, RootError, StoreError

if TYPE_CHECKING:
    from flashckpt.storage.store import Store

SETTLE_S = 1.0
"""Seconds a writer waits before it reads back what it wrote, where writes cannot be conditional."""

PROBE = "probe"
"""Folder of the objects that are written to find out what a service can do; empty otherwise."""

_DELETES_IN_FLIGHT = 16
_log = logging.getLogger(__name__)


class UnknownRequestError(RootError):
    """The server has no such request, or ignores what it is asked for in it: not to be tried again, but done in another way."""


def require_restartable(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    """Return `parts`; ValueError if they can be iterated only once (a programming error)."""
    if iter(parts) is parts:
        raise ValueError("put_object needs parts that can be iterated again after a failed attempt")
    return parts


def delete_each(url: str, keys: Sequence[str], delete: Callable[[str], None]) -> None:
    """Delete keys one by one, several at a time, where the service has no batch delete; errors as `delete_many`."""
    failed: dict[str, RootError | StoreError] = {}

    def one(key: str) -> None:
        try:
            delete(key)
        except (RootError, StoreError) as error:
            failed[key] = error

    if keys:
        with ThreadPoolExecutor(min(_DELETES_IN_FLIGHT, len(keys)), thread_name_prefix="flashckpt-delete") as pool:
            list(pool.map(one, keys))
    raise_undeleted(url, failed)


def raise_undeleted(url: str, failed: Mapping[str, RootError | StoreError]) -> None:
    """Raise the first error of a batch delete, with the number of keys that failed; nothing if none did."""
    if not failed:
        return
    first = min(failed)
    error = failed[first]
    raise type(error)(
        f"{len(failed)} objects of {url} could not be deleted",
        found=f"{first}: {error.found or error.problem}",
        expected=error.expected,
        state="All others of the batch were deleted; what is left is deleted by the next sweep.",
        remedy=error.remedy,
    ) from error


def publish_unconditional(store: Store, key: str, data: bytes) -> bool:
    """Publish `data` under `key` in a store that ignores conditions; return whether our object is the one that remained.

    Check, write, wait, read back: of two writers within SETTLE_S seconds the last one wins and the
    first one notices. Two writers further apart than that cannot collide, because the second one sees
    the object. A writer that stalls for longer between check and write can still replace an object:
    MANIFESTs of one (generation, step) are equal byte for byte, so this is harmless, and
    generation claims carry a token that their owner reads again before each persist.
    """
    if store.head(key) is not None:
        return False
    store.put(key, data)
    time.sleep(SETTLE_S)
    return store.get(key) == data


class ProbedStore(ABC):
    """The part of an object store that publishes an object unless it exists; probes whether the service supports that.

    Args:
        url: The root, without credentials.
        conditional: The value of `is_conditional`; None: probed on first use.
    """

    def __init__(self, url: str, conditional: bool | None) -> None:
        self.url = url
        self._conditional = conditional

    @abstractmethod
    def _create(self, key: str, data: bytes) -> bool:
        """Publish a small object by one conditional write; False where the service says that it is there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, key by key: fsspec has no batch delete that reports what failed."""
        delete_each(self.url, keys, self.delete)

    @property
    def is_conditional(self) -> bool:
        """Whether the service honours conditional writes: a random key is written twice, once per store object."""
        if self._conditional is None:
            self._conditional = self._probe()
            if not self._conditional:
                warn_unconditional(self.url)
        return self._conditional

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Publish a small object unless it exists, in one request (never multipart: some servers ignore the condition there)."""
        if not self.is_conditional:
            return publish_unconditional(cast("Store", self), key, data)
        return self._create(key, data)

    def _probe(self) -> bool:
        """Return whether the second write of a random key was refused; the key is removed."""
        key = f"{PROBE}/{secrets.token_hex(8)}"
        try:
            return self._create(key, b"first") and not self._create(key, b"second")
        except UnknownRequestError:
            return False
        finally:
            self.delete(key)


def truncated(url: str, key: str, *, found: str, needed: int) -> DamagedError:
    """Return the error for an object that ends before a range the manifest promises."""
    return DamagedError(
        f"the object {key} of {url} is truncated",
        found=found,
        expected=f"at least {needed} bytes",
        remedy=f"flashckpt verify {url}",
    )


def warn_unconditional(url: str) -> None:
    """Log once per store that it ignores conditional writes, and the rule that applies instead."""
    _log.warning("%s does not honour conditional writes: relying on one writer per generation instead", url)
