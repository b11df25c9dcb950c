"""Copy rows of memory and digest them on the way: in C where it was built, else in Python, with one result.

In: addresses and sizes, int64[n, 3]. Out: bytes at their targets, one digest per MiB, or an error before a byte is touched.
May import: core, errors; no torch.
"""

from flashckpt.native.copying import (
    IMPLEMENTATIONS,
    LEVEL_VARIABLE,
    copy_and_digest,
    digest_ranges,
    implementation,
    is_native,
    levels,
)
from flashckpt.native.descriptors import DescriptorError, UnusableMemoryError

__all__ = [
    "IMPLEMENTATIONS",
    "LEVEL_VARIABLE",
    "DescriptorError",
    "UnusableMemoryError",
    "copy_and_digest",
    "digest_ranges",
    "implementation",
    "is_native",
    "levels",
]
