"""A Llama-like model: RMSNorm, rotary positions, grouped queries, SwiGLU. Its families differ by configuration.

A tied head is a separate parameter, equal to the embedding in every layout: gradients of both are added
(`parallel/tied`), so that the two ends of a pipeline each have what they need and state has the same names everywhere.

A pipeline stage is the same class with parts left out; layers keep their global number as name, so
state names are unique over stages. Shapes: B batch, T tokens, D model, H local heads, K head size.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.parallel import Recompute
from flashckpt.trainer.model.cache import KeyValueCache
from flashckpt.trainer.model.context import ContextAttention, ContextSlice
from flashckpt.trainer.model.flex import FlexMasks
from flashckpt.trainer.model.joint import Linear, joins, turned_projections
from flashckpt.trainer.model.moe import FeedForward, MixtureOfExperts
from flashckpt.trainer.model.operators import RMSNorm, chunked_losses
from flashckpt.trainer.model.positions import Positions, make_positions, rotate, with_documents
from flashckpt.trainer.model.ring import RingAttention

KEPT_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
    }
)
"""Products, attention and collectives: what costs most to compute again. Norms, turns and SwiGLU are made again."""


def selective() -> Callable[[], Any]:
    """Return `context_fn` of torch's checkpoint that keeps the results of `KEPT_OPERATORS`."""

    def policy(_context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


@contextmanager
def moved_to_host(module: nn.Module) -> Iterator[None]:
    """Let autograd keep a copy in host memory of what the forward inside saves, but for parameters of `module`.

    torch's `save_on_cpu` would move weights too, and a tensor again for every operator that saves it. On a CPU it is a
    copy, and saves nothing.
    """
    # parameters as FSDP gathered them for this forward; linear layers save views of them
    own = {_local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
    copies = _HostCopies()

    def pack(tensor: Tensor) -> Any:
        local = _local(tensor)
        if not tensor.is_floating_point() or local.untyped_storage().data_ptr() in own:
            return tensor
        packed = copies.of(local), local.shape, local.stride(), local.device
        if not isinstance(tensor, DTensor):
            return *packed, None
        return *packed, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, shape, stride, device, spec = packed
        moved: Tensor = host.to(device, non_blocking=True)
        moved = moved.as_strided(shape, stride) if moved.dim() == 1 else moved
        if spec is None:
            return moved
        mesh, placements, shape, stride = spec
        return DTensor.from_local(moved, mesh, placements, run_check=False, shape=shape, stride=stride)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _HostCopies:
    """Copies of what one forward saves: of what several operators save, and views of it, one."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Any, int, Tensor]] = {}

    def of(self, local: Tensor) -> Tensor:
        """Return the bytes of a tensor in host memory: in one dimension, as they lie; of one with gaps as it is."""
        if local.dim() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(local):
            return _copied(local)
        storage = local.untyped_storage()
        key = (storage._cdata, local.storage_offset(), local.numel(), local.dtype)  # noqa: SLF001 -- which memory it is
        owner, version, copy = self._known.get(key, (None, -1, local))
        # memory that was freed may have been given out again, and what is the same memory may have been written since
        if owner is None or owner() is not storage or version != local._version:  # noqa: SLF001 -- as autograd asks
            copy = _copied(local.as_strided((local.numel(),), (1,), local.storage_offset()))
            self._known[key] = (weakref.ref(storage), local._version, copy)  # noqa: SLF001 -- as above
        return copy


def _copied(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
    return host.copy_(tensor, non_blocking=not tensor.is_cpu)


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; a result that is still on its way is waited for."""
    detached: Any = tensor.detach()
    local: Any = detached.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class Attention(nn.Module):
    """Causal self-attention with grouped queries; the number of local heads follows from the weights."""

    def __init__(self, config: ModelConfig, *, has_window: bool) -> None:
        super().__init__()
        self.head_dim, self.has_window, self.joint = config.head_size, has_window, True
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wo = Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, tokens, _ = x.shape
        q, k, v = (part.transpose(1, 2) for part in self._projected(x, positions))
        out = self._attend(q, k, v, positions)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]  # nn.Module calls are Any

    def _projected(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries and keys, normalised and turned, and values: (B, T, H or G, K)."""
        linears = (self.wq, self.wk, self.wv)
        if self.joint and self.q_norm is None and joins(x, *linears):
            return turned_projections(
                x, (self.wq.weight, self.wk.weight, self.wv.weight), *positions.tables(x.shape[1])
            )
        shape = (*x.shape[:2], -1, self.head_dim)  # -1: the local heads under tensor parallelism
        q, k, v = (linear(x).view(shape) for linear in linears)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, positions), rotate(k, positions), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """(B, H, T, K), (B, G, T, K) twice -> (B, H, T, K)."""
        if positions.flex is not None:
            return positions.flex.attend(q, k, v, has_window=self.has_window)
        if positions.context is not None:
            found: Tensor = positions.context.attend(q, k, v, has_window=self.has_window)
            return found
        mask = positions.mask(q.shape[2], has_window=self.has_window)
        if positions.cache is not None:
            k, v = positions.cache.extend(self, k, v)
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)


class Block(nn.Module):
    """One layer. `recompute`: "none", "ffn" (only the feed-forward part), "full" or "selective" (by operator)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, has_window=config.window > 0 and number >= config.window_from)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.experts else FeedForward(config.dim, config.ffn)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute, self.offloads = "none", False

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, T, D) -> (B, T, D); under sequence parallelism T is this rank's part."""
        # Recomputing here instead of in a wrapper module keeps the names of all state unchanged.
        if self.recompute == "full" and self.training:
            return checkpoint(self._both, x, positions, use_reentrant=False)  # type: ignore[no-any-return]  # untyped in torch
        if self.recompute == "selective" and self.training:
            return checkpoint(self._both, x, positions, use_reentrant=False, context_fn=selective())  # type: ignore[no-any-return]  # untyped in torch
        if self.offloads and self.training:
            with moved_to_host(self):
                return self._both(x, positions)
        return self._both(x, positions)

    def _both(self, x: Tensor, positions: Positions) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        if self.recompute == "ffn" and self.training:
            recomputed: Tensor = checkpoint(self._ffn, x, use_reentrant=False)
            return x + recomputed
        return x + self._ffn(x)

    def compile_inside(self) -> None:
        """Compile what a checkpoint calls: inside of one torch compiles neither DTensors nor what leaves the graph.

        Not the module: its hooks, with which FSDP gathers parameters, are no part of the graph.
        """
        self._both = torch.compile(self._both)  # type: ignore[method-assign]  # as torch documents it

    def _ffn(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.ffn_norm(x)))  # type: ignore[no-any-return]  # nn.Module calls are Any


