"""All parameters and persistent buffers of the tracked modules, as columns: one walk, each shared tensor once, and what is left out."""

from __future__ import annotations

import fnmatch
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flashckpt.core.shard import split_owner
from flashckpt.errors import ConfigError
from flashckpt.state import modules
from flashckpt.state.box_sets import FORM
from flashckpt.state.placement import dtensor, dtype_name

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_LAYOUT = operator.attrgetter("layout")
_LAYOUT_IN_FORM = operator.itemgetter(3)
_Value = TypeVar("_Value")


_WILD = frozenset("*?[")


class Exclusion:
    """Patterns over the names of module state.

    A pattern matches a name with or without its track name: "base.*" and "model.base.*" are the same where the module
    is tracked as `model`.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._patterns: list[str] = []
        self._known: dict[str, bool] = {}

    def add(self, patterns: str | Iterable[str]) -> None:
        """Add patterns; a name without `*`, `?` and `[` stands for itself, and there may be many.

        Raises:
            ConfigError: One is not a text, or is empty.
        """
        more = [patterns] if isinstance(patterns, str) else list(patterns)
        for one in more:
            if not isinstance(one, str) or not one:
                raise ConfigError(
                    "exclude= is not a pattern over names",
                    found=repr(one),
                    expected='a text as "base.*", or a list of them',
                    state="Nothing was tracked.",
                )
        self._names.update(one for one in more if not _WILD & set(one))
        self._patterns += [one for one in more if _WILD & set(one)]
        self._known = {}

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def __call__(self, name: str) -> bool:
        """Whether a name, with its track name, is left out."""
        if not self:
            return False
        if (known := self._known.get(name)) is None:
            both = {name, _short(name)}
            known = self._known[name] = not both.isdisjoint(self._names) or any(
                fnmatch.fnmatchcase(one, pattern) for pattern in self._patterns for one in both
            )
        return known

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        known = {one for name in names for one in (name, _short(name))}
        patterns = (p for p in self._patterns if not any(fnmatch.fnmatchcase(one, p) for one in known))
        return [*sorted(self._names - known), *patterns]


def _short(name: str) -> str:
    return name.partition(".")[2]


def refuse_trained(name: str, tensor: torch.Tensor) -> None:
    """Refuse to leave out what training changes.

    Raises:
        ConfigError: The tensor takes gradients.
    """
    if tensor.requires_grad:
        raise ConfigError(
            f"{name!r} is left out by exclude= and is trained",
            found="requires_grad is true: a restart would begin with the weights of before training",
            expected="frozen parameters and constant buffers",
            state="No snapshot was taken of it.",
            remedy="call requires_grad_(False) on it before track(), or narrow the pattern",
        )


@dataclass(eq=False)
class ModuleTensors:
    """Parameters and persistent buffers under their global names, one entry per column for each.

    Attributes:
        names: Global names, with the track name.
        tensors: As their modules hold them.
        is_parameter: False for a buffer.
        ddp_ranks: Ranks of the DDP wrapper around each, or None.
        aliases: Other names of tensors that are held once: alias -> name.
        aliased: The tensors under those other names.
        walked: (path in its part, module) of every module, once, by track name and part.
        left_out: Tensors that no snapshot is to hold, by name.
    """

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    is_parameter: list[bool] = field(default_factory=list)
    ddp_ranks: list[tuple[int, ...] | None] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    aliased: dict[str, torch.Tensor] = field(default_factory=dict)
    walked: list[tuple[str, list[tuple[str, nn.Module]]]] = field(default_factory=list)
    left_out: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def ids(self) -> list[int]:
        """id() of each tensor."""
        return list(map(id, self.tensors))

    @cached_property
    def forms(self) -> list[tuple[Any, ...]]:
        """Dtype, shape, device and layout of each: torch makes a new object for every shape that is asked for."""
        return list(map(FORM, self.tensors))

    @cached_property
    def shortened(self) -> dict[int, str]:
        """id(tensor) -> its name inside the name of its optimizer state: without the track name `model`."""
        others = [*self.left_out.items(), *reversed(self.aliased.items())]
        named = {id(tensor): alias.removeprefix("model.") for alias, tensor in others}
        names = self.names
        if any(label == "model" for label, _ in self.walked):
            names = list(map(str.removeprefix, names, repeat("model.")))
        named.update(zip(self.ids, names, strict=True))
        return named

    def by_id(self, column: Sequence[_Value]) -> dict[int, _Value]:
        """Return id(tensor) -> its value in a column; an alias has the value of the tensor it stands for."""
        place = {name: i for i, name in enumerate(self.names)} if self.aliases else {}
        found = {id(self.aliased[alias]): column[place[name]] for alias, name in reversed(self.aliases.items())}
        found.update(zip(self.ids, column, strict=True))
        return found

    def walked_modules(self) -> Iterable[nn.Module]:
        """Yield every module."""
        return (module for _, part in self.walked for _, module in part)


def collect(parts_by_label: Mapping[str, Sequence[nn.Module]], exclusion: Exclusion | None = None) -> ModuleTensors:
    """Return the tensors of all tracked modules.

    Args:
        parts_by_label: The modules by track name.
        exclusion: What is left out.

    Raises:
        ConfigError: Two tensors of one name, or one that is trained is left out.
        UnsupportedStateError: A module keeps state where a snapshot would not find it, or has not made it yet.
    """
    found, exclusion = ModuleTensors(), exclusion or Exclusion()
    for label, parts in parts_by_label.items():
        for part in parts:
            _walk(found, label, part, exclusion)
    if exclusion:
        found = _without_excluded(found, exclusion)
    modules.refuse_lazy(found.names, found.tensors)
    _refuse_nested(found)
    refuse_coordinates(found.names)
    doubles = _storages_met_twice(found.tensors, map(_LAYOUT_IN_FORM, found.forms))
    if doubles is None or doubles or len(set(found.names)) < len(found.names):
        return _without_aliases(found, doubles)
    return found


def refuse_coordinates(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is like that of the state of one rank: "x@rank0"."""
    of_ranks = [name for name in names if split_owner(name)[1]] if "@" in "\0".join(names) else []
    if of_ranks:
        raise ConfigError(
            f"the tensor {of_ranks[0]!r} is named as state of one rank is",
            found=f"'@{split_owner(of_ranks[0])[1]}' at its end",
            expected="a name that does not end in '@', letters and digits",
            state="Nothing was tracked.",
            remedy="give the parameter, buffer or module another name, or leave it out with track(exclude=)",
        )


