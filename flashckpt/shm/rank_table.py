"""The table of all ranks' times in the job directory of the first node, as its agent knows them. Torch-free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from flashckpt.core.rank_table import RankTimes, decode_table, encode_table
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.shm import private
from flashckpt.shm.private import read_file

NAME = "ranks.msgpack"
MOST_BYTES = 16 << 20


def write_table(job: Path, ranks: Iterable[RankTimes]) -> None:
    """Write the table in one move; where there is no room the old one stays."""
    with contextlib.suppress(OSError, FlashckptError):
        private.write_raw(job / NAME, encode_table(ranks, time.time()))


def read_raw(job: Path) -> bytes:
    """Return the bytes of the table; b"" where there is none."""
    with contextlib.suppress(OSError, DamagedError):
        return read_file(job / NAME, most=MOST_BYTES)
    return b""


def read_table(job: Path) -> tuple[list[RankTimes], float]:
    """Return the ranks, and when that was so (unix seconds); nothing where there is no table."""
    return decode_table(read_raw(job))
