"""Runs compared instant by instant: what moved, the cause before its consequences. Pure, torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashckpt.exactness.records import BEGINS, ENDS, RESTORED, Recorded, RunTrace

EXACT, NOT_EXACT, NOT_DETERMINISTIC = "exact", "not exact", "not deterministic"
_DRAWN = (
    "something draws from it or seeds it between restore() and the first step: a shuffle, weights, a seed in the loop"
)
_ELASTIC = "take the data from an ElasticSampler, track it, and give it to the loader"
_SEEDED = "the order is tracked: samples that draw in loader workers need SeededSamples, other draws and changes what is named here"
_SOURCES = frozenset(("ElasticSampler", "ElasticBatchSampler", "ExactLoader", "StepBatches", "PreparedPosition"))
_AGAIN = " a second time"
_MOST_LIKELY = 6
_ORDER = ("state", "changed", "object", "generator", "tensor", "gradient", "data", "value")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One thing that is not what it was.

    Attributes:
        kind: One of `_ORDER`.
        name: How the script calls it.
    """

    kind: str
    name: str
    what: str
    remedy: str

    def as_json(self) -> dict[str, str]:
        """Return it for JSON."""
        return {"kind": self.kind, "name": self.name, "what": self.what, "remedy": self.remedy}


@dataclass(kw_only=True)
class Judgement:
    """What the comparison of two runs says of one rank.

    Attributes:
        verdict: EXACT, NOT_EXACT or NOT_DETERMINISTIC.
        hints: Variables that are other ones and may not matter.
        moved: Names of tracked state that differs.
        first: The first step at whose end it does.
    """

    verdict: str = EXACT
    restored: int = 0
    causes: list[Moved] = field(default_factory=list)
    hints: list[Moved] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    first: int | None = None

    @property
    def likely(self) -> list[Moved]:
        """The causes; where nothing is known but that the data differ, what they may follow from is before them."""
        is_explained = any(one.kind != "data" or one.what.endswith(_AGAIN) for one in self.causes)
        return self.causes if is_explained else [*self.hints[:_MOST_LIKELY], *self.causes]


def deterministic(first: RunTrace, second: RunTrace, ignored: Sequence[str] = ()) -> Judgement:
    """Compare two unbroken runs; NOT_DETERMINISTIC names what differs first."""
    found = Judgement()
    for at in (at for at in first.leaves if at in second.leaves):
        other = _differing(first.leaves[at], second.leaves[at], ignored)
        data = at[0] == ENDS and first.inputs[at[1]] != second.inputs[at[1]]
        state = [path for path, leaf in other.items() if leaf.kind == "tracked"]
        if not state and not data:
            continue
        found.verdict, found.first, found.moved = NOT_DETERMINISTIC, at[1], state
        drawn = [path for path, leaf in other.items() if leaf.kind == "generator" and _moves(first, path)]
        found.causes = [
            Moved(kind="generator", name=path, what=f"{path} differs between two unbroken runs", remedy="seed it")
            for path in drawn
        ]
        if data:
            what = f"step {at[1]} is given other data in each unbroken run"
            found.causes.append(Moved(kind="data", name="data", what=what, remedy="give the order of the data a seed"))
        if not found.causes:
            remedy = "look for clocks, hashes, threads, and operations without torch.use_deterministic_algorithms(True)"
            what = f"{state[0]} differs between two unbroken runs, with the same data and generators"
            found.causes.append(Moved(kind="state", name=state[0], what=what, remedy=remedy))
        break
    return found


def noise(first: RunTrace, second: RunTrace) -> set[str]:
    """Return the paths that differ between two unbroken runs: clocks, and generators that nothing of the state needs."""
    return {
        path
        for at in first.leaves
        if at in second.leaves
        for path in _differing(first.leaves[at], second.leaves[at], ())
    }


