"""Who takes part in a synchronisation of groups that are separate runs, and which samples each trains next. Torch-free.

All of it is small objects on storage, each written once. Synchronisation 7, and its second attempt:

    0000007.1/here.2     group 2 has come, and what it brings
    0000007.1/roster     who takes part: decided by whichever group writes it first
    0000007.1/outcome    whether all of these hold the result: the commit point

What a group trains between two synchronisations is a *share* of the stream: `parallel.sync_every` of its batches. A share
is trained once in what survives: that of a group whose training did not count is given to another.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from flashckpt.checkpoint.root_records import explaining, open_record
from flashckpt.core.records import Record, pack, seal
from flashckpt.errors import LayoutError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

_GOOD, _BAD = b"good", b"bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """A group that has come to a synchronisation.

    Attributes:
        version: The synchronisation that it took part in last; 0: none.
        step: The step that it has trained to.
        address: Of the store that it opens for the exchange, host:port.
        settings: Those that have to be the same in all groups, as text.
    """

    group: int
    version: int
    step: int
    address: str
    settings: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """What was decided of one synchronisation.

    Attributes:
        base: The one whose result the groups that gave began with.
        step: The step at which its groups continue.
        groups: All that take part, ascending.
        gave: Those of them whose training counts; the others are taken in.
        again: It does not: what came after `base` is lost, and they continue with the shares that they have.
        shares: The share that each of `groups` trains next.
        owed: Shares that were given to groups whose training did not count, and to no other since.
        unused: The first share that was given to none.
        address: Where they exchange what they bring, host:port.
        settings: As of `Here`, of those that gave.
    """

    number: int
    base: int
    step: int
    groups: tuple[int, ...]
    gave: tuple[int, ...]
    again: bool
    shares: tuple[int, ...]
    owed: tuple[int, ...]
    unused: int
    address: str
    settings: str = ""

    def share_of(self, group: int) -> int:
        """Return the share that a group of it trains next."""
        return self.shares[self.groups.index(group)]


def first_roster(count: int) -> Roster:
    """Return what `count` groups begin with."""
    every = tuple(range(count))
    return Roster(
        number=0, base=0, step=0, groups=every, gave=every, again=False, shares=every, owed=(), unused=count, address=""
    )


def decide(number: int, here: Mapping[int, Here], base: Roster) -> Roster:
    """Return the roster of a synchronisation of the groups that are `here`.

    Args:
        number: Of the synchronisation.
        here: By group.
        base: The roster of the newest synchronisation that one of them took part in.
    """
    groups = sorted(here)
    gave, again = [group for group in groups if here[group].version == base.number], base.number < number - 1
    undone = [share for group, share in zip(base.groups, base.shares, strict=True) if group not in gave]
    owed, unused = sorted({*base.owed, *undone}), base.unused
    shares = {group: base.share_of(group) for group in gave} if again else {}
    for group in groups:
        if group not in shares:
            shares[group] = owed.pop(0) if owed else unused
            unused += shares[group] == unused
    return Roster(
        number=number,
        base=base.number,
        step=base.step if again else here[gave[0]].step,
        groups=tuple(groups),
        gave=tuple(gave),
        again=again,
        shares=tuple(shares[group] for group in groups),
        owed=tuple(owed),
        unused=unused,
        address=here[gave[0]].address,
        settings=here[gave[0]].settings,
    )


def refuse_others(settings: Collection[str]) -> None:
    """Refuse to synchronise groups whose settings differ: steps, shares or weights would not mean the same.

    Raises:
        LayoutError: they do.
    """
    known = sorted({*settings} - {""})
    if len(known) > 1:
        raise LayoutError(
            "groups that synchronise have different settings",
            found=known[0],
            expected=known[1],
            state="Nothing was synchronised.",
            remedy="start all groups with the same settings, but for parallel.group and the addresses",
        )


class Synchronisations:
    """The synchronisations of a run, as one of its groups sees them.

    Args:
        store: Where the objects are.
        patience_s: How long a synchronisation waits for groups of the one before, once one is there whose training counts.
    """

    def __init__(self, store: Store, count: int, patience_s: float) -> None:
        self._store, self._count, self._patience_s = store, count, patience_s
        self._asked: dict[str, float] = {}

    def newest(self) -> int:
        """Return the number of the newest synchronisation that took place; 0: none did."""
        numbers = sorted({number for number, _ in self._attempts()}, reverse=True)
        return next((number for number in numbers if self.roster(number) is not None), 0)

    def roster(self, number: int) -> Roster | None:
        """Return the roster of a synchronisation that took place; None if it did not."""
        if number == 0:
            return first_roster(self._count)
        good = [folder for at, folder in self._attempts(number) if at == number and self._outcome(folder)]
        return self._decided(good[0]) if good else None

    def open_attempt(self, number: int) -> str:
        """Return the folder of the attempt at a synchronisation that is under way, or of the next one."""
        attempts = [folder for _, folder in self._attempts(number)]
        if attempts and self._outcome(attempts[-1]) is not False:
            return attempts[-1]
        return f"{number:07d}.{len(attempts)}"

    def come(self, folder: str, here: Here) -> None:
        """Say that this group is there."""
        crash_point("groups.before-here")
        self._store.put(f"{folder}/here.{here.group}", seal(pack(here)))

    def decided(self, folder: str, number: int) -> Roster | None:
        """Return the roster of an attempt, deciding on it if that is due; None: it is to be waited for."""
        if (found := self._decided(folder)) is not None:
            return found
        here = {one.group: one for one in self._here(folder)}
        refuse_others([one.settings for one in here.values()])
        before, is_next = self._newest_of(here, number)
        if not self._awaited(before, is_next=is_next) <= here.keys() and not (is_next and self._is_late(folder)):
            return None
        if self._store.put_if_absent(f"{folder}/roster", seal(pack(decide(number, here, before)))):
            crash_point("groups.after-roster")
        return self._decided(folder)

    def settle(self, folder: str, *, is_good: bool) -> bool:
        """Say whether all groups of an attempt hold its result, unless another has; return what counts."""
        crash_point("groups.before-outcome")
        self._store.put_if_absent(f"{folder}/outcome", _GOOD if is_good else _BAD)
        crash_point("groups.after-outcome")
        return bool(self._outcome(folder))

    def is_over(self, folder: str) -> bool:
        """Return whether an attempt has ended."""
        return self._outcome(folder) is not None

    def missing(self, folder: str, number: int) -> list[int]:
        """Return the groups that are waited for."""
        here = {one.group: one for one in self._here(folder)}
        before, is_next = self._newest_of(here, number)
        return sorted(self._awaited(before, is_next=is_next) - here.keys())

    def _newest_of(self, here: Mapping[int, Here], number: int) -> tuple[Roster, bool]:
        """Return the roster of the newest synchronisation that one of them took part in; whether it is the one before."""
        base = max(one.version for one in here.values())
        before = self.roster(base)
        assert before is not None, "a group has taken part in it"
        return before, base == number - 1

    def _awaited(self, before: Roster, *, is_next: bool) -> set[int]:
        return {*before.groups} if is_next else {*range(self._count)}  # one that was left out comes when it is there

    def _is_late(self, folder: str) -> bool:
        """Return whether an attempt has waited long enough since this was asked first."""
        now = time.monotonic()
        return now - self._asked.setdefault(folder, now) >= self._patience_s

    def _attempts(self, number: int | None = None) -> list[tuple[int, str]]:
        """Return number and folder of all attempts, oldest first, or those of one synchronisation."""
        found = []
        for name in self._store.folders():
            at, _, attempt = name.partition(".")
            if at.isdigit() and attempt.isdigit() and number in (None, int(at)):
                found.append((int(at), int(attempt), name))
        return [(at, name) for at, _, name in sorted(found)]

    def _here(self, folder: str) -> Iterator[Here]:
        for info in self._store.list(f"{folder}/here."):
            if (raw := self._get(info.key)) is not None:
                yield _opened(Here, raw, info.key)

    def _decided(self, folder: str) -> Roster | None:
        raw = self._get(f"{folder}/roster")
        return None if raw is None else read_roster(raw, folder)

    def _outcome(self, folder: str) -> bool | None:
        raw = self._get(f"{folder}/outcome")
        return None if raw is None else raw == _GOOD

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissingError:
            return None


def read_roster(raw: bytes, folder: str) -> Roster:
    """Return the roster of an attempt; raises DamagedError where the bytes are none."""
    return _opened(Roster, raw, f"{folder}/roster")


def _opened(kind: type[Record], raw: bytes, key: str) -> Record:
    with explaining(
        f"{key}, with which groups synchronise, is damaged",
        state="The groups are as they were; nothing was synchronised.",
        remedy="stop all groups, delete the folder of this object, and start them again",
    ):
        return open_record(kind, raw, key)
