"""What is prepared of each channel, and how often a run reads it. Pure; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashckpt.trainer.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """The text of one channel."""

    documents: int
    tokens: int
    held: int
    epochs: float


def channels_of_index(config: RunConfig, index: Mapping[str, Any] | None, tokens: float) -> dict[str, Channel]:
    """Return the channels of a run that have prepared text, by name."""
    total = sum(source.weight for source in config.data.sources)
    read: dict[str, float] = {}
    found: dict[str, list[Any]] = {}
    for source, records in zip(config.data.sources, (index or {}).get("sources", ()), strict=False):
        read[source.channel] = read.get(source.channel, 0.0) + tokens * source.weight / total
        found.setdefault(source.channel, []).extend(records)
    sums = {
        name: (
            sum(one["train"]["documents"] for one in few),
            sum(one["train"]["tokens"] for one in few),
            sum(one["held"]["tokens"] for one in few),
        )
        for name, few in found.items()
    }
    return {
        name: Channel(documents=documents, tokens=trained, held=held, epochs=read[name] / trained)
        for name, (documents, trained, held) in sums.items()
        if trained
    }
