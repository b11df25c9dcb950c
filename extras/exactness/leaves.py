"""What a rank holds at one instant, as named digests: the tracked state, and what the script's own variables lead to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from flashckpt.core.records import digest, digest_of
from flashckpt.exactness.insides import contents, is_own, place_of
from flashckpt.state import rng
from flashckpt.state.data_sources import begins_when_read, keeps_state
from flashckpt.state.placement import dtensor
from flashckpt.state.registry import StateRegistry

DEEPEST, MOST, MOST_ITEMS, LONGEST = 6, 20_000, 100_000, 64
"""Levels that are followed, leaves and objects of one instant, items of a list that is one leaf, items that are each a leaf."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_GENERATORS = {
    torch.Generator: "get_state() and set_state()",
    random.Random: "getstate() and setstate()",
    np.random.Generator: "bit_generator.state",
    np.random.RandomState: "get_state() and set_state()",
}
"""How each kind gives and takes its state, for the remedy."""
_OF_MODULES = frozenset(vars(nn.Module()))


class Leaf(NamedTuple):
    """One thing of which a digest was taken.

    Attributes:
        kind: "tracked", "object" (of one that nobody tracks), "generator", "tensor", "value" or "gradient".
        owner: The object whose state it is part of, "" for a variable.
        of: The class of that object; of a generator of the script's own how it gives and takes its state.
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


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor is all zeros: asks no other rank."""
    raw = bytes_of(tensor)
    return isinstance(raw, np.ndarray) and not raw.any()


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
    """One walk over everything; what is tracked is not met a second time."""

    def __init__(self, tracked: StateRegistry, *, reads_sources: bool) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._tracked, self._reads_sources = tracked, reads_sources
        self._seen: dict[int, Any] = {}  # held, so that no id is used again
        self._names: dict[int, str] = {}
        self._waiting: deque[tuple[str, Any, int, bool]] = deque()  # the nearest first: by the shortest name

    def run(self, frame: FrameType | None) -> dict[str, Leaf]:
        """Return the leaves of the tracked state, the generators, and the variables from `frame` on."""
        self._tracked_state()
        self.leaves |= generators()
        for path, value in variables(frame):
            self._wait(path, value, 0, is_foreign=False)
        while self._waiting:
            path, value, depth, is_foreign = self._waiting.popleft()
            self._visit(path, value, depth, is_foreign=is_foreign)
        return self.leaves

    def _tracked_state(self) -> None:
        tracked = self._tracked
        for label, parts in tracked.modules.items():
            self._names |= {id(p): name for part in parts for name, p in part.named_parameters()}
            for part in parts:
                self._module(label, part, ("tracked", label, type(part).__qualname__))
                self._gradients(label, part)
                self._modes(label, part)
        for label, optimizer in ((label, one) for label, several in tracked.optimizers.items() for one in several):
            self._optimizer(label, optimizer, ("tracked", label, type(optimizer).__qualname__))
            self._beside(label, optimizer)
        for label, thing in tracked.objects.items():
            self._seen[id(thing)] = thing
            if label not in tracked.unread and (self._reads_sources or not begins_when_read(thing)):
                self._tree(label, thing.state_dict(), 0, ("tracked", label, type(thing).__qualname__))
            self._beside(label, thing)
        for part in chain.from_iterable(tracked.modules.values()):
            self._attributes_of_modules("", part)

    def _wait(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:
        if depth <= DEEPEST and (type(value) in _PLAIN or id(value) not in self._seen):
            self._waiting.append((path, value, depth, is_foreign))

    def _beside(self, path: str, value: Any, depth: int = 0) -> None:
        """Visit what an object has beside what is already taken of it."""
        for name, one, is_foreign in contents(path, value):
            self._wait(name, one, depth + 1, is_foreign=is_foreign)

    def _leaf(self, path: str, value: Any, owner: tuple[str, str, str] | None, kind: str) -> None:
        if len(self.leaves) >= MOST:
            return
        if isinstance(value, torch.Tensor):
            raw, shown = bytes_of(value), f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            shown = repr(value.tolist()) if type(value) is torch.Tensor and not (value.ndim or value.is_meta) else shown
        elif isinstance(value, np.ndarray):
            raw, shown = np.ascontiguousarray(value).tobytes(), f"{value.dtype}{list(value.shape)}"
        else:
            text = repr(value)
            raw, shown = text.encode(errors="replace"), text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        shown = "" if kind == "generator" else shown
        self.leaves[path] = Leaf(*(owner or (kind, "", "")), f"{digest(raw):x}", shown)

    # -- objects with state -----------------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module, owner: tuple[str, str, str]) -> None:
        unsaved = set[str]()
        for name, one in module.named_modules():
            self._seen[id(one)] = one
            unsaved |= {f"{name}.{key}".removeprefix(".") for key in one._non_persistent_buffers_set}  # noqa: SLF001 -- has no public name
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) in self._seen:
                continue
            self._seen[id(tensor)] = tensor
            if owner[0] == "tracked" and name in unsaved:
                self._leaf(f"{path}.{name}, of persistent=False,", tensor, None, "tensor")
            else:
                self._leaf(f"{path}.{name}", tensor, owner, "tensor")
            for key, value in vars(tensor).items():
                if not key.startswith("_"):
                    self._wait(f"{path}.{name}.{key}", value, 1, is_foreign=False)

    def _gradients(self, label: str, module: nn.Module) -> None:
        raw = [bytes_of(p.grad) for p in module.parameters() if p.grad is not None and not is_zero(p.grad)]
        self.leaves[f"gradients of {label}"] = Leaf("gradient", label, "", f"{digest_of(*raw):x}" if raw else "", "")

    def _modes(self, label: str, module: nn.Module) -> None:
        """Take which parameters are frozen and which modules are in evaluation mode: no snapshot has it."""
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        resting = [name for name, one in module.named_modules() if not one.training]
        self._leaf(f"frozen parameters of {label}", frozen, None, "value")
        self._leaf(f"modules in evaluation mode of {label}", resting, None, "value")

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer, owner: tuple[str, str, str]) -> None:
        self._seen |= {id(one): one for one in (optimizer, optimizer.state, optimizer.param_groups)}
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
        """Visit what modules keep beside parameters and buffers, and their hooks: no snapshot has it."""
        for name, one in module.named_modules():
            where, is_foreign = ".".join(filter(None, (path or "model", name))), not is_own(type(one).__module__)
            for key, value in vars(one).items():
                if key not in _OF_MODULES and not (is_foreign and key.startswith("_")):
                    self._wait(f"{where}.{key}", value, 1, is_foreign=is_foreign and type(value) not in _PLAIN)
            for hook in chain(one._forward_hooks.values(), one._forward_pre_hooks.values()):  # noqa: SLF001 -- has no public name
                self._wait(f"a hook of {where}", hook, 1, is_foreign=True)

    # -- variables --------------------------------------------------------------------------------------------

    def _visit(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:
        if path in self.leaves:  # what a state says of it counts
            return
        if type(value) in _PLAIN or isinstance(value, np.generic):
            if not is_foreign:
                self._leaf(path, value, None, "value")
        elif id(value) not in self._seen and len(self._seen) <= MOST:
            self._seen[id(value)] = value
            self._object(path, value, depth, is_foreign=is_foreign)

    def _object(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:
        owner = ("object", path, type(value).__qualname__)
        if isinstance(value, torch.Tensor | np.ndarray):
            if not is_foreign:
                self._leaf(path, value, None, "tensor" if value.ndim else "value")  # a number: a meter, as any other
        elif (how := next((how for kind, how in _GENERATORS.items() if isinstance(value, kind)), "")) != "":
            self._leaf(path, _state_of(value), ("generator", "", how), "generator")
        elif isinstance(value, _CONTAINERS):
            self._container(path, value, depth, is_foreign=is_foreign)
        elif isinstance(value, nn.Module):
            self._module(path, value, owner)
            self._attributes_of_modules(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(path, value, owner)
        elif (state := _asked(value, "state_dict", "load_state_dict")) is not None:
            self._tree(path, state, 0, owner)
        elif is_foreign or not self._has_place(path, value, owner):
            if keeps_state(type(value)) and is_own(
                type(value).__module__
            ):  # a source of data: it may begin to read when it is asked
                self._tree(path, {key: one for key, one in vars(value).items() if _is_data(one, 1)}, 0, owner)
            self._beside(path, value, depth)

    def _has_place(self, path: str, value: Any, owner: tuple[str, str, str]) -> bool:
        """Take what an object says of its place by other names, or what it is by its bytes; False where it does not."""
        if (state := _asked(value, "get_state", "set_state")) is not None:
            self._tree(path, {"state": state}, 0, owner)
        elif (state := _asked(value, "getstate", "setstate")) is not None:
            self._leaf(path, repr(state), ("generator", "", _GENERATORS[random.Random]), "generator")
        elif (place := place_of(value)) is not None:
            self._leaf(path, place, None, "value")
        else:
            return False
        return True

    def _container(self, path: str, value: Any, depth: int, *, is_foreign: bool) -> None:
        items = list(value.values() if isinstance(value, dict) else value)
        is_plain = _PLAIN.issuperset(map(type, items))
        if not is_foreign and (is_plain or len(items) > LONGEST) and not isinstance(value, dict):
            ordered = sorted(items, key=repr) if isinstance(value, set | frozenset) else items
            if is_plain:
                self._leaf(path, ordered, None, "value")
            elif all(_is_data(one, 2) for one in items):
                shown = f"{type(value).__name__} of {len(items)}"
                self.leaves[path] = Leaf("tensor", "", "", f"{digest_of_inputs(ordered):x}", shown)
        if not is_foreign and not (is_plain and items):
            self._leaf(f"len({path})", len(items), None, "value")
        if path in self.leaves or len(items) > MOST_ITEMS or isinstance(value, set | frozenset):
            return
        for key, one in zip(value if isinstance(value, dict) else range(len(items)), items, strict=True):
            self._wait(f"{path}[{key!r}]", one, depth + 1, is_foreign=is_foreign)


def _is_data(value: Any, depth: int) -> bool:
    """Return whether it is a tensor, an array, plain, or a sequence of these."""
    if isinstance(value, (torch.Tensor, np.ndarray)) or type(value) in _PLAIN:
        return True
    return depth > 0 and type(value) in (tuple, list) and all(_is_data(one, depth - 1) for one in value)


def _asked(value: Any, give: str, take: str) -> Any:
    """Return the state of an object that has one to give and to take; None too where its own code fails when it is asked."""
    try:
        has_both = callable(getattr(value, give, None)) and callable(getattr(value, take, None))
        return (
            getattr(value, give)()
            if has_both and not isinstance(value, (type, ModuleType)) and not begins_when_read(value)
            else None
        )
    except Exception:  # noqa: BLE001 -- any object of the script: some make what they are asked for, and fail
        return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False))
