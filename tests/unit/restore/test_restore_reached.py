"""What the root may hold though memory has lost it: there the root is asked before older memory is taken, with patience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.planning.inventory import HeldSlot, Inventory, Member
from flashckpt.planning.selection import Candidate, RestoreRequest, RootSummary, select
from flashckpt.report import RestoreReport
from flashckpt.restore.candidate_restore import Rejected
from flashckpt.restore.coordinator import RestoreCoordinator
from flashckpt.restore.gather import Patience

COMMITTED = RootSummary(committed=(SnapshotId(1, 60),), prefixes=("step-60",))
FAILED = RootSummary(error="a time-out", may_pass=True)


def node(rank: int, steps: Sequence[int], *, replica_of: int = -1, committed: int | None = None) -> Inventory:
    """Return what one rank on a node of its own publishes: three of them ran, and a partner's step 40 may lie there."""
    held = [HeldSlot(rank, 1, step, 3, 7, None) for step in steps]
    held += [HeldSlot(replica_of, 1, 40, 3, 7, None)] if replica_of >= 0 else []
    known = None if committed is None else SnapshotId(1, committed)
    ran = Generation(number=1, token="ran", world_size=3)
    return Inventory(
        node=f"n{rank}", slots=tuple(held), generation=ran, restart=1, members=(Member(1, rank),), committed=known
    )


LOST = [node(0, (40, 60)), node(2, (40, 60), replica_of=1)]
"""Rank 1 is lost with its node, behind the commit of step 60: its replica is of step 40."""
ALL = [node(0, (40, 60)), node(1, (40,)), node(2, (40, 60), replica_of=1)]
"""All are here, and rank 1 has not finished step 60."""
DAMAGED = [node(rank, (40, 50)) for rank in range(3)]
"""All have steps 40 and 50, and the latter is damaged."""


@pytest.mark.parametrize(
    ("inventories", "is_behind"),
    [
        pytest.param(LOST, True, id="a-rank-is-lost"),
        pytest.param(ALL, False, id="nobody-is-lost"),
        pytest.param([*ALL[:2], replace(ALL[2], committed=SnapshotId(1, 60))], True, id="a-persister-knows-more"),
        pytest.param([*ALL[:2], replace(ALL[2], committed=SnapshotId(1, 40))], False, id="a-persister-knows-as-much"),
        pytest.param([LOST[0], node(2, (40,), replica_of=1)], False, id="what-another-never-finished-was-nowhere"),
        pytest.param([node(0, (40,)), node(2, (40,), replica_of=1)], False, id="replicas-are-as-new-as-all-there-is"),
    ],
)
def test_memory_that_the_root_may_be_ahead_of_is_behind(inventories: list[Inventory], is_behind: bool) -> None:
    found = select([Inventory.unpack(one.pack()) for one in inventories], RootSummary())
    assert found.found[0].identity == (1, 40)
    assert found.found[0].is_common
    assert found.is_behind(found.found[0]) == is_behind


def test_what_was_rolled_back_is_no_reason_to_call_memory_old() -> None:
    began = Generation(number=2, token="again", parent=SnapshotId(1, 40), world_size=2)
    again = [replace(one, generation=began, committed=SnapshotId(1, 60)) for one in LOST]
    found = select(again, RootSummary())
    assert [c.identity.step for c in found.found] == [40]
    assert not found.is_behind(found.found[0])


class Restore(RestoreCoordinator):
    """A restore that notes what it tries, with answers of the root that are given."""

    def _ask_root(self) -> RootSummary:
        answer: RootSummary = self.options["answers"].pop(0)
        return answer

    def _try(self, candidate: Candidate, *_: Any) -> RestoreReport | Rejected:
        generation, step = candidate.identity
        self.options["tried"].append((step, candidate.on_root))
        if step in self.options["damaged"] and not candidate.on_root:
            return Rejected("damaged", "damaged", DamagedError("a snapshot is damaged"))
        return RestoreReport(step=step, generation=generation, life=0)


class Waits(Patience):
    """Two waits, of no time."""

    left = 2

    def again(self, *, may_pass: bool, why: str) -> bool:
        self.left -= 1
        return may_pass and self.left >= 0


@pytest.mark.parametrize(
    ("inventories", "answers", "tried"),
    [
        (ALL, [], [(40, False)]),
        (LOST, [COMMITTED], [(60, True)]),
        (LOST, [RootSummary()], [(40, False)]),
        (LOST, [FAILED, COMMITTED], [(40, False), (60, True)]),
        (LOST, [FAILED, FAILED, FAILED], [(40, False)] * 3),
        (LOST, [RootSummary(error="no credentials")], [(40, False)]),
        (DAMAGED, [FAILED, COMMITTED], [(50, False), (40, False), (50, False), (60, True)]),
        (DAMAGED, [RootSummary()], [(50, False), (40, False)]),
    ],
    ids=["silent", "newer", "nothing-newer", "a-moment-later", "not-for-ever", "refused", "damaged", "damaged-alone"],
)
def test_the_root_is_asked_before_older_memory_is_taken(
    inventories: list[Inventory], answers: list[RootSummary], tried: list[tuple[int, bool]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"answers": [*answers], "tried": [], "damaged": {50}}
    tracked: Any = None
    restore = Restore(
        tracked=tracked, directory=None, options=options, request=RestoreRequest(root=str(tmp_path)), patience=Waits()
    )
    search = restore._found(inventories, None)
    assert options["tried"] == tried
    assert options["answers"] == []
    assert search.restored is not None
    assert (search.restored.identity.step, search.restored.on_root) == tried[-1]
