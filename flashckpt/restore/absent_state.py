"""Optimizer state that the sources have and the live optimizers have not made yet."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.restore.source_names import SourceNames
from flashckpt.state import optimizer_state, state_forms
from flashckpt.state.placement import Box, World, boxes_of
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_forms import Form


class AbsentTensor(NamedTuple):
    """One tensor of optimizer state that is still to be made.

    Attributes:
        optimizer, group, param, key: Where it belongs: `optimizer.state[param][key]`.
        fqn: Its name in the sources.
        dtype, shape: Of the global tensor.
        boxes: What this rank holds of it.
        form: How it lies beside its parameter.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    param: torch.Tensor
    key: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    form: Form


@dataclass(frozen=True, eq=False)
class AbsentState:
    """All of it, in the order in which it is made: parameter after parameter."""

    tensors: Sequence[AbsentTensor] = ()

    @cached_property
    def table(self) -> ShardTable:
        """The rows that are wanted of it: one per box, tensor after tensor."""
        rows = [(one, box) for one in self.tensors for box in one.boxes]
        return ShardTable.from_boxes(
            [one.fqn for one, _ in rows],
            [one.dtype for one, _ in rows],
            [one.shape for one, _ in rows],
            [box.offsets for _, box in rows],
            [box.lengths for _, box in rows],
        )

    @property
    def shards(self) -> list[Shard]:
        """The same rows as shards."""
        return [self.table.shard(row) for row in range(len(self.table))]

    def allocate(self) -> Iterator[tuple[AbsentTensor, torch.Tensor]]:
        """Make each tensor and attach it to its optimizer; the restore overwrites all of it."""
        dtypes = {dtype: getattr(torch, dtype) for dtype in {one.dtype for one in self.tensors}}
        last, state = None, dict[str, torch.Tensor]()
        for one in self.tensors:
            optimizer, group, param, key, fqn, dtype, shape, _, form = one
            if param is not last:
                last, state = param, optimizer.state[param]
            made = state_forms.allocate(param, key, shape=shape, dtype=dtypes[dtype], group=group, fqn=fqn, form=form)
            state[key] = made
            yield one, made


def absent_state(
    tracked: StateRegistry, names: SourceNames, *, exact: bool = False, wanted: Callable[[str], bool] | None = None
) -> AbsentState:
    """Return the optimizer state that the sources have and the live optimizers have not made yet.

    Args:
        tracked: The live objects.
        names: Of the sources.
        exact: Another rank's state is not taken in place of one's own.
        wanted: Tells of a name whether it is asked for; None asks for everything.
    """
    unmade = [one for one in _unmade(tracked, names, exact=exact) if wanted is None or wanted(one[-1])]
    kinds = names.kinds([one[-1] for one in unmade])
    forms, boxes = names.forms, _Boxes()
    tensors = []
    for (optimizer, group, param, key, fqn), (dtype, shape) in zip(unmade, kinds, strict=True):
        form = names.form(fqn) if forms else state_forms.USUAL
        cut = boxes.of(param, fqn, shape, form)
        tensors.append(AbsentTensor(optimizer, group, param, key, fqn, dtype, shape, cut, form))
    return AbsentState(tensors)


def is_of_this_rank(name: str, suffix: str, known: Container[str]) -> bool:
    """Whether the sources hold a parameter of this rank's own: then another rank's state of it is another tensor's."""
    return f"model.{name}@{suffix}" in known or f"{name}@{suffix}" in known


_Unmade = tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor, str, str]
"""Optimizer, group, parameter and key of state to be made, and the name that the sources have for it."""


def _unmade(tracked: StateRegistry, names: SourceNames, *, exact: bool) -> Iterator[_Unmade]:
    has_own = bool(names.of_ranks)
    suffix = tracked.world.suffix
    for label, optimizers in tracked.optimizers.items():
        recorded = _by_parameter(label, names)
        if not recorded:
            continue
        for optimizer in optimizers:
            live, groups = tracked.names_for([optimizer]), optimizer_state.groups_by_parameter(optimizer)
            made = optimizer.state
            for param in optimizer_state.parameters(optimizer):
                name = live[id(param)]
                found = recorded.get(name)
                if found is None:
                    continue
                if has_own:
                    own = exact or is_of_this_rank(name, suffix, names.index)
                    found = _of_this_rank(found, tracked.world, exact=own)
                state = made.get(param)
                for key, fqn in sorted(found):
                    if state is None or not isinstance(state.get(key), torch.Tensor):
                        yield optimizer, groups[id(param)], param, key, fqn


def _by_parameter(label: str, names: SourceNames) -> dict[str, list[tuple[str, str]]]:
    """Return (state key, name in the sources) of all state of one optimizer, by parameter."""
    found: dict[str, list[tuple[str, str]]] = {}
    prefix = f"{label}."
    skip = len(prefix)
    for fqn in names.index:
        if fqn.startswith(prefix):
            base = fqn.partition("@")[0] if "@" in fqn else fqn
            name, _, key = base[skip:].rpartition(".")
            if name in found:
                found[name].append((key, fqn))
            else:
                found[name] = [(key, fqn)]
    return found


def _of_this_rank(candidates: Sequence[tuple[str, str]], world: World, *, exact: bool) -> list[tuple[str, str]]:
    """Of several names of one key (one per rank), return this rank's, else (where not `exact`) the first."""
    chosen: dict[str, str] = {}
    for key, fqn in sorted(candidates):
        if exact and "@" in fqn and not fqn.endswith(f"@{world.suffix}"):
            continue
        if key not in chosen or fqn.endswith(f"@{world.suffix}"):
            chosen[key] = fqn
    return list(chosen.items())


class _Boxes:
    """The boxes of absent tensors; those of one parameter, or of one shape, are computed once."""

    def __init__(self) -> None:
        self._param: torch.Tensor | None = None
        self._of_param: tuple[tuple[int, ...], tuple[Box, ...]] = (), ()
        self._of_shape: dict[tuple[int, ...], tuple[Box, ...]] = {}

    def of(self, param: torch.Tensor, fqn: str, shape: tuple[int, ...], form: Form) -> tuple[Box, ...]:
        """Return what this rank holds of a tensor: of the parameter's shape, as much as of the parameter."""
        if param is not self._param:
            own = tuple(param.shape)
            is_plain = type(param) in (torch.Tensor, torch.nn.Parameter)
            self._param, self._of_param = param, (own, self._whole(own) if is_plain else boxes_of(fqn, param))
        if shape == self._of_param[0] and form[0] in ("", state_forms.LOCAL):
            return self._of_param[1]
        return self._whole(shape)

    def _whole(self, shape: tuple[int, ...]) -> tuple[Box, ...]:
        known = self._of_shape.get(shape)
        if known is None:
            known = self._of_shape[shape] = boxes_of("", torch.empty(shape, device="meta"))
        return known
