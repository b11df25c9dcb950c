"""Log lines beside training, which end no run where they cannot be written, and the report of a restore.

Torch-free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError, ObjectStateError
from flashckpt.printable import printable


class GuardedLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # not generic at run time before Python 3.11
    """A logger whose handlers may fail: a full disk, a closed standard error, a user's handler that raises.

    The handlers of the standard library ignore a failed write, but not a closed stream.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log; a line that cannot be written is lost."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})  # report the caller's line, not this one

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self.log(logging.ERROR, msg, *args, exc_info=exc_info, **kwargs)


class PrintableFormatter(logging.Formatter):
    """Escapes unprintable characters in log messages: names of tensors, paths, texts of a storage server."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- of the standard library
        """Format as the base class does; an appended traceback stays unescaped."""
        text = super().formatMessage(record)
        return text if text.isprintable() else printable(text, keep="\n\t")


class _StandardError(logging.Handler):
    """Writes to the current standard error; a line that cannot be written is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with contextlib.suppress(Exception):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


_standard_error = _StandardError()
_standard_error.setFormatter(PrintableFormatter("[flashckpt] %(message)s"))


def notice(logger: logging.Logger, text: str, *args: object, is_shown: bool = True) -> None:
    """Log a notice for the user at level INFO; to standard error if the program has not set up logging.

    Nothing is attached to any logger and no level is changed: logging is configured by the program, and standard
    output belongs to it. A level set on `logger`, or logging.disable(), is obeyed without handlers too. Never raises.

    Args:
        logger: The library's logger.
        text: Message, with %-fields for `args`.
        args: Values of the fields.
        is_shown: Whether this process prints it if there are no handlers (rank 0 does).
    """
    with contextlib.suppress(Exception):
        if logger.hasHandlers():
            logger.info(text, *args, stacklevel=2)
        elif is_shown and logger.level <= logging.INFO and logger.manager.disable < logging.INFO:
            _standard_error.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, args, None))


def guarded(logger: logging.Logger) -> GuardedLogger:
    """Return a logger of the same name that never raises."""
    return GuardedLogger(logger, {})


def show_own_errors_plainly() -> None:
    """Let an error of this project that nobody catches end in its message, below the program's own lines alone.

    FLASHCKPT_TRACEBACK=1 shows every frame, as does a hook that the program sets later.
    """
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        is_asked = False
        with contextlib.suppress(ConfigError):  # it may be what is reported here
            is_asked = env.FLASHCKPT_TRACEBACK
        if is_asked or not isinstance(error, FlashckptError):
            previous(kind, error, trace)
            return
        with contextlib.suppress(Exception):
            sys.stderr.write("".join(_without_our_frames(error).format()))

    sys.excepthook = hook


def _without_our_frames(error: FlashckptError) -> traceback.TracebackException:
    """Return an error with the program's frames alone; of its causes only what a method of the program raised."""
    shown = traceback.TracebackException(type(error), error, error.__traceback__)
    shown.__cause__ = shown.__cause__ if isinstance(error, ObjectStateError) else None
    shown.__context__ = None
    for one in filter(None, (shown, shown.__cause__)):
        own = [frame for frame in one.stack if not _is_ours(frame.filename)]
        one.stack = traceback.StackSummary.from_list(own) if own else None  # type: ignore[assignment]  # then there is no heading
    return shown


def _is_ours(file: str) -> bool:
    return file.startswith(str(Path(__file__).parent) + os.sep) or Path(file).name == "contextlib.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of `Checkpointer.restore()`.

    Attributes:
        step: The optimizer step that was restored; training continues with the next one.
        generation: The generation that took the snapshot.
        life: The generation that begins now.
        tier_bytes: Bytes that went into live state, by tier: "memory", "peer", "storage".
        seconds: Seconds per phase: inventory, root, decide, structure, open, requirements, plan, names, allocate, read,
            values, report, lineage, total.
        missing: Names that were wanted and are in no source (only with strict=False).
        unexpected: Names of parameters, buffers and optimizer state in the source that no rank has: left behind (only with
            strict=False or `only`).
        overruled: In words, settings of optimizers that the program has changed since, and that are those of the snapshot again.
        damaged: One sentence per range that came from another source than planned.
        read_bytes: Bytes that were read for them, by tier: rounded out to 1 MiB chunks.
        manifest_bytes: Bytes of MANIFEST, which rank 0 read from storage and sent to the others; 0 without storage.
        nodes: Bytes that went into the live state of each node's ranks: host -> tier -> bytes.
        reseeded: State of this rank alone that no reachable snapshot holds: its generators were seeded from (step, rank).
        passed_over: One sentence per newer snapshot or checkpoint that could not be restored: which, and why.
        is_same_layout: Whether this rank's shards are those of the snapshot ("exact") or were resharded
            ("state-exact").
    """

    step: int
    generation: int
    life: int
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    overruled: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    manifest_bytes: int = 0
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reseeded: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    is_same_layout: bool = True

    @property
    def tier(self) -> str:
        """The tier that most bytes came from."""
        return max(self.tier_bytes, key=lambda t: self.tier_bytes[t], default="none")

    def __str__(self) -> str:
        parts = _amounts(self.tier_bytes)
        promise = "same layout" if self.is_same_layout else "another layout"
        total = self.seconds.get("total", 0.0)
        line = f"restored step {self.step} of generation {self.generation}: {parts} in {total:.3f} s ({promise})"
        if self.damaged:
            line += f"; {len(self.damaged)} damaged ranges were read elsewhere"
        if self.missing:
            line += f"; {len(self.missing)} names were missing"
        if self.unexpected:
            line += f"; {len(self.unexpected)} names that the program lacks were not restored"
        if self.reseeded:
            line += f"; {', '.join(self.reseeded)} is in no snapshot: reseeded from (step, rank)"
        line += "".join(f"\n  {sentence}" for sentence in self.overruled)
        if len(self.nodes) > 1:
            line += "".join(f"\n  {host}: {_amounts(tiers)}" for host, tiers in self.nodes.items())
        if self.passed_over:
            line += "".join(f"\n  passed over: {sentence}" for sentence in self.passed_over)
        return line


def _amounts(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{n / 1e6:.1f} MB from {tier}" for tier, n in tiers.items() if n) or "no bytes"
