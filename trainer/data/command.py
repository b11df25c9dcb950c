"""`python -m flashckpt.trainer data prepare | duplicates --config FILE`. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.config.command_line import take_flag
from flashckpt.trainer.data.channels import channels_of_index
from flashckpt.trainer.data.duplicates import duplicate_lines, find_duplicates
from flashckpt.trainer.data.prepare import PrepareProgress, prepare
from flashckpt.trainer.data.prepared import not_held_out
from flashckpt.trainer.data.sets import prepare_sets, sets_of

INTERRUPTED = 130


def data(words: Sequence[str], path: str | None) -> int:
    """Run `data WORDS --config PATH` and return the exit code; errors are raised."""
    if list(words[:1]) not in (["prepare"], ["duplicates"]):
        raise ConfigError(
            "unknown command",
            found=" ".join(["data", *words[:1]]),
            expected="data prepare --config FILE, or data duplicates",
        )
    rest = list(words[1:])
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
        if (of_sets := prepare_sets(config, lines)) is not None:
            _say(sets_of(config).data.folder, lines, of_sets)
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
