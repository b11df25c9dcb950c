"""The choice of the next slot, case by case; the state machine of M1 runs it over whole histories."""

from __future__ import annotations

from typing import Any

import pytest

from flashckpt.core.superblock import SlotHeader, SlotState
from flashckpt.shm.acks import choose_slot

E, W, C = SlotState.EMPTY, SlotState.WRITING, SlotState.COMPLETE


def slots(*what: tuple[SlotState, int, int]) -> list[SlotHeader]:
    return [SlotHeader(sequence=i + 1, state=s, generation=g, step=n) for i, (s, g, n) in enumerate(what)]


@pytest.mark.parametrize(
    ("headers", "options", "expected"),
    [
        # what holds no snapshot goes first, also what a dead writer left
        (slots((C, 1, 5), (E, 0, 0)), {}, 1),
        (slots((C, 1, 5), (W, 1, 10)), {}, 1),
        # nothing is known: nothing may go
        (slots((C, 1, 5), (C, 1, 10)), {}, None),
        # only what is older than a common snapshot, the oldest first; never the common one itself
        (slots((C, 1, 5), (C, 1, 10)), {"common": [(1, 10)]}, 0),
        (slots((C, 1, 10), (C, 1, 15)), {"common": [(1, 10)]}, None),
        (slots((C, 1, 15), (C, 1, 10), (C, 1, 5)), {"common": [(1, 15)]}, 2),
        (slots((C, 1, 99), (C, 2, 5)), {"common": [(2, 5)]}, 0),
        (slots((C, 2, 5), (C, 1, 99)), {"common": [(1, 99)]}, None),
        # pinned slots stay, even if everything else must
        (slots((C, 1, 5), (C, 1, 10)), {"common": [(1, 10)], "pinned": {0}}, None),
        (slots((E, 0, 0), (C, 1, 5), (C, 1, 10)), {"common": [(1, 10)], "pinned": {0}}, 1),
        # what can never become common protects nothing
        (slots((C, 1, 10), (C, 1, 15)), {"common": [(1, 10)], "unrecoverable": {(1, 15)}}, 1),
        # what a committed checkpoint supersedes
        (slots((C, 1, 20), (C, 1, 25)), {"superseded": (1, 20)}, 0),
        (slots((C, 1, 21), (C, 1, 25)), {"superseded": (1, 20)}, None),
    ],
)
def test_a_slot_is_taken_only_if_nobody_can_need_it(headers: Any, options: Any, expected: Any) -> None:
    assert choose_slot(headers, **({"pinned": set(), "common": []} | options)) == expected