class Transformer(nn.Module):
    """The model, or the part of it that one pipeline stage holds.

    Args:
        config: Sizes.
        seq_len: Longest sequence, in tokens.
        layers: Global numbers of the layers held; None for all.
        first: Whether the embedding is held.
        last: Whether the final norm and the head are held.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        numbers = range(config.layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in numbers})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.output = Linear(config.dim, config.vocab, bias=False) if last else None
        self.window, self.uses_flex, self.uses_ring = config.window, False, False
        self.context: ContextSlice | None = None
        self.group, self.loss_chunk = 1, 0
        self.use_positions(config, seq_len)

    def use_positions(self, config: ModelConfig, seq_len: int) -> None:
        """Take rotary tables for another length or base from the next forward on."""
        self._positions: Positions | None = None
        self._make_positions = functools.partial(make_positions, config, seq_len)

    def forward(self, x: Tensor, documents: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Tokens (B, T) int64 or activations (B, T, D) -> activations or logits (B, T, vocab).

        With `targets` (B, T) the last stage gives the loss of each token instead, float32 (B, T), by `loss_chunk`.
        `documents`, integers (B, T), tells tokens of one document from those of another; None: a row is one document.
        With a `context` T is this rank's part of the rows, and `documents` are of all their tokens.
        """
        positions = self._known_positions()
        if documents is not None:
            positions = with_documents(positions, documents, mask=self._needs_mask())
        if self.uses_flex:
            masks = FlexMasks(len(x), window=self.window, documents=documents, device=x.device, held=self.context)
            positions = replace(positions, flex=masks)
        if self.context is not None:
            context = (RingAttention if self.uses_ring else ContextAttention)(
                self.context, window=self.window, documents=documents
            )
            positions = replace(positions, context=context)
        return self._through(x, positions, targets)

    def step(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Tokens (B, T) int64 behind those of a cache -> their logits (B, T, vocab); the cache has them afterwards.

        Only for a whole model that is in one piece: no wrapper sees the call.
        """
        logits = self._through(tokens, self._known_positions().behind(cache, tokens.shape[1]))
        cache.length += tokens.shape[1]
        return logits

    def _known_positions(self) -> Positions:
        if self._positions is None:  # not before: the model is made on the meta device
            self._positions = self._make_positions(next(self.parameters()).device, mask=self._needs_mask())
        return self._positions

    def _needs_mask(self) -> bool:
        return not self.uses_flex and self.context is None

    def _through(self, x: Tensor, positions: Positions, targets: Tensor | None = None) -> Tensor:
        hidden = x if self.tok_embeddings is None else self.tok_embeddings(x)
        blocks = list(self.layers.values())
        for start in range(0, len(blocks), self.group):
            group = blocks[start : start + self.group]
            if self.group > 1 and self.training:
                hidden = checkpoint(_in_turn, group, hidden, positions, use_reentrant=False)
            else:
                hidden = _in_turn(group, hidden, positions)
        if self.norm is None or self.output is None:
            return hidden
        if targets is not None:
            return chunked_losses(self.output, self.norm(hidden), targets, self.loss_chunk)
        return self.output(self.norm(hidden))  # type: ignore[no-any-return]  # nn.Module calls are Any

    def set_recompute(self, recompute: Recompute, *, offload: bool = False) -> None:
        """Choose what backward computes again, and whether what blocks keep lies in host memory."""
        if recompute.mode == "groups":
            self.group = recompute.number
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            is_full = recompute.mode == "full" and int(number) % recompute.number == 0
            chosen = "full" if is_full else recompute.mode if recompute.mode in ("ffn", "selective") else "none"
            block.recompute, block.offloads = chosen, offload
        if recompute.mode == "selective":  # keeps the results of products, which joint layers write over
            self.split_layers()

    def split_layers(self) -> None:
        """Compute each linear layer separately: backward may then give the gradients of inputs and of weights at two times."""
        for module in self.modules():
            if isinstance(module, Attention | FeedForward | Linear):
                module.joint = False

    def compile_blocks(self) -> None:
        """Let torch.compile make the forward of every block, at its first call; names and hooks stay as they are."""
        # DDP's buckets end between blocks, each of which is a graph already: cutting it again is of no use, and fails
        # where the first bucket of torch is not the smallest (bucket_mb below 1).
        torch._dynamo.config.optimize_ddp = False  # noqa: SLF001 -- torch documents it under this name
        for block in self.layers.values():
            assert isinstance(block, Block)
            block.compile_inside()


def _in_turn(blocks: Sequence[nn.Module], hidden: Tensor, positions: Positions) -> Tensor:
    for block in blocks:
        hidden = block(hidden, positions)
    return hidden
