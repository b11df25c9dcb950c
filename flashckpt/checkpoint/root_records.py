"""Small records on a root, sealed since format 1.2: what decides which checkpoint is chosen has its own digest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgpack

from flashckpt.core.records import Record, is_sealed, unpack, unseal
from flashckpt.errors import DamagedError, FormatVersionError

IN_FLIGHT = 64
"""Requests in flight at a time where many small ones are made: the connections that an S3 client keeps open."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@contextlib.contextmanager
def explaining(problem: str, *, state: str, remedy: str) -> Iterator[None]:
    """Turn whatever is wrong with one record into a DamagedError with this problem, state and remedy."""
    try:
        yield
    except FormatVersionError as error:
        raise FormatVersionError(
            error.problem, found=error.found, expected=error.expected, state=state, remedy=error.remedy
        ) from error
    except DamagedError as error:
        raise DamagedError(problem, found=error.found, expected=error.expected, state=state, remedy=remedy) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise DamagedError(
            problem, found=found, expected="a record as docs/format.md says", state=state, remedy=remedy
        ) from error


def open_record(kind: type[Record], raw: bytes, name: str, *, leave_out: Collection[str] = ()) -> Record:
    """Return the record in the bytes of the object `name`; one without a digest was written before format 1.2.

    Raises:
        DamagedError, FormatVersionError, ValueError, KeyError: As `unseal` and `unpack`.
    """
    return unpack(kind, _fields_of(raw, name), leave_out=leave_out)


def _fields_of(raw: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a record; before 1.2 it was the msgpack map alone, as msgpack writes it and no other way."""
    if is_sealed(raw):
        return unseal(raw, name)
    fields = msgpack.unpackb(raw)
    if type(fields) is not dict or msgpack.packb(fields) != raw:
        raise ValueError(f"{len(raw)} bytes starting {raw[:16]!r}")
    return fields


def parallel(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Return `work(item)` for each item in order, IN_FLIGHT requests at a time."""
    todo = list(items)
    if len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(max_workers=min(IN_FLIGHT, len(todo)), thread_name_prefix="flashckpt-root") as pool:
        return list(pool.map(work, todo))
