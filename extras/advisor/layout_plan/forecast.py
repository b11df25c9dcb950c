"""Bytes and time of one candidate: what its fullest rank needs, and a step between the bounds of a roofline. Pure.

Lower bound: the longer of computing and moving bytes, as if one hid the other. Upper bound: their sum. The estimate adds what
computing waits for (tensor, context and expert parallelism, pipelines) and what is left of data parallelism when all that can is
hidden: nothing of it with a pipeline, where it comes before the first and after the last micro-batch. A pipeline's idle share
lengthens computing and what waits with it; the slowest rank lengthens all.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.float8.layers import float8_flops_per_token, uses_float8
from flashckpt.trainer.flops import flops_per_token, mfu, recomputed_flops_per_token
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.activations import MASTER, estimate, in_flight, itemsize
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.held import SLOTS, StateBytes, held
from flashckpt.trainer.plan.kernels import MOVED, kernel_bytes, straggling
from flashckpt.trainer.plan.wire import Traffic, rounds, traffic

RESERVED = 0.08
"""Share of a device's memory that is left to torch, NCCL and fragments."""

WAITED_FOR = ("tp", "cp", "ep", "pp")
HOST_RATE = 25e9
"""Bytes per second between a device and host memory, in one direction: PCIe 4.0 x16 without its headers."""

OUTSIDE = 0.05
"""Time of a run that is spent neither in steps nor in restarts (evaluation, data that is late, people): fitted to published runs."""

FILL_SCRATCH = 40 << 15
"""Bytes beside the parameters while weights are drawn (see `counter_normal`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the fullest rank, and when.

    Attributes:
        pp_rank: Which along "pp".
        held: Parameters, gradients, optimizer state.
        gathered, activations, moved: As `Estimate`.
        is_offloaded: Whether what is held lies in host memory.
    """

    pp_rank: int
    held: StateBytes
    gathered: int
    activations: int
    moved: int = 0
    is_offloaded: bool = False

    @property
    def start(self) -> int:
        """While first weights are drawn: what comes from the meta device is the rank's part alone."""
        return FILL_SCRATCH if self.is_offloaded else self.held.parameters + FILL_SCRATCH

    @property
    def restore(self) -> int:
        """While a snapshot is read: into parameters and optimizer state, which are there before."""
        return 0 if self.is_offloaded else self.held.parameters + self.held.optimizer

    @property
    def step(self) -> int:
        """In a step, at the end of forward."""
        state = 0 if self.is_offloaded else self.restore + self.held.gradients
        return state + self.gathered + self.activations

    @property
    def peak(self) -> int:
        """The most of the three."""
        return max(self.start, self.restore, self.step)

    def fits(self, gpu: Gpu) -> bool:
        """Return whether a device has room for the peak, and for what is reserved."""
        return self.peak <= gpu.memory * (1 - RESERVED)

    @property
    def slots(self) -> int:
        """Of the host, for the data of all snapshots."""
        return SLOTS * self.held.state

    @property
    def host(self) -> int:
        """Of the host in all: snapshots, activations that are moved there, and with `parallel.offload` the state."""
        return self.slots + self.moved + self.state_on_host

    @property
    def state_on_host(self) -> int:
        """Of the host, for parameters, gradients and optimizer state with `parallel.offload`."""
        return self.held.state + self.held.gradients if self.is_offloaded else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute_s: Of the busiest rank, without idling: products, and kernels that are none.
        products_s: The first; peak_s: at the full peak.
        optimizer_s: Reading and writing the state once.
        traffic: By dimension; host_s: to and from host memory, with offload.
        exposed_s: Of data parallelism and of offload, what computing does not hide.
        bubble: Idle share.
        straggling: What the slowest rank lengthens the rest by, 1 or more.
        lower_s, upper_s, estimate_s: Of the whole step.
        flops: Model FLOPs per token.
        hardware_flops: With what is computed again; float8_flops: of these, per token, products in float8.
    """

    compute_s: float
    products_s: float
    peak_s: float
    optimizer_s: float
    traffic: tuple[Traffic, ...]
    host_s: float
    exposed_s: float
    bubble: float
    straggling: float
    lower_s: float
    upper_s: float
    estimate_s: float
    flops: float
    hardware_flops: float
    float8_flops: float = 0.0


def memory(config: RunConfig, layout: Layout, *, is_plain: bool = False) -> Memory:
    """Return what the fullest rank needs; arguments as `estimate`."""
    each = (memory_of(config, layout, pp_rank, is_plain=is_plain) for pp_rank in range(layout.pp))
    return max(each, key=lambda memory: memory.peak)


def memory_of(config: RunConfig, layout: Layout, pp_rank: int, shard: int = 0, *, is_plain: bool = False) -> Memory:
    """Return what a rank needs at its coordinates along "pp" and "dp_shard"."""
    one = held(config, layout, pp_rank, shard)
    guess = estimate(config, layout, pp_rank, block=one.block, rest=one.rest, whole=one.whole, is_plain=is_plain)
    return Memory(
        pp_rank=pp_rank,
        held=one,
        gathered=guess.gathered,
        activations=guess.activations,
        moved=guess.moved,
        is_offloaded=config.parallel.offload == "state",
    )


def is_plain(config: RunConfig, layout: Layout, gpu: Gpu) -> bool:
    """Return whether the model's operators for processors are used."""
    return not gpu.device and layout.tp == 1 and itemsize(config) == MASTER and not uses_float8(config)


