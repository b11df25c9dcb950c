"""Rows of memory copied and digested, in C where built.

Else it is Python, with the same result.
In: addresses and sizes, int64[n, 3]. Out: bytes at their targets, one digest per MiB, or an error before a byte is touched.
Beside it a mapping of a file whose end or damage is not the end of the process that reads it.
No torch.
"""

from flashckpt.native.copying import (
    IMPLEMENTATIONS,
    LEVEL_VARIABLE,
    SharedCopy,
    copy_and_digest,
    digest_ranges,
    implementation,
    is_native,
    levels,
)
from flashckpt.native.descriptors import DescriptorError, UnusableMemoryError
from flashckpt.native.guarding import GuardedMap

__all__ = [
    "IMPLEMENTATIONS",
    "LEVEL_VARIABLE",
    "DescriptorError",
    "GuardedMap",
    "SharedCopy",
    "UnusableMemoryError",
    "copy_and_digest",
    "digest_ranges",
    "implementation",
    "is_native",
    "levels",
]
