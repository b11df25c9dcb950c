"""Megatron data sets for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def write_megatron(prefix: Path, documents: list[np.ndarray], code: int, dtype: str) -> None:
    """The published layout, written here on its own: magic, version, type, counts, lengths, pointers, documents."""
    lengths = np.array([len(d) for d in documents], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(b"".join(d.astype(dtype).tobytes() for d in documents))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + lengths.tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )
