"""Live state as the target of a restore: what is wanted, where its bytes go, what becomes of values."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashckpt.core.directory import Wish
from flashckpt.core.layout import Shard
from flashckpt.core.manifest import Manifest
from flashckpt.restore.fill import Target
from flashckpt.restore.sources import Source
from flashckpt.tracking import loaders, optimizer_state, rng, samplers, trees
from flashckpt.tracking.placement import Box, World, boxes_of, local_of, shard_of
from flashckpt.tracking.structure import Structure
from flashckpt.tracking.tracked import Tracked


@dataclass(eq=False)
class Want:
    """One box of live state that is to be filled.

    Attributes:
        fqn: Name in the live state.
        shard: The box, under the name that the source has for it.
        tensor: The live tensor; None where it is still to be allocated.
        box: Where the box lies in it.
    """

    fqn: str
    shard: Shard
    tensor: torch.Tensor | None
    box: Box


@dataclass(eq=False)
class Wishes:
    """Everything wanted from one set of sources.

    Attributes:
        wants: Boxes that the sources name.
        missing: Names that no source has.
        absent_state: Optimizer state to allocate: (optimizer label, optimizer, parameter, key, fqn, box shape, dtype).
        unexpected: Names that the sources have and nothing wants.
        unnamed: What these sources do not name although the snapshot may have it; found only on request.
    """

    wants: list[Want] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unnamed: list[Wish] = field(default_factory=list)
    absent_state: list[AbsentState] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def shards(self) -> list[Shard]:
        """What the plan is made for."""
        return [w.shard for w in self.wants] + [s for a in self.absent_state for s in a.shards]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentState:
    """Optimizer state that the snapshot has and the live optimizer has not made yet."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    param: torch.Tensor
    key: str
    fqn: str
    shards: tuple[Shard, ...]

    def allocate(self) -> torch.Tensor:
        """Make the state tensor and hang it into the optimizer; the restore overwrites it whole."""
        first = self.shards[0]
        tensor = optimizer_state.allocate(
            self.param,
            self.key,
            shape=first.global_shape,
            dtype=getattr(torch, first.dtype),
            group=self.group,
            fqn=self.fqn,
        )
        self.optimizer.state[self.param][self.key] = tensor
        return tensor


class Names:
    """The names that a set of sources has, with aliases and the state of other ranks."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.known: dict[str, tuple[Manifest, int]] = {}
        self.aliases: dict[str, str] = {}
        for manifest in manifests:
            for i, fqn in enumerate(manifest.table.fqns):
                self.known.setdefault(fqn, (manifest, i))
            self.aliases |= manifest.aliases
        self._bases: dict[str, list[str]] = {}
        for fqn in self.known:
            if "@" in fqn:
                self._bases.setdefault(fqn.partition("@")[0], []).append(fqn)

    def find(self, fqn: str, *, exact: bool = False) -> str | None:
        """Return the name in the sources that `fqn` is to be read from, or None.

        What belongs to one rank alone comes from another rank's only where not `exact`.
        """
        if fqn in self.known:
            return fqn
        if (other := self.aliases.get(fqn)) in self.known:
            return other
        base = fqn.partition("@")[0]
        if base in self.known:
            return base
        others = None if exact else self._bases.get(base)
        return min(others) if others else None

    def shard(self, fqn: str) -> Shard:
        """Return any row of `fqn`: its dtype and global shape."""
        manifest, _ = self.known[fqn]
        return manifest.table.shard(manifest.table.rows(fqn)[0])


def wishes(
    tracked: Tracked, structure: Structure, manifests: Sequence[Manifest], only: str | None, *, exact: bool = False
) -> Wishes:
    """Return what is wanted of the sources: live tensors they name, and optimizer state still to be made.

    Args:
        tracked: The live objects.
        structure: Their structure now.
        manifests: Of the sources.
        only: A pattern over names ("model.*"), or None for everything.
        exact: The sources may not be all of the snapshot: what they do not name may be somewhere else, and
            another rank's state is not taken in place of one's own. Fills `unnamed`.
    """
    names, found = Names(manifests), Wishes()
    used: set[str] = set()
    for row in structure.rows:
        fqn = row.entry.fqn
        if fqn in structure.fresh or not _is_wanted(fqn, only):
            continue
        source = names.find(fqn, exact=exact)
        if source is None:
            found.missing.append(fqn)
            if exact:
                found.unnamed.append((fqn.partition("@")[0], fqn, shard_of(fqn, row.entry.dtype, row.box, 0)))
            continue
        used.add(source)
        shard = shard_of(source, row.entry.dtype, row.box, 0)
        found.wants.append(Want(fqn=fqn, shard=shard, tensor=row.entry.tensor, box=row.box))
    for absent in _absent_state(tracked, names, exact=exact):
        if _is_wanted(absent.fqn, only):
            used |= {s.fqn for s in absent.shards}
            found.absent_state.append(absent)
    if exact:
        found.unnamed += _unnamed_state(tracked, manifests, found, only)
    labels = {*tracked.modules, *tracked.optimizers}
    found.missing = sorted(set(found.missing))
    found.unexpected = sorted(
        f for f in names.known if f not in used and f.partition(".")[0] in labels and "@" not in f and f not in names.aliases
    )  # fmt: skip
    return found


def _unnamed_state(tracked: Tracked, manifests: Sequence[Manifest], found: Wishes, only: str | None) -> Iterator[Wish]:
    """Yield a wish for the optimizer state of each parameter that no source has state of.

    A parameter that some source's optimizer had has no state to miss: it never stepped.
    """
    named = {id(absent.param) for absent in found.absent_state}
    for label, optimizers in tracked.optimizers.items():
        listed = set(_listed(label, manifests))
        live = tracked.names_for(optimizers)
        for optimizer in optimizers:
            for param in optimizer_state.parameters(optimizer):
                name = live[id(param)]
                known = optimizer.state.get(param) or id(param) in named or name in listed
                if known or not _is_wanted(f"{label}.{name}.", only):
                    continue
                for box in boxes_of(name, param):
                    yield f"{label}.{name}.*", "", shard_of(name, "float32", box, 0)


def _listed(label: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the parameters of every optimizer that recorded its groups under `label`."""
    for manifest in manifests:
        for key, value in manifest.values.items():
            if key.partition("@")[0] == f"{label}.groups":
                for group in (g for one in trees.put_together(value, lambda _: torch.empty(0)) for g in one):
                    yield from group["params"]


