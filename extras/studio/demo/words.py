"""What the demo's model reads and says: its text as tokens, and a few words from the last checkpoint."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from flashckpt.errors import DataError
from flashckpt.printable import printable
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.corpus import prepare_corpus
from flashckpt.trainer.data.prepare import prepare
from flashckpt.trainer.data.prepared import check_prepared

PROMPT = "The "
TOKENS = 40


def without_library(config: RunConfig) -> list[str]:
    """Return the settings with which a run that trains a BPE reads bytes, where the tokenizers library is not installed."""
    if not config.data.bpe or importlib.util.find_spec("tokenizers") is not None:
        return []
    return ["--data.bpe", "0", "--model.vocab", "256", "--data.folder", f"{config.data.folder}-bytes"]


def prepare_text(config: RunConfig) -> str:
    """Prepare the tokens of a run, unless they are; return what they are, channel by channel.

    Raises:
        DataError, ConfigError: They cannot be prepared.
    """
    if not config.data.sources:
        index = prepare_corpus(config.data.folder, config.data.source, config.data.holdout_every)
        sets = [entry for entry in index["sets"].values() if entry["split"] == "train"]
        return ", ".join(f"{entry['channel']} {entry['tokens'] / 1e6:.2f} M bytes" for entry in sets)
    try:
        index = check_prepared(config) or prepare(config.data)
    except DataError:
        index = prepare(config.data)
    kind = f"tokens of a BPE of {index['vocab']}" if config.data.bpe else "bytes"
    counts = [sum(record["train"]["tokens"] for record in records) for records in index["sources"]]
    channels = [source.channel for source in config.data.sources]
    return ", ".join(f"{name} {count / 1e6:.2f} M {kind}" for name, count in zip(channels, counts, strict=True))


def say_words(root: Path) -> tuple[bool, str]:
    """Return whether `generate` worked on the newest checkpoint of a root, and what it printed."""
    command = [
        sys.executable, "-m", "flashckpt.trainer", "generate", str(root), PROMPT,
        "--max-tokens", str(TOKENS), "--temperature", "0.6", "--seed", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    text = done.stdout if done.returncode == 0 else done.stderr
    return done.returncode == 0, printable(" ".join(text.split()))
