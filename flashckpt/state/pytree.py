"""State dicts as plain values plus tensors: the result of `state_dict()`, flattened and unflattened.

Tensors (and numpy arrays) become named tensors of the snapshot; the rest stays in place as msgpack types.
Nothing is ever pickled: what has no plain form is refused by its key.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from flashckpt.errors import UnsupportedStateError
from flashckpt.state.placement import dtensor

_MARK = "__flashckpt__"  # key of a dict that stands for something msgpack has no type for
_PLAIN = (bool, int, float, bytes)
_NUMBERS = frozenset({*_PLAIN, type(None)})
_LEAVES = frozenset({*_PLAIN, str, type(None)})
DEEPEST = 64
"""Levels of dicts, lists and tuples inside each other that a value may have; a decoder recurses for each."""


def flatten(tree: Any, name: str, *, mesh: DeviceMesh | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (skeleton, tensors by name) of a state dict; a tensor that occurs twice is one tensor with one name.

    Args:
        tree: Nested dicts, lists and tuples of tensors, numpy arrays and scalars, None, bool, int, float, str, bytes,
            torch dtypes and devices, io.BytesIO.
        name: Prefix of the tensors' names, e.g. "scheduler".
        mesh: DTensors on this mesh that are equal on all of its ranks may be in it; others have no place here.

    Raises:
        UnsupportedStateError: Anything else, or more than DEEPEST levels; the message names the key.
    """
    if tree is None or type(tree) in _PLAIN:  # a step counter per parameter: most values are no trees
        return tree, {}
    apart = _Apart(mesh)
    return apart.node(tree, name, 0), apart.tensors


class _Apart:
    """One tree being taken apart."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._mesh, self._names = mesh, dict[int, str]()

    def node(self, node: Any, path: str, depth: int) -> Any:  # noqa: C901, PLR0911, PLR0912 -- one case per type
        if node is None or type(node) in _PLAIN:
            return node
        if type(node) is str:
            return _text(node, path)
        if depth > DEEPEST:
            refuse_depth(path)
        if isinstance(node, torch.Tensor):
            return self._tensor(node, path)
        if isinstance(node, np.ndarray):
            return {_MARK: "array", "name": self._enter(_from_array(node, path), path)}
        if type(node) is dict and {str}.issuperset(map(type, node)) and "".join(node).isascii() and _MARK not in node:
            # nearly every dict there is: hyperparameters and counters are read for each snapshot
            return {k: v if type(v) in _NUMBERS else self.node(v, f"{path}.{k}", depth + 1) for k, v in node.items()}
        if isinstance(node, Mapping):
            items = [[_key(k, path), self.node(v, f"{path}.{k}", depth + 1)] for k, v in node.items()]
            if all(type(k) is str for k, _ in items) and _MARK not in node:
                return dict(items)
            return {_MARK: "dict", "items": items}
        if type(node) is tuple and _NUMBERS.issuperset(map(type, node)):
            return node  # betas
        if type(node) in (list, tuple, torch.Size):
            parts = [self.node(v, f"{path}.{i}", depth + 1) for i, v in enumerate(node)]
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

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if (known := self._names.get(id(tensor))) is not None:
            return {_MARK: "tensor", "name": known, "device": str(tensor.device)}
        if tensor.is_nested:
            _refuse(path, tensor, "a nested tensor")
        mark: dict[str, Any] = {_MARK: "tensor", "name": path, "device": str(tensor.device)}
        if isinstance(tensor, dtensor()):
            if self._mesh is None or tensor.device_mesh != self._mesh:
                _refuse(path, tensor, "a DTensor, of which nothing else says on what mesh it lies")
            if not all(p.is_replicate() for p in tensor.placements):
                _refuse(path, tensor, f"a DTensor of {tensor.placements}, in a list or dict")
            mark["replicated"] = True
        mark["name"] = self._names[id(tensor)] = self._enter(tensor, path)
        return mark

    def _enter(self, tensor: torch.Tensor, path: str) -> str:
        """Return the tensor's name: its path, made unique if another key gives the same (1 and "1", "a.b" and "a" "b")."""
        name, count = path, 1
        while name in self.tensors:
            name, count = f"{path}~{count}", count + 1
        self.tensors[name] = tensor
        return name


