"""The sampler's errors: each function builds one, which the caller raises."""

from __future__ import annotations

from flashckpt.errors import ConfigError, LayoutError, SamplerStateError, StoreError

UNWEIGHTED = (
    "the global batch of %d samples does not divide over %d replicas, and sampler.weights was not read: a mean over rows "
    "counts padding, and samples of replicas that have fewer of them count more. Multiply the loss of each row by its weight"
)
"""A warning of a loop that takes the plain mean of a batch that does not divide."""

LEFT_OUT = (
    "the loop took %d samples since its last step, over all replicas, and commits %d. If it leaves out a batch without a "
    "step (a loss that is not finite), a restart trains its last samples once more: call sampler.commit(%d) where it does so"
)
"""A warning of a loop that took more than it commits, in one step after some that did not."""


def assumed(world: int) -> LayoutError:
    """A sampler without a place among several ranks, which nothing has confirmed."""
    return LayoutError(
        "the sampler needs its data-parallel rank",
        found=f"no dp_rank and dp_size in a world of {world} ranks",
        expected="dp_rank=, dp_size= or mesh= (the global rank is wrong where a replica has several ranks), or a "
        "Checkpointer that tracks the sampler and a model in DDP or FSDP2 over all ranks, and restore() before iterating",
        remedy="without tensor or pipeline parallelism pass num_replicas=world_size, rank=rank",
    )


def backwards(epoch: int, *, now: int, offset: int) -> SamplerStateError:
    """`set_epoch` to an epoch before the position."""
    return SamplerStateError(
        "set_epoch goes back to an epoch that is already trained",
        found=f"set_epoch({epoch})",
        expected=f"{now} or later (epoch {now}, offset {offset} is committed)",
        state="The sampler keeps its position.",
        remedy="start the loop at sampler.epoch: for epoch in range(sampler.epoch, epochs)",
    )


def too_many(samples: int, taken: int, what: str) -> SamplerStateError:
    """A commit of samples that were not handed out."""
    other = f"ElasticSampler(..., global_batch_size={taken})" if taken else "pass global_batch_size="
    return SamplerStateError(
        "more samples are committed than were handed out",
        found=f"commit of {samples} samples; {taken} {what}",
        expected="samples of one optimizer step, over all replicas and micro-batches",
        state="The sampler keeps its position.",
        remedy=f"{other}, or commit the samples that were trained, counted over all replicas",
    )


def mixed() -> SamplerStateError:
    """A batch sampler that gives samples out in another order than that in which it takes them."""
    return SamplerStateError(
        "the loader's batch sampler gives out other samples than the next ones of the sampler",
        found="a step of samples that do not follow each other in the sampler's order: pools, buckets by length, filters",
        expected="each step has the next samples, in any order within it",
        state="The sampler keeps its position. A restart would lose some of these samples and train others twice.",
        remedy="let it mix or sort the samples of one global batch alone, or bring the data set into that order beforehand",
    )


def too_few(taken: int, samples: int, *, lead: int) -> SamplerStateError:
    """Commits of less than the loop takes, one after another."""
    return SamplerStateError(
        "the loop takes more samples for each step than it commits",
        found=f"{taken} samples taken since the last step, over all replicas, and {samples} committed; "
        f"{lead} are not committed by now",
        expected="as many: those of one optimizer step, over all replicas and micro-batches",
        state="The sampler keeps its position. A restart would train again what was not committed.",
        remedy=f"ElasticSampler(..., global_batch_size={taken}), or ckpt.step(step, samples={taken}); "
        f"or call ckpt.step() after every {samples} samples",
    )


def other_step(taken: int, samples: int, *, of_epoch: bool = False) -> SamplerStateError:
    """A framework whose steps, or all those of an epoch, are not what its settings gave when training began."""
    since, line = (
        ("in an epoch", "")
        if of_epoch
        else ("since the last step", f"FlashCheckpoint(..., global_batch_size={taken}); or ")
    )
    return SamplerStateError(
        "the framework trains other samples in a step than its settings say",
        found=f"{taken} samples taken {since}, over all ranks, and {samples} counted as trained",
        expected="as many batches in a step as accumulation says when training begins, and every batch of the loader in one",
        state="The position in the data is that of the last step that was counted.",
        remedy=line + "leave accumulation and the loader as they are when training begins",
    )


def unknown_size(samples: int | None) -> SamplerStateError:
    """A commit without the number of samples of the step, or with less than one."""
    return SamplerStateError(
        "the size of the step is unknown",
        found="no samples=" if samples is None else f"samples={samples}",
        expected="the number of samples that the step trained, over all replicas",
        remedy="pass global_batch_size= to the sampler, or commit(samples)",
    )


def never_committed(position: int, *, epoch: int, offset: int, taken: int) -> SamplerStateError:
    """An iteration to the end without a commit, or with the epoch before it not yet committed."""
    return SamplerStateError(
        "the sampler was iterated to its end and never committed",
        found=f"position {position} (epoch {epoch}, offset {offset}); handed out up to position {taken}",
        expected="commit() after every optimizer step, of the samples that it trained",
        state="Nothing of the last iteration counts as trained; a restart would repeat it.",
        remedy="track the sampler and call ckpt.step(), or sampler.commit(samples), or pass auto_commit=True",
    )


def iterating(what: str, handed_out: int) -> SamplerStateError:
    """A change that a running iterator has already planned around."""
    return SamplerStateError(
        f"{what} while an iterator is running",
        found=f"an iterator that has handed out {handed_out} samples of this replica",
        expected="the call before iter()",
        state="The sampler keeps its position; nothing was changed.",
        remedy="restore before iterating over the loader; to go back on purpose, drop the loader's iterator first",
    )


def trained_already(what: str, position: int, *, committed: int) -> SamplerStateError:
    """A change of positions before the committed one."""
    return SamplerStateError(
        f"{what} that are already trained",
        found=f"from position {position}",
        expected=f"the committed position {committed} or later",
        state="Nothing was changed.",
        remedy="restore a snapshot before them first",
    )


def nothing_padded() -> ConfigError:
    """Weights of a sampler that hands out no padding."""
    return ConfigError(
        'tail="short" has no weights: its replicas have unequally many rows',
        found='tail="short"',
        expected='tail="span", "pad" or "drop"',
        remedy="weigh each sample alike, or choose another tail",
    )


def unreachable(url: str, error: BaseException, seconds: float) -> StoreError:
    """Training data that could not be reached for some time: it may be all right, so a restart can help."""
    return StoreError(
        f"{url} cannot be reached",
        found=f"{type(error).__name__}: {error}, for {seconds:.0f} s",
        expected="a storage that answers",
        state="The position in the data is that of the last step; nothing is lost.",
        remedy="check network and endpoint; start again when it answers (dlrun does so itself)",
    )
