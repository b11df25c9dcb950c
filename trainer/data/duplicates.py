"""`data duplicates`: which documents of a run's sources are there twice, exactly or nearly. Reads, and changes nothing. Torch-free."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.documents import parts_of, placed_documents

NEAR = 0.8
"""Share of their passages that two documents have in common to be near duplicates (Jaccard), as MinHash estimates it."""
_PASSAGE, _PERMUTATIONS = 12, 128
"""Characters of a passage: words of a language without spaces are found as well."""
_SHOWN = 3


@dataclass(kw_only=True, slots=True)
class Duplicates:
    """What was found in one channel: a duplicate is a document that repeats an earlier one, of any channel.

    Attributes:
        exact, near: Duplicates of each kind.
        pairs: Where a few of them are, with the document that they repeat.
    """

    documents: int = 0
    exact: int = 0
    near: int = 0
    pairs: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, kind: str, where: str, earlier: str) -> None:
        """Count one."""
        if kind == "exact":
            self.exact += 1
        else:
            self.near += 1
        if sum(one[0] == kind for one in self.pairs) < _SHOWN:
            self.pairs.append((kind, where, earlier))


def find_duplicates(data: DataConfig, *, near: bool) -> dict[str, Duplicates]:
    """Return what is there twice, by channel.

    Args:
        data: The sources; those of tokens are left out.
        near: Whether documents are compared by MinHash besides, which takes some milliseconds and kilobytes for each.

    Raises:
        ConfigError: `near` without the datasketch library.
        DataError: A source cannot be read.
    """
    seen: dict[bytes, str] = {}
    index = _NearIndex() if near else None
    found: dict[str, Duplicates] = {}
    for channel, where, text in _texts(data):
        mine = found.setdefault(channel, Duplicates())
        mine.documents += 1
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
        if (earlier := seen.get(key)) is not None:
            mine.add("exact", where, earlier)
        elif index is not None and (earlier := index.like(text)):
            mine.add("near", where, earlier)
        if key not in seen:
            seen[key] = where
            if index is not None:
                index.add(where, text)
    return found


def _texts(data: DataConfig) -> Iterator[tuple[str, str, str]]:
    for source in data.sources:
        for part in parts_of(source) if source.has_text else []:
            for where, text in placed_documents(part):
                if text.strip():
                    yield source.channel, where, text


class _NearIndex:
    """Documents by the MinHash of their passages."""

    def __init__(self) -> None:
        try:
            self._library: Any = importlib.import_module("datasketch")
        except ImportError as error:
            raise ConfigError(
                "near duplicates need the datasketch library",
                found="not installed",
                remedy="pip install '.[dedup]', or leave --near out",
            ) from error
        self._near = self._library.MinHashLSH(threshold=NEAR, num_perm=_PERMUTATIONS)
        self._last: tuple[str, Any] = ("", None)

    def _hash(self, text: str) -> Any:
        if self._last[0] != text:
            plain = " ".join(text.lower().split())
            passages = {plain[at : at + _PASSAGE] for at in range(max(1, len(plain) - _PASSAGE + 1))}
            found = self._library.MinHash(num_perm=_PERMUTATIONS)
            found.update_batch([one.encode() for one in sorted(passages)])
            self._last = text, found
        return self._last[1]

    def like(self, text: str) -> str:
        """Return where a document like this one is; "" if none is."""
        return min(self._near.query(self._hash(text)), default="")

    def add(self, where: str, text: str) -> None:
        self._near.insert(where, self._hash(text), check_duplication=False)


def duplicate_lines(found: dict[str, Duplicates], say: Callable[[str], object]) -> None:
    """Say what was found, a line for each channel and for a few of its duplicates."""
    for channel, one in found.items():
        shares = ", ".join(
            f"{count:,} {kind} ({count / one.documents:.1%})"
            for kind, count in (("exact", one.exact), ("near", one.near))
        )
        say(f"{channel}: {one.documents:,} documents, duplicates: {shares}")
        for kind, where, earlier in one.pairs:
            say(f"  {kind}: {where} repeats {earlier}")
