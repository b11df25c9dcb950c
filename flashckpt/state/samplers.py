"""Tracked samplers: objects with `commit`. Each is committed once per step, and checked to move and to be drawn from."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from flashckpt import collectives
from flashckpt.errors import ConfigError, FlashckptError, LayoutError, SamplerStateError
from flashckpt.report import guarded
from flashckpt.state import rng
from flashckpt.state.placement import dtensor, fsdp_module

_log = guarded(logging.getLogger("flashckpt"))
_PATIENCE = 2
"""Steps in a row without a move that are an error: a single one may be the end of an epoch."""
_AHEAD_STEPS = 3
"""Steps in a row with the same samples in flight that are a loop which fetches ahead."""

_DEPTH = 8
"""Maximum depth of nested samplers that are searched."""


def is_sampler(thing: Any) -> bool:
    """Whether `ckpt.step()` commits it."""
    return callable(getattr(thing, "commit", None))


def refuse_second(name: str, thing: Any, tracked: Mapping[str, Any]) -> None:
    """Refuse a sampler that another tracked object commits too: every step would count its samples twice.

    Raises:
        ConfigError: Names both, and which to leave out.
    """
    mine = set(map(id, _reached(thing)))
    for other, known in tracked.items():
        if mine & set(map(id, _reached(known))):
            inner = name if any(thing is part for part in _reached(known)) else other
            raise ConfigError(
                f"{other!r} and {name!r} would commit the same sampler, twice in every step",
                found=f"{type(known).__qualname__} as {other!r}, {type(thing).__qualname__} as {name!r}",
                expected="every sampler tracked once",
                state="It was not tracked.",
                remedy=f"leave {inner!r} out of track(): its state is that of the other one",
            )


def _reached(thing: Any) -> Iterator[Any]:
    """Yield the samplers that a commit of `thing` moves: itself and those it wraps."""
    while is_sampler(thing):
        yield thing
        thing = next((p for key in ("sampler", "batch_sampler") if is_sampler(p := getattr(thing, key, None))), None)


def refuse_gaps(tracked: Mapping[str, Any], modules: Sequence[nn.Module] = ()) -> None:
    """Compare the data-parallel places of tracked samplers: together they must deal all samples. Collective.

    Ranks of one replica have one place, and ranks that get their batches from others track no sampler. A place that was
    taken from the process group is confirmed where the modules say that every rank is a replica.

    Args:
        tracked: Objects by track name.
        modules: The tracked modules.

    Raises:
        LayoutError: On every rank; names the places that nobody has.
    """
    placed = {name: part for name, thing in tracked.items() if (part := _placed(thing)) is not None}
    if any(getattr(part, "place_is_assumed", False) for part in placed.values()) and _each_is_a_replica(modules):
        for part in placed.values():
            part.place_is_assumed = False
    mine = [[name, part.dp_rank, part.dp_size] for name, part in placed.items()]
    found: dict[tuple[str, int], set[int]] = {}
    everybody = collectives.all_gather(mine)
    for name, rank, size in itertools.chain.from_iterable(everybody):
        found.setdefault((name, size), set()).add(rank)
    for (name, size), ranks in found.items():
        if len(ranks) < size:
            some = sorted(ranks)
            raise LayoutError(
                f"nobody trains a part of what the tracked sampler {name!r} deals",
                found=f"dp_size {size}, and dp_rank {str(some)[1:-1]:.100} on the {len(everybody)} ranks of this run",
                expected=f"every dp_rank from 0 to {size - 1} on some rank",
                state="Nothing was restored, and nothing was trained.",
                remedy=f"dp_size={len(some)}, the number of replicas that train; or a mesh: ElasticSampler(..., mesh=mesh)",
            )


def _each_is_a_replica(modules: Sequence[nn.Module]) -> bool:
    """Return whether DDP or FSDP2 says that all ranks train one model on different samples."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    for part in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(part, DistributedDataParallel) and part.process_group.size() == world:
            return True
        if isinstance(part, fsdp_module()):
            meshes = [p.device_mesh for p in part.parameters() if isinstance(p, dtensor())]
            return bool(meshes) and all(mesh.ndim == 1 and mesh.size() == world for mesh in meshes)
    return False


def _placed(thing: Any) -> Any:
    """Return the part of a thing that has a place among the replicas; None where none has."""
    todo = [thing]
    for part in todo:
        if type(getattr(part, "dp_rank", None)) is int and type(getattr(part, "dp_size", None)) is int:
            return part
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler", "order"))
        todo += [one for one in inner if one is not None and len(todo) < _DEPTH]
    return None


