"""Samplers whose every sample is trained exactly once, at any number of ranks.

Modules here: Samplers, their iterators, batches and positions.
"""

if not __name__.startswith("flashckpt."):  # a bare `import sampler` would make a second copy of every class
    raise ImportError(f"import this package as flashckpt.sampler, not as {__name__!r}")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashckpt.sampler.order.block import BlockPermutation
from flashckpt.sampler.order.mixture import Mixture
from flashckpt.sampler.order.permutation import Permutation
from flashckpt.sampler.order.stream import Order
from flashckpt.sampler.replicas import check_same_samples

if TYPE_CHECKING:
    from flashckpt.sampler.batch import ElasticBatchSampler
    from flashckpt.sampler.datasets.columns import ArrowRows, ParquetRows
    from flashckpt.sampler.datasets.lines import JsonLines, TextLines, build_line_index
    from flashckpt.sampler.datasets.packing import PackedWindows, build_packing
    from flashckpt.sampler.datasets.tokens import MegatronFile, TokenFile
    from flashckpt.sampler.sampler import ElasticSampler
    from flashckpt.sampler.seeded import SeededSamples

_LAZY = {  # these import torch (the Sampler base type) or read files; the permutation does neither
    "ArrowRows": "datasets.columns",
    "ElasticBatchSampler": "batch",
    "ElasticSampler": "sampler",
    "JsonLines": "datasets.lines",
    "MegatronFile": "datasets.tokens",
    "PackedWindows": "datasets.packing",
    "ParquetRows": "datasets.columns",
    "SeededSamples": "seeded",
    "TextLines": "datasets.lines",
    "TokenFile": "datasets.tokens",
    "build_line_index": "datasets.lines",
    "build_packing": "datasets.packing",
}

__all__ = [
    "ArrowRows",
    "BlockPermutation",
    "ElasticBatchSampler",
    "ElasticSampler",
    "JsonLines",
    "MegatronFile",
    "Mixture",
    "Order",
    "PackedWindows",
    "ParquetRows",
    "Permutation",
    "SeededSamples",
    "TextLines",
    "TokenFile",
    "build_line_index",
    "build_packing",
    "check_same_samples",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"flashckpt.sampler.{_LAZY[name]}"), name)
