"""Live state as the target of a restore: what is wanted of its tensors, and where their bytes go."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashckpt.core.digest import chunk_count
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.errors import UnsupportedStateError
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.restore.destinations import Target
from flashckpt.state import optimizer_state, pytree, state_forms
from flashckpt.state.placement import Box, World, boxes_of, local_of, shard_of
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_forms import Form
from flashckpt.state.structure import Structure


@dataclass(eq=False)
class RequiredShard:
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
class Requirements:
    """Everything wanted from one set of sources.

    Attributes:
        wants: Boxes that the sources name.
        missing: Names that no source has.
        absent_state: Optimizer state to allocate: (optimizer label, optimizer, parameter, key, fqn, box shape, dtype).
        unnamed: What these sources do not name although the snapshot may have it; found only on request.
    """

    wants: list[RequiredShard] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unnamed: list[PeerQuery] = field(default_factory=list)
    absent_state: list[AbsentState] = field(default_factory=list)

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
    boxes: tuple[Box, ...]
    form: Form

    def allocate(self) -> torch.Tensor:
        """Make the state tensor and hang it into the optimizer; the restore overwrites it whole."""
        first = self.shards[0]
        tensor = state_forms.allocate(
            self.param,
            self.key,
            shape=first.global_shape,
            dtype=getattr(torch, first.dtype),
            group=self.group,
            fqn=self.fqn,
            form=self.form,
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
        self._manifests, self.forms = manifests, _forms(manifests)
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

    def are_equal(self, alias: str, fqn: str) -> bool:
        """Return whether one live tensor can stand for both: no two tensors in the sources, or two of the same bytes.

        A tied weight is one tensor where all of the model is one process' own, and two on two pipeline stages.
        """
        if alias not in self.known or fqn not in self.known:
            return True
        return self._contents(alias) == self._contents(fqn)

    def _contents(self, fqn: str) -> dict[tuple[Any, ...], bytes]:
        """Return the digests of each box of a tensor."""
        found = {}
        for manifest in self._manifests:
            if fqn in (table := manifest.table).fqns:
                for row in table.rows(fqn):
                    shard, first = table.shard(row), int(table.first_chunk[row])
                    digests = manifest.digests[first : first + chunk_count(int(table.nbytes[row]))]
                    found[shard.dtype, shard.offsets, shard.lengths] = digests.tobytes()
        return found

    def form(self, fqn: str) -> Form:
        """Return how a tensor of optimizer state lies beside its parameter."""
        return self.forms.get(fqn.partition("@")[0], state_forms.USUAL)

    def shard(self, fqn: str) -> Shard:
        """Return any row of `fqn`: its dtype and global shape."""
        manifest, _ = self.known[fqn]
        return manifest.table.shard(manifest.table.rows(fqn)[0])


def _forms(manifests: Sequence[Manifest]) -> dict[str, Form]:
    found: dict[str, Form] = {}
    for manifest in manifests:
        for key, value in manifest.values.items():
            label, _, rest = key.partition("@")[0].partition(".")
            if rest == "forms" and isinstance(value, dict):
                for name, (kind, device) in value.items():
                    found.setdefault(f"{label}.{name}", (kind, device))
    return found


def requirements(
    tracked: StateRegistry,
    structure: Structure,
    manifests: Sequence[Manifest],
    only: str | None,
    *,
    exact: bool = False,
) -> Requirements:
    """Return what is wanted of the sources: live tensors they name, and optimizer state still to be made.

    Args:
        tracked: The live objects.
        structure: Their structure now.
        manifests: Of the sources.
        only: A pattern over names ("model.*"), or None for everything.
        exact: The sources may not be all of the snapshot: what they do not name may be somewhere else, and
            another rank's state is not taken in place of one's own. Fills `unnamed`.
    """
    names, found = Names(manifests), Requirements()
    for row in structure.rows:
        fqn = row.entry.fqn
        if fqn in structure.fresh or not is_wanted(fqn, only):
            continue
        source = names.find(fqn, exact=exact)
        if source is None:
            found.missing.append(fqn)
            if exact:
                found.unnamed.append((fqn.partition("@")[0], fqn, shard_of(fqn, row.entry.dtype, row.box, 0)))
            continue
        shard = shard_of(source, row.entry.dtype, row.box, 0)
        found.wants.append(RequiredShard(fqn=fqn, shard=shard, tensor=row.entry.tensor, box=row.box))
    for absent in absent_state(tracked, names, exact=exact):
        if is_wanted(absent.fqn, only):
            found.absent_state.append(absent)
    if exact:
        found.unnamed += _unnamed_state(tracked, manifests, found, only)
    found.missing = sorted(set(found.missing))
    return found


def _unnamed_state(
    tracked: StateRegistry, manifests: Sequence[Manifest], found: Requirements, only: str | None
) -> Iterator[PeerQuery]:
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
                if known or not is_wanted(f"{label}.{name}.", only):
                    continue
                for box in boxes_of(name, param):
                    yield f"{label}.{name}.*", "", shard_of(name, "float32", box, 0)


def _listed(label: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the parameters of every optimizer that recorded its groups under `label`."""
    for manifest in manifests:
        for key, value in manifest.values.items():
            if key.partition("@")[0] == f"{label}.groups":
                for group in (g for one in pytree.unflatten(value, lambda _: torch.empty(0)) for g in one):
                    yield from group["params"]


