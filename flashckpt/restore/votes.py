"""What the ranks tell each other about one candidate, and what follows for all of them. One collective per vote.

Judged together is also what a candidate has and the program has not. A rank knows names that only others hold: other
pipeline stages in a MANIFEST, other ranks' slots on its node. A name is unexpected if no rank has it. Names are compared
without the coordinate of their owner: "w@rank3" is at home wherever `w` is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flashckpt import collectives
from flashckpt.core.manifest import Manifest
from flashckpt.core.records import digest
from flashckpt.core.shard import split_owner
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import (
    DisagreementError,
    FlashckptError,
    ObjectStateError,
    TensorMismatchError,
    UnexpectedStateError,
)
from flashckpt.planning.read_plan import SourceNames
from flashckpt.restore.requirements import LiveState, Requirements, Wanted, is_wanted
from flashckpt.state import optimizer_state, pytree, value_reader
from flashckpt.state.registry import StateRegistry

MOST_REASON_CHARS = 300
"""Most characters of an error that are sent to every rank."""
Result = TypeVar("Result")
_OF_THE_PROGRAM = (TensorMismatchError, ObjectStateError)


class CandidateState(IntEnum):
    """What a rank can do about a candidate."""

    REJECTED = 0
    READY = 1
    LACKING = 2
    """Something of it is to be asked of other nodes."""
    MISMATCH = 3
    """It is of another program."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a step failed on this rank: the ranks decide together what becomes of it."""

    error: Exception

    @property
    def reason(self) -> str:
        """The error in one line, as it is sent to other ranks."""
        return str(self.error).replace("\n", "; ")[:MOST_REASON_CHARS]

    @property
    def state(self) -> CandidateState:
        """What the rank votes."""
        is_mismatch = isinstance(self.error, _OF_THE_PROGRAM)
        return CandidateState.MISMATCH if is_mismatch else CandidateState.REJECTED


