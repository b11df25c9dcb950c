"""A digest of every part of a live program's state, by path, made without any code of the product."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def fingerprint(tracked: dict[str, Any]) -> dict[str, str]:
    """Return path -> digest (tensors) or text (values) of everything tracked and of the random number generators."""
    found: dict[str, str] = {}  # the generators first: what a loader does for its state_dict() may draw
    for name, state in (
        ("torch", torch.get_rng_state()), ("python", random.getstate()), ("numpy", np.random.get_state()),  # noqa: NPY002 -- the global generator is what programs use
    ):  # fmt: skip
        found.update(_walk(f"rng.{name}", state))
    found.update(item for name, thing in tracked.items() for item in _parts(name, thing))
    return found


def _parts(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    if isinstance(thing, (list, tuple)):
        for number, part in enumerate(thing):
            yield from _parts(f"{name}[{number}]", part)
    elif isinstance(thing, nn.Module):
        yield from _module(name, thing)
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _optimizer(name, thing)
    else:
        yield from _walk(name, thing.state_dict())


def _module(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    for key, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        yield from _walk(f"{name}.{key}", tensor.detach())
    for key, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield from _walk(f"{name}.{key}._extra_state", part.get_extra_state())


def _optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """Yield its state in the order of its parameters; a parameter has no state where the entry is missing or empty."""
    inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer: this rank's part
    inner = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    for i, group in enumerate(inner.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield from _walk(f"{name}.group{i}.{key}", value)
        for j, param in enumerate(group["params"]):
            yield from _walk(f"{name}.group{i}.{j}", inner.state.get(param, {}))


def _walk(path: str, node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, torch.Tensor):
        yield path, digest(node)
    elif isinstance(node, np.ndarray):
        yield path, f"{node.dtype}{node.shape} {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(node).tobytes())}"
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(f"{path}.{key}", value)
    elif isinstance(node, (list, tuple)) and len(node) > 64:  # a generator's state: 625 numbers
        yield path, xxhash.xxh3_64_hexdigest(repr(node).encode())
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _walk(f"{path}.{number}", value)
    elif isinstance(node, (*_PLAIN, np.generic)):
        yield path, node.hex() if isinstance(node, float) else repr(node)
    else:
        yield path, type(node).__qualname__  # functions and classes: nothing that a run changes


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a digest of a tensor's bytes; of a wrapper's, those of the tensors inside."""
    tensor = tensor.detach()
    if hasattr(tensor, "_local_tensor"):
        tensor = tensor._local_tensor
    if tensor.is_meta:
        return f"{tensor.dtype}{list(tensor.shape)} without bytes"
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
        inner, context = tensor.__tensor_flatten__()
        return " ".join([repr(context), *(digest(getattr(tensor, name)) for name in inner)])
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce()
        return " ".join([digest(tensor.indices()), digest(tensor.values())])
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return f"{tensor.dtype}{list(tensor.shape)} {xxhash.xxh3_64_hexdigest(raw.numpy().tobytes())}"
