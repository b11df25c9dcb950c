"""State dicts of torch's world, flattened: what is read from files of torch.save and dcp, and what is written to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.dcp.direct_writer import StreamedRow, held_while_read
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import UnsupportedStateError
from flashckpt.interop.foreign_files import refuse_expanded
from flashckpt.restore.live_memory import bytes_of


@dataclass(kw_only=True)
class StateDict:
    """A flattened state dict of torch's world.

    Attributes:
        tensors: Boxes by flattened key; one row per box, `shard.fqn` is the key.
        values: Other leaves by flattened key.
        paths: Places in the nested state dict.
        skipped: Keys of values that were not asked for.
        doubles: Keys of tensors that are the memory of an earlier one: tied weights.
        whole: Members of the nested dict that hold no tensor, as they are: flattening makes strings of their keys.
    """

    tensors: list[StreamedRow] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, StatePath] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    doubles: set[str] = field(default_factory=set)
    whole: dict[str, Any] = field(default_factory=dict)


def nest(leaves: Mapping[str, Any], paths: Mapping[str, StatePath]) -> dict[str, Any]:
    """Return the nested state dict of flattened leaves."""
    nested: dict[str, Any] = {}
    for key, leaf in leaves.items():
        set_element(nested, paths[key], leaf)
    return nested


def at_path(nested: Any, path: StatePath) -> Any:
    """Return the leaf of a place in a nested state dict."""
    for part in path:
        nested = nested[part]
    return nested


def rows_of(tensors: Mapping[str, torch.Tensor]) -> list[StreamedRow]:
    """Return tensors in memory as rows under their names."""
    return [row_of(key, tensor) for key, tensor in tensors.items()]


def row_of(key: str, tensor: torch.Tensor) -> StreamedRow:
    """Return a whole tensor in memory as a row."""
    shape = tuple(tensor.shape)
    return StreamedRow(
        shard=shard_of(key, tensor.dtype, shape, (0,) * len(shape), shape), read=reader_of(lambda: tensor)
    )


def shard_of(
    key: str, dtype: torch.dtype, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Shard:
    """Return one box of a tensor (elements); UnsupportedStateError where its dtype cannot be held."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UnsupportedStateError(f"the tensor {key!r} has a dtype that cannot be held", found=name)
    return Shard(fqn=key, dtype=name, global_shape=tuple(shape), offsets=tuple(offsets), lengths=tuple(lengths))


def reader_of(tensor: Callable[[], torch.Tensor]) -> Callable[[int, int], memoryview]:
    """Return what reads bytes of a tensor that is fetched when the first of them is asked for."""
    return held_while_read(lambda: bytes_of(tensor().detach().resolve_conj().resolve_neg().contiguous()))


def refuse_tensor(key: str, tensor: torch.Tensor, path: Path) -> None:
    """Refuse what has no bytes in row-major order: sparse, quantized, nested and subclassed tensors, those without data."""
    kind = type(tensor)
    plain = (
        kind in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    )
    if not plain or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedStateError(
            f"the tensor {key!r} of {path} cannot be held",
            found=f"{kind.__name__}, {tensor.layout}, on {tensor.device}",
            expected="a dense tensor with its data",
            state="Nothing was imported.",
            remedy="leave it out with --only, or save it as a dense tensor",
        )
    nbytes = tensor.numel() * tensor.element_size()
    refuse_expanded(key, nbytes, tensor.untyped_storage().nbytes(), path)
