"""The guard over the structure: what C says is what Python says, and every change of a member is seen."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
from support import sanitized  # noqa: F401 -- the build with sanitizers, where one is named, comes before flashckpt.native

from flashckpt.native import is_native
from flashckpt.native.copying import same_members
from flashckpt.state.structure import StructureGuard


class Own(list[Any]):
    """A list that may iterate in its own way."""


def containers(seed: int) -> tuple[list[Any], list[Any]]:
    random.seed(seed)
    kinds: list[Any] = [dict, lambda: defaultdict(dict), dict]
    dicts = [random.choice(kinds)() for _ in range(random.randrange(1, 60))]
    for one in dicts:
        one.update((key, object()) for key in random.sample(range(40), random.randrange(12)))
    return dicts, [[object() for _ in range(random.randrange(5))] for _ in range(3)]


def change(dicts: list[Any], lists: list[Any]) -> None:
    """Change one container, or exchange something for an equal one."""
    one, many = random.choice(dicts), random.choice(lists)
    match random.randrange(8):
        case 0:
            one[random.randrange(40)] = object()
        case 1 if one:
            del one[random.choice(list(one))]
        case 2 if one:
            one.clear()
        case 3:
            many.append(object())
        case 4 if many:
            many.pop()
        case 5 if many:
            many[random.randrange(len(many))] = object()
        case 6 if one:
            key = random.choice(list(one))
            one[key] = one.pop(key)
        case _:
            pass


@pytest.mark.parametrize("seed", range(200))
def test_every_change_is_seen_as_a_comparison_one_by_one_sees_it(seed: int, copied_by: str) -> None:
    dicts, lists = containers(seed)
    guard = StructureGuard(dicts, lists)
    assert guard.holds()
    held = list(guard._members())
    for _ in range(4):
        change(dicts, lists)
        now = list(guard._members())
        expected = len(now) == len(held) and all(a is b for a, b in zip(now, held, strict=True))
        assert guard.holds() is expected
        assert guard._holds_plain() is expected


@pytest.mark.skipif(not is_native(), reason="the C part was not built")
def test_c_leaves_containers_of_other_classes_to_python() -> None:
    member = object()
    assert same_members([{1: member}], [[member]], [member, member]) is True
    assert same_members([{1: member}], [[member]], [member]) is False
    assert same_members([{1: member}], [[member]], [member, member, member]) is False
    assert same_members([OrderedDict({1: member})], [], [member]) is None
    assert same_members([UserDict({1: member})], [], [member]) is None
    assert same_members([], [Own([member])], [member]) is None


def test_an_ordered_dict_is_guarded_in_its_own_order(copied_by: str) -> None:
    members = OrderedDict((key, torch.zeros(1)) for key in "abc")
    members.move_to_end("a")
    guard = StructureGuard([members], [])
    assert guard.holds()
    members["b"] = torch.zeros(1)
    assert not guard.holds()