def unnamed_values(tracked: Tracked, values: Values, only: str | None) -> list[Wish]:
    """Return wishes for the values of this rank and its objects that the sources do not have under their own name."""
    keys = [tracked.key_of(name, thing) for name, thing in tracked.objects.items() if _is_wanted(name, only)]
    if tracked.rng and _is_wanted("rng", only):
        keys.append(f"rng@{tracked.world.suffix}")
    return [(f"={key}", "", None) for key in keys if key not in values.all]


def _is_wanted(fqn: str, only: str | None) -> bool:
    return only is None or fnmatch.fnmatchcase(fqn, only)


def _absent_state(tracked: Tracked, names: Names, *, exact: bool = False) -> Iterator[AbsentState]:
    for label, optimizers in tracked.optimizers.items():
        by_param: dict[str, list[tuple[str, str]]] = {}
        for fqn in names.known:
            if fqn.startswith(f"{label}."):
                base, _, _ = fqn.removeprefix(f"{label}.").partition("@")
                param_name, _, key = base.rpartition(".")
                by_param.setdefault(param_name, []).append((key, fqn))
        for optimizer in optimizers:
            live, groups = tracked.names_for([optimizer]), optimizer_state.groups_by_parameter(optimizer)
            for param in optimizer_state.parameters(optimizer):
                if optimizer.state.get(param):
                    continue
                for key, fqn in _mine(by_param.get(live[id(param)], []), tracked.world, exact=exact):
                    any_shard = names.shard(fqn)
                    whole = any_shard.global_shape == tuple(param.shape)
                    shape = torch.empty(any_shard.global_shape, device="meta")
                    boxes = boxes_of(fqn, param if whole else shape)
                    shards = tuple(shard_of(fqn, any_shard.dtype, box, 0) for box in boxes)
                    yield AbsentState(
                        optimizer=optimizer, group=groups[id(param)], param=param, key=key, fqn=fqn, shards=shards
                    )


def _mine(candidates: Iterable[tuple[str, str]], world: World, *, exact: bool) -> list[tuple[str, str]]:
    """Of several names of one key (one per rank), return this rank's, else (where not `exact`) the first."""
    chosen: dict[str, str] = {}
    for key, fqn in sorted(candidates):
        if exact and "@" in fqn and not fqn.endswith(f"@{world.suffix}"):
            continue
        if key not in chosen or fqn.endswith(f"@{world.suffix}"):
            chosen[key] = fqn
    return list(chosen.items())


