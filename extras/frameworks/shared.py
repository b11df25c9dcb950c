"""What several integrations have in common: state that is one for all ranks, and an object that owns a Checkpointer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler


class OneForAllRanks:
    """A framework's object whose state is the same on all ranks, and is kept once.

    Args:
        thing: Has `state_dict` and `load_state_dict`.
    """

    flashckpt_replicated = True
    flashckpt_is_of_users = True

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        state: dict[str, Any] = self._thing.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it its state."""
        self._thing.load_state_dict(state_dict)


class OwnsCheckpointer:
    """An object of a training loop that has made its Checkpointer and ends it."""

    checkpointer: Checkpointer

    @property
    def should_stop(self) -> bool:
        """Whether every rank is to end after the step just done."""
        return self.checkpointer.should_stop

    def close(self) -> None:
        """Wait for the last commit, give the memory up.

        Raises:
            PersistError: As `Checkpointer.wait`; the memory is given up nevertheless.
        """
        try:
            self.checkpointer.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()


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