def continued(unbroken: RunTrace, restarted: RunTrace, *, ignored: Sequence[str] = ()) -> Judgement:
    """Compare a run that was killed and restarted with one that was not."""
    at = restarted.restored or 0
    found = Judgement(restored=at)
    last = max((step for step in restarted.steps if step in unbroken.inputs), default=0)
    kept = _differing(_of(unbroken, ENDS, last), _of(restarted, ENDS, last), ignored)
    given = _differing(_of(unbroken, ENDS, at), _of(restarted, RESTORED, at), ignored)
    begun = _of(restarted, BEGINS, at + 1)
    before = _differing(_of(unbroken, BEGINS, at + 1), begun, ignored)
    if not begun:  # no tracked model is called as one: what was another one at once
        begun = _of(restarted, RESTORED, at)
        before = given
    carried = {path for path, leaf in _of(unbroken, ENDS, at).items() if before.get(path) == leaf}
    causes = _of_state(given, before, carried, at)
    _consequences(found, unbroken, restarted, ignored)
    kinds = _of_variables(found, _Seen(given, before, kept, carried, begun), unbroken)
    found.hints = [cause for cause in kinds if cause.kind == "value"]
    causes += [cause for cause in kinds if cause.kind != "value"]
    causes += [
        _of_generator(path, leaf, unbroken.rng, [] if path in given else found.hints)
        for path, leaf in before.items()
        if leaf.kind == "generator" and _moves(unbroken, path)
    ]
    if found.moved and not causes:
        added = unbroken.added.get(at + 1) or ()
        causes = [
            _of_gradients(leaf, at) for leaf in before.values() if leaf.kind == "gradient" and leaf.owner in added
        ]
    causes += _of_data(unbroken, restarted, found, causes)
    causes = list({(cause.kind, cause.name): cause for cause in reversed(causes)}.values())[::-1]
    found.causes = sorted(causes, key=lambda cause: _ORDER.index(cause.kind))
    if found.moved and not found.causes and not found.hints:
        found.causes = _of_the_moved(found, unbroken, before)
    if found.causes or found.moved:
        found.verdict = NOT_EXACT
    return found


class _Seen(NamedTuple):
    """What differs: at the restore, at the beginning of the first step, at the last end; what the step before left so; what is there now."""

    given: Mapping[str, Recorded]
    before: Mapping[str, Recorded]
    kept: Mapping[str, Recorded]
    carried: Collection[str]
    begun: Mapping[str, Recorded]


def _of_variables(found: Judgement, seen: _Seen, unbroken: RunTrace) -> list[Moved]:
    """Return objects, tensors and values; first of all those that were other ones when restore() ended, last what never changes."""
    moved, named = bool(found.moved), []
    for path, leaf in seen.before.items():
        is_steady = leaf.kind == "value" and not _moves(unbroken, path)
        if is_steady and not moved:
            continue  # it says that there was a restore
        is_memory = leaf.kind == "value" and path in seen.carried and path in seen.given
        if is_memory or _is_cause(leaf, path in seen.carried, path in seen.given, path in seen.kept, moved=moved):
            named.append((is_steady, path not in seen.given, _of_variable(path, leaf, seen.begun.get(path))))
    return [cause for *_, cause in sorted(named, key=lambda one: one[:2])]


def _is_cause(leaf: Recorded, is_carried: bool, is_given: bool, is_kept: bool, *, moved: bool) -> bool:
    """Return whether what differs before the first step is a cause: a tensor that the step itself makes is a consequence.

    Unless something moved: then it may have been read before it was made, and what heals again, as a batch that was
    fetched ahead, may have been why.
    """
    is_state = is_carried or leaf.kind != "tensor" or (moved and is_given)
    is_left = is_kept or (moved and is_carried and leaf.kind != "value")
    return leaf.kind in ("object", "tensor", "value") and is_left and is_state


def _consequences(found: Judgement, unbroken: RunTrace, restarted: RunTrace, ignored: Sequence[str]) -> None:
    for step in restarted.steps:
        if step in unbroken.inputs and not found.moved:
            other = _differing(_of(unbroken, ENDS, step), _of(restarted, ENDS, step), ignored)
            found.moved = [path for path, leaf in other.items() if leaf.kind == "tracked"]
            found.first = step if found.moved else None


def _of(trace: RunTrace, kind: str, step: int) -> Mapping[str, Recorded]:
    return trace.leaves.get((kind, step), {})


