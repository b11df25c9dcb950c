"""What foreign decoders may cost and how they may fail: memory bounded by the file, one error that names it. Torch-free.

Decoders of other projects raise whatever they like on damaged input, and allocate what a damaged number says. So
they run with the process's data limited (RLIMIT_DATA), and everything they raise becomes one DamagedError.
"""

from __future__ import annotations

import contextlib
import contextvars
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.core.values import MAX_DEPTH
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, UnsupportedStateError

SPARE_BYTES = 1 << 30
"""What a decoder may take whatever the size of its file: arenas, stacks of threads, torch's own tables."""
EXPANDED_BYTES = 16 << 20
"""Most bytes of a tensor that is larger than what is stored of it (`expand`)."""
_MOST_DIMS = 64


@dataclass(kw_only=True)
class Seen:
    """What an import looked at."""

    files: set[Path] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def left_in(self, folder: Path) -> list[str]:
        """Return the names in a folder of what was not looked at."""
        known = {one.relative_to(folder).parts[0] for one in self.files if one != folder and one.is_relative_to(folder)}
        return sorted(one.name for one in folder.iterdir() if one.name not in known and not one.name.startswith("."))


_seen: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("seen", default=None)


@contextlib.contextmanager
def seeing() -> Iterator[Seen]:
    """Give what is looked at within the block."""
    before = _seen.set(seen := Seen())
    try:
        yield seen
    finally:
        _seen.reset(before)


def saw(path: Path, note: str = "") -> None:
    """Say that a file was looked at, and what of it is not taken."""
    if (seen := _seen.get()) is not None:
        seen.files.add(path)
        seen.notes += [note] if note and note not in seen.notes else []


@contextlib.contextmanager
def decoding(path: Path | str, what: str, *, nbytes: int | None = None) -> Iterator[None]:
    """Within the block, `path` is decoded by code that is not ours.

    Args:
        path: For error texts.
        what: What it should be: "a file of torch.save".
        nbytes: Size of what is decoded; memory is bounded by a multiple of it. None: the caller bounds it.

    Raises:
        ConfigError: It cannot be opened or read.
        DamagedError: Any other exception of the block that is not ours.
    """
    if isinstance(path, Path):
        saw(path)
    try:
        with _limited(nbytes):
            yield
    except FlashckptError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be read",
            found=error.strerror or str(error),
            expected=f"{what} that may be read",
        ) from error
    except Exception as error:
        raise DamagedError(
            f"{path} cannot be read as {what}",
            found=_reason(error),
            state="Nothing was imported.",
            remedy="check the file, or get it again; --format says what it is",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than a file of its size can need"
    text = next(iter(str(error).splitlines()), "")[:200]
    return (
        text if isinstance(error, (RuntimeError, ValueError, EOFError)) and text else f"{type(error).__name__}: {text}"
    )


@contextlib.contextmanager
def _limited(nbytes: int | None) -> Iterator[None]:
    """Limit what this process allocates to what it has, and a multiple of `nbytes`, while the block runs."""
    if nbytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    limit = (
        held + SPARE_BYTES + 4 * nbytes + min(32 * nbytes, 8 * SPARE_BYTES)
    )  # small objects take many times their bytes
    limit = min([limit, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def refuse_boundless(tree: Any, path: Path | str, nbytes: int) -> None:
    """Raise DamagedError where nested containers are deeper than a snapshot holds, or have more leaves than a file explains.

    A file may name one list many times over, and itself: walking such a thing would take for ever.
    """
    todo: list[tuple[Any, int]] = [(tree, 1)]
    left = nbytes + (1 << 20)
    while todo:
        node, depth = todo.pop()
        left -= len(node)
        if depth > MAX_DEPTH or left < 0:
            raise DamagedError(
                f"{path} holds no state that can be imported",
                found=f"containers nested more than {MAX_DEPTH} deep" if left >= 0 else "more leaves than bytes",
                state="Nothing was imported.",
            )
        items = node.values() if isinstance(node, dict) else node
        todo += [(item, depth + 1) for item in items if isinstance(item, (dict, list, tuple, set))]


def refuse_shape(name: str, shape: tuple[Any, ...], path: Path | str) -> None:
    """Raise DamagedError for a shape that no tensor has, or a name that has no bytes in UTF-8."""
    fits = len(shape) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    if not fits or any("\ud800" <= char <= "\udfff" for char in name):
        raise DamagedError(
            f"{path} is damaged",
            found=f"a tensor named {name!r:.80} of shape {str(shape)[:80]}",
            expected=f"a name in UTF-8 and a shape of at most {_MOST_DIMS} dimensions",
            state="Nothing was imported.",
        )


def refuse_expanded(name: str, nbytes: int, stored_bytes: int, path: Path | str) -> None:
    """Raise UnsupportedStateError where a tensor is much larger than what its file stores of it."""
    if nbytes > max(stored_bytes, EXPANDED_BYTES):
        raise UnsupportedStateError(
            f"the tensor {name!r} of {path} is expanded: most of it is not in the file",
            found=f"{nbytes} bytes of tensor, {stored_bytes} bytes stored",
            expected=f"a tensor that is stored whole, or of at most {EXPANDED_BYTES} bytes",
            state="Nothing was imported.",
            remedy="save it after .contiguous(), or leave it out with --only",
        )
