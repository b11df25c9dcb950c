"""Switches of [parallel] and [train] that cannot work together, refused with the reason. Pure and torch-free."""

from __future__ import annotations

from dataclasses import replace

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.parallel import ParallelConfig, Recompute
from flashckpt.trainer.model.recompute import parse_recompute

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules whose backward has two halves, of which the second fills gaps."""
_SPLIT = frozenset(name.lower() for name in SPLIT_BACKWARD)


def bubble(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the share of a step, 0 to 1, in which a rank of a pipeline has nothing to do; 0 without a pipeline.

    Exact for stages that take equally long; of InterleavedZeroBubble with fewer micro-batches than ranks at most that.

    Args:
        schedule: A name that `resolve_layout` knows.
        pp: Ranks.
        stages_per_rank: Stages that each holds.
        micro_batches: Of each data-parallel rank and step.
    """
    idle = idle_forwards(schedule, pp, stages_per_rank, micro_batches)
    return idle / (3 * stages_per_rank * micro_batches + idle)


def idle_forwards(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> int:
    """Return how long a rank idles in a step, in forwards of a stage; arguments as `bubble`."""
    ends = pp - 1
    if schedule == "ZBVZeroBubble":
        return max(ends, 4 * ends - 2 * (micro_batches - 1))
    each = ends if schedule in SPLIT_BACKWARD else 3 * ends
    missing = max(0, pp - micro_batches)  # of a round: a rank then waits between the rounds of its stages
    return each + 3 * (stages_per_rank - 1) * missing


def recompute_of(parallel: ParallelConfig) -> Recompute:
    """Return what a run computes again in backward.

    Raises:
        LayoutError: the mode is not known.
    """
    return parse_recompute(parallel.activation_checkpoint)


def replicas_of(parallel: ParallelConfig, world: int) -> int:
    """Return `dp_replicate`; under zero = 0, which cuts nothing, replicas fill up the world where no degree is given."""
    if parallel.zero == 0 and parallel.dp_shard == -1 and parallel.dp_replicate == 1:
        return max(1, world // (parallel.pp * parallel.cp * parallel.tp))
    return parallel.dp_replicate


def check_zero(parallel: ParallelConfig) -> None:
    """Refuse a `zero` that the other settings of data parallelism contradict.

    Raises:
        LayoutError: they do.
    """
    zero = parallel.zero
    if zero > 0 and parallel.data_parallel == "ddp":
        raise _refused(
            f"parallel.zero = {zero} does not go with data_parallel = ddp: DDP keeps everything on each rank",
            found=f"parallel.zero = {zero}, parallel.data_parallel = ddp",
            expected="zero = 0 with ddp, or data_parallel = fsdp",
        )
    if zero == 0 and parallel.dp_shard > 1:
        raise _refused(
            "parallel.zero = 0 cuts nothing, and dp_shard asks for it",
            found=f"parallel.zero = 0, parallel.dp_shard = {parallel.dp_shard}",
            expected="dp_shard = 1, and as many dp_replicate",
        )
    if zero in (2, 3) and parallel.pp > 1:
        raise _refused(
            f"parallel.zero = {zero} does not go with a pipeline: torch keeps whole gradients and parameters of a stage "
            "until its last micro-batch",
            found=f"parallel.zero = {zero}, parallel.pp = {parallel.pp}",
            expected="zero = 1 (what it is with a pipeline), or pp = 1",
        )


def check_switches(config: RunConfig, pp: int, dp_shard: int, tp: int) -> None:
    """Refuse pairs of switches that cannot work, for the degrees of a layout.

    Raises:
        LayoutError: a pair cannot work, or a switch would have no effect; the message says why.
    """
    parallel = config.parallel
    if parallel.zero > 0 and dp_shard == 1:
        raise _refused(
            f"parallel.zero = {parallel.zero} would have no effect: there is nothing to cut over",
            found=f"parallel.zero = {parallel.zero}, parallel.dp_shard = 1",
            expected="dp_shard of 2 or more, or zero = 0",
        )
    _check_kept(config, recompute_of(parallel))
    _check_context(config)
    _check_offload(config, pp)
    if config.train.loss_chunk and tp > 1:
        raise _refused(
            "train.loss_chunk does not go with tensor parallelism: the ranks of one hold different columns of the logits",
            found=f"train.loss_chunk = {config.train.loss_chunk}, parallel.tp = {tp}",
            expected="parallel.loss_parallel = true, which never gathers logits, or tp = 1",
        )
    if pp > 1 and parallel.schedule.lower() in _SPLIT and recompute_of(parallel).mode == "selective":
        raise _refused(
            f"activation_checkpoint = selective does not go with {parallel.schedule}: it goes backward in two halves, and "
            "what is kept by operator can be used once",
            found=f'parallel.activation_checkpoint = "selective", parallel.schedule = "{parallel.schedule}"',
            expected="another mode, or a schedule whose backward is one pass",
        )
    if config.train.compile and recompute_of(parallel).mode == "selective":
        raise _refused(
            "train.compile does not go with activation_checkpoint = selective: the compiler chooses what is kept",
            found='train.compile = true, parallel.activation_checkpoint = "selective"',
            expected="one of the two",
        )


def _check_kept(config: RunConfig, recompute: Recompute) -> None:
    parallel = config.parallel
    if parallel.activation_offload and recompute.mode not in ("none", "ffn"):
        raise _refused(
            f"activation_offload does not go with activation_checkpoint = {parallel.activation_checkpoint}: "
            "what that keeps is not among what autograd saves, so nothing would be moved",
            found=f'parallel.activation_offload = true, activation_checkpoint = "{parallel.activation_checkpoint}"',
            expected='activation_checkpoint = "none" or "ffn"',
        )
    if parallel.activation_offload and config.train.compile:
        raise _refused(
            "activation_offload does not go with train.compile: compiled blocks save through their own graphs",
            found="parallel.activation_offload = true, train.compile = true",
            expected="one of the two",
        )


def _check_context(config: RunConfig) -> None:
    if config.parallel.cp_exchange == "ring" and config.train.attention == "flex":
        raise _refused(
            "train.attention = flex does not go with parallel.cp_exchange = ring: its backward is for the keys of one round, "
            "without the sums of the others",
            found='train.attention = "flex", parallel.cp_exchange = "ring"',
            expected='attention = "sdpa", or cp_exchange = "gather"',
        )


def check_cut_experts(config: RunConfig, ep: int, dp_shard: int) -> None:
    """Refuse what does not go with experts that FSDP gathers in the middle of a block, as it does with fewer than all ranks for them.

    Raises:
        LayoutError: something does not; the message says why.
    """
    reasons = {
        "train.compile = true": (config.train.compile, "they would be inside of what is compiled, which was not tried"),
        'parallel.activation_checkpoint = "selective"': (
            recompute_of(config.parallel).mode == "selective",
            "operators are counted, and in backward experts are not always gathered as often as in forward",
        ),
    }
    for setting, (does_apply, reason) in reasons.items():
        if does_apply and ep < dp_shard:
            raise _refused(
                f"{setting} does not go with experts that are cut further: {reason}",
                found=f"{setting}, parallel.ep = {ep} of {dp_shard} ranks",
                expected="parallel.ep omitted, or a run without the other",
            )


def _check_offload(config: RunConfig, pp: int) -> None:
    parallel, model = config.parallel, config.model
    if parallel.offload == "none":
        return
    reason = ""
    if parallel.data_parallel == "ddp":
        reason = "data_parallel = ddp: DDP reduces gradients where they are computed"
    elif model.experts:
        reason = f"model.experts = {model.experts}: experts are outside of FSDP and stay on the device"
    elif model.tied_embeddings and pp > 1:
        reason = "model.tied_embeddings with parallel.pp > 1: the two ends exchange gradients from the device"
    if reason:
        raise _refused(
            f"parallel.offload = {parallel.offload} does not go with this run",
            found=reason,
            expected='parallel.offload = "none", or a run without it',
        )


def _refused(problem: str, *, found: str, expected: str) -> LayoutError:
    return LayoutError(
        problem, found=found, expected=expected, state="Nothing was started.", remedy="change one of the two settings"
    )


def on_device(config: RunConfig, device: str) -> RunConfig:
    """Return the run with what "auto" is on a type of device: its precision, and its attention."""
    train = config.train
    if train.precision == "auto":
        train = replace(train, precision="float32" if device == "cpu" else "bfloat16")
    if train.attention == "auto":
        is_flex = device == "cuda" and keeps_scores(config) and config.parallel.cp_exchange == "gather"
        train = replace(train, attention="flex" if is_flex else "sdpa")
    return replace(config, train=train)


def keeps_scores(config: RunConfig) -> bool:
    """Return whether torch's attention keeps all scores on a GPU: heads are grouped, and there is a mask, which no kernel has."""
    is_masked = bool(config.model.window) or config.parallel.cp > 1 or masks_documents(config)
    return is_masked and config.model.heads != config.model.kv_heads


def masks_documents(config: RunConfig) -> bool:
    """Return whether a token sees its own document alone."""
    return bool(config.data.sources) and config.data.document_mask


def host_memory_switches(parallel: ParallelConfig) -> str:
    """Return those that move something to host memory, for people."""
    names = {"parallel.offload": parallel.offload != "none", "parallel.activation_offload": parallel.activation_offload}
    return ", ".join(name for name, is_on in names.items() if is_on)
