"""Small records on a root, sealed since format 1.2: what decides which checkpoint is chosen has a digest of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgpack

from flashckpt.core.records import is_sealed, unseal
from flashckpt.errors import DamagedError, FormatVersionError


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


def fields_of(raw: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a record; before 1.2 it was the msgpack map alone, as msgpack writes it and no other way.

    Raises:
        DamagedError, FormatVersionError, ValueError: It is neither.
    """
    if is_sealed(raw):
        return unseal(raw, name)
    fields = msgpack.unpackb(raw)
    if type(fields) is not dict or msgpack.packb(fields) != raw:
        raise ValueError(f"{len(raw)} bytes starting {raw[:16]!r}")
    return fields
