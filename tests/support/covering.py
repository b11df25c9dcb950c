"""Covers all pairs of values of several factors with few rows, leaving out what cannot be combined. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]


def pairs_of(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Return every pair of values of two factors."""
    return [
        frozenset({(a, one), (b, other)})
        for a, b in itertools.combinations(factors, 2)
        for one in factors[a]
        for other in factors[b]
    ]


def cover(factors: Mapping[str, Sequence[str]], works: Callable[[Row], bool]) -> tuple[list[Row], list[Row]]:
    """Return rows that have every pair which works, and a row for each pair that does not, even with all defaults beside it.

    Args:
        factors: Values of each, the default first.
        works: Whether a row can be run.
    """
    defaults = {name: values[0] for name, values in factors.items()}
    left, rows, refused = set(pairs_of(factors)), [], []
    for pair in pairs_of(factors):
        if pair not in left:
            continue
        row = {**defaults, **dict(pair)}
        if not works(row):
            left.discard(pair)
            refused.append(row)
            continue
        for name, values in factors.items():
            if name not in dict(pair):
                candidates = [{**row, name: value} for value in values]
                # the first of the best: what is cheap comes first among the values of a factor
                row = max((each for each in candidates if works(each)), key=lambda each: len(_pairs_in(each) & left))
        rows.append(row)
        left -= _pairs_in(row)
    return rows, refused


def cover_each(factors: Mapping[str, Sequence[str]], works: Callable[[Row], bool]) -> tuple[list[Row], list[Row]]:
    """Return rows in which each value occurs that works, and a row for each that does not, even with all defaults beside it.

    Arguments as `cover` has them.
    """
    defaults = {name: values[0] for name, values in factors.items()}
    left, rows, refused = {(name, value) for name in factors for value in factors[name]}, [], []
    for name, values in factors.items():
        for value in (value for value in values if (name, value) in left):
            row = {**defaults, name: value}
            if not works(row):
                refused.append(row)
                continue
            for other, choices in factors.items():
                if other != name:
                    candidates = [{**row, other: choice} for choice in choices]
                    row = max(
                        (each for each in candidates if works(each)), key=lambda each: len(set(each.items()) & left)
                    )
            rows.append(row)
            left -= set(row.items())
    return rows, refused


def _pairs_in(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
