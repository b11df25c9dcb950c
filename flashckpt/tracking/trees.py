"""State dicts as plain values plus tensors: what `state_dict()` returns, taken apart and put together again.

Tensors (and numpy arrays) become named tensors of the snapshot; the rest stays in place as msgpack types.
Nothing is ever pickled: what has no plain form is refused by its key.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flashckpt.errors import UnsupportedStateError

_MARK = "__flashckpt__"  # key of a dict that stands for something msgpack has no type for
_PLAIN = (bool, int, float, str, bytes)


def take_apart(tree: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (skeleton, tensors by name) of a state dict.

    Args:
        tree: Nested dicts, lists and tuples of tensors, numpy arrays and scalars, None, bool, int, float, str, bytes,
            torch dtypes and devices, io.BytesIO.
        name: Prefix of the tensors' names, e.g. "scheduler".

    Raises:
        UnsupportedStateError: Anything else; the message names the key.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _apart(tree, name, tensors), tensors


def _apart(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: C901, PLR0911 -- one case per type
    if node is None or type(node) in _PLAIN:
        return node
    if isinstance(node, torch.Tensor):
        tensors[path] = node
        return {_MARK: "tensor", "name": path, "device": str(node.device)}
    if isinstance(node, np.ndarray):
        if node.dtype.hasobject or node.dtype.kind not in "biufc":
            _refuse(path, node)
        tensors[path] = torch.from_numpy(np.ascontiguousarray(node).reshape(node.shape))
        return {_MARK: "array", "name": path}
    if isinstance(node, Mapping):
        items = [[_key(k, path), _apart(v, f"{path}.{k}", tensors)] for k, v in node.items()]
        if all(type(k) is str for k, _ in items) and _MARK not in node:
            return dict(items)
        return {_MARK: "dict", "items": items}
    if type(node) in (list, tuple, torch.Size):
        parts = [_apart(v, f"{path}.{i}", tensors) for i, v in enumerate(node)]
        return tuple(parts) if isinstance(node, tuple) else parts
    if isinstance(node, np.generic) and node.dtype.kind in "biufc":
        return {_MARK: "scalar", "dtype": node.dtype.str, "value": node.tobytes()}
    if isinstance(node, (torch.dtype, torch.device)):
        return {_MARK: type(node).__name__, "value": str(node)}
    if type(node) is io.BytesIO:
        return {_MARK: "bytes_io", "value": node.getvalue(), "position": node.tell()}
    for kind in (int, float, str, bytes):  # subclasses such as enum.IntEnum keep their value
        if isinstance(node, kind):
            return kind(node)  # type: ignore[arg-type]  # the union of four constructors
    return _refuse(path, node)


def _key(key: Any, path: str) -> Any:
    if type(key) in (str, int, float, bool, bytes) or key is None:
        return key
    if type(key) is tuple and all(type(k) in (str, int, float, bool) for k in key):
        return key
    return _refuse(f"{path} (a key)", key)


def _refuse(path: str, node: Any) -> Any:
    raise UnsupportedStateError(
        f"the value of {path!r} cannot be held in a snapshot",
        found=f"{type(node).__module__}.{type(node).__qualname__}",
        expected="tensors, numpy arrays, None, bool, int, float, str, bytes, io.BytesIO, or dicts, lists and tuples of them",
        remedy="convert it in the object's state_dict(), or leave the object out of track()",
    )


def tensor_names(skeleton: Any) -> list[str]:
    """Return the names of the tensors that `put_together` will ask for."""
    names: list[str] = []

    def note(name: str) -> torch.Tensor:
        names.append(name)
        return torch.empty(0)

    put_together(skeleton, note)
    return names


def put_together(skeleton: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return the state dict that `take_apart` took apart; `tensor(name)` gives each tensor's values (on the CPU)."""
    if isinstance(skeleton, dict):
        kind = skeleton.get(_MARK)
        if kind is None:
            return {k: put_together(v, tensor) for k, v in skeleton.items()}
        return _special(kind, skeleton, tensor)
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)(put_together(v, tensor) for v in skeleton)
    return skeleton


def _special(kind: str, node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    if kind == "tensor":
        return tensor(node["name"])
    if kind == "array":
        return tensor(node["name"]).numpy().copy()
    if kind == "dict":
        return {k: put_together(v, tensor) for k, v in node["items"]}
    if kind == "scalar":
        return np.frombuffer(node["value"], np.dtype(node["dtype"]))[0]
    if kind == "bytes_io":
        return _file(node["value"], node["position"])
    return torch.device(node["value"]) if kind == "device" else getattr(torch, node["value"].removeprefix("torch."))


def _file(data: bytes, position: int) -> io.BytesIO:
    file = io.BytesIO(data)
    file.seek(position)
    return file
