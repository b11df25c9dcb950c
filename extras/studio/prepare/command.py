"""`python -m flashckpt.trainer data prepare | duplicates --config FILE`. Torch-free."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt import entry_points
from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.config.command_line import take_flag, take_value
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.prepared import not_held_out
from flashckpt.trainer.prepare.channels import channels_of_index
from flashckpt.trainer.prepare.documents import parts_of, placed_documents
from flashckpt.trainer.prepare.shards import PrepareProgress, prepare

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


INTERRUPTED = 130


def data(words: Sequence[str]) -> int:
    """Run `data WORDS` and return the exit code; errors are raised."""
    words = list(words)
    path = take_value(words, "--config")
    if words[:1] not in (["prepare"], ["duplicates"]):
        raise ConfigError(
            "unknown command",
            found=" ".join(["data", *words[:1]]),
            expected="data prepare --config FILE, or data duplicates",
        )
    rest = words[1:]
    is_near = words[0] == "duplicates" and take_flag(rest, "--near")
    config = read_config(path, rest)
    if words[0] == "duplicates":
        duplicate_lines(find_duplicates(config.data, near=is_near), lambda line: sys.stdout.write(f"{line}\n"))
        return 0
    try:
        if config.data.sources or not config.eval.sets:
            lines = _Lines()
            index = prepare(config.data, lines)
            _say(config.data.folder, lines, index)
            _say_channels(config, index)
            for line in not_held_out(config, index):
                sys.stderr.write(f"warning: {line}; lower data.holdout_every, or add documents\n")
        lines = _Lines()
        sets = entry_points.load(entry_points.EXTRAS, "scored") if config.eval.sets else None
        if sets is not None and (of_sets := sets.prepare_sets(config, lines)) is not None:
            _say(sets.sets_of(config).data.folder, lines, of_sets)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the finished parts are kept, and the same command continues after them\n")
        return INTERRUPTED
    return 0


def _say(folder: str, lines: _Lines, index: dict[str, Any]) -> None:
    sys.stdout.write(
        f"{folder}: {_number(lines.tokens)} tokens of a vocabulary of {index['vocab']}, "
        f"fingerprint {index['fingerprint']}\n"
    )


def _say_channels(config: RunConfig, index: dict[str, Any]) -> None:
    trained = config.train.steps * config.train.global_batch * config.train.seq_len
    for name, one in channels_of_index(config, index, trained).items():
        sys.stdout.write(
            f"  {name}: {one.documents:,} documents, {_number(one.tokens)} tokens, {_number(one.held)} held out; "
            f"{one.epochs:.3g} epochs in {config.train.steps} steps\n"
        )


class _Lines:
    """One line per finished part, at most one a second: parts, tokens, rate, and the time that is left."""

    def __init__(self) -> None:
        self.tokens = 0
        self._began = time.monotonic()
        self._shown = 0.0
        self._before = 0

    def __call__(self, progress: PrepareProgress) -> None:
        self.tokens = progress.tokens
        now = time.monotonic()
        if progress.reused == progress.done:  # the clock starts with the first part that is read
            self._before, self._began = progress.tokens, now
        if progress.done < progress.parts and now - self._shown < 1.0:
            return
        self._shown = now
        rate = (progress.tokens - self._before) / max(now - self._began, 1e-9)
        worked = progress.done - progress.reused
        left = (progress.parts - progress.done) * (now - self._began) / worked if worked else 0.0
        sys.stderr.write(
            f"part {progress.done} of {progress.parts} ({progress.reused} reused): {_number(progress.tokens)} tokens, "
            f"{_number(rate)} tokens/s, {left:.0f} s left\n"
        )


def _number(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"
