"""Bytes and time of one candidate: what its fullest rank needs, and a step between the bounds of a roofline. Pure.

Lower bound: the longer of computing and moving bytes, as if one hid the other. Upper bound: their sum. The estimate hides
what runs beside computing (gathering and scattering over data-parallel ranks) and adds what computing waits for (tensor and
expert parallelism). A pipeline's idle share lengthens computing and what waits with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.flops import flops_per_token, mfu, recomputed_flops_per_token
from flashckpt.trainer.parallel.float8_layers import float8_flops_per_token, uses_float8
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.activations import MASTER, estimate, itemsize
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.held import SLOTS, StateBytes, held
from flashckpt.trainer.plan.wire import Traffic, traffic

EFFICIENCY = 0.75
"""Share of their peak that devices reach in the products of large layers; assumed, until `--measure` finds it."""

RESERVED = 0.08
"""Share of a device's memory that is left to torch, NCCL and fragments."""

WAITED_FOR = ("tp", "cp", "ep")
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
        compute_s: Products of the busiest rank, without idling; peak_s: at the full peak.
        optimizer_s: Reading and writing the state once.
        traffic: By dimension.
        bubble: Idle share.
        lower_s, upper_s, estimate_s: Of the whole step.
        flops: Model FLOPs per token.
        hardware_flops: With what is computed again; float8_flops: of these, per token, products in float8.
    """

    compute_s: float
    peak_s: float
    optimizer_s: float
    traffic: tuple[Traffic, ...]
    bubble: float
    lower_s: float
    upper_s: float
    estimate_s: float
    flops: float
    hardware_flops: float
    float8_flops: float = 0.0


def memory(config: RunConfig, layout: Layout, *, is_plain: bool = False) -> Memory:
    """Return what the fullest rank needs; arguments as `estimate`."""
    found = []
    for pp_rank in range(layout.pp):
        one = held(config, layout, pp_rank)
        guess = estimate(config, layout, pp_rank, block=one.block, rest=one.rest, whole=one.whole, is_plain=is_plain)
        found.append(
            Memory(
                pp_rank=pp_rank,
                held=one,
                gathered=guess.gathered,
                activations=guess.activations,
                moved=guess.moved,
                is_offloaded=config.parallel.offload == "state",
            )
        )
    return max(found, key=lambda memory: memory.peak)


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
    efficiency: float = EFFICIENCY,
) -> StepTime:
    """Return how long a step takes.

    Args:
        config: The run.
        layout: Its layout.
        gpu: What devices and links can do.
        needed: What `memory` gave.
        ranks_per_node: Ranks that share the links of a node.
        efficiency: Share of the peak that products reach.
    """
    flops = flops_per_token(config.model, config.train.seq_len)
    hardware = flops + recomputed_flops_per_token(
        config.model, config.train.seq_len, config.parallel.activation_checkpoint
    )
    float8 = float8_flops_per_token(config, layout.tp)
    tokens = config.train.global_batch * config.train.seq_len
    peak_s = ((hardware - float8) / gpu.flops + float8 / float8_rate(config, gpu)) * tokens / layout.world
    compute_s = peak_s / efficiency
    # Each element of parameters and two moments is read and written, each of the gradients read (and cleared).
    optimizer_s = (2 * needed.held.state + 2 * needed.held.gradients) / gpu.memory_rate
    moved = traffic(config, layout, needed.pp_rank, needed.held, gpu=gpu, ranks_per_node=ranks_per_node)
    waits = sum(one.seconds for one in moved if one.dimension in WAITED_FOR)
    beside = sum(one.seconds for one in moved) - waits
    idle = 1 / (1 - layout.bubble)
    busy = compute_s * idle
    return StepTime(
        compute_s=compute_s,
        peak_s=peak_s,
        optimizer_s=optimizer_s,
        traffic=tuple(moved),
        bubble=layout.bubble,
        lower_s=max(busy, waits + beside) + optimizer_s,
        upper_s=(compute_s + waits) * idle + beside + optimizer_s,
        estimate_s=max((compute_s + waits) * idle, beside) + optimizer_s,
        flops=flops,
        hardware_flops=hardware,
        float8_flops=float8,
    )


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