def _refuse_nested(found: ModuleTensors) -> None:
    """Refuse a nested tensor by name: one that is strided cannot even be asked for its shape."""
    try:
        found.forms  # noqa: B018 -- kept by it, and needed next
    except RuntimeError:
        for name, tensor in zip(found.names, found.tensors, strict=True):
            dtype_name(name, tensor, takes_meta=True)
        raise


def _without_excluded(found: ModuleTensors, exclusion: Exclusion) -> ModuleTensors:
    """Return the columns without what is excluded; before shared tensors are looked for: one may be kept under another name."""
    kept = ModuleTensors(walked=found.walked)
    columns = zip(found.names, found.tensors, found.ddp_ranks, found.is_parameter, strict=True)
    for name, tensor, ranks, is_parameter in columns:
        if exclusion(name):
            kept.left_out[name] = tensor
        else:
            _append(kept, name, tensor, ranks, is_parameter=is_parameter)
    held = set(kept.ids)
    for name, tensor in kept.left_out.items():
        if id(tensor) not in held:
            refuse_trained(name, tensor)
    return kept


def _walk(found: ModuleTensors, label: str, part: nn.Module, exclusion: Exclusion) -> None:
    named = list[tuple[str, nn.Module]]()
    _enter_named_modules(named, "", part)
    once = named
    if len(set(map(id, (module for _, module in named)))) < len(named):
        once = list({id(module): (prefix, module) for prefix, module in reversed(named)}.values())[::-1]
    found.walked.append((label, once))
    modules.reshard(module for _, module in once)
    wrapped = {
        prefix: tuple(dist.get_process_group_ranks(module.process_group))
        for prefix, module in named
        if isinstance(module, DistributedDataParallel)
    }
    is_unwrapped = not wrapped
    is_plain = is_unwrapped and not modules.has_wrapper("\n".join(prefix for prefix, _ in named))
    own_way = {kind for kind in {type(module) for _, module in once} if modules.saves_in_its_own_way(kind)}
    for prefix, module in named:
        parameters, buffers = module._parameters, module._buffers  # noqa: SLF001 -- named_parameters() drops the owner of each
        if type(module) in own_way:
            path = modules.strip(prefix, wrapped)
            dotted = f"{label}.{path}." if path else f"{label}."
            modules.refuse_hidden_in(path, module, lambda key, dotted=dotted: exclusion(dotted + key))  # type: ignore[misc]
        if not parameters and not buffers:
            continue
        clean = prefix if is_plain else modules.strip(prefix, wrapped)
        ranks = None if is_unwrapped else _ranks_around(prefix, wrapped)
        dot = f"{label}.{clean}." if clean else f"{label}."
        before = len(found.names)
        for key, tensor in parameters.items():
            if tensor is not None:
                found.names.append(dot + key)
                found.tensors.append(tensor)
        count = len(found.names) - before
        found.is_parameter += [True] * count
        for key, buffer in _persistent(module) if buffers else ():
            found.names.append(dot + key)
            found.tensors.append(buffer)
        found.is_parameter += [False] * (len(found.names) - before - count)
        found.ddp_ranks += [ranks] * (len(found.names) - before)


