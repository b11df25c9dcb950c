"""Messages between the persisters of a job, which its ranks carry: two files of the job directory. Torch-free.

`outgoing` is the message of this node's persister. The relay of the node's first rank (`ack_relay`) carries it to the
other nodes, and writes `incoming`: their messages, its own process and the time. A persister believes `incoming` only
while that process runs and turns; else it uses the root for the same. Both files are replaced as a whole.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashckpt.core.intent import NodeMessage
from flashckpt.core.records import digest_of, pack, seal, unpack, unseal
from flashckpt.errors import DamagedError, FormatVersionError
from flashckpt.faults import crash_point
from flashckpt.framing import SHORT_LENGTH, frame, split
from flashckpt.shm.private import mark_file, open_file, read_file, remove_file, replace

SILENT_S = 3.0
"""Seconds after which a relay that did not turn is taken to be dead or cut off; it turns once a second."""
RESTAMP_S = 0.9
"""Seconds after which a relay writes again that it turned, where it has nothing new."""
LARGEST = 1 << 16
"""Bytes of one message at most."""
_MOST = LARGEST << 12
_OUT = struct.Struct("<8sQqq")  # magic, digest of the rest, generation, whether it waits
_IN = struct.Struct("<8sQqqqq")  # magic, digest of the rest, generation, pid, CLOCK_MONOTONIC ns, messages
_OUT_MAGIC, _IN_MAGIC = b"FCKMSGO1", b"FCKMSGI1"


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """The message of this node's persister: bytes that the relay does not look into; b"" where there is none.

    `waits`: it waits for an answer, so that the relay does not rest.
    """

    message: bytes = b""
    waits: bool = False


NO_MESSAGE = OutgoingMessage()


class MessageFiles:
    """The two files of one job directory, from both sides."""

    def __init__(self, folder: Path) -> None:
        """Reads and writes nothing yet."""
        self._outgoing, self._incoming = folder / "outgoing", folder / "incoming"
        self._event = folder / "events" / "incoming"
        self._written: tuple[int, tuple[bytes, ...]] | None = None
        self._written_s = float("-inf")
        self._decoded: dict[bytes, NodeMessage | None] = {}

    # -- the persister's side -------------------------------------------------------------------------------

    def send(self, message: NodeMessage) -> None:
        """Replace the message of this node."""
        rest = struct.pack("<qq", message.generation, message.waits) + seal(pack(message))
        _replace(self._outgoing, _OUT_MAGIC + struct.pack("<Q", digest_of(rest)) + rest)

    def received(self, generation: int) -> tuple[NodeMessage, ...] | None:
        """Return the messages of other nodes in a generation: all of them for the leader, the leader's for the others.

        None where no relay of that generation turns: it died, hangs, or its store fails.
        """
        raw = _read(self._incoming)
        if len(raw) < _IN.size or raw[:8] != _IN_MAGIC:
            return None
        _, seal_, number, pid, stamp_ns, count = _IN.unpack_from(raw)
        if number != generation or digest_of(memoryview(raw)[16:]) != seal_:
            return None
        silent_s = (time.monotonic_ns() - stamp_ns) / 1e9
        if not 0 <= silent_s < SILENT_S or not _is_running(pid):
            return None
        known = self._decoded  # each is decoded once: most are as they were
        self._decoded = {one: known.get(one) or _decoded(one) for one in _parts(memoryview(raw)[_IN.size :], count)}
        return tuple(one for one in self._decoded.values() if one is not None)

    # -- the relay's side -----------------------------------------------------------------------------------

    def outgoing(self, generation: int) -> OutgoingMessage:
        """Return what the persister of this node says to its generation."""
        raw = _read(self._outgoing)
        if not _OUT.size < len(raw) <= LARGEST or raw[:8] != _OUT_MAGIC:
            return NO_MESSAGE
        _, seal_, number, waits = _OUT.unpack_from(raw)
        if number != generation or digest_of(memoryview(raw)[16:]) != seal_:
            return NO_MESSAGE
        return OutgoingMessage(raw[_OUT.size :], bool(waits))

    def deliver(self, generation: int, messages: Sequence[bytes]) -> None:
        """Write messages where they are new, and wake the persister; else that the relay turns, about once a second."""
        content, now_s = (generation, tuple(messages)), time.monotonic()
        is_new = content != self._written
        if not is_new and now_s - self._written_s < RESTAMP_S:
            return
        rest = struct.pack("<qqqq", generation, os.getpid(), time.monotonic_ns(), len(messages))
        rest += b"".join(frame(one, SHORT_LENGTH) for one in messages)
        _replace(self._incoming, _IN_MAGIC + struct.pack("<Q", digest_of(rest)) + rest)
        self._written, self._written_s = content, now_s
        if is_new:
            mark_file(self._event)

    def forget(self) -> None:
        """Remove what was received: the relay ends."""
        self._written = None
        remove_file(self._incoming)


def _decoded(raw: bytes) -> NodeMessage | None:
    """Return a message; None where it is damaged. It came over a network, from another process."""
    try:
        message = unpack(NodeMessage, unseal(raw, "a message"), partial=True)
    except (DamagedError, FormatVersionError, ValueError, KeyError):
        return None
    return message if message.ranks else None


def _parts(rest: memoryview, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        one, rest = split(rest, SHORT_LENGTH)
        found.append(bytes(one))
    return found


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(path: Path) -> bytes:
    try:
        return read_file(path, most=_MOST)
    except (FileNotFoundError, DamagedError):  # what stands there instead is replaced by the next message
        return b""


def _replace(path: Path, raw: bytes) -> None:
    """Replace a file in one move. One process writes it: a temporary one that a kill left is written over."""
    temporary = path.with_name(f".{path.name}.tmp")
    fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:
        file.write(raw)
    crash_point("messages.before-rename")
    replace(temporary, path)
    crash_point("messages.after-rename")
