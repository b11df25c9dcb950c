"""Which generations began with what, and which of those with one number counts: as the simulation knows it, apart from the product."""

from __future__ import annotations

from collections import defaultdict

from flashckpt.core.lineage import Generation
from flashckpt.core.records import mark_of
from flashckpt.core.snapshot_id import SnapshotId
from simulation.states import State


class Lineages:
    """All generations of one simulation.

    Attributes:
        committed: Checkpoints that are on the root now, whole.
        parents: What each generation of the line began with.
        on_root: The same of those that are claimed.
    """

    def __init__(self) -> None:
        self.committed: dict[SnapshotId, State] = {}
        self.parents: dict[int, SnapshotId | None] = {}
        self.on_root: dict[int, SnapshotId | None] = {}
        self._begun: dict[int, dict[int, State | None]] = defaultdict(dict)  # by number and mark
        self._claims: dict[int, int] = {}  # the mark of each claim on the root
        self._running = (0, 0)  # number and mark of what goes on now, whether it is claimed or not
        self._behind: dict[int, int] = {}  # number and mark of those that it came of
        self._used: set[tuple[int, int]] = set()  # number and mark of generations that took a snapshot

    def _ancestors(self, number: int, mark: int, known: dict[int, int] | None = None) -> dict[int, SnapshotId | None]:
        """Return what each generation of a line began with; `known`: numbers and marks of those that anybody knows of."""
        found: dict[int, SnapshotId | None] = {}
        while number > 0:
            parent = self._begun[number].get(mark)
            found[number] = None if parent is None else parent.identity
            if parent is not None:
                number, mark = parent.identity.generation, parent.mark
            else:
                number -= 1
                mark = (
                    self.owner(number) or next(reversed(self._begun[number]), 0)
                    if known is None
                    else known.get(number, 0)
                )
        return found

    def owner(self, number: int) -> int:
        """Return the mark of the generation that counts where several have a number: of a claim of which something came; else 0."""
        mark = self._claims.get(number, 0)
        is_used = (
            (number, mark) in self._used
            or self.on_root.get(number) is not None
            or any(one.generation == number for one in self.committed)
        )
        return mark if is_used else 0

    def claimed_mark(self, number: int) -> int | None:
        """Return the mark of the claim of a number on the root; None where nobody has claimed it."""
        return self._claims.get(number)

    def says_the_same(self, record: Generation) -> bool:
        """Whether the claim of a generation on the root, where there is one, has the parent that its ranks know."""
        is_its = self._claims.get(record.number) == mark_of(record.token)
        return not is_its or self.on_root.get(record.number) == record.parent

    def may_write(self, record: Generation) -> bool:
        """Whether the claims on the root leave it to a generation to write there."""
        mark = mark_of(record.token)
        return max(self._claims, default=0) <= record.number and self._claims.get(record.number, mark) == mark

    def _counts(self, state: State) -> bool:
        number, mark = self._running
        if state.identity.generation != number:  # what goes on now has chosen, also between those of which nothing came
            number = state.identity.generation
            mark = self._behind[number] if number in self._behind else self.owner(number)
        return mark in (0, state.mark)

    def _goes_on(self, number: int, mark: int) -> None:
        """All ranks go on with a generation now."""
        self._running, self._behind = (number, mark), {}
        while (parent := self._begun[number].get(mark)) is not None and parent.identity.generation > 0:
            number, mark = parent.identity.generation, parent.mark
            self._behind[number] = mark

    def line(self, newest: int, parents: dict[int, SnapshotId | None]) -> dict[int, float]:
        """Return what survives of each generation from where one stands: the last step."""
        bounds: dict[int, float] = {}
        number, step = newest, float("inf")
        while number > 0:
            bounds[number] = step
            parent = parents.get(number)
            if parent is not None:
                number, step = parent
            else:  # it began with nothing, or before anything was known of it: it hides nothing more
                number -= 1
        return bounds

    def is_on_line(self, identity: SnapshotId, newest: int | None = None) -> bool:
        """Whether nothing has rolled a snapshot back."""
        number = max(self.parents, default=0) if newest is None else newest
        return identity.step <= self.line(number, self.parents).get(identity.generation, -1)