def leave_out(tracked: Mapping[str, Any], done: int, first: int, last: int) -> str:
    """Leave out the samples of the steps `first` to `last`, where the state of step `done` was restored; return what was done."""
    first, found = max(first, done + 1), list[str]()
    for name, thing in tracked.items():
        part = next((part for part in _parts_of(thing) if callable(getattr(part, "leave_out", None))), None)
        if part is not None:
            try:
                samples, spans = part.leave_out(done, first, last)
                found.append(f"{samples} of {name!r} ({spans})")
            except FlashckptError as error:
                found.append(f"none of {name!r} ({error.problem})")
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return f"samples of {steps} are left out: {', '.join(found)}" if found else ""


class Commits:
    """Commits tracked samplers and records their positions.

    Args:
        is_alone: This rank is the only one, so that no other can draw the samples for it.
    """

    def __init__(self, *, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self._seen: dict[str, tuple[Any, int]] = {}
        self._undrawn: dict[str, int] = {}
        self._ahead: dict[str, tuple[int, int]] = {}
        self._warned: set[str] = set()

    def commit(self, objects: Mapping[str, Any], samples: int | None, step: int) -> None:
        """Commit every sampler among the tracked objects.

        Args:
            objects: By track name.
            samples: Global samples of the step; None lets each sampler say it.
            step: The step just done.

        Raises:
            SamplerStateError: One of them did not move, for the second step in a row: a restart would repeat samples.
                Or one that deals samples was never asked for any, and there is no other rank that could have been.
        """
        for name, thing in objects.items():
            if is_sampler(thing):
                self._check_drawn(name, thing, step)
                before, still = self._seen.get(name) or (_place(thing), 0)
                thing.commit(samples)
                now = _place(thing)
                still = still + 1 if _equal(now, before) else 0
                self._seen[name] = now, still
                if still >= _PATIENCE:
                    raise _stuck(name, thing.state_dict(), step)
                self._watch_ahead(name, thing)

    def _check_drawn(self, name: str, thing: Any, step: int) -> None:
        """Refuse to count samples that were not drawn; warn if another rank may have drawn them for this one."""
        if getattr(thing, "was_drawn_from", True) or name in self._warned:
            return
        count = self._undrawn[name] = self._undrawn.get(name, 0) + 1
        if count < _PATIENCE:
            return
        error = _never_drawn(name, step)
        if self._is_alone:
            raise error
        self._warned.add(name)
        _log.warning("%s; it is right only if another rank gives this one its batches", error.problem)

    def _watch_ahead(self, name: str, thing: Any) -> None:
        """Warn once that a loop fetches its batches ahead. Loader workers do so too, harmlessly."""
        ahead = getattr(thing, "ahead", 0)
        if not ahead or name in self._warned:
            self._ahead.pop(name, None)
            return
        known, count = self._ahead.get(name, (ahead, 0))
        self._ahead[name] = ahead, count + 1 if ahead == known else 1
        if self._ahead[name][1] >= _AHEAD_STEPS:
            self._warned.add(name)
            if not multiprocessing.active_children():
                _log.warning(_FETCHED_AHEAD, name, ahead)


_FETCHED_AHEAD = (
    "the tracked sampler %r has %d samples that are fetched and not committed at every step(): the loop fetches its next "
    "batch before step(), or leaves out batches. A restart deals as many again, none is lost; but what was drawn at random "
    "to prepare them is in the snapshot already and is drawn once more. Fetch after step(), or wrap the data set in "
    "SeededSamples; call sampler.commit(samples) for a batch that is left out"
)


def _place(thing: Any) -> Any:
    """Return what a step that trains changes: of our samplers a pair of numbers, whatever they skip; else the state."""
    place = getattr(thing, "flashckpt_progress", None)
    if place is not None:
        return place
    return copy.deepcopy(thing.state_dict())  # some return the very dict that they keep changing


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # arrays or tensors in the state of a foreign sampler: cannot be compared here
        return False


def _stuck(name: str, state: Any, step: int) -> SamplerStateError:
    return SamplerStateError(
        f"the tracked sampler {name!r} has not moved for {_PATIENCE} steps",
        found=f"its position is unchanged after the commit of step {step}: {str(state)[:200]}",
        expected="every step that trains moves it on, or a restart would train the same samples again",
        state="No snapshot of this step was taken; earlier ones are intact.",
        remedy="track the sampler that the loop draws from, and give ckpt.step(step, samples=...) what a step trains",
    )


def _never_drawn(name: str, step: int) -> SamplerStateError:
    return SamplerStateError(
        f"the tracked sampler {name!r} is committed and nothing was drawn from it",
        found=f"{_PATIENCE} steps without iter() or next_ids(), up to step {step}",
        expected="the sampler that the training loader deals from",
        state="No snapshot of this step was taken; samples counted so far were not this sampler's.",
        remedy="DataLoader(dataset, sampler=sampler), or leave it out of track()",
    )


# -- Loaders begun after a restore: their seed is drawn once in a run, not once more in every resumed one ----------
#
# A torch DataLoader draws a seed for its workers from the default generator whenever an iterator of it is made,
# workers or not, and a sampler or a transform may draw too. In the unbroken run that happened when the epoch
# began, so a snapshot in the middle of the epoch holds generators after that draw; a resumed run creates its
# iterator again, and must leave the generators as the snapshot had them, or everything random after it differs.
# An iterator that the unbroken run, too, creates after the snapshot, because the restored step was the last of
# its epoch, draws in both, unless its workers persist: those draw once per process.
#
# No public hook of torch comes before the draw. So from a restore until each tracked sampler has been begun once,
# `DataLoader.__iter__` is replaced by one that remembers the generators as they were before.

"""Maximum depth of nested samplers that are searched."""
_held: Held | None = None


class Held:
    """The generators of a restore, and the tracked samplers and loaders whose first iterator has yet to be created.

    Args:
        objects: The tracked objects, by track name.
        state: What `rng.capture` had returned for the snapshot.
    """

    def __init__(self, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        self.objects = objects
        self._waiting = [t for t in objects.values() if isinstance(t, (DataLoader, Sampler)) or is_sampler(t)]
        self._state: dict[str, Any] | None = state

    def put_back(self) -> None:
        """Set the generators to their state in the snapshot again, until the first step."""
        if self._state is not None:
            rng.restore(self._state)

    def step_is_done(self) -> None:
        """Record that training continues: the recorded generators are out of date."""
        self._state = None

    def iterate(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Return the iterator that `make` makes of `loader`; its draws are undone if the snapshot holds them already."""
        parts = list(_parts_of(loader))
        mine = [t for t in self._waiting if any(one is part for one in _parts_of(t) for part in parts)]
        if not mine:
            return make(loader)
        self._waiting = [t for t in self._waiting if all(t is not m for m in mine)]
        stages = {stage for part in (*mine, *parts) if (stage := getattr(part, "restored_stage", None))}
        before = rng.capture()
        iterator = make(loader)
        # foreign samplers do not tell, the middle of an epoch is likely; a stateful loader continues its own
        if stages <= {"running"} or any(thing is loader for thing in mine):
            # what the program drew between the restore and here is not in the snapshot either; but once one loader
            # has begun, its transforms may have drawn: the next one gives back its own draws alone
            rng.restore(before if self._state is None else self._state)
            self._state = None
        elif "between" in stages and getattr(loader, "persistent_workers", False):
            rng.restore(before)
        return iterator


def _parts_of(thing: Any) -> Iterator[Any]:
    """Yield a sampler or loader and the samplers inside it."""
    found = [thing]
    for part in found:
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
        found += [i for i in inner if i is not None and len(found) < _DEPTH and all(i is not f for f in found)]
    yield from found


def hold(objects: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Keep the generators of a restore for the first iterators of the tracked samplers and loaders."""
    global _held  # noqa: PLW0603 -- one process trains one job
    _held = Held(objects, state)
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", DataLoader)
    for kind in {DataLoader, stateful}:  # its own __iter__ does not call that of DataLoader
        if not hasattr(kind.__iter__, "__wrapped__"):
            kind.__iter__ = _watched(kind.__iter__)  # type: ignore[method-assign]  # the aim


def _watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807 -- takes its place
        return original(self) if _held is None else _held.iterate(self, original)

    return __iter__


def put_back(objects: Mapping[str, Any]) -> None:
    """Undo what was drawn since the restore of these objects: asked for its state, a stateful loader begins an iterator."""
    if _held is not None and _held.objects is objects:
        _held.put_back()


def step_is_done() -> None:
    """Record that the first step after the restore is done, see `Held.step_is_done`."""
    if _held is not None:
        _held.step_is_done()
