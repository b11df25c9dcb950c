"""One forward and backward over the micro-batches of a step, in any layout, and its totals in one collective."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.data.windows import Batch
from flashckpt.trainer.model.moe import MixtureOfExperts
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.model.router_loss import move_bias, set_router_scale
from flashckpt.trainer.parallel.apply import Parallel, local_tensor, set_gradient_sync
from flashckpt.trainer.train.optim import local_square_sum, scale_gradients, settle_gradients
from flashckpt.trainer.train.step_phases import PhaseTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The totals after backward, equal on all ranks but for `group_norm`.

    Attributes:
        loss: Nats per token.
        norm: Of the gradients; where groups train apart, the largest of theirs.
        group_norm: Of the gradients of this rank's group.
        channels: Loss per channel.
        experts: Of each layer the tokens that chose each expert; [] without experts.
    """

    loss: float
    norm: float
    group_norm: float
    channels: dict[str, float]
    experts: list[list[int]] = field(default_factory=list)


@contextmanager
def generators_kept_in_trials(parts: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore torch's generators after every forward without gradients.

    Before its first step, a torch pipeline runs each stage on zeros to infer the shapes. Since torch 2.12 it preserves
    the generators; 2.11 does not. A resumed process repeats that run: its dropout would then differ from the unbroken
    run's.

    Args:
        parts: The stages; they do not nest.
        device: Theirs.
    """
    devices = [] if device.type == "cpu" else [device]
    with ExitStack() as hooks:
        trial = hooks.enter_context(ExitStack())

        def before(*_: Any) -> None:
            if not torch.is_grad_enabled():
                trial.enter_context(torch.random.fork_rng(devices))

        def after(*_: Any) -> None:
            trial.close()

        for part in parts:
            hooks.callback(part.register_forward_pre_hook(before).remove)
            hooks.callback(part.register_forward_hook(after).remove)
        yield


@contextmanager
def loss_context(*, is_sharded: bool) -> Iterator[None]:
    """Compute losses from logits that may be `is_sharded` over the vocabulary."""
    with warnings.catch_warnings(), loss_parallel() if is_sharded else contextlib.nullcontext():
        # The logits of a tensor-parallel head are a view of a DTensor; the loss never writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield


class TrainStep:
    """Runs forward and backward; the caller runs the optimizer.

    Args:
        channels: Names of the data channels, in the order of their numbers.
        has_losses: Whether the last stage gives losses, not logits (`loss_chunk`).
        phases: Measures forward, backward and sync.

    Attributes:
        scale: Factor of the loss before backward, which the gradients are divided by.
        experts: What the routers count.
    """

    def __init__(
        self,
        parallel: Parallel,
        channels: Sequence[str],
        *,
        settings: ParallelConfig | None = None,
        has_losses: bool = False,
        phases: PhaseTimer | None = None,
    ) -> None:
        self._phases = phases or PhaseTimer()
        self._parallel, self._channels = parallel, list(channels)
        self._settings = settings or ParallelConfig()
        self._sharded_loss = self._settings.loss_parallel and parallel.layout.tp > 1
        self._has_losses, self.scale = has_losses, 1.0
        self.experts = ExpertLoad(parallel)
        self._schedule: Any = None
        # (summed loss, channel, targets) per sample, one entry per micro-batch
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def backward(self, batch: Batch) -> Totals:
        """Compute the gradients of the global batch and return the totals of the step. Collective."""
        self._parts.clear()
        self.experts.begin()
        for parameter in self._parallel.parameters():
            parameter.grad = None
        tokens, targets, documents = self._on_device(batch)
        layout = self._parallel.layout  # with a pipeline, gradients are divided after backward
        set_router_scale(self._parallel.parts, self.scale / (layout.divisor if layout.pp == 1 else 1.0))
        with loss_context(is_sharded=self._sharded_loss):
            if self._parallel.layout.pp == 1:
                self._accumulate(tokens, targets, documents)
            else:
                self._run_schedule(tokens, targets, documents)
        settle_gradients(self._parallel)
        if self.scale != 1.0:
            scale_gradients(self._parallel, 1.0 / self.scale)
        totals = self._reduce(local_square_sum(self._parallel))
        if experts := self.experts.total():
            totals = replace(totals, experts=experts)
        self._phases.reach("sync")
        return totals

    def own_losses(self) -> list[Tensor]:
        """Return the summed losses of this rank's samples in the last step, per micro-batch; [] where there are none."""
        return [losses for losses, _, _ in self._parts[-self._parallel.layout.micro_batches :]]

    def norm(self) -> float:
        """Return the norm of the gradients of this rank's group as they are now. Collective."""
        squares = self._by_group(local_square_sum(self._parallel))
        dist.all_reduce(squares)
        return math.sqrt(squares[self._parallel.group].item())

    def _by_group(self, square_sum: Tensor) -> Tensor:
        """Return one number for each group: for this rank's what is given, for the others 0."""
        squares = torch.zeros(self._parallel.layout.groups, dtype=square_sum.dtype, device=square_sum.device)
        squares[self._parallel.group] = square_sum
        return squares

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        device, documents = self._parallel.device, batch.documents
        if documents is not None:  # rows of one document each need no mask
            has_several = bool((documents != documents[:, :1]).any())
            documents = documents.to(device, non_blocking=True) if has_several else None
        tokens, targets = batch.tokens, batch.targets
        if (context := self._parallel.context) is not None:
            tokens, targets = context.cut(tokens), context.cut_targets(targets)
        return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True), documents

    def _micro(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        count = self._parallel.layout.micro_batches
        rows = [None] * count if documents is None else documents.chunk(count)
        return list(zip(tokens.chunk(count), targets.chunk(count), rows, strict=True))

    def _accumulate(self, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        part, divisor = self._parallel.parts[0], self._parallel.layout.divisor
        rows = self._micro(tokens, targets, documents)
        for number, (x, y, row) in enumerate(rows):
            set_gradient_sync(part, last=number == len(rows) - 1, zero=self._settings.zero)
            loss = self._loss(part(x, row, **self._given(y)), y) / divisor
            self._phases.reach("forward")
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            self._phases.reach("backward")

    def _given(self, targets: Tensor) -> dict[str, Tensor]:
        """Return what the last stage needs to give losses, not logits."""
        return {"targets": targets[:, :-1]} if self._has_losses else {}

    def _run_schedule(self, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        trial: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._schedule is None:
            self._schedule = self._parallel.schedule(self._loss)
            self._time_forwards()
            trial = generators_kept_in_trials(self._parallel.parts, self._parallel.device)
        first, last = self._parallel.has_first, self._parallel.has_last
        inputs = (tokens,) if first else ()
        everywhere = self._given(targets) if documents is None else {"documents": documents, **self._given(targets)}
        with trial:
            self._schedule.step(*inputs, target=targets if last else None, losses=[] if last else None, **everywhere)
        self._divide_gradients()
        self._phases.reach("backward")  # with what its rank waited for others

    def _time_forwards(self) -> None:
        """Take the forwards of the stages out of what a schedule does; what is between them counts as backward."""
        for part in self._parallel.parts:
            part.register_forward_pre_hook(lambda *_: self._phases.reach("backward", alone=True))
            part.register_forward_hook(lambda *_: self._phases.reach("forward", alone=True))

    def _divide_gradients(self) -> None:
        """Make sums over micro-batches means over samples; on local shards, since DTensor would plan each shape again."""
        for parameter in self._parallel.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).div_(self._parallel.layout.divisor)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = output.flatten() if self._has_losses else per_token_loss(output, targets[:, :-1])
        with torch.no_grad():
            whole = losses.full_tensor() if isinstance(losses, DTensor) else losses
            per_sample = whole.detach().double().view(targets.shape[0], -1).sum(1)
            self._parts.append((per_sample, targets[:, -1], (targets[:, :-1] >= 0).sum(1).double()))
        return losses.mean() * self.scale

    def _channel_sums(self) -> Tensor:
        """Return loss sums and token counts per channel, (2, C); zero if another rank reports them."""
        sums = torch.zeros(2, len(self._channels), dtype=torch.float64, device=self._parallel.device)
        if self._parallel.has_last and self._parallel.coordinate("tp") == 0:
            # A pipeline also calls the loss beforehand, on empty tensors, to infer its shape.
            for losses, channel, counts in self._parts[-self._parallel.layout.micro_batches :]:
                sums[0].index_add_(0, channel, losses)
                sums[1].index_add_(0, channel, counts)
        return sums

    def _reduce(self, square_sum: Tensor) -> Totals:
        # one all-reduce over the world: the ranks then hold the same bits and make the same decisions
        vector = torch.cat([self._channel_sums().flatten(), self._by_group(square_sum)])
        dist.all_reduce(vector)
        flat, count = vector.tolist(), len(self._channels)
        sums, counts = flat[:count], flat[count : 2 * count]
        norms = [math.sqrt(square) if square >= 0 else math.nan for square in flat[2 * count :]]
        return Totals(
            loss=sum(sums) / max(1.0, sum(counts)),
            norm=math.nan if any(map(math.isnan, norms)) else max(norms),
            group_norm=norms[self._parallel.group],
            channels={n: s / c for n, s, c in zip(self._channels, sums, counts, strict=True) if c},
        )


class ExpertLoad:
    """Tokens per expert of every layer in a step: adds up what the routers of all ranks counted."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._routers = _routers(parallel)

    def begin(self) -> None:
        """Forget what was counted before this step."""
        for layer in self._routers.values():
            layer.router_load.take()

    def total(self) -> list[list[int]]:
        """Return for each layer the tokens that chose each expert, of all data-parallel ranks; [] without experts. Collective.

        In integers, so that no order of the sum matters. A separate collective: the one of the totals adds up floats, whose
        order would be another in a longer vector.
        """
        if not self._routers:
            return []
        number = next(iter(self._routers.values())).number
        layers = sum(map(len, self._parallel.layout.stage_layers))
        tokens = torch.zeros(layers, number, dtype=torch.int64, device=self._parallel.device)
        is_first = self._parallel.coordinate("tp") == 0  # the others route the same tokens
        for index, layer in self._routers.items():
            counts = layer.router_load.take()
            if counts is not None and is_first:
                tokens[index] = counts
        dist.all_reduce(tokens)
        found: list[list[int]] = tokens.tolist()
        return found

    def balance(self, tokens: Sequence[Sequence[int]], rate: float) -> None:
        """Move the biases of the routers that have one; every rank that holds one moves it by the same bits."""
        for index, layer in self._routers.items():
            if layer.router_bias is not None:
                move_bias(layer.router_bias, tokens[index], rate)


def _routers(parallel: Parallel) -> dict[int, MixtureOfExperts]:
    """Return this rank's layers with experts by their global number."""
    found = {}
    for part in parallel.parts:
        for name, module in part.named_modules():
            if isinstance(module, MixtureOfExperts):
                found[int(name.split("layers.")[1].split(".")[0])] = module
    return found
