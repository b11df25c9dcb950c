"""Bytes that a rank sends in a step, by dimension of the mesh, and the link that they take. Pure.

Per layer and micro-batch, in elements: tensor parallelism 8 b s h, data parallelism twice the weights (16 h^2 for the two
matrices of a feed-forward part of 4 h), a pipeline 2 b s h per stage. Of n ranks in a ring each sends (n - 1) / n of that.

Each collective also waits for a message to go round: NCCL's own figures for a ring with its simple protocol (src/graph/tuning.cc).
Links carry 0.8 of their data sheet: nccl-tests' bus bandwidth for large messages, 235 of 300 GB/s on a DGX A100, 370 of 450 on a DGX H100.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.recompute import FULL, recompute_of
from flashckpt.trainer.parallel.layout import Layout, needs_fsdp
from flashckpt.trainer.plan.activations import MASTER, gathered_elements, itemsize
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.held import StateBytes

NODE_LINK, NETWORK = "node", "network"
CARRIED = 0.8
"""Share of a link's rate that large messages reach."""

_START_S, _HOP_S = 8.4e-6, {NODE_LINK: 3.4e-6, NETWORK: 14e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one dimension of the mesh moves.

    Attributes:
        dimension: "tp", "cp", "pp", "dp_shard", "dp_replicate", "ep" (tokens, over the ranks that share the experts) or "edp"
            (weights of experts, over the ranks with the same ones). Both are in dp_shard. Parameters and experts move over the
            ranks of cp too, which one of the data-parallel dimensions has in it.
        sent: Bytes that a rank sends per step.
        link: "node" or "network".
        rate: Bytes per second of that link for one rank, in one direction, by its data sheet.
        latency_s: Seconds of the step's messages without their bytes.
    """

    dimension: str
    sent: int
    link: str
    rate: float
    latency_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long that takes."""
        return self.sent / (CARRIED * self.rate) + self.latency_s


def data_elements(weights: int) -> int:
    """Return what an all-reduce of gradients moves: twice the weights, 16 h^2 for two matrices of h x 4 h."""
    return 2 * weights


def pipeline_elements(batch: int, seq_len: int, dim: int) -> int:
    """Return what a stage hands over, 2 b s h: activations on, and their gradients back."""
    return 2 * batch * seq_len * dim


def sharded_passes(zero: int) -> float:
    """Return how often the weights pass over the wire in a step by stage of ZeRO: 2 up to stage 2, and 3 in stage 3."""
    return 3.0 if zero == 3 else 2.0


def traffic(
    config: RunConfig, layout: Layout, pp_rank: int, held: StateBytes, *, gpu: Gpu, ranks_per_node: int
) -> list[Traffic]:
    """Return what the dimensions of more than one rank move in a step."""
    sent = {
        "tp": _tensor(config, layout, pp_rank),
        "cp": _context(config, layout, pp_rank),
        "ep": _experts(config, layout, pp_rank),
        "edp": _passed(config, layout) * held.experts * _ring(layout.edp),
        "dp_shard": _shards(config, layout, held),
        "dp_replicate": _replicas(config, layout, held),
        "pp": _pipeline(config, layout),
    }
    count = messages(config, layout, pp_rank)
    return [
        _over_link(name, round(nbytes), count[name], layout, gpu=gpu, ranks_per_node=ranks_per_node)
        for name, nbytes in sent.items()
        if nbytes
    ]


def messages(config: RunConfig, layout: Layout, pp_rank: int) -> dict[str, float]:
    """Return how many collectives a rank of a pipeline takes part in per step, by dimension; FSDP's and DDP's one per block."""
    layers = [number for stage in layout.stages_of(pp_rank) for number in layout.stage_layers[stage]]
    modes = [recompute_of(config.parallel.activation_checkpoint, number) for number in layers]
    each = len(layers) * layout.micro_batches
    gathers, scatters = rounds(config, layout)
    of_weights = float(len(layers) * (gathers + scatters))
    return {
        "tp": layout.micro_batches * sum(8 + {"full": 4, "ffn": 2}.get(mode, 0) for mode in modes),
        "cp": layout.micro_batches * sum(2 + (mode == FULL) for mode in modes),
        "ep": 4.0 * each, "edp": of_weights, "dp_shard": of_weights, "dp_replicate": 2.0 * len(layers),
        "pp": 2.0 * layout.stages_per_rank * layout.micro_batches,
    }  # fmt: skip


def _over_link(name: str, sent: int, count: float, layout: Layout, *, gpu: Gpu, ranks_per_node: int) -> Traffic:
    """Ranks count tp fastest, then cp, dp_shard, dp_replicate, pp: a dimension inside a node uses its links."""
    stride, degree = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "ep": (layout.tp, layout.ep),
        "edp": (layout.tp * layout.ep, layout.edp),
        "dp_shard": (layout.tp, layout.dp_shard),
        "dp_replicate": (layout.tp * layout.dp_shard, layout.dp_replicate),
        "pp": (layout.world // layout.pp, layout.pp),
    }[name]
    ring = 2 if name == "pp" else degree
    if stride * degree <= ranks_per_node:
        latency = count * (_START_S + (ring - 1) * _HOP_S[NODE_LINK])
        return Traffic(dimension=name, sent=sent, link=NODE_LINK, rate=gpu.node_link, latency_s=latency)
    # Of a ring, only the ends of each node use the network: all adapters that its members there have, together.
    members = max(1, ranks_per_node // stride) if name != "pp" else 1
    nodes = -(-ring // members)
    latency = count * (_START_S + (ring - nodes) * _HOP_S[NODE_LINK] + (nodes - 1) * _HOP_S[NETWORK])
    rate = min(gpu.node_link, gpu.network * members)
    return Traffic(dimension=name, sent=sent, link=NETWORK, rate=rate, latency_s=latency)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _stream(config: RunConfig, layout: Layout) -> int:
    return config.train.micro_batch * config.train.seq_len // layout.cp * config.model.dim * itemsize(config)


def _tensor(config: RunConfig, layout: Layout, pp_rank: int) -> float:
    if layout.tp == 1:
        return 0.0
    one = _stream(config, layout) * _ring(layout.tp)
    passes = 0.0
    for stage in layout.stages_of(pp_rank):
        for layer in layout.stage_layers[stage]:
            again = {"full": 4, "ffn": 2}.get(recompute_of(config.parallel.activation_checkpoint, layer), 0)
            passes += 8 + again  # a forward is half of it
        passes += 2 if stage == 0 else 0  # the embedding's output, and its gradient
        passes += 4 if stage == layout.stages - 1 else 0  # the head's input, and its gradient's sum
    total = passes * one
    if layout.stages - 1 in layout.stages_of(pp_rank) and not config.parallel.loss_parallel:
        tokens = config.train.micro_batch * config.train.seq_len // layout.cp
        total += tokens * config.model.vocab * itemsize(config) * _ring(layout.tp)  # logits are gathered
    return total * layout.micro_batches


def _context(config: RunConfig, layout: Layout, pp_rank: int) -> float:
    if layout.cp == 1:
        return 0.0
    passes = 0
    for stage in layout.stages_of(pp_rank):
        for layer in layout.stage_layers[
            stage
        ]:  # gathered, and their gradients scattered; gathered again where recomputed
            passes += 2 + (recompute_of(config.parallel.activation_checkpoint, layer) == FULL)
    # In a ring keys and values go round again in backward, where all-gathered ones are kept, with gradients in float32.
    gradients = sum(len(layout.stage_layers[stage]) for stage in layout.stages_of(pp_rank)) * MASTER
    nbytes = passes * itemsize(config) + (gradients if config.parallel.cp_exchange == "ring" else 0)
    return nbytes * gathered_elements(config, layout) * _ring(layout.cp) * layout.micro_batches


def _experts(config: RunConfig, layout: Layout, pp_rank: int) -> float:
    if not config.model.experts or layout.ep == 1:
        return 0.0
    passes = 0
    for stage in layout.stages_of(pp_rank):
        for layer in layout.stage_layers[stage]:  # there and back, and so backward; forward again where recomputed
            passes += 4 + 2 * (recompute_of(config.parallel.activation_checkpoint, layer) in ("full", "ffn"))
    rows = config.model.experts_per_token * _stream(config, layout)
    return passes * rows * _ring(layout.ep) * layout.micro_batches


def _shards(config: RunConfig, layout: Layout, held: StateBytes) -> float:
    if layout.dp_shard == 1 or config.parallel.data_parallel == "ddp" or not needs_fsdp(config, layout):
        return 0.0
    return _passed(config, layout) * (held.whole - held.experts) * _ring(layout.dp_shard)


def _passed(config: RunConfig, layout: Layout) -> int:
    """Return the bytes that pass for each element that is gathered, its gradient with them, which is scattered."""
    gathers, scatters = rounds(config, layout)
    return gathers * itemsize(config) + scatters * _added(config)


def _added(config: RunConfig) -> int:
    """Return the bytes of an element in which gradients are added up."""
    return 2 if config.parallel.reduce_dtype == "bfloat16" else MASTER


def rounds(config: RunConfig, layout: Layout) -> tuple[int, int]:
    """Return how often FSDP gathers weights and scatters gradients in a step: up to ZeRO 2 what is gathered stays, from it on gradients do not."""
    zero = config.parallel.zero
    stays = layout.pp > 1 or zero in (0, 1, 2)
    return 1 if stays else 2 * layout.micro_batches, layout.micro_batches if zero >= 2 else 1


def _replicas(config: RunConfig, layout: Layout, held: StateBytes) -> float:
    """Gradients in each step; parameters, of as many bytes, where groups are synchronised every few steps."""
    share = 1.0 if layout.sync_every else _added(config) / MASTER
    return data_elements(held.gradients) * share * _ring(layout.dp_replicate) / max(1, layout.sync_every)


def _pipeline(config: RunConfig, layout: Layout) -> float:
    if layout.pp == 1:
        return 0.0
    cut = layout.cp * (layout.tp if config.parallel.sequence_parallel else 1)
    elements = pipeline_elements(config.train.micro_batch, config.train.seq_len, config.model.dim)
    return elements * itemsize(config) / cut * layout.stages_per_rank * layout.micro_batches