def _differing(a: Mapping[str, Recorded], b: Mapping[str, Recorded], ignored: Sequence[str]) -> dict[str, Recorded]:
    """Return what both have and is another one, as `a` has it; of an object that both have also what `b` lacks."""
    exact, patterns = set(ignored), [one for one in ignored if set("*?[") & set(one)]
    owners = {leaf.owner for leaf in b.values() if leaf.kind == "object"}
    return {
        path: leaf
        for path, leaf in a.items()
        if (leaf.digest != b[path].digest if path in b else leaf.kind == "object" and leaf.owner in owners)
        and not exact & {path, leaf.owner}
        and not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }


def _moves(trace: RunTrace, path: str) -> bool:
    """Return whether a generator is drawn from at all: one that stands still may have any state."""
    return len({leaves[path].digest for leaves in trace.leaves.values() if path in leaves}) > 1


def _of_state(
    given: Mapping[str, Recorded], before: Mapping[str, Recorded], carried: Collection[str], step: int
) -> list[Moved]:
    found = []
    for path, leaf in given.items():
        if leaf.kind == "tracked":
            what = f"{leaf.owner!r} ({leaf.of}) is not what it was after step {step}: {path} differs"
            remedy = "let its load_state_dict() set what its state_dict() returns"
            found.append(Moved(kind="state", name=leaf.owner, what=what, remedy=remedy))
    for path, leaf in before.items():
        if leaf.kind == "tracked" and path not in given and path not in carried:
            what = f"step {step + 1} sets {path} of {leaf.owner!r} ({leaf.of}) to another value"
            remedy = "derive the value from the step, or keep what it is made of in a tracked object"
            found.append(Moved(kind="changed", name=leaf.owner, what=what, remedy=remedy))
        elif leaf.kind == "tracked" and path not in given:
            what = f"{leaf.owner!r} ({leaf.of}) is changed between restore() and the first step: {path} differs"
            remedy = "build and initialise everything before restore()"
            found.append(Moved(kind="changed", name=leaf.owner, what=what, remedy=remedy))
    return found


def _of_variable(path: str, leaf: Recorded, now: Recorded | None) -> Moved:
    if leaf.kind == "object":
        what, remedy = (
            f"{leaf.owner} ({leaf.of}) is not restored: {path} differs",
            f"track it: track({_name(leaf)}=...)",
        )
        return Moved(kind="object", name=leaf.owner, what=what, remedy=remedy)
    if leaf.kind == "tensor":
        remedy = "keep it in a tracked object: a buffer, or one with state_dict() and load_state_dict()"
        what = f"the tensor {path} ({leaf.shown}) is not restored"
        return Moved(kind="tensor", name=path.partition("[")[0], what=what, remedy=remedy)
    what = f"{path} is {now.shown if now else '?'} and was {leaf.shown}"
    return Moved(kind="value", name=path, what=what, remedy="derive it from the step, or keep it in a tracked object")


def _of_gradients(leaf: Recorded, step: int) -> Moved:
    what = f"step {step + 1} begins with gradients of {leaf.owner!r} from before it, which no snapshot has"
    remedy = "call ckpt.step() after optimizer.step() and zero_grad(), not for each micro-batch"
    return Moved(kind="gradient", name=leaf.owner, what=what, remedy=remedy)


def _name(leaf: Recorded) -> str:
    words = leaf.owner.rpartition(": ")[2].replace(".", "_")
    return words if words.isidentifier() else "name"


def _of_the_moved(found: Judgement, unbroken: RunTrace, before: Mapping[str, Recorded]) -> list[Moved]:
    """Return the cause where nothing was another one before the first step: gradients, or an object that counts otherwise now."""
    step, gradients = found.restored, [leaf for leaf in before.values() if leaf.kind == "gradient" and leaf.digest]
    models = {leaf.owner for leaf in _of(unbroken, ENDS, step).values() if leaf.kind == "gradient"}
    leaves = {path: _of(unbroken, ENDS, found.first or 0)[path] for path in found.moved}
    if any(leaf.owner in models for leaf in leaves.values()):
        added = [_of_gradients(leaf, step) for leaf in gradients if unbroken.added.get(step + 1) is None]
        return added or [_unseen(found)]
    path, leaf = next(iter(leaves.items()))
    what = (
        f"{leaf.owner!r} ({leaf.of}) is another one after step {found.first} than in the unbroken run: {path} differs"
    )
    remedy = "what it was given is the same: a second restart would continue elsewhere (docs/data.md)"
    return [Moved(kind="state", name=leaf.owner, what=what, remedy=remedy)]