class Landing:
    """Byte buffers over live tensors; where a tensor has no row-major host memory, a buffer that is copied in after."""

    def __init__(self) -> None:
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []

    def target(self, shard: Shard, tensor: torch.Tensor, box: Box) -> Target:
        """Return the target for one box of a live tensor."""
        part = local_of(tensor).detach()
        for dim, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        if part.device.type != "cpu" or not part.is_contiguous() or part.is_conj() or part.is_neg():
            staged = torch.empty(part.shape, dtype=part.dtype)
            self._after.append((part, staged))
            part = staged
        return Target(shard=shard, buffer=bytes_of(part))

    def finish(self) -> None:
        """Copy the staged buffers to where they belong."""
        with torch.no_grad():
            for live, staged in self._after:
                live.copy_(staged)
        self._after.clear()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous host tensor of any dtype."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class Values:
    """The non-tensor state of a snapshot as this rank sees it: its own manifest first."""

    def __init__(self, sources: Sequence[Source], rank: int) -> None:
        manifests = [s.manifest for s in sources]
        self._manifests = sorted(manifests, key=lambda m: (m.rank != rank, m.rank))
        self.all: dict[str, Any] = {}
        for manifest in self._manifests:
            for key, value in manifest.values.items():
                self.all.setdefault(key, value)

    def find(self, key: str) -> tuple[bool, Any]:
        """Return (found, value) of a key: its own, that of all ranks, or that of the others if they agree."""
        if key in self.all:
            return True, self.all[key]
        base = key.partition("@")[0]
        if base in self.all:
            return True, self.all[base]
        others = [value for name, value in self.all.items() if name.partition("@")[0] == base]
        if others and all(value == others[0] for value in others):
            return True, others[0]
        return False, None

    def recorded(self, base: str) -> list[Any]:
        """Return the values under `base` and `base@...` of all manifests, this rank's first."""
        return [
            value
            for manifest in self._manifests
            for key, value in manifest.values.items()
            if key.partition("@")[0] == base
        ]


def restore_values(
    tracked: Tracked,
    values: Values,
    tensor: Any,
    *,
    step: int,
    only: str | None,
    is_whole: bool = True,
) -> tuple[list[str], list[str]]:
    """Give every object its state back; return what was missing, and what was seeded anew.

    Args:
        tracked: The live objects.
        values: Of the snapshot.
        tensor: `tensor(name)` gives the tensors that objects' state consists of, filled.
        step: The restored step; seeds generators whose own state was never taken.
        only: A pattern over names, or None.
        is_whole: The values are all that the snapshot has; else what a module has no state for is missing.
    """
    missing = []
    # samplers last: asked for its state before the restore, a stateful loader began an iterator, which it drops now
    for name, thing in sorted(tracked.objects.items(), key=lambda item: samplers.is_sampler(item[1])):
        if not _is_wanted(name, only):
            continue
        found, skeleton = values.find(tracked.key_of(name, thing))
        if found:
            thing.load_state_dict(trees.put_together(skeleton, tensor))
        else:
            missing.append(name)
    for label, optimizers in tracked.optimizers.items():
        if _is_wanted(f"{label}.groups", only):
            names = tracked.names_for(optimizers)
            recorded = values.recorded(f"{label}.groups")
            missing += optimizer_state.restore_groups(optimizers, names, recorded, tensor)
            _restore_scalars(tracked, label, values)
    for name, module in tracked.extra_states():
        found, value = values.find(name)
        if found and _is_wanted(name, only):
            module.set_extra_state(trees.put_together(value, tensor))
        elif not (found or is_whole):
            missing.append(name)
    return missing, _restore_rng(tracked, values, step) if tracked.rng and _is_wanted("rng", only) else []


def _restore_rng(tracked: Tracked, values: Values, step: int) -> list[str]:
    """Set the generators; without a state of this rank seed them from (step, rank), and return its name."""
    key = f"rng@{tracked.world.suffix}"
    if key in values.all:
        rng.restore(values.all[key])
        loaders.hold(tracked.objects, values.all[key])
        return []
    rng.reseed(step=step, rank=tracked.world.rank)
    return [key]


def _restore_scalars(tracked: Tracked, label: str, values: Values) -> None:
    """Set optimizer state that is no tensor, e.g. a Python `step`."""
    for optimizer in tracked.optimizers[label]:
        names = tracked.names_for([optimizer])
        by_name = {names[id(p)]: p for p in optimizer_state.parameters(optimizer)}
        for key, value in values.all.items():
            if key.startswith(f"{label}.") and not key.startswith(f"{label}.groups"):
                name, _, state_key = key.partition("@")[0].removeprefix(f"{label}.").rpartition(".")
                if name in by_name:
                    optimizer.state[by_name[name]][state_key] = trees.put_together(value, _no_tensor)


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def value_tensors(tracked: Tracked, values: Values) -> set[str]:
    """Return the names of the tensors that the wanted values refer to."""
    names: set[str] = set()
    for name, thing in tracked.objects.items():
        found, skeleton = values.find(tracked.key_of(name, thing))
        names |= set(trees.tensor_names(skeleton)) if found else set()
    for label in tracked.optimizers:
        for value in values.recorded(f"{label}.groups"):
            names |= set(trees.tensor_names(value))
    for name, _ in tracked.extra_states():
        found, value = values.find(name)
        names |= set(trees.tensor_names(value)) if found else set()
    return names