def float8_rate(config: RunConfig, gpu: Gpu) -> float:
    """Return the peak of products in float8; emulated ones are counted at that of bfloat16."""
    return gpu.float8_flops if gpu.float8_flops and not config.train.float8_emulate else gpu.flops


def step_time(
    config: RunConfig,
    layout: Layout,
    gpu: Gpu,
    needed: Memory,
    *,
    ranks_per_node: int,
    efficiency: float = 0.0,
) -> StepTime:
    """Return how long a step takes.

    Args:
        config: The run.
        layout: Its layout.
        gpu: What devices and links can do.
        needed: What `memory` gave.
        ranks_per_node: Ranks that share the links of a node.
        efficiency: Share of the peak that products reach; 0: the device's `efficiency`.
    """
    flops, hardware, float8 = _flops(config, layout)
    tokens = config.train.global_batch * config.train.seq_len
    peak_s = ((hardware - float8) / gpu.flops + float8 / float8_rate(config, gpu)) * tokens / layout.world
    products_s = peak_s / (efficiency or gpu.efficiency)
    compute_s = products_s + kernel_bytes(config, layout, needed.pp_rank) / (MOVED * gpu.memory_rate)
    # Each element of parameters and two moments is read and written, each of the gradients read (and cleared).
    state_rate = HOST_RATE if needed.is_offloaded else MOVED * gpu.memory_rate
    optimizer_s = (2 * needed.held.state + 2 * needed.held.gradients) / state_rate
    moved = traffic(config, layout, needed.pp_rank, needed.held, gpu=gpu, ranks_per_node=ranks_per_node)
    waits = sum(one.seconds for one in moved if one.dimension in WAITED_FOR)
    host_s = _host_bytes(config, layout, needed) / HOST_RATE
    beside = sum(one.seconds for one in moved) - waits + host_s
    exposed = _exposed(config, layout, beside, compute_s)
    idle, slowest = 1 / (1 - layout.bubble), straggling(layout.world)
    return StepTime(
        compute_s=compute_s,
        products_s=products_s,
        peak_s=peak_s,
        optimizer_s=optimizer_s,
        traffic=tuple(moved),
        host_s=host_s,
        exposed_s=exposed,
        bubble=layout.bubble,
        straggling=slowest,
        lower_s=max(compute_s * idle, waits + beside) + optimizer_s,
        upper_s=((compute_s + waits) * idle + beside) * slowest + optimizer_s,
        estimate_s=((compute_s + waits) * idle + exposed) * slowest + optimizer_s,
        flops=flops,
        hardware_flops=hardware,
        float8_flops=float8,
    )


def _flops(config: RunConfig, layout: Layout) -> tuple[float, float, float]:
    """Return FLOPs per token of the model, with what is computed again, and those of them in float8."""
    model, seq_len = config.model, config.train.seq_len
    flops = flops_per_token(model, seq_len)
    again = recomputed_flops_per_token(model, seq_len, config.parallel.activation_checkpoint)
    return flops, flops + again, float8_flops_per_token(config, layout.tp)


def _host_bytes(config: RunConfig, layout: Layout, needed: Memory) -> float:
    """Return the bytes to and from host memory in a step: activations there and back, weights for each gather, gradients."""
    moved = 2 * needed.moved * layout.micro_batches / in_flight(layout, needed.pp_rank)
    if needed.is_offloaded:
        gathers, scatters = rounds(config, layout)
        moved += gathers * needed.held.parameters + scatters * needed.held.gradients
    return moved


def _exposed(config: RunConfig, layout: Layout, beside: float, compute_s: float) -> float:
    """Return the seconds of data parallelism that computing does not hide: at least the first block's gather or the last one's scatter."""
    if layout.pp > 1:
        return beside
    blocks = len(layout.stage_layers[0])
    if config.parallel.data_parallel == "fsdp" and config.parallel.zero in (-1, 3):  # for each micro-batch
        return max(beside - compute_s, beside / (blocks * layout.micro_batches))
    last_backward = compute_s / layout.micro_batches * 2 / 3
    return max(beside - last_backward, beside / blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a step time comes to."""

    tokens_per_s: float
    mfu: float
    hfu: float


def speed(config: RunConfig, time: StepTime, gpu: Gpu, world: int, seconds: float) -> Speed:
    """Return tokens per second and shares of the peak, at so many seconds per step."""
    tokens_per_s = config.train.global_batch * config.train.seq_len / seconds
    return Speed(
        tokens_per_s=tokens_per_s,
        mfu=mfu(tokens_per_s, time.flops, gpu.flops, world),
        hfu=mfu(tokens_per_s, time.hardware_flops, gpu.flops, world),
    )
