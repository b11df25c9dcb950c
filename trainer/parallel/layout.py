"""Arithmetic of the parallel layout: degrees, stages, and every way in which they can fail to fit.

Pure and torch-free: a layout that cannot work is refused before torch is imported.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt import entry_points
from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.parallel import switches
from flashckpt.trainer.parallel.batch_split import Rounds, split_batch
from flashckpt.trainer.parallel.groups import check_groups
from flashckpt.trainer.parallel.switches import check_cut_experts, check_switches, check_zero, replicas_of

SINGLE_STAGE = ("1F1B", "GPipe")
MULTI_STAGE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = switches.SPLIT_BACKWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout that fits.

    Attributes:
        dp_replicate, dp_shard: Ranks over which state is repeated and cut. One of them has `cp` in it, whose ranks are to
            parameters what data-parallel ranks are: cp x dp_shard, with DDP or zero = 0 cp x dp_replicate.
        cp: Ranks that share each row.
        ep: Ranks next to each other along `dp_shard` that share the experts; all of them without `parallel.ep`, and without experts.
        stage_layers: Entry i: layers of stage i.
        micro_batches: Micro-batches of a step, the same on each data-parallel rank.
        local_batch: Rows of a step on each data-parallel rank. What they are more than its samples is padding.
        global_batch: Samples of a step over all data-parallel ranks.
        sync_every: As `parallel.sync_every`: with 1 or more, each index along dp_replicate is a group that trains apart.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    schedule: str
    stages_per_rank: int
    stage_layers: tuple[tuple[int, ...], ...]
    micro_batches: int
    local_batch: int
    global_batch: int
    cp: int = 1
    ep: int = 1
    sync_every: int = 0

    @property
    def edp(self) -> int:
        """Number of ranks along `dp_shard` that have the same experts, of each of which they hold a part; 1: none is gathered."""
        return self.dp_shard // self.ep

    @property
    def mesh_names(self) -> tuple[str, str, str, str]:
        """Names of the mesh dimensions. Groups that train apart hold different state, and a snapshot knows that by this name."""
        return ("pp", "diloco" if self.sync_every else "dp_replicate", "dp_shard", "tp")

    @property
    def groups(self) -> int:
        """Number of groups whose parameters differ between two synchronisations; 1: all ranks have the same."""
        return self.dp_replicate if self.sync_every else 1

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks: each reads its own samples."""
        return self.dp_replicate * self.dp_shard // self.cp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return len(self.stage_layers)

    @property
    def padding(self) -> int:
        """Rows of a step, over all data-parallel ranks, that hold no sample: they weigh nothing."""
        return self.local_batch * self.dp - self.global_batch

    @property
    def divisor(self) -> float:
        """What makes the sum of the means of all micro-batches, averaged over replicas, the mean over the samples.

        `micro_batches` where the batch divides; less where rows are padding.
        """
        return self.global_batch * self.micro_batches / (self.local_batch * self.dp)

    @property
    def bubble(self) -> float:
        """Idle share of a step, by the schedule."""
        return switches.bubble(self.schedule, self.pp, self.stages_per_rank, self.micro_batches)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, in the order the schedule wants them."""
        if self.schedule in V_SHAPED and self.pp > 1:
            return (pp_rank, self.stages - 1 - pp_rank)
        return tuple(pp_rank + i * self.pp for i in range(self.stages_per_rank))

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        return next(r for r in range(self.pp) if stage in self.stages_of(r))

    def describe(self) -> str:
        """Return one line for people."""
        dp = f"DP {self.dp_shard}" if self.dp_replicate == 1 else f"DP {self.dp_replicate}x{self.dp_shard} (HSDP)"
        if self.sync_every:
            dp = f"{self.groups} group{'s' * (self.groups > 1)} of DP {self.dp_shard}, synchronised every {self.sync_every} steps"
        dp += f" with CP {self.cp} in it" if self.cp > 1 else ""
        dp += f", each expert on one of {self.ep} and cut over {self.edp}" if self.edp > 1 else ""
        pp = f"PP {self.pp}" + (f" ({self.schedule}, {self.stages} stages)" if self.pp > 1 else "")
        bubble = f", bubble {self.bubble:.1%}" if self.pp > 1 else ""
        padding = f" ({self.padding} of {self.local_batch * self.dp} rows are padding)" if self.padding else ""
        return f"{dp} x TP {self.tp} x {pp}, {self.micro_batches} micro-batches{padding}{bubble}"


def resolve_layout(config: RunConfig, world: int) -> Layout:
    """Return the layout of a run on `world` ranks.

    Raises:
        LayoutError: something does not fit; the message names both numbers.
    """
    degrees = _degrees(config, world)
    _check_model(config, degrees["tp"])
    _check_context(config)
    ep = _expert_ranks(config, degrees)
    schedule = _schedule_name(config.parallel.schedule)
    per_rank = _stages_per_rank(config, schedule, degrees["pp"])
    stages = per_rank * degrees["pp"]
    rounds = Rounds(schedule=schedule, pp=degrees["pp"], stages=stages)
    replicas = degrees["dp_replicate"] * degrees["dp_shard"] // degrees["cp"]
    micro_batches, rows = split_batch(config.train.global_batch, replicas, config.train.micro_batch, rounds)
    layout = Layout(
        **degrees,
        ep=ep,
        schedule=schedule,
        stages_per_rank=per_rank,
        stage_layers=stage_layers(config.model.layers, stages, config.parallel.layers_per_stage),
        micro_batches=micro_batches,
        local_batch=micro_batches * rows,
        global_batch=config.train.global_batch,
        sync_every=config.parallel.sync_every,
    )
    _check_ddp(config, layout)
    _check_compile(config, layout)
    check_cut_experts(config, layout.ep, layout.dp_shard)
    _check_router_losses(config, layout)
    check_switches(config, layout.pp, layout.dp_shard, layout.tp)
    check_groups(config, layout.padding)
    if config.train.float8 != "off":
        tokens = layout.local_batch // layout.micro_batches * config.train.seq_len // layout.cp
        entry_points.load(entry_points.EXTRAS, "float8").check_float8(config, tp=layout.tp, tokens=tokens)
    return layout


def stage_layers(layers: int, stages: int, override: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the global layer numbers of each stage.

    Layers that are left over go to the middle stages first: the first stage also has the embedding
    and the last the head, which count about as one layer each.

    Raises:
        LayoutError: fewer layers than stages, or an override that does not add up.
    """
    if layers < stages:
        raise LayoutError(
            "there are fewer layers than pipeline stages",
            found=f"model.layers = {layers}, {stages} stages",
            expected=f"at least {stages} layers",
            remedy="lower parallel.pp or parallel.stages_per_rank, or add layers",
        )
    counts = list(override) or [layers // stages] * stages
    if override and (len(counts) != stages or sum(counts) != layers or min(counts) < 1):
        raise LayoutError(
            "parallel.layers_per_stage does not fit",
            found=f"{counts}: {len(counts)} stages, {sum(counts)} layers",
            expected=f"{stages} numbers of at least 1 that add up to {layers}",
        )
    order = [*range(1, stages - 1), 0, stages - 1]
    for i in range(layers - sum(counts)):
        counts[order[i % stages]] += 1
    starts = [sum(counts[:i]) for i in range(stages)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def _degrees(config: RunConfig, world: int) -> dict[str, int]:
    p = config.parallel
    degrees = {"pp": p.pp, "dp_replicate": p.dp_replicate, "dp_shard": p.dp_shard, "cp": p.cp, "tp": p.tp}
    for name, degree in degrees.items():
        if degree < 1 and not (name == "dp_shard" and degree == -1):
            raise LayoutError(f"parallel.{name} is not a degree", found=str(degree), expected="1 or more")
    check_zero(p)
    degrees["dp_replicate"] = replicas_of(p, world)
    if p.dp_shard == -1:
        degrees["dp_shard"] = max(1, world // (p.pp * degrees["dp_replicate"] * p.cp * p.tp))
    product = math.prod(degrees.values())
    if product != world:
        raise LayoutError(
            "the layout does not fill the world",
            found=f"{world} ranks, pp {p.pp} x dp_replicate {p.dp_replicate} x dp_shard {p.dp_shard} x cp {p.cp} x tp {p.tp}",
            expected=f"{product} ranks, or degrees whose product is {world}",
            state="Nothing was started.",
            remedy=f"start with --nproc-per-node {product}, or change [parallel]; dp_shard = -1 fills up",
        )
    if p.data_parallel == "ddp" and (p.tp > 1 or degrees["dp_shard"] > 1):
        raise LayoutError(
            "data_parallel = ddp goes with tp = 1 and dp_shard = 1 only",
            found=f"tp = {p.tp}, dp_shard = {degrees['dp_shard']}",
            expected="tp = 1, dp_shard = 1, dp_replicate = N",
            remedy="use data_parallel = fsdp: DDP over tensor parallel runs, but with wrong gradient norms",
        )
    degrees["dp_replicate" if p.data_parallel == "ddp" or p.zero == 0 else "dp_shard"] *= p.cp
    return degrees


def _check_context(config: RunConfig) -> None:
    cp, tp = config.parallel.cp, config.parallel.tp
    _divides("train.seq_len", config.train.seq_len, "two chunks for each rank of parallel.cp", 2 * cp if cp > 1 else 1)
    if config.parallel.sequence_parallel:
        _divides("train.seq_len (sequence parallel)", config.train.seq_len, "parallel.cp x parallel.tp", cp * tp)


def _check_model(config: RunConfig, tp: int) -> None:
    model, train = config.model, config.train
    divided = {
        "model.heads": model.heads,
        "model.ffn": model.ffn,
        "model.vocab": model.vocab,
    }
    if model.shared_ffn:
        divided["model.shared_ffn"] = model.shared_ffn
    if config.parallel.sequence_parallel:
        divided["train.seq_len (sequence parallel)"] = train.seq_len
    for name, value in divided.items():
        _divides(name, value, "parallel.tp", tp)
    if not model.head_dim:
        _divides("model.dim", model.dim, "model.heads", model.heads)
    _divides("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    if model.head_size % 2:
        raise LayoutError("the head dimension is odd", found=f"{model.head_size}", expected="even (rotary pairs)")


def expert_dimension(experts: int, ranks: int) -> int:
    """Return the dimension of experts' weights that is cut over the ranks with the same experts.

    0, whole experts, where those divide over all `ranks` along "dp_shard"; else 1, rows of each.
    """
    return 0 if experts % ranks == 0 else 1


def _expert_ranks(config: RunConfig, degrees: dict[str, int]) -> int:
    """Return how many ranks share the experts."""
    ep, ranks = config.parallel.ep, degrees["dp_shard"]
    if not config.model.experts:
        return ranks
    _divides(
        "parallel.dp_shard x parallel.cp" if config.parallel.cp > 1 else "parallel.dp_shard",
        ranks,
        "parallel.ep",
        ep or ranks,
    )
    _check_experts(config, ep or ranks, degrees)
    return ep or ranks


def _check_experts(config: RunConfig, ep: int, degrees: dict[str, int]) -> None:
    model, same = config.model, degrees["dp_shard"] // ep
    _divides("model.experts", model.experts, "parallel.ep" if config.parallel.ep else "parallel.dp_shard", ep)
    if (
        expert_dimension(model.experts, degrees["dp_shard"]) and same > 1
    ):  # torch cuts other dimensions than the first evenly
        each = "the ranks with the same experts (dp_shard / ep)"
        _divides("model.dim", model.dim, each, same)
        _divides("model.ffn", model.ffn, f"parallel.tp x {each}", degrees["tp"] * same)
    if not 1 <= model.experts_per_token <= model.experts:
        raise LayoutError(
            "model.experts_per_token does not fit", found=str(model.experts_per_token), expected=f"1 to {model.experts}"
        )
    if config.parallel.data_parallel == "ddp":
        raise LayoutError(
            "experts go with fsdp",
            found=f"data_parallel = {config.parallel.data_parallel}",
            expected="data_parallel = fsdp",
            remedy="set parallel.data_parallel = fsdp; dp_shard = 1 with dp_replicate keeps all experts on each rank",
        )


def _check_ddp(config: RunConfig, layout: Layout) -> None:
    # Gradients of weights come in the second half of such a backward, which DDP does not see.
    if config.parallel.data_parallel == "ddp" and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        raise LayoutError(
            f"data_parallel = ddp does not go with {layout.schedule}",
            found=f"parallel.data_parallel = ddp, parallel.schedule = {layout.schedule}",
            expected="a schedule whose backward is one pass: 1F1B, GPipe, Interleaved1F1B or LoopedBFS",
            state="Nothing was started.",
            remedy="use data_parallel = fsdp: DDP would not average the gradients of these schedules",
        )


def _check_router_losses(config: RunConfig, layout: Layout) -> None:
    # Padding passes through the routers, where nothing tells it from samples.
    model = config.model
    if layout.padding and (model.router_aux_loss or model.router_z_loss or model.router_bias_rate):
        raise LayoutError(
            "router losses are incompatible with a padded batch: rows without a sample would count as tokens",
            found=f"train.global_batch = {layout.global_batch}, {layout.local_batch * layout.dp} rows in this layout",
            expected=f"a global batch that fills the rows, such as {layout.local_batch * layout.dp}",
            state="Nothing was started.",
            remedy="change train.global_batch, train.micro_batch or the layout, or omit model.router_aux_loss, router_z_loss and router_bias_rate",
        )


def _schedule_name(name: str) -> str:
    known = {known.lower(): known for known in (*SINGLE_STAGE, *MULTI_STAGE)}
    if name.lower() not in known:
        nearest = difflib.get_close_matches(name.lower(), known, n=1)
        raise LayoutError(
            f"unknown pipeline schedule {name!r}",
            found=name,
            expected=f"{known[nearest[0]]} (the nearest name)" if nearest else " | ".join(known.values()),
            remedy=f"choose one of {', '.join(known.values())}",
        )
    return known[name.lower()]


def _stages_per_rank(config: RunConfig, schedule: str, pp: int) -> int:
    wanted = config.parallel.stages_per_rank
    if pp == 1:
        return 1
    default = 1 if schedule in SINGLE_STAGE else 2
    fixed = schedule in SINGLE_STAGE or schedule in V_SHAPED
    if wanted < 0 or (fixed and wanted not in (0, default)):
        raise LayoutError(
            f"parallel.stages_per_rank does not fit schedule {schedule}",
            found=str(wanted),
            expected=f"{default} (or 0: choose)",
        )
    return wanted or default


def _check_compile(config: RunConfig, layout: Layout) -> None:
    if config.train.compile and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        raise LayoutError(
            "train.compile does not go with this layout: compiled blocks would have other gradients",
            found=f"parallel.schedule = {layout.schedule}, whose backward has two halves",
            expected="a pipeline whose backward is whole (1F1B, GPipe)",
            state="Nothing was started.",
            remedy="omit train.compile, or choose another schedule",
        )


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise LayoutError(
            f"{name} is not divisible by {by_name}",
            found=f"{name} = {value}, {by_name} = {by}",
            expected=f"{name} a multiple of {by}",
            state="Nothing was started.",
        )


def needs_fsdp(config: RunConfig, layout: Layout) -> bool:
    """Return whether there is something to gather or to cast: a single data-parallel rank would only copy weights and gradients."""
    is_half = config.train.precision in ("bfloat16", "float16")
    ranks = layout.dp * layout.cp // layout.groups
    return ranks > 1 or is_half or config.model.experts > 0 or config.parallel.offload != "none"
