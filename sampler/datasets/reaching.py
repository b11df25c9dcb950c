"""Reads that fail for a while: what may work a moment later is tried again, and is no damage when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from flashckpt.errors import DataError, FlashckptError
from flashckpt.sampler.errors import unreachable

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PATIENCE_S = 90.0
"""Seconds for which a read is tried again: less than other ranks wait in a collective (120 s in the trainer)."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 15.0
_PASSING = frozenset({
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET,
    errno.ENOTCONN, errno.EREMOTEIO, errno.ENOBUFS,
})  # fmt: skip
_CLIENTS = frozenset({"aiohttp", "urllib3", "requests", "httpx", "httpcore", "google", "gcsfs", "azure"})
_BOTOCORE = frozenset({"HTTPClientError", "ConnectionError"})
"""Its errors without a status that come from the network; the others come from settings."""
_LASTING = ("Credential", "Param", "NoSuch", "Forbidden", "Unauthorized", "InvalidURL", "Redirect", "Cert")

waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
"""Context manager that is entered while a read waits: a program that is watched says so, since no step ends meanwhile."""


def may_pass(error: BaseException) -> bool:
    """Return whether what raised this error may work a moment later: time-outs, refused connections, errors of a server."""
    chain = [error]
    while (
        cause := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)
    ) is not None:
        chain.append(cause)
    for one in reversed(chain):  # what it began with decides: file systems call any failure a missing file
        if _lasts(one) or _passes(one):
            return not _lasts(one)
    return False


def _status(error: BaseException) -> int:
    """Return the HTTP status that an error of a client carries; 0: none."""
    if type(error).__module__ == "aiohttp.http_exceptions":  # its own words for an answer that was cut short
        return 0
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    status = next((int(one) for one in found if isinstance(one, int | str) and str(one).isdigit()), 0)
    return status or int(getattr(response, "status_code", 0) or 0)


def _passes(error: BaseException) -> bool:
    if status := _status(error):
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    package = type(error).__module__.partition(".")[0]
    if package in ("botocore", "aiobotocore"):
        return any(one.__name__ in _BOTOCORE for one in type(error).__mro__)
    return package in _CLIENTS


def _lasts(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | FlashckptError):
        return True
    refused = 400 <= (status := _status(error)) < 500 and status not in (408, 425, 429)
    return refused or any(word in type(error).__name__ for word in _LASTING)


def reach(
    url: str, work: Callable[[], _T], what: str = "a readable file", *, forget: Callable[[], Any] = lambda: None
) -> _T:
    """Return what `work` does, tried again with growing waits for `PATIENCE_S` where the storage cannot be reached.

    Args:
        url: The file that is read.
        work: May be repeated.
        what: The contents that are expected there.
        forget: Called before each further try: handles may be dead.

    Raises:
        DataError: it cannot be read, whenever it is tried.
        StoreError: it could not be reached for so long.
    """
    began, wait = time.monotonic(), _FIRST_WAIT_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                return work()
            except FlashckptError:
                raise
            except Exception as error:
                if not may_pass(error):
                    raise unreadable(url, error, what) from error
                waited = time.monotonic() - began
                if waited + wait > PATIENCE_S:
                    raise unreachable(url, error, waited) from error
                _log.warning(
                    "%s cannot be reached (%s: %s): trying again in %.1f s", url, type(error).__name__, error, wait
                )
            if wait == _FIRST_WAIT_S:
                stack.enter_context(waiting())
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)
            forget()


def unreadable(url: str, error: BaseException, what: str = "a readable file") -> DataError:
    """Return the error for a file that cannot be read, whenever it is tried."""
    return DataError(
        f"{url} cannot be read",
        found=f"{type(error).__name__}: {error}",
        expected=what,
        remedy="check the path, the kind and the access",
    )
