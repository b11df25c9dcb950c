"""Every error that reaches a user: one hierarchy, each class with a stable exit code.

The text of an error answers, in this order: what the problem is, what was found
and what was expected (with units), what state was left behind, and what to do now.
Torch-free; imported by every other part of the project.
"""

from __future__ import annotations

import errno

from flashckpt.printable import printable

FINAL_CODES = range(10, 20)
"""Exit codes of permanent errors: a restart cannot change the configuration, layout, data, root or machine."""
PASSING_CODES = frozenset({40, 41})
"""Exit codes of what may pass: storage that cannot be reached now. Whoever restarts waits a little before."""

_PASSING_ERRNO = frozenset({
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,
    errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EREMOTEIO,
    errno.ENOLINK, errno.ECOMM,
})  # fmt: skip
_PASSING_NAMES = frozenset({
    "ConnectionError", "TimeoutError", "Timeout", "gaierror", "herror", "URLError", "HTTPClientError",
    "ClientConnectionError", "ClientPayloadError", "TransportError", "CredentialRetrievalError", "TokenRetrievalError",
})  # fmt: skip
"""Classes of Python, botocore, aiohttp, requests and httpx: known by name, since none of them is imported here."""
_PASSING_STATUS = (408, 409, 425, 429)
_PERMANENT_STATUS = (501, 505)


class FlashckptError(Exception):
    """Base of all errors of this project.

    Args:
        problem: The fault, in one sentence, in lower case and without a full stop.
        found: The value or state that was found, with units.
        expected: The value or state that was expected, with units.
        state: The state that was left behind ("Nothing was written.").
        remedy: The next thing to do, a command where there is one.
    """

    exit_code = 1

    def __init__(self, problem: str, *, found: str = "", expected: str = "", state: str = "", remedy: str = "") -> None:
        """Keep the parts, so that callers can test them and JSON output can carry them."""
        self.problem, self.found, self.expected = problem, found, expected
        self.state, self.remedy = state, remedy
        super().__init__(self.render())

    def render(self) -> str:
        """Return the whole message, one labelled line per known part; unprintable characters are escaped."""
        lines = [self.problem]
        parts = (("found", self.found), ("expected", self.expected), ("state", self.state), ("to do", self.remedy))
        lines += [f"  {label + ':':<10}{text}" for label, text in parts if text]
        lines.append(f"  exit code {self.exit_code}")
        return printable("\n".join(lines), keep="\n")

    def settle(self) -> int:
        """Return the exit code to end with: that of a StoreError where a permanent one was caused by what may pass."""
        if self.exit_code in FINAL_CODES and may_pass(self):
            self.exit_code = StoreError.exit_code
            super().__init__(self.render())
        return self.exit_code

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts (exceptions with keyword arguments do not copy by default)."""
        return _rebuild, (type(self), (self.problem, self.found, self.expected, self.state, self.remedy))


def _rebuild(cls: type[FlashckptError], parts: tuple[str, str, str, str, str]) -> FlashckptError:
    problem, found, expected, state, remedy = parts
    return cls(problem, found=found, expected=expected, state=state, remedy=remedy)


class ConfigError(FlashckptError):
    """A setting, argument or configuration file is wrong."""

    exit_code = 10


class LayoutError(FlashckptError):
    """A parallel layout does not divide: heads by tp, world by dp x tp x pp, layers by stages."""

    exit_code = 11


class DataError(FlashckptError):
    """Training data is missing, empty, damaged, or not the data that the state was recorded with."""

    exit_code = 12


class RootError(FlashckptError):
    """The checkpoint root cannot be used: missing, unwritable, unreachable, or not ours."""

    exit_code = 13


class SharedMemoryError(FlashckptError):
    """Host shared memory is too small or cannot be reserved."""

    exit_code = 14


class JobInUseError(FlashckptError):
    """Another live process holds this job, segment or root."""

    exit_code = 15


class UnsupportedStateError(FlashckptError):
    """A tracked value or tensor cannot be stored in a snapshot (its key is named)."""

    exit_code = 16


class ReplicaMismatchError(FlashckptError):
    """Replicas that were declared equal differ (the tensor is named)."""

    exit_code = 17


class FenceError(FlashckptError):
    """State was modified while it was copied; that snapshot was discarded."""

    exit_code = 18


class SamplerStateError(FlashckptError):
    """A sampler was resumed on other data, another seed, or in the wrong order of calls."""

    exit_code = 19


class NoCheckpointError(FlashckptError):
    """No checkpoint or snapshot matches the request."""

    exit_code = 30


class ShardGapError(FlashckptError):
    """The existing shards do not cover the required state."""

    exit_code = 31


class TensorMismatchError(ShardGapError):
    """A tensor of another dtype or shape, or an optimizer or scheduler of another class or other groups; no older snapshot is tried."""

    exit_code = 39


class DamagedError(FlashckptError):
    """Bytes do not match their digest, or a manifest, index or object is broken or missing."""

    exit_code = 32


class RestartBudgetError(FlashckptError):
    """Too many restarts, or the same error at the same step twice."""

    exit_code = 33


class HangError(FlashckptError):
    """No training step within the hang timeout."""

    exit_code = 34


class FencedError(FlashckptError):
    """A newer generation of the job exists; this process must not write any more."""

    exit_code = 35


class FormatVersionError(FlashckptError):
    """Written in a newer major format version than this program reads."""

    exit_code = 36


class DisagreementError(FlashckptError):
    """Ranks disagree on what to restore, or on the structure of the state."""

    exit_code = 37


class UnexpectedStateError(FlashckptError):
    """A snapshot or checkpoint has parameters, buffers or groups that the program lacks (they are named)."""

    exit_code = 38


class PersistError(FlashckptError):
    """A persist failed; training and the memory tier are unaffected."""

    exit_code = 40


class StoreError(FlashckptError):
    """One storage operation failed after its retries (the object is named)."""

    exit_code = 41


class ObjectMissingError(StoreError):
    """The requested object is not in the store."""

    exit_code = 42


class ObjectStateError(FlashckptError):
    """A tracked object's own method raised, or the object is not what it was given; no older snapshot is tried."""

    exit_code = 43


class DivergedError(FlashckptError):
    """Training diverged: too many non-finite steps in a row, or too many rollbacks."""

    exit_code = 50


RESUME_EXIT_CODE = 75
"""Exit code that means "stopped on request with state kept: start me again" (EX_TEMPFAIL)."""


def may_pass(error: BaseException | None) -> bool:
    """Return whether trying again may help: the error, or one that it was raised from, is of a network or a server.

    A refusal (no such bucket, no permission), a wrong name and damage stay what they are.
    """
    while error is not None:
        if isinstance(error, StoreError) and not isinstance(error, ObjectMissingError):
            return True
        if not isinstance(error, FlashckptError) and _is_passing(error):
            return True
        error = error.__cause__
    return False


def _is_passing(error: BaseException) -> bool:
    if status := http_status(error):
        return is_passing_status(status)
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & _PASSING_NAMES) or (isinstance(error, OSError) and error.errno in _PASSING_ERRNO)


def is_passing_status(status: int) -> bool:
    """Return whether the same request may be answered otherwise later, by the HTTP status of the answer."""
    return (status >= 500 and status not in _PERMANENT_STATUS) or status in _PASSING_STATUS


def http_status(error: BaseException) -> int:
    """Return the status of the answer that an error of some client is about; 0 where there was none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = (getattr(place, name, 0) for place in (response, error) for name in ("status_code", "status", "code"))
    return next((one for one in found if isinstance(one, int) and 100 <= one < 600), 0)