def _from_array(array: np.ndarray, path: str) -> torch.Tensor:
    plain = type(array) in (np.ndarray, np.memmap) and array.dtype.kind in "biufc" and array.dtype.isnative
    if plain:
        try:
            own = array if array.flags.writeable else array.copy()  # torch warns of memory that nobody may write
            return torch.from_numpy(np.ascontiguousarray(own).reshape(array.shape))
        except TypeError:  # a dtype that torch has not, e.g. longdouble
            pass
    found = f"a {type(array).__module__}.{type(array).__qualname__} of dtype {array.dtype.str}"
    return _refuse(path, array, found)  # type: ignore[no-any-return]  # it raises


def _text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse(path, text, f"text that is no Unicode: {ascii(text)[:80]}")
    return text


def _key(key: Any, path: str) -> Any:
    if type(key) is str:
        return _text(key, f"{path} (a key)")
    if type(key) in _PLAIN or key is None:
        return key
    if type(key) is tuple and all(type(k) in (str, int, float, bool) for k in key):
        return key
    return _refuse(f"{path} (a key)", key)


def _refuse(path: str, node: Any, found: str = "") -> Any:
    raise UnsupportedStateError(
        f"the value of {path!r} cannot be held in a snapshot",
        found=found or f"{type(node).__module__}.{type(node).__qualname__}",
        expected="tensors, numpy arrays, None, bool, int, float, str, bytes, io.BytesIO, or dicts, lists and tuples of them",
        remedy="convert it in the object's state_dict(), or leave the object out of track()",
    )


def refuse_depth(path: str) -> None:
    """Raise the error for a value that is nested too deeply."""
    raise UnsupportedStateError(
        f"the value of {path[:80] + '...' if len(path) > 80 else path!r} is nested too deeply",
        found=f"more than {DEEPEST} levels of dicts, lists and tuples inside each other",
        expected=f"at most {DEEPEST} levels",
        remedy="flatten it in the object's state_dict(), or leave the object out of track()",
    )


def tensor_names(skeleton: Any) -> list[str]:
    """Return the names of the tensors that `unflatten` will ask for."""
    names: list[str] = []

    def note(name: str) -> torch.Tensor:
        names.append(name)
        return torch.empty(0)

    unflatten(skeleton, note)
    return names


Place = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]
"""Brings a tensor to its place: the second argument has "device", and "replicated" where it was a DTensor."""


def unflatten(skeleton: Any, tensor: Callable[[str], torch.Tensor], *, place: Place | None = None) -> Any:
    """Return the state dict that `flatten` took apart.

    Args:
        skeleton: What it returned.
        tensor: `tensor(name)` gives each tensor's values (on the CPU).
        place: Brings a tensor to its place; called once per tensor, which stays one where it occurs twice.
    """
    return _Together(tensor, place).node(skeleton)


class _Together:
    """One tree being put together."""

    def __init__(self, tensor: Callable[[str], torch.Tensor], place: Place | None) -> None:
        self._tensor, self._place = tensor, place
        self._made: dict[str, torch.Tensor] = {}

    def node(self, skeleton: Any) -> Any:
        if isinstance(skeleton, dict):
            kind = skeleton.get(_MARK)
            if kind is None:
                return {k: v if type(v) in _LEAVES else self.node(v) for k, v in skeleton.items()}
            return self._special(kind, skeleton)
        if isinstance(skeleton, (list, tuple)):
            if _LEAVES.issuperset(map(type, skeleton)):  # names of a hundred thousand parameters
                return type(skeleton)(skeleton)
            return type(skeleton)([self.node(v) for v in skeleton])
        return skeleton

    def _special(self, kind: str, node: dict[str, Any]) -> Any:  # noqa: PLR0911 -- one case per kind
        if kind == "tensor":
            name = node["name"]
            if name not in self._made:
                values = self._tensor(name)
                self._made[name] = values if self._place is None else self._place(values, node)
            return self._made[name]
        if kind == "array":
            return self._tensor(node["name"]).numpy().copy()
        if kind == "dict":
            return {k: self.node(v) for k, v in node["items"]}
        if kind == "scalar":
            return np.frombuffer(node["value"], np.dtype(node["dtype"]))[0]
        if kind == "bytes_io":
            return _file(node["value"], node["position"])
        if kind == "device":
            return torch.device(node["value"])
        return getattr(torch, node["value"].removeprefix("torch."))


def _file(data: bytes, position: int) -> io.BytesIO:
    file = io.BytesIO(data)
    file.seek(position)
    return file