def _unseen(found: Judgement) -> Moved:
    what = f"nothing that can be looked at was another one before step {found.first}, and yet it ended otherwise"
    remedy = "look for what the step reads elsewhere: files, variables of a thread or of the environment, objects of C"
    return Moved(kind="state", name="unseen", what=what, remedy=remedy)


def _of_generator(path: str, leaf: Recorded, rng: bool, others: Sequence[Moved]) -> Moved:
    if not leaf.owner:
        remedy = f"track an object whose state_dict() and load_state_dict() are its {leaf.of}"
        return Moved(kind="generator", name=path, what=f"the generator {path} is not restored", remedy=remedy)
    if rng:
        return Moved(
            kind="generator",
            name=path,
            what=f"{path} differs at the first step after the restore",
            remedy=_DRAWN + _or(others),
        )
    what = f"{path} differs after the restore: it is not tracked"
    return Moved(kind="generator", name=path, what=what, remedy="track(..., rng=True)")


def _or(others: Sequence[Moved]) -> str:
    return f"; or draws otherwise because {others[0].what}" if others else ""


def _of_data(unbroken: RunTrace, restarted: RunTrace, found: Judgement, causes: Sequence[Moved]) -> list[Moved]:
    """Return the first step that was given other data, and whose: what a model that had moved by then gives another is none."""
    at = found.restored
    for step in restarted.steps:
        if step not in unbroken.inputs or unbroken.inputs[step] == restarted.inputs[step]:
            continue
        if causes and found.first is not None and step > found.first:
            break
        wanted, given = unbroken.inputs[step], restarted.inputs[step]
        known = [one for one in sorted(unbroken.inputs, reverse=True) if unbroken.inputs[one] == given and one != step]
        whose = f"what step {known[-1]} is given" if known else "other data than"
        if known:
            again = _AGAIN if known[-1] <= at else ""
            what = f"step {step} is given {whose}{again}"
        elif set(given) & set(wanted):
            what = f"step {step} is given only a part of its data"
            if set(given) - set(wanted):
                what = f"step {step} is given data of which some is other than in the unbroken run"
        else:
            what = f"step {step} is given {whose} in the unbroken run"
        is_ordered = any(leaf.kind == "tracked" and leaf.of in _SOURCES for leaf in _of(restarted, ENDS, step).values())
        elsewhere = f"; or it follows from this: {found.hints[0].what}" if found.hints else ""
        return [
            Moved(kind="data", name=f"step {step}", what=what, remedy=_SEEDED if is_ordered else _ELASTIC + elsewhere)
        ]
    return []


def merged(findings: Iterable[Judgement]) -> Judgement:
    """Return one finding of all ranks: the worst verdict, each cause once."""
    every = list(findings)
    worst = max(every, key=lambda one: (EXACT, NOT_EXACT, NOT_DETERMINISTIC).index(one.verdict))
    causes = {(c.kind, c.name): c for one in reversed(every) for c in one.causes}
    hints = {c.name: c for one in reversed(every) for c in one.hints}
    moved = list(dict.fromkeys(path for one in every for path in one.moved))
    return Judgement(
        verdict=worst.verdict,
        restored=worst.restored,
        causes=sorted(causes.values(), key=lambda cause: _ORDER.index(cause.kind)),
        hints=list(hints.values()),
        moved=moved,
        first=min((one.first for one in every if one.first is not None), default=None),
    )


def as_json(found: Judgement) -> dict[str, Any]:
    """Return a finding for JSON."""
    return {
        "verdict": found.verdict,
        "restored_step": found.restored,
        "first_step": found.first,
        "causes": [cause.as_json() for cause in found.causes],
        "hints": [cause.as_json() for cause in found.hints],
        "moved": found.moved,
    }
