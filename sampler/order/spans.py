"""Skipped spans of the sample stream: many may be added one by one, and every question takes O(log k) of them.

The spans lie in runs of at most `MOST` spans each, so adding one moves few others. What each span hides, and how many
used positions come before it, is summed up per run when it is asked for; an added span renews the sums of the run
it belongs to, and those over the runs.
"""

from __future__ import annotations

import base64
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
Span = tuple[int, int]
MOST = 1024


class _Run:
    """Neighbouring spans. All sums count from the first of them."""

    def __init__(self, spans: list[Span]) -> None:
        self.starts = [start for start, _ in spans]
        self.stops = [stop for _, stop in spans]

    @cached_property
    def hidden(self) -> list[int]:
        """Positions that the spans hide, up to the end of each."""
        return list(accumulate(stop - start for start, stop in zip(self.starts, self.stops, strict=True)))

    @cached_property
    def used(self) -> list[int]:
        """Each start, less the positions that the spans before it hide: ascending, as no two spans touch."""
        return [start - hidden for start, hidden in zip(self.starts, [0, *self.hidden], strict=False)]

    def replace(self, first: int, last: int, spans: list[Span]) -> None:
        """Put `spans` in the place of those from `first` to `last` (exclusive)."""
        self.starts[first:last] = [start for start, _ in spans]
        self.stops[first:last] = [stop for _, stop in spans]
        self.__dict__.pop("hidden", None)
        self.__dict__.pop("used", None)

    def spans(self) -> Iterable[Span]:
        """Return the spans, ascending."""
        return zip(self.starts, self.stops, strict=True)


class _Sums(NamedTuple):
    """Over runs: the positions hidden before each, and the used positions before its first span."""

    hidden: list[int]
    used: list[int]


