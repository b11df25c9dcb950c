"""State dicts taken apart: the usual kind of dict has a shorter way, with the same result."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from flashckpt.errors import UnsupportedStateError
from flashckpt.state.pytree import flatten

SHARED = torch.zeros(3)
TREES: tuple[dict[Any, Any], ...] = (
    {},
    {"lr": 0.1, "steps": 3, "on": True, "none": None, "raw": b"x", "text": "long", "betas": (0.9, 0.95)},
    {"\N{GREEK SMALL LETTER PSI}": 1, "a": {"b": [1, {"c": SHARED}], "d": SHARED}},
    {1: "a", "1": "b"},
    {"__flashckpt__": "tensor"},
    {"a": {"__flashckpt__": 1, 2: 3}},
    {"a": torch.float32, "b": torch.Size([2, 3]), "c": torch.zeros(1).numpy()},
)


def other(tree: Any) -> Any:
    """Return the tree with mappings that are no dicts."""
    return UserDict({key: other(value) for key, value in tree.items()}) if isinstance(tree, dict) else tree


@pytest.mark.parametrize("tree", TREES)
def test_a_dict_is_taken_apart_as_any_mapping_is(tree: dict[Any, Any]) -> None:
    (plain, tensors), (expected, same) = flatten(tree, "thing"), flatten(other(tree), "thing")
    assert repr(plain) == repr(expected)
    assert list(map(type, plain)) == list(map(type, expected))
    assert list(tensors) == list(same)


@pytest.mark.parametrize("tree", [{"\ud800": 1}, {"a": "\ud800"}, {"a": object()}, {"a": {(object(),): 1}}])
def test_what_is_refused_in_a_mapping_is_refused_in_a_dict(tree: dict[Any, Any]) -> None:
    with pytest.raises(UnsupportedStateError) as plain:
        flatten(tree, "thing")
    with pytest.raises(UnsupportedStateError) as expected:
        flatten(other(tree), "thing")
    assert str(plain.value).partition(" at 0x")[0] == str(expected.value).partition(" at 0x")[0]


def test_what_was_read_does_not_follow_later_changes() -> None:
    group = {"lr": 0.1}
    first, _ = flatten(group, "thing")
    group["lr"] = 0.2
    assert first == {"lr": 0.1}
