"""What a rank holds at one instant, as named digests: the tracked state, and what the script's own variables lead to."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from flashckpt.core.digest import digest, digest_of
from flashckpt.state import rng
from flashckpt.state.data_sources import begins_when_read
from flashckpt.state.placement import dtensor
from flashckpt.state.registry import StateRegistry

DEEPEST, MOST, MOST_ITEMS, LONGEST = 6, 20_000, 100_000, 64
"""Levels that are followed, leaves and objects of one instant, items of a list that is one leaf, items that are each a leaf."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_FOREIGN = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
_OF_MODULES = frozenset(vars(nn.Module()))


class Leaf(NamedTuple):
    """One thing of which a digest was taken.

    Attributes:
        kind: "tracked", "object" (of one that nobody tracks), "generator", "tensor" or "value".
        owner: The object whose state it is part of, "" for a variable.
        of: Its class.
        digest: Of its bytes.
        shown: For people.
    """

    kind: str
    owner: str
    of: str
    digest: str
    shown: str


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of this rank's part of a tensor; the form where it has none that can be read."""
    own: torch.Tensor = tensor.detach()
    if isinstance(own, dtensor()):
        own = own.to_local()
    if own.layout is not torch.strided or own.is_meta or own.is_quantized:
        return repr((own.layout, own.shape)).encode()
    return own.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def digest_of_inputs(value: Any) -> int:
    """Return the digest of what a model was given: tensors, arrays and plain values, however they are nested."""
    if isinstance(value, torch.Tensor):
        return digest_of(repr(value.shape).encode(), bytes_of(value))
    if isinstance(value, np.ndarray):
        return digest(np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return digest(repr([(repr(key), digest_of_inputs(one)) for key, one in value.items()]).encode())
    if isinstance(value, list | tuple):
        return digest(repr([digest_of_inputs(one) for one in value]).encode())
    return digest(repr(value).encode() if type(value) in _PLAIN else type(value).__qualname__.encode())


def is_own(name: str | None) -> bool:
    """Return whether a module is the user's: not of Python, of an installed package or of flashckpt."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if not file or (name or "").partition(".")[0] == "flashckpt":
        return False
    return not str(Path(file).resolve()).startswith(_FOREIGN)


def generators() -> dict[str, Leaf]:
    """Return the global generators of this process."""
    found = {"torch": "torch's generator", "python": "Python's generator", "numpy": "numpy's generator"}
    return {
        found.get(name, f"the generator of {name}"): Leaf("generator", name, "", f"{digest(repr(one).encode()):x}", "")
        for name, one in rng.capture().items()
    }


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Return the variables of the functions that are running and of their modules, those of the user's files alone."""
    namespaces: dict[str, Mapping[str, Any]] = {}
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if is_own(module):
            if frame.f_code.co_name != "<module>":
                yield from ((f"{frame.f_code.co_name}(): {name}", value) for name, value in frame.f_locals.items())
            namespaces.setdefault(module or "", frame.f_globals)
        frame = frame.f_back
    for module, names in namespaces.items():
        prefix = "" if module == "__main__" else f"{module}."
        yield from ((f"{prefix}{name}", value) for name, value in list(names.items()) if not name.startswith("__"))


class Walk:
    """One walk over everything; what is tracked is not met a second time.

    Args:
        tracked: What is tracked.
        reads_sources: Whether sources of data may be asked for their state now.

    Attributes:
        leaves: By path.
    """

    def __init__(self, tracked: StateRegistry, *, reads_sources: bool) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._tracked, self._reads_sources = tracked, reads_sources
        self._seen: dict[int, Any] = {}  # held, so that no id is used again
        self._names: dict[int, str] = {}

    def run(self, frame: FrameType | None) -> dict[str, Leaf]:
        """Return the leaves of the tracked state, the generators, and the variables from `frame` on."""
        tracked = self._tracked
        for label, parts in tracked.modules.items():
            self._names |= {id(p): name for part in parts for name, p in part.named_parameters()}
            for part in parts:
                self._module(label, part, ("tracked", label, type(part).__qualname__))
        for label, optimizer in ((label, one) for label, several in tracked.optimizers.items() for one in several):
            self._optimizer(label, optimizer, ("tracked", label, type(optimizer).__qualname__))
        for label, thing in tracked.objects.items():
            self._seen[id(thing)] = thing
            if label not in tracked.unread and (self._reads_sources or not begins_when_read(thing)):
                self._tree(label, thing.state_dict(), 0, ("tracked", label, type(thing).__qualname__))
        self.leaves |= generators()
        for part in chain.from_iterable(tracked.modules.values()):
            self._attributes_of_modules("", part)
        for path, value in variables(frame):
            self._visit(path, value, 0, is_foreign=False)
        return self.leaves

    def _leaf(self, path: str, value: Any, owner: tuple[str, str, str] | None, kind: str) -> None:
        if len(self.leaves) >= MOST:
            return
        if isinstance(value, torch.Tensor):
            raw, shown = bytes_of(value), f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        elif isinstance(value, np.ndarray):
            raw, shown = np.ascontiguousarray(value).tobytes(), f"{value.dtype}{list(value.shape)}"
        else:
            text = repr(value)
            raw, shown = text.encode(errors="replace"), text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        shown = "" if kind == "generator" else shown
        self.leaves[path] = Leaf(*(owner or (kind, "", "")), f"{digest(raw):x}", shown)

    # -- objects with state -----------------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module, owner: tuple[str, str, str]) -> None:
        for one in module.modules():
            self._seen[id(one)] = one
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._leaf(f"{path}.{name}", tensor, owner, "tensor")

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer, owner: tuple[str, str, str]) -> None:
        self._seen |= {id(optimizer): optimizer, id(optimizer.state): optimizer.state}
        for at, group in enumerate(optimizer.param_groups):
            own = {key: value for key, value in group.items() if key != "params"}
            self._tree(f"{path} group {at}", own, 0, owner)
            for number, parameter in enumerate(group["params"]):
                name = self._names.get(id(parameter), f"{at}.{number}")
                self._tree(f"{path}.{name}", dict(optimizer.state.get(parameter, {})), 0, owner)

    def _tree(self, path: str, node: Any, depth: int, owner: tuple[str, str, str]) -> None:
        """Take a leaf of each tensor and value of a state dict."""
        if isinstance(node, Mapping) and depth < DEEPEST:
            for key, value in node.items():
                self._tree(f"{path}.{key}", value, depth + 1, owner)
        elif isinstance(node, list | tuple) and depth < DEEPEST and not _PLAIN.issuperset(map(type, node)):
            for at, value in enumerate(node):
                self._tree(f"{path}[{at}]", value, depth + 1, owner)
        elif isinstance(node, torch.Tensor | np.ndarray) or type(node) in _PLAIN or isinstance(node, list | tuple):
            self._leaf(path, node, owner, "value")

    def _attributes_of_modules(self, path: str, module: nn.Module) -> None:
        """Visit what modules keep beside parameters and buffers: no snapshot has it."""
        for name, one in module.named_modules():
            where = ".".join(filter(None, (path or "model", name)))
            for key, value in vars(one).items():
                if key not in _OF_MODULES and not key.startswith("_"):
                    self._visit(f"{where}.{key}", value, 1, is_foreign=not is_own(type(one).__module__))

    # -- variables --------------------------------------------------------------------------------------------

    def _visit(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:  # noqa: C901 -- one case per type
        kind = type(value)
        if kind in _PLAIN or isinstance(value, np.generic):
            if not is_foreign:
                self._leaf(path, value, None, "value")
            return
        if depth > DEEPEST or id(value) in self._seen or len(self._seen) > MOST or isinstance(value, type | ModuleType):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor | np.ndarray):
            if not is_foreign:
                self._leaf(path, value, None, "tensor")
        elif isinstance(value, _GENERATORS):
            self._leaf(path, _state_of(value), None, "generator")
        elif isinstance(value, _CONTAINERS):
            self._container(path, value, depth, is_foreign=is_foreign)
        elif isinstance(value, nn.Module):
            self._module(path, value, ("object", path, kind.__qualname__))
            self._attributes_of_modules(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(path, value, ("object", path, kind.__qualname__))
        elif _keeps_state(value):
            self._tree(path, value.state_dict(), 0, ("object", path, kind.__qualname__))
        elif isinstance(value, FunctionType | MethodType):
            self._function(path, value, depth)
        else:
            self._members(path, value, depth)

    def _container(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:
        if len(value) > MOST_ITEMS:
            return
        items = list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, set | frozenset) or (len(items) > LONGEST and _PLAIN.issuperset(map(type, items))):
            if not is_foreign and _PLAIN.issuperset(map(type, items)):
                self._leaf(
                    path, sorted(items, key=repr) if isinstance(value, set | frozenset) else items, None, "value"
                )
            return
        if not isinstance(value, dict) and _PLAIN.issuperset(map(type, items)):
            if not is_foreign:
                self._leaf(path, items, None, "value")
            return
        for key, one in zip(value if isinstance(value, dict) else range(len(items)), items, strict=True):
            self._visit(f"{path}[{key!r}]", one, depth + 1, is_foreign=is_foreign)

    def _function(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, MethodType):
            self._visit(f"{path}.__self__", value.__self__, depth + 1, is_foreign=True)
            return
        if not is_own(value.__module__):
            return
        cells: tuple[CellType, ...] = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._visit(f"{name} of {value.__name__}()", inside, depth + 1, is_foreign=False)
        for name, one in vars(value).items():
            self._visit(f"{path}.{name}", one, depth + 1, is_foreign=False)

    def _members(self, path: str, value: Any, depth: int) -> None:
        module = type(value).__module__
        if module.partition(".")[0] in ("flashckpt", "logging", "threading"):
            return
        for name, one in list(getattr(value, "__dict__", {}).items()):
            self._visit(f"{path}.{name}", one, depth + 1, is_foreign=not is_own(module))


def _keeps_state(value: Any) -> bool:
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not begins_when_read(value)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False))