class SkippedSpans:
    """Spans [first, last) of excluded positions: sorted, disjoint and not adjacent.

    Args:
        spans: Any spans; those that touch become one.
    """

    def __init__(self, *, spans: Iterable[Span] = ()) -> None:
        self._runs = _cut(_merged(sorted(span for span in spans if span[0] < span[1])))
        self._starts = [run.starts[0] for run in self._runs]
        self._known: _Sums | None = None
        self._packed: str | None = None

    def __len__(self) -> int:
        return sum(len(run.starts) for run in self._runs)

    @property
    def packed(self) -> str:
        """All of them as text, remade only after a change: a snapshot records them while training waits for it."""
        if self._packed is None:
            self._packed = base64.b64encode(np.array(self.spans, "<i8").tobytes()).decode()
        return self._packed

    @classmethod
    def unpacked(cls, text: str) -> SkippedSpans:
        """Return those that `packed` gave; ValueError where it is none of its texts."""
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i8")
        starts, stops = numbers.reshape(-1, 2).T.tolist()
        return cls(spans=zip(starts, stops, strict=True))

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them, ascending."""
        return tuple(chain.from_iterable(run.spans() for run in self._runs))

    def add(self, first: int, last: int) -> None:
        """Exclude [first, last) too; spans that it touches become one with it.

        Raises:
            ConfigError: the span is empty.
        """
        if not 0 <= first < last:
            raise ConfigError(
                "a span to skip must end after it begins",
                found=f"first {first}, last {last}",
                expected="0 <= first < last, counted in samples of the global stream",
                state="Nothing is skipped.",
            )
        self._known = self._packed = None
        low = max(0, bisect_right(self._starts, first) - 1)
        high = max(low, bisect_right(self._starts, last) - 1)  # the run of the last span that it can touch
        if high > low:
            self._join(low, high)
        if not self._runs:
            self._runs = [_Run([])]
            self._starts = [first]
        run = self._runs[low]
        begin, end = bisect_left(run.stops, first), bisect_right(run.starts, last)
        if begin < end:
            first, last = min(first, run.starts[begin]), max(last, run.stops[end - 1])
        run.replace(begin, end, [(first, last)])
        self._starts[low] = run.starts[0]
        if len(run.starts) > MOST:
            self._split(low)

    def _join(self, low: int, high: int) -> None:
        """Make one run of those from `low` to `high` (inclusive); what lies between them is about to be covered."""
        first, last = self._runs[low], self._runs[high]
        self._runs[low : high + 1] = [_Run([*first.spans(), *last.spans()])]
        del self._starts[low + 1 : high + 1]

    def _split(self, at: int) -> None:
        runs = _cut(list(self._runs[at].spans()))
        self._runs[at : at + 1] = runs
        self._starts[at : at + 1] = [run.starts[0] for run in runs]

    # -- questions

    def end_of(self, position: int) -> int:
        """Return the end of the span that hides `position`; `position` itself if it is used."""
        at = bisect_right(self._starts, position) - 1
        if at < 0:
            return position
        run = self._runs[at]
        return max(position, run.stops[bisect_right(run.starts, position) - 1])

    def count(self, first: int, last: int) -> int:
        """Return how many positions of [first, last) are used."""
        return last - first - self._hidden_before(last) + self._hidden_before(first) if first < last else 0

    def advance(self, position: int, count: int) -> int:
        """Return the position after the next `count` used positions from `position` (`position` itself for 0)."""
        if count < 1 or not self._runs:
            return position + count
        wanted = position - self._hidden_before(position) + count
        at, within = self._after(wanted - 1)
        return wanted + self._hidden_of(at, within)

    def positions(self, position: int, ordinals: Int64Array) -> Int64Array:
        """Return the positions of the k-th used samples from `position`, for every k of `ordinals`, in any order."""
        if not len(ordinals) or not self._runs or self.end_of_all <= position:
            return ordinals + position
        used = ordinals + (position - self._hidden_before(position))
        low, begin = self._after(int(used.min()))  # not of the first and last: what fills a batch comes from its start
        high, end = self._after(int(used.max()))
        before = self._hidden_of(low, begin)
        if (low, begin) == (high, end):
            return used + before
        starts, hidden = self._between(low, begin, high, end)
        return used + np.array([before, *hidden], np.int64)[np.searchsorted(np.array(starts), used, side="right")]

    @property
    def end_of_all(self) -> int:
        """The end of the last span; 0 if there is none."""
        return self._runs[-1].stops[-1] if self._runs else 0

    def _between(self, low: int, begin: int, high: int, end: int) -> tuple[list[int], list[int]]:
        """Return, for the spans from one place to another: used positions before each, and positions hidden up to its end."""
        starts: list[int] = []
        hidden: list[int] = []
        for at in range(low, high + 1):
            run, before = self._runs[at], self._sums.hidden[at]
            part = slice(begin if at == low else 0, end if at == high else None)
            starts += [start - before for start in run.used[part]]
            hidden += [count + before for count in run.hidden[part]]
        return starts, hidden

    @property
    def _sums(self) -> _Sums:
        if self._known is None:
            hidden = list(accumulate((run.hidden[-1] for run in self._runs), initial=0))
            used = [start - count for start, count in zip(self._starts, hidden, strict=False)]
            self._known = _Sums(hidden, used)
        return self._known

    def _hidden_before(self, position: int) -> int:
        at = bisect_left(self._starts, position) - 1
        if at < 0:
            return 0
        run = self._runs[at]
        last = bisect_left(run.starts, position) - 1
        beyond = max(0, run.stops[last] - position)
        return self._sums.hidden[at] + run.hidden[last] - beyond

    def _after(self, used: int) -> tuple[int, int]:
        """Return (run, spans of it) that lie before the position which `used` used ones precede."""
        at = max(0, bisect_right(self._sums.used, used) - 1)
        return at, bisect_right(self._runs[at].used, used + self._sums.hidden[at])

    def _hidden_of(self, at: int, within: int) -> int:
        """Return the positions that all spans before one place hide."""
        return self._sums.hidden[at] + (self._runs[at].hidden[within - 1] if within else 0)


def _cut(spans: list[Span]) -> list[_Run]:
    half = MOST // 2
    return [_Run(spans[at : at + half]) for at in range(0, len(spans), half)]


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