def _enter_named_modules(named: list[tuple[str, nn.Module]], prefix: str, module: nn.Module) -> None:
    """Enter what `module.named_modules(remove_duplicate=False)` yields: its generators pass each through every level."""
    if type(module).named_modules is not nn.Module.named_modules:
        named += module.named_modules(prefix=prefix, remove_duplicate=False)
        return
    named.append((prefix, module))
    if not module._modules:  # noqa: SLF001 -- what named_modules() reads
        return
    dot = f"{prefix}." if prefix else ""
    for name, child in module._modules.items():  # noqa: SLF001 -- as above
        if child is not None:
            _enter_named_modules(named, dot + name, child)


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are part of a module's state."""
    transient = module._non_persistent_buffers_set  # noqa: SLF001 -- the only place that says so
    for key, buffer in module._buffers.items():  # noqa: SLF001 -- named_buffers() yields those of submodules too
        if buffer is not None and key not in transient:
            yield key, buffer


def _ranks_around(prefix: str, wrapped: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the ranks of the DDP wrapper around a module."""
    return next((r for p, r in wrapped.items() if prefix == p or prefix.startswith(f"{p}." if p else "")), None)


def _append(
    found: ModuleTensors, name: str, tensor: torch.Tensor, ranks: tuple[int, ...] | None, *, is_parameter: bool
) -> None:
    found.names.append(name)
    found.tensors.append(tensor)
    found.is_parameter.append(is_parameter)
    found.ddp_ranks.append(ranks)


def _storages_met_twice(tensors: Sequence[torch.Tensor], layouts: Iterable[torch.layout]) -> set[int] | None:
    """Return the addresses and ids that occur more than once; None where the tensors are not all of a kind that has them.

    Tensors that share their bytes have equal addresses: where none are equal, nothing has to be compared one by one.

    Args:
        tensors: What is compared.
        layouts: Of each.
    """
    kinds, sharded, plain = set(map(type, tensors)), dtensor(), tensors
    if not kinds.issubset({*_PLAIN, sharded}):
        return None
    if sharded in kinds:
        plain = [tensor for tensor in tensors if type(tensor) is not sharded]
        layouts = map(_LAYOUT, plain)
    if not {torch.strided}.issuperset(layouts):
        return None
    addresses = list(map(torch.Tensor.data_ptr, plain))
    distinct = set(addresses)
    if len(distinct) == len(tensors) and 0 not in distinct:
        return set()  # then no tensor is there twice either
    twice = {address for address, times in Counter(addresses).items() if times > 1 and address}  # 0: it has no bytes
    twice |= {one for one, times in Counter(map(id, tensors)).items() if times > 1}
    return twice


def _without_aliases(found: ModuleTensors, doubles: set[int] | None) -> ModuleTensors:
    """Return the columns with every tensor once: the first of its names, the others as aliases.

    Raises:
        ConfigError: Two tensors of one name.
    """
    kept, by_storage = ModuleTensors(walked=found.walked, left_out=found.left_out), dict[tuple[object, ...], str]()
    named: dict[str, torch.Tensor] = {}
    columns = zip(found.names, found.tensors, found.ddp_ranks, found.is_parameter, strict=True)
    for full, tensor, ranks, is_parameter in columns:
        known = full
        if doubles is None or id(tensor) in doubles or (type(tensor) is not dtensor() and tensor.data_ptr() in doubles):
            known = by_storage.setdefault(modules.storage_key(tensor), full)
        if known == full and full not in named:
            named[full] = tensor
            _append(kept, full, tensor, ranks, is_parameter=is_parameter)
        elif full in named or full in kept.aliases:
            if named.get(full) is not tensor:  # not one module reached on two ways
                raise two_of_one_name(full)
        else:
            kept.aliases[full], kept.aliased[full] = known, tensor
    return kept


def may_share(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two of the tensors may share their bytes; `first_shared` says whether they do."""
    doubles = _storages_met_twice(tensors, map(_LAYOUT, tensors))
    return doubles is None or bool(doubles)


def first_shared(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of the first two tensors that share their bytes; None if none do."""
    if not may_share(tensors):
        return None
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        known = seen.setdefault(modules.storage_key(tensor), name)
        if known != name:
            return known, name
    return None


def are_global(parts: Sequence[nn.Module]) -> bool:
    """Whether no two tensors of some modules have one name: then a list of them is parts of one model, and else a module."""
    found, by_name = ModuleTensors(), dict[str, torch.Tensor]()
    for part in parts:
        _walk(found, "", part, Exclusion())
    return all(by_name.setdefault(n, t) is t for n, t in zip(found.names, found.tensors, strict=True))


def two_of_one_name(full: str) -> ConfigError:
    """Return the error for two tensors of one name."""
    return ConfigError(
        f"two tracked tensors have the name {full!r}",
        found="model parts whose names are not global",
        expected="one name per tensor over all parts and pipeline stages, e.g. the global layer number in it",
        state="Nothing was tracked.",
    )
