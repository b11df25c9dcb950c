"""The registry: the tracked objects, and what a snapshot of them consists of on this rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from flashckpt.core.values import RESERVED
from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.state import modules, optimizer_state, samplers, value_reader
from flashckpt.state.data_sources import (
    begins_when_read,
    fetches_when_read,
    keeps_its_place,
    may_be_read_first,
    refusal_of,
    remedy_for,
    with_state_dict,
)
from flashckpt.state.module_tensors import Exclusion, ModuleTensors, are_global, collect, may_share
from flashckpt.state.modules import refuse_deep, unwrapped
from flashckpt.state.optimizer_state import DeferredState
from flashckpt.state.parts import TensorPart, parts_of
from flashckpt.state.placement import World, dtensor
from flashckpt.state.state_layout import StateLayout, Tracked, build
from flashckpt.state.structure import Captured, Structure, StructureGuard
from flashckpt.state.value_reader import ValueReader

_MOST_READINGS = 3
_SHAPE = operator.itemgetter(1)  # of a FORM
_PARAMS = operator.itemgetter("params")
_NOTHING = StructureGuard([], [])


class Foreseen(NamedTuple):
    """A structure with state that did not exist, kept while a restore may be making that very state.

    Attributes:
        layout: Of it.
        state: What it awaits.
        guard: Over everything that existed.
        built_of: As in `StateRegistry`.
    """

    layout: StateLayout
    state: DeferredState
    guard: StructureGuard
    built_of: list[Any]


class StateRegistry:
    """The tracked objects of one process.

    Args:
        world: The ranks as this one sees them.
        plans_only: Tensors on the meta device are planned too: how large snapshots would be. Nothing can be copied then.

    Attributes:
        modules: Model parts by track name.
        optimizers: torch optimizers by track name.
        objects: Everything else with state_dict and load_state_dict, by track name.
        unread: Track names of sources of data whose state is not asked for yet: asked before it is loaded, some begin then.
        rng: Whether the random number generators are part of the state.
        planned: The structure built last, which `holds` speaks of.
        ahead: Optimizer state in it that does not exist yet.
        aliases: Other names of tensors that are held once: alias -> name.
        fenced: Track names whose tensors the user declared to change only inside `optimizer.step()`.
        exclusion: State of modules that is left out.
        by_design: Tensors that were not finite in what was restored, and not suspect; None where nothing is known.
    """

    def __init__(self, world: World, *, plans_only: bool = False) -> None:
        self.world, self._plans_only = world, plans_only
        self.modules: dict[str, list[nn.Module]] = {}
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        self.objects: dict[str, Any] = {}
        self.unread: set[str] = set()
        self.rng = False
        self.fenced: set[str] = set()
        self.exclusion = Exclusion()
        self.by_design: set[str] | None = None
        self.planned: Structure | None = None
        self.ahead = DeferredState()
        self.aliases: dict[str, str] = {}
        self._guard = self._appeared = _NOTHING
        self._built_of: list[Any] = []
        self._layout: StateLayout | None = None
        self._foreseen: Foreseen | None = None
        self._found = ModuleTensors()
        self._names: dict[int, str] = {}
        self._reader = ValueReader(self)
        self._shapes = modules.Shapes()

    def add(self, name: str, thing: Any, *, fenced: bool = False) -> None:
        """Track one object, or a list of modules or of optimizers, under a name.

        Raises:
            ConfigError: The name is taken or not usable, or the object has no state_dict/load_state_dict.
            UnsupportedStateError: A module or an optimizer keeps state where a snapshot would not find it.
        """
        if why := self._refused(name):
            raise ConfigError(
                f"cannot track anything under the name {name!r}",
                found=why,
                expected="a separate name for every tracked object",
                remedy="track it under another name",
            )
        thing = unwrapped(thing)
        is_list = isinstance(thing, (list, tuple)) or (isinstance(thing, nn.ModuleList) and are_global(list(thing)))
        parts = list(thing) if is_list else [thing]
        if parts and all(isinstance(p, nn.Module) for p in parts):
            refuse_deep(name, *parts)
            for part in parts:
                modules.refuse_hidden(name, part, self.exclusion)
            self.modules[name] = parts
        elif parts and all(isinstance(p, torch.optim.Optimizer) for p in parts):
            for part in parts:
                optimizer_state.refuse_wrapper(name, part)
                value_reader.refuse_one_way(name, part)
            refuse_deep(name, *parts)
            self.optimizers[name] = parts
        elif isinstance(thing, (list, tuple)):
            for i, part in enumerate(parts):
                self.add(f"{name}-{i}", part, fenced=fenced)
        elif keeps_its_place(thing := with_state_dict(thing)):
            samplers.refuse_second(name, thing, self.objects)
            refuse_deep(name, thing)
            self.objects[name] = thing
            self.unread |= {name} if begins_when_read(thing) else set()
        else:
            anything = "a module, an optimizer, a list of them, or anything with state_dict() and load_state_dict()"
            expected, remedy = refusal_of(thing) or (anything, remedy_for(thing))
            raise ConfigError(
                f"cannot track {name!r}",
                found=f"an object of class {type(thing).__qualname__}",
                expected=expected,
                remedy=remedy,
            )
        if fenced:
            self.fenced.add(name)
        self.planned = None  # of other objects

    def _refused(self, name: str) -> str:
        if name in RESERVED:
            return "the name of something else that snapshots hold"
        if not name or "@" in name or "." in name:
            return "an empty name, '@' or '.'"
        return "the name is already used" if name in {*self.modules, *self.optimizers, *self.objects} else ""

    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return every tracked torch optimizer."""
        return list(chain.from_iterable(self.optimizers.values()))

    def parts(self) -> list[nn.Module]:
        """Return every tracked module."""
        return list(chain.from_iterable(self.modules.values()))

    def in_parts(self) -> list[dict[str, Sequence[TensorPart]]]:
        """Return the tensors that lie in parts, of each object that has some."""
        return parts_of(self.objects.values()) if self.objects else []

    def left_out(self) -> dict[str, torch.Tensor]:
        """Return the tensors of modules that no snapshot holds, by name.

        Raises:
            ConfigError: One of them is trained.
        """
        self._look_at_modules()
        return self._found.left_out

    def changed_left_out(self, recorded: Iterable[Any]) -> list[str]:
        """Return the parameters that are left out and are not those of which a snapshot holds these samples."""
        ours = self._reader.sample_of_left_out() if self.exclusion else b""
        return sorted({name for theirs in recorded for name in value_reader.differing(ours, theirs)}) if ours else []

    # -- structure ---------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Return whether the structure built last is still that of the live objects (cheap)."""
        is_whole = not self.ahead.parts and self._are_owners(self._built_of)
        return is_whole and self._appeared.holds() and self._rest_holds()

    def _rest_holds(self) -> bool:
        if self._guard.holds():
            return True
        modules.reshard(self._found.walked_modules())
        return self._guard.holds()

    def appeared(self) -> list[torch.Tensor] | None:
        """Return the tensors that were awaited, in the order of the structure's `awaited`; None: not all of them, or others."""
        tensors = self.ahead.found() if self.ahead else None
        if tensors is not None and self._rest_holds():
            self._appeared, self.ahead = self.ahead.watch(tensors), DeferredState()
            return tensors
        return None

    def layout(self) -> StateLayout:
        """Return the layout of the structure built last: worked out once for each structure."""
        assert self.planned is not None, "settled() first"
        if self._layout is None or self._layout.structure is not self.planned:
            self._layout = StateLayout.of(self.planned)
        return self._layout

    def settled(self, *, ahead: bool = False) -> tuple[Structure, Captured]:
        """Return the structure and what was read with it: the one that is there, where it is still that of the state.

        Args:
            ahead: Optimizer state that the first step will make is part of it too.

        Raises:
            UnsupportedStateError: As `structure`; or an object returns different tensors each time it is read.
        """
        if self.planned is not None:
            captured = self.capture()
            if (planned := self._still_there(captured, ahead=ahead)) is not None:
                return planned, captured
            if ahead and (planned := self._as_foreseen(captured)) is not None:
                return planned, captured
        for _ in range(_MOST_READINGS):  # state that has just appeared may consist of tensors too
            self._look_at_modules()
            captured = self.capture()
            structure = self._build(captured, ahead=ahead)
            if self._reader.has_all(captured) or (captured := self.capture()).forms == structure.forms:
                return structure, captured
        before, now = ({one[0]: one for one in forms} for forms in (structure.forms, captured.forms))
        name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
        raise UnsupportedStateError(
            f"{name!r} is another tensor each time the state is read",
            found=f"{now.get(name, 'no such tensor')} after {before.get(name, 'no such tensor')}",
            expected="the same keys, dtypes and shapes as long as no step was made",
            remedy="let state_dict() or get_extra_state() only read, or leave the object out of track()",
        )

    def _still_there(self, captured: Captured, *, ahead: bool) -> Structure | None:
        """Return the structure built last if it is still that of the state, without what is no longer awaited."""
        planned = self.planned
        if planned is None or not self._are_owners(self._built_of):
            return None
        if ahead and planned.forecast and not len(planned.awaited):
            return None  # state that is only forecast is to be planned too
        if captured.forms != planned.forms or not planned.has_form():
            return None
        if len(planned.awaited):
            if not self.ahead or not self.ahead.is_awaited() or not self._rest_holds():
                return None
            if not ahead:  # from now on every change is to be seen, also that this state appears
                if self._layout is not None and self._layout.structure is planned:
                    self._foreseen = Foreseen(self._layout, self.ahead, self._guard, self._built_of)
                self.planned, self.ahead = planned.present(), DeferredState()
                self._watch()
            return self.planned
        return planned if self.holds() else None

    def foreseen(self) -> Foreseen | None:
        """Return what was planned with state that does not exist yet, as long as none of it does and it may still come."""
        known = self._foreseen
        is_awaited = known is not None and known.state.is_awaited() and self._are_owners(known.built_of)
        return known if is_awaited else None

    def _as_foreseen(self, captured: Captured) -> Structure | None:
        """Return the structure of which a restore has made all the state that did not exist, and nothing else.

        None where that cannot be said. Its layout is known already: there is nothing to sort, to place or to hash.
        """
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or not self._are_owners(foreseen.built_of):
            return None
        planned, tensors = foreseen.layout.structure, foreseen.state.found()
        if tensors is None or not {torch.Tensor, dtensor()}.issuperset(kinds := set(map(type, tensors))):
            return None
        filled = planned.filled(tensors)
        if captured.forms != planned.forms or not foreseen.guard.holds() or not filled.has_form():
            return None
        is_as_foreseen = not planned.is_sharded and dtensor() not in kinds and filled.is_in_place()
        if not is_as_foreseen and foreseen.state.refused(tensors) is not None:
            return None
        if any(map(torch.Tensor.is_inference, tensors)) or may_share(tensors):
            return None  # building says it in words
        self.planned = filled
        self._layout = foreseen.layout.with_tensors(self.planned)
        self._guard, self._appeared, self.ahead = foreseen.guard, foreseen.state.watch(tensors), DeferredState()
        self._built_of = foreseen.built_of
        return self.planned

    def structure(self, captured: Captured, *, ahead: bool = False) -> Structure:
        """Build the structure of the state as it is now; objects' tensors are taken from `captured`.

        Args:
            captured: What was read last.
            ahead: As in `settled`.

        Raises:
            UnsupportedStateError: A tensor that cannot be held; names it.
            ConfigError: Two tensors of one name, or an optimizer over parameters of no tracked module.
        """
        self._look_at_modules()
        return self._build(captured, ahead=ahead)

    def _owners(self) -> list[Any]:
        """Return the objects that a structure is of and that a guard over their members does not see replaced.

        `load_state_dict` of an optimizer replaces its state as a whole: the tensors planned before stay as they were.
        """
        found: list[Any] = [self.world]
        for optimizer in self.all_optimizers():
            groups = optimizer.param_groups
            found += [optimizer.state, groups, *map(_PARAMS, groups)]
        return found

    def _are_owners(self, known: list[Any]) -> bool:
        """Return whether `_owners` are still the same objects."""
        owners = self._owners()
        return len(owners) == len(known) and all(map(operator.is_, owners, known))

    def _build(self, captured: Captured, *, ahead: bool) -> Structure:
        self._shapes.look(self._found.names, list(map(_SHAPE, self._found.forms)))
        self.ahead, self._foreseen = DeferredState(self.all_optimizers() if ahead else ()), None
        tracked = Tracked(
            world=self.world,
            found=self._found,
            names=self._names,
            optimizers=self.optimizers,
            fenced=self.fenced,
            captured=captured,
            ahead=self.ahead,
            parts=self.in_parts(),
            plans_only=self._plans_only,
        )
        self.planned, entries = build(tracked)
        self.aliases = self._found.aliases
        self._reader.take(entries)
        self._watch()
        return self.planned

    def _look_at_modules(self) -> None:
        self._found = collect(self.modules, self.exclusion)
        self._names = self._found.shortened
        self._reader.look(self._found, self.exclusion)

    def _watch(self) -> None:
        assert self.planned is not None
        dicts: list[Any] = [*modules.watched(self._found.walked_modules()), *self.in_parts()]
        lists: list[Any] = []
        mixed: list[Any] = []
        changing = {id(value.state) for value in self._reader.values}
        for optimizer in self.all_optimizers():
            if self.ahead.of(optimizer) is None:
                (mixed if optimizer_state.other_keys(optimizer) else dicts).append(optimizer.state)
                for state in (v for k, v in optimizer.state.items() if isinstance(k, torch.Tensor)):
                    (mixed if id(state) in changing else dicts).append(state)
            lists += [group["params"] for group in optimizer.param_groups]
            lists.append(optimizer.param_groups)
        self._guard = StructureGuard(dicts, lists, self.planned.sharded(), mixed=mixed, is_member=_is_watched)
        self._appeared = _NOTHING
        self._built_of = self._owners()

    # -- values ------------------------------------------------------------------------------------------

    def was_given(self, name: str) -> None:
        """Record that an object has its state, or that nobody has any for it; some are asked once they continue."""
        if not fetches_when_read(self.objects[name]):
            self.unread.discard(name)

    def nothing_is_given(self) -> None:
        """Record that nothing is restored: what a later restore can load all the same may be asked."""
        self.unread = {name for name in self.unread if not may_be_read_first(self.objects[name])}

    def capture(self) -> Captured:
        """Read what is not a held tensor: hyperparameters, objects' state, random number generators."""
        return self._reader.read()

    def key_of(self, name: str, thing: Any = None) -> str:
        """Return the key of an object's state: with a suffix where the state belongs to this rank alone."""
        return self._reader.key_of(name, thing)

    def extra_states(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of modules with extra state."""
        return list(self._reader.extra)

    def rows(self) -> dict[str, str]:
        """Return in what row parameters stand, as `parameter_rows.rows` does."""
        return self._reader.rows()

    def group_names(self, label: str) -> list[list[list[str]]]:
        """Return the names of the parameters of the optimizers of one label, per optimizer and group."""
        return self._reader.group_names(label)

    def names_for(self, group: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
        """Return the names of the parameters: id(parameter) -> name without the track name `model`.

        Raises:
            ConfigError: An optimizer of `group` has a parameter that no tracked module has.
        """
        ids = map(id, chain.from_iterable(map(optimizer_state.parameters, group)))
        if not all(map(self._names.__contains__, ids)):
            self._names = collect(self.modules, self.exclusion).shortened
            for label, optimizers in self.optimizers.items():
                for p in (p for o in optimizers for p in optimizer_state.parameters(o)):
                    optimizer_state.name_of(p, self._names, label)
        return self._names


def _is_watched(key: Any, value: Any) -> bool:
    """Whether a value in `optimizer.state`, or in the state of one parameter, is held and not read again."""
    return isinstance(key, torch.Tensor) or isinstance(value, torch.Tensor)
