"""All parameters and persistent buffers of the tracked modules, as columns: one walk, each shared tensor once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashckpt.errors import ConfigError
from flashckpt.state import modules

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_LAYOUT = operator.attrgetter("layout")


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
    """

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    is_parameter: list[bool] = field(default_factory=list)
    ddp_ranks: list[tuple[int, ...] | None] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    aliased: dict[str, torch.Tensor] = field(default_factory=dict)
    walked: list[tuple[str, list[tuple[str, nn.Module]]]] = field(default_factory=list)

    @property
    def shortened(self) -> dict[int, str]:
        """id(tensor) -> its name inside the name of its optimizer state."""
        named = {id(tensor): short(alias) for alias, tensor in reversed(self.aliased.items())}
        named.update(zip(map(id, self.tensors), map(short, self.names), strict=True))
        return named

    @property
    def places(self) -> dict[int, int]:
        """id(tensor) -> its place in the columns; an alias has the place of the tensor it stands for."""
        place = {name: i for i, name in enumerate(self.names)} if self.aliases else {}
        found = {id(self.aliased[alias]): place[name] for alias, name in reversed(self.aliases.items())}
        found.update(zip(map(id, self.tensors), range(len(self.tensors)), strict=True))
        return found

    def walked_modules(self) -> Iterable[nn.Module]:
        """Yield every module."""
        return (module for _, part in self.walked for _, module in part)


def short(full: str) -> str:
    """Return a parameter's name inside the name of its optimizer state: without the track name `model`."""
    return full.removeprefix("model.")


def collect(parts_by_label: Mapping[str, Sequence[nn.Module]]) -> ModuleTensors:
    """Return the tensors of all tracked modules.

    Raises:
        ConfigError: Two tensors of one name.
        UnsupportedStateError: A module keeps state where a snapshot would not find it, or has not made it yet.
    """
    found = ModuleTensors()
    for label, parts in parts_by_label.items():
        for part in parts:
            _walk(found, label, part)
    modules.refuse_lazy(found.names, found.tensors)
    doubles = _storages_met_twice(found.tensors)
    if doubles is None or doubles or len(set(found.names)) < len(found.names):
        return _without_aliases(found, doubles)
    return found


def _walk(found: ModuleTensors, label: str, part: nn.Module) -> None:
    named = list(part.named_modules(remove_duplicate=False))
    once = list({id(module): (prefix, module) for prefix, module in reversed(named)}.values())[::-1]
    found.walked.append((label, once))
    modules.reshard(module for _, module in once)
    wrapped = {
        prefix: tuple(dist.get_process_group_ranks(module.process_group))
        for prefix, module in named
        if isinstance(module, DistributedDataParallel)
    }
    is_unwrapped = not wrapped
    for prefix, module in named:
        parameters, buffers = module._parameters, module._buffers  # noqa: SLF001 -- named_parameters() drops the owner of each
        if modules.saves_in_its_own_way(type(module)):
            modules.refuse_hidden_in(modules.strip(prefix, wrapped), module)
        if not parameters and not buffers:
            continue
        clean = modules.strip(prefix, wrapped)
        ranks = None if is_unwrapped else _ranks_around(prefix, wrapped)
        dot = f"{label}.{clean}." if clean else f"{label}."
        transient = module._non_persistent_buffers_set  # noqa: SLF001 -- the only place that says so
        own = [(key, one) for key, one in parameters.items() if one is not None]
        count = len(own)
        own += [(key, one) for key, one in buffers.items() if one is not None and key not in transient]
        found.names += [dot + key for key, _ in own]
        found.tensors += [tensor for _, tensor in own]
        found.is_parameter += [True] * count + [False] * (len(own) - count)
        found.ddp_ranks += [ranks] * len(own)


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


def _storages_met_twice(tensors: Sequence[torch.Tensor]) -> set[int] | None:
    """Return the addresses and ids that occur more than once; None where the tensors are not all of a kind that has them.

    Tensors that share their bytes have equal addresses: where none are equal, nothing has to be compared one by one.
    """
    kinds = set(map(type, tensors))
    if not all(kind in _PLAIN or kind is DTensor for kind in kinds):
        return None
    plain = tensors if DTensor not in kinds else [tensor for tensor in tensors if type(tensor) is not DTensor]
    if set(map(_LAYOUT, plain)) - {torch.strided}:
        return None
    seen = Counter(map(torch.Tensor.data_ptr, plain))
    seen.pop(0, None)  # empty, or without bytes
    twice = {address for address, times in seen.items() if times > 1} if len(seen) < len(plain) else set()
    if len(set(map(id, tensors))) < len(tensors):
        twice |= {one for one, times in Counter(map(id, tensors)).items() if times > 1}
    return twice


def _without_aliases(found: ModuleTensors, doubles: set[int] | None) -> ModuleTensors:
    """Return the columns with every tensor once: the first of its names, the others as aliases.

    Raises:
        ConfigError: Two tensors of one name.
    """
    kept, by_storage = ModuleTensors(walked=found.walked), dict[tuple[object, ...], str]()
    named: dict[str, torch.Tensor] = {}
    columns = zip(found.names, found.tensors, found.ddp_ranks, found.is_parameter, strict=True)
    for full, tensor, ranks, is_parameter in columns:
        known = full
        if doubles is None or id(tensor) in doubles or (type(tensor) is not DTensor and tensor.data_ptr() in doubles):
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


def first_shared(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of the first two tensors that share their bytes; None if none do."""
    doubles = _storages_met_twice(tensors)
    if doubles is not None and not doubles:
        return None
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        known = seen.setdefault(modules.storage_key(tensor), name)
        if known != name:
            return known, name
    return None


def two_of_one_name(full: str) -> ConfigError:
    """Return the error for two tensors of one name."""
    return ConfigError(
        f"two tracked tensors have the name {full!r}",
        found="model parts whose names are not global",
        expected="one name per tensor over all parts and pipeline stages, e.g. the global layer number in it",
        state="Nothing was tracked.",
    )