def attempted(step: Callable[[], Result]) -> Result | Rejection:
    """Return what a step returns, or its error as a value: an exception here would leave other ranks waiting."""
    try:
        return step()
    except (FlashckptError, OSError) as error:
        return Rejection(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rank's answer on one candidate.

    Attributes:
        id: The candidate: all ranks must try the same one.
        state: What the rank can do about it.
        reason: Why it rejects it; "" if it does not.
        foreign_names: How many names the sources have and this rank has not.
        own_names: How many names this rank has.
        tier_bytes: Bytes that went into its live state, by tier.
    """

    id: SnapshotId
    state: CandidateState
    reason: str = ""
    foreign_names: int = 0
    own_names: int = 0
    tier_bytes: Mapping[str, int] = field(default_factory=dict)

    def pack(self) -> dict[str, Any]:
        """Return it as msgpack types."""
        return asdict(self) | {"id": list(self.id), "state": int(self.state)}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Vote:
        """Return what `pack` packed."""
        return cls(**packed | {"id": SnapshotId.of(packed["id"]), "state": CandidateState(packed["state"])})


@dataclass(frozen=True, slots=True)
class Ballot:
    """All ranks' votes, in rank order."""

    votes: Sequence[Vote]

    @property
    def is_lacking(self) -> bool:
        """Whether some rank must ask other nodes, and none rejects the candidate."""
        states = {vote.state for vote in self.votes}
        return CandidateState.LACKING in states and CandidateState.REJECTED not in states

    @property
    def rejecting_rank(self) -> int | None:
        """The first rank that rejects the candidate; None where none does."""
        return next((rank for rank, vote in enumerate(self.votes) if vote.state is CandidateState.REJECTED), None)


def hold(vote: Vote, rejection: Rejection | None = None) -> Ballot:
    """Exchange votes. Collective.

    Raises:
        DisagreementError: Another rank tries another candidate; names it. On every rank.
        TensorMismatchError: What some rank has is of another form than the candidate's, or an object does not take its
            state. On every rank: an older candidate might fit by chance, and everything since would be lost.
    """
    is_alone = collectives.is_alone()
    votes = [vote] if is_alone else [Vote.unpack(packed) for packed in collectives.all_gather(vote.pack())]
    for rank, other in enumerate(votes):
        if other.id != votes[0].id:
            raise DisagreementError(
                "ranks disagree on what to restore",
                found=f"rank {rank}: {other.id}",
                expected=f"rank 0: {votes[0].id}",
                state="Nothing was restored.",
                remedy="start the job again; the same versions of the program must run on every node",
            )
    first = next((rank for rank, other in enumerate(votes) if other.state is CandidateState.MISMATCH), None)
    if first is None:
        return Ballot(votes)
    if rejection is not None and isinstance(rejection.error, _OF_THE_PROGRAM):
        raise rejection.error
    raise TensorMismatchError(
        f"snapshot of {vote.id} does not match this program (see rank {first})",
        found=votes[first].reason,
        state="Nothing was restored.",
    )


# -- What a snapshot or checkpoint has and the program has not, judged over all ranks together ---------------------


_HASHES, _BITS_PER_NAME, _MOST_FOLD = 6, 32, 8
_OF_THE_WHOLE = frozenset({"groups", "forms", "state"})


def _base(fqn: str) -> str:
    return split_owner(fqn)[0] if "@" in fqn else fqn


@dataclass(frozen=True, kw_only=True, eq=False)
class NameComparison:
    """Which names the sources have, and which this rank has.

    Attributes:
        foreign: Of the sources', those that this rank has not.
        count: How many names this rank has, or somewhat more.
    """

    foreign: frozenset[str]
    count: int
    find_own: Callable[[], AbstractSet[str]]

    @cached_property
    def own(self) -> AbstractSet[str]:
        """Names that this rank has: put together where somebody asks, for as a rule nothing is foreign."""
        return self.find_own()


def compare_names(
    live: LiveState, names: SourceNames, manifests: Sequence[Manifest], required: Requirements, only: Wanted
) -> NameComparison:
    """Compare the names that sources have with those that this rank has: what is unexpected follows from all ranks'.

    Names in `required` are read from them, and so this rank's.
    """
    tracked = live.tracked
    unknown = {name for manifest in manifests for name in _unknown_values(tracked, manifest)}
    if required.is_foreseen and not unknown:  # every tensor that they name is this rank's
        own = functools.partial(_own_names, live, names, required, unknown)
        parameters = sum(len(group["params"]) for o in tracked.all_optimizers() for group in o.param_groups)
        return NameComparison(foreign=frozenset(), count=len(required.wanted.fqns) + parameters, find_own=own)
    of_tensors = _tensor_names(live, required)
    unknown |= _unknown_tensors(tracked, manifests, of_tensors)
    found = _own_names(live, names, required, unknown)
    foreign = frozenset(name for name in unknown - found if is_wanted(name, only) and not tracked.exclusion(name))
    return NameComparison(foreign=foreign, count=len(found), find_own=lambda: found)


def _tensor_names(live: LiveState, required: Requirements) -> set[str]:
    """Return the names of the tensors that this rank has or reads."""
    # a tensor that a value consists of is named after its value ("optimizer.extra@rank0.sums"): it is not compared
    wanted = required.wanted.fqns
    found = set(_bases(list(set(wanted).difference(required.in_values)) if required.in_values else wanted))
    found.update(_bases(live.table.fqns))
    return found


def _own_names(live: LiveState, names: SourceNames, required: Requirements, unknown: set[str]) -> set[str]:
    """Return all names of this rank; `unknown` ones are among them where they are state of its parameters."""
    own = _tensor_names(live, required)
    return own | _other_names(live.tracked, names, own, unknown)


def _bases(fqns: Sequence[str]) -> Iterable[str]:
    """Return names without the coordinates of their owners; nearly always there are none, and one search says so."""
    return map(_base, fqns) if "@" in "\0".join(fqns) else fqns


def _unknown_values(tracked: StateRegistry, manifest: Manifest) -> set[str]:
    """Return the names of values that a manifest has under the tracked names, and of parameters in its groups.

    The parameters of live optimizers are left out: their names in groups are this rank's own.
    """
    labels, found = {*tracked.modules, *tracked.optimizers}, set[str]()
    for key, value in manifest.values.items():
        label, _, rest = _base(key).partition(".")
        if label not in labels:
            continue
        if label in tracked.optimizers and rest == "groups":
            if not _are_parameters(tracked, label, value):
                found.update(f"{label}.{name}" for name in set(grouped(value)) - _parameters(tracked, label))
        elif rest not in _OF_THE_WHOLE:
            found.add(_base(key))
    return found


def _unknown_tensors(tracked: StateRegistry, manifests: Sequence[Manifest], own: AbstractSet[str]) -> set[str]:
    """Return the parameters, buffers and state that manifests have under the tracked names, without those in `own`.

    What is not tracked at all (a model read without its optimizer) is nobody's mistake and not among them.
    """
    labels, found = {*tracked.modules, *tracked.optimizers}, set[str]()
    labels |= {name.partition(".")[0] for parts in tracked.in_parts() for name in parts}
    prefixes = tuple(f"{label}." for label in labels)
    for manifest in manifests:
        inside: set[str] = set()  # tensors that values consist of come and go with their value
        for key, value in manifest.values.items():
            if _base(key).partition(".")[0] in labels and isinstance(value, (dict, list, tuple)):
                inside.update(pytree.tensor_names(value))
        left_out = inside | manifest.aliases.keys()
        others = [fqn for fqn in manifest.table.fqns if fqn not in own]
        found.update(_base(fqn) for fqn in others if fqn.startswith(prefixes) and fqn not in left_out)
    return found


def _are_parameters(tracked: StateRegistry, label: str, value: Any) -> bool:
    """Return whether recorded groups have just the parameters of the live optimizers, in their order."""
    return [[group["params"] for group in optimizer] for optimizer in value] == tracked.group_names(label)


def grouped(value: Any) -> Iterable[str]:
    """Yield the names of the parameters in recorded groups."""
    for optimizer in value:
        for group in optimizer:
            yield from group["params"]


def _other_names(tracked: StateRegistry, names: SourceNames, own: set[str], unknown: set[str]) -> set[str]:
    """Return further names of this rank: aliases, values, and state (`unknown` so far) of its parameters."""
    more = {alias for alias, full in tracked.aliases.items() if names.are_equal(alias, full)}
    more |= {*tracked.aliases.values(), *(name for name, _ in tracked.extra_states())}
    more |= {other for alias, other in names.aliases.items() if alias in own or alias in more}
    for label, optimizers in tracked.optimizers.items():
        if not all(map(value_reader.says_nothing_more, optimizers)):
            more.add(f"{label}.extra")
        prefix = f"{label}."
        here = _parameters(tracked, label)
        more |= {prefix + name for name in here}
        state = (name for name in unknown if name.startswith(prefix))
        more |= {name for name in state if name[len(prefix) :].rpartition(".")[0] in here}
    return more


def _parameters(tracked: StateRegistry, label: str) -> set[str]:
    optimizers = tracked.optimizers[label]
    names = tracked.names_for(optimizers)
    return {*map(names.__getitem__, map(id, chain.from_iterable(map(optimizer_state.parameters, optimizers))))}


def ungrouped(tracked: StateRegistry, manifests: Sequence[Manifest], only: Wanted = None) -> list[str]:
    """Return the parameters of live optimizers that no recorded group has; to be asked where all values are known."""
    missing = []
    for label in (label for label in tracked.optimizers if is_wanted(f"{label}.groups", only)):
        groups = [v for m in manifests for k, v in m.values.items() if _base(k) == f"{label}.groups"]
        if any(_are_parameters(tracked, label, value) for value in groups):
            continue
        recorded = {name for value in groups for name in grouped(value)}
        missing += [f"{label}.{name}" for name in sorted(_parameters(tracked, label) - recorded) if groups]
    return missing


def names_nowhere(mine: Iterable[str], own: Iterable[str], *, counts: Sequence[int]) -> list[str]:
    """Return those of `mine` that no rank has. Collective, if there is more than one rank.

    Every rank marks its names in a table, and the tables become one: nothing is sent by name, whatever the world. A
    name that is taken for another's (less than once in a thousand) is not reported; none is reported wrongly.
    """
    if collectives.is_alone():
        return sorted(mine)
    size = _BITS_PER_NAME * max(1, min(sum(counts), _MOST_FOLD * max(counts, default=0)))
    table = np.zeros(size, np.uint8)
    for name in own:
        table[_bits(name, size)] = 1
    table = np.frombuffer(collectives.maximum(table), np.uint8)
    return sorted(name for name in mine if not table[_bits(name, size)].all())


def _bits(name: str, size: int) -> npt.NDArray[np.int64]:
    mixed = digest(name.encode())
    first, step = mixed >> 32, (mixed & 0xFFFFFFFF) | 1
    return np.array([(first + k * step) % size for k in range(_HASHES)], np.int64)


def refuse_unexpected(names: Sequence[str], count: int, what: str) -> None:
    """Raise the error for names that no rank has, if there are any.

    Raises:
        UnexpectedStateError: There are.
    """
    if not count:
        return
    more = f" and {count - 1} more" if count > 1 else ""
    raise UnexpectedStateError(
        f"{names[0]!r}{more} is in {what} and not in this program",
        found=", ".join(names[:5]),
        expected="every parameter, buffer and group of it is tracked by some rank",
        state="Nothing was restored.",
        remedy="restore(strict=False) leaves such state behind and lists it in report.unexpected; "
        "restore(only='model.*') takes a part",
    )
