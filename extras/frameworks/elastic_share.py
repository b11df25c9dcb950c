"""The elastic sampler inside a loader, and whether it deals what a framework trains in one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a framework trains on this rank.

    Attributes:
        rank: Of the ranks that train on different samples.
        size: Number of them.
        accumulation: Micro-batches per optimizer step.
        place_remedy: How a sampler gets its rank.
        batch_remedy: How the global batch is set.
    """

    rank: int
    size: int
    accumulation: int
    place_remedy: str
    batch_remedy: str


def elastic_in(source: Any) -> Any:
    """Return the elastic sampler that a source is or has; None where there is none."""
    todo, seen = [source], 0
    while todo and seen < 8:  # accelerate nests batch samplers two deep
        part, seen = todo.pop(0), seen + 1
        if isinstance(part, (ElasticSampler, ElasticBatchSampler)):
            return part
        todo += [inner for name in ("batch_sampler", "sampler") if (inner := getattr(part, name, None)) is not None]
    return None


def check_share(elastic: Any, source: Any, share: Share) -> None:
    """Refuse a sampler that deals this rank another part than its own, or other steps than the framework makes.

    Raises:
        ConfigError: It does.
    """
    sampler = elastic if isinstance(elastic, ElasticSampler) else elastic.sampler
    if (sampler.dp_rank, sampler.dp_size) != (share.rank, share.size):
        raise ConfigError(
            "the ElasticSampler deals the samples of another rank",
            found=f"dp_rank {sampler.dp_rank} of dp_size {sampler.dp_size}",
            expected=f"dp_rank {share.rank} of dp_size {share.size}",
            remedy=share.place_remedy,
        )
    if sampler.cursor.tail == "short" and share.accumulation > 1:
        raise ConfigError(
            "the last optimizer step of an epoch would have fewer batches, which no accumulation sees",
            found=f"tail='short' and {share.accumulation} gradient accumulation steps",
            expected="an ElasticSampler with another tail",
            remedy="leave tail out: the last step of an epoch then takes the first samples of the next one",
        )
    micro, batch = getattr(source, "batch_size", None), sampler.global_batch_size
    if batch is None or micro is None:
        return
    if batch != micro * share.size * share.accumulation:
        raise ConfigError(
            "the global batch of the ElasticSampler is not what an optimizer step trains",
            found=f"global_batch_size={batch}; {share.size} ranks with micro-batches of {micro} and "
            f"{share.accumulation} gradient accumulation steps",
            expected="global batch = micro-batch * accumulation * ranks",
            remedy=share.batch_remedy,
        )


__all__ = ["Share", "check_share", "elastic_in"]