def is_wanted(fqn: str, only: str | None) -> bool:
    """Whether a name is part of what the caller asked for."""
    return only is None or fnmatch.fnmatchcase(fqn, only)


def absent_state(tracked: StateRegistry, names: Names, *, exact: bool = False) -> Iterator[AbsentState]:
    """Yield the optimizer state that the sources have and the live optimizers have not made yet."""
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
                state = optimizer.state.get(param, {})
                name = live[id(param)]
                own = exact or is_of_this_rank(name, tracked.world.suffix, names.known)
                for key, fqn in _mine(by_param.get(name, []), tracked.world, exact=own):
                    if not isinstance(state.get(key), torch.Tensor):
                        yield _absent(optimizer, param, groups[id(param)], key, names.shard(fqn), names.form(fqn))


def _absent(  # noqa: PLR0917 -- what one record consists of
    optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any], key: str, any_shard: Shard, form: Form
) -> AbsentState:
    fqn = any_shard.fqn
    like_parameter = any_shard.global_shape == tuple(param.shape) and form[0] in ("", state_forms.LOCAL)
    boxes = boxes_of(fqn, param if like_parameter else torch.empty(any_shard.global_shape, device="meta"))
    return AbsentState(
        optimizer=optimizer,
        group=group,
        param=param,
        key=key,
        fqn=fqn,
        shards=tuple(shard_of(fqn, any_shard.dtype, box, 0) for box in boxes),
        boxes=boxes,
        form=form,
    )


def is_of_this_rank(name: str, suffix: str, known: Container[str]) -> bool:
    """Whether the sources hold a parameter of this rank's own: then another rank's state of it is another tensor's."""
    return f"model.{name}@{suffix}" in known or f"{name}@{suffix}" in known


def _mine(candidates: Iterable[tuple[str, str]], world: World, *, exact: bool) -> list[tuple[str, str]]:
    """Of several names of one key (one per rank), return this rank's, else (where not `exact`) the first."""
    chosen: dict[str, str] = {}
    for key, fqn in sorted(candidates):
        if exact and "@" in fqn and not fqn.endswith(f"@{world.suffix}"):
            continue
        if key not in chosen or fqn.endswith(f"@{world.suffix}"):
            chosen[key] = fqn
    return list(chosen.items())


class HostStaging:
    """Byte buffers over live tensors; where a tensor has no row-major host memory, a buffer that is copied in after."""

    def __init__(self) -> None:
        self._after: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def target(self, shard: Shard, tensor: torch.Tensor, box: Box) -> Target:
        """Return the target for one box of a live tensor."""
        part = local_of(tensor).detach()
        for dim, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        if part.device.type != "cpu" or not part.is_contiguous() or part.is_conj() or part.is_neg():
            staged = torch.empty(part.shape, dtype=part.dtype)
            self._after.append((shard.fqn, part, staged))
            part = staged
        return Target(shard=shard, buffer=bytes_of(part))

    def finish(self) -> None:
        """Copy the staged buffers to where they belong.

        Raises:
            UnsupportedStateError: A live tensor has one element where the snapshot has several that differ.
        """
        with torch.no_grad():
            for fqn, live, staged in self._after:
                _copy_once(fqn, live, staged)
        self._after.clear()


def _copy_once(fqn: str, live: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy; of an expanded tensor, whose elements are one in memory along some dimensions, each element once."""
    if live.numel() and 0 in live.stride():
        whole = staged
        for dim, stride in enumerate(live.stride()):
            if not stride and live.shape[dim] > 1:
                live, staged = live.narrow(dim, 0, 1), staged.narrow(dim, 0, 1)
        if bytes(bytes_of(staged.expand(whole.shape).contiguous())) != bytes(bytes_of(whole)):
            raise UnsupportedStateError(
                f"{fqn!r} is an expanded tensor here, which has one value where the snapshot has several",
                found=f"strides {live.stride()} for shape {tuple(whole.shape)}",
                state="Live state is a mixture and must not be trained on.",
                remedy="build the tensor as the run that took the snapshot did: .clone() or .contiguous()",
            )
    live.copy_(staged)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous host tensor of any dtype."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
