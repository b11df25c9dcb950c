"""What Megatron's model and optimizer keep on this rank, by the names of the parameters.

The distributed optimizer lays the gradients of a bucket end to end, pads them and deals equal pieces to the data-parallel
ranks; a rank keeps the fp32 weights and the moments of what of each parameter is in its piece. Padding is no state. Tensor
and pipeline parallel ranks have other parameters, or other parts of them, under equal names: there their coordinate is part
of the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashckpt.errors import ConfigError
from flashckpt.integrations.deepspeed_state import beside, make_state, persistent_buffers, set_in
from flashckpt.state.parts import TensorPart, cut

HALF_RESTORED = "Weights and moments were restored, settings were not: train nothing with them."


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Where this rank is in Megatron's layout.

    Attributes:
        prefix: Of the names of its tensors: "" where it differs from other ranks in its data alone.
        equal: Ranks with the same parameters; () where there is no other one.
    """

    prefix: str
    equal: tuple[int, ...]

    @staticmethod
    def here() -> Coordinate:
        """Return this rank's, as `megatron.core.parallel_state` has it."""
        from megatron.core import parallel_state as state

        sizes = {
            "tp": (state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()),
            "pp": (state.get_pipeline_model_parallel_world_size(), state.get_pipeline_model_parallel_rank()),
        }
        ranks = dist.get_process_group_ranks(state.get_data_parallel_group(with_context_parallel=True))
        return Coordinate(
            prefix="".join(f"{axis}{rank}of{size}." for axis, (size, rank) in sizes.items() if size > 1),
            equal=tuple(ranks) if len(ranks) > 1 else (),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Master:
    """The tensor that the optimizer updates in the place of a parameter, or of a piece of it.

    Attributes:
        inner: The torch optimizer.
        tensor: Its tensor.
        start: First element in the flattened parameter; None: it is the whole parameter on every rank.
    """

    inner: torch.optim.Optimizer
    tensor: torch.Tensor
    start: int | None = None


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the one that there is."""
    if optimizer is None:
        return []
    chain = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    return [one for one in chain if not getattr(one, "is_stub_optimizer", False)]


def unwrapped_chunk(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in the wrappers for data parallelism and half precision."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module


class MegatronState:
    """All state of a model and its optimizer: one for all ranks, but for the parts of tensors.

    Args:
        chunks: The model, or its parts on this pipeline rank.
        optimizer: What Megatron made, or None.
        where: Of this rank.
    """

    flashckpt_replicated = True

    def __init__(self, chunks: Sequence[Any], optimizer: Any, where: Coordinate) -> None:
        self._chunks, self._where = list(chunks), where
        self.optimizers = optimizers_of(optimizer)
        for one in self.optimizers:
            _make_moments(one)
        masters = {id(param): own for one in self.optimizers for param, own in _masters(one)}
        self._known = masters
        self._generators = _Generators(where)
        self._parts: dict[str, Sequence[TensorPart]] = {}
        self.look()

    def look(self) -> None:
        """Find the tensors again: DDP and `Module.to` replace some."""
        self._parts.clear()
        self._generators.look()
        for number, chunk in enumerate(self._chunks):
            prefix = self._where.prefix + (f"chunk{number}." if len(self._chunks) > 1 else "")
            for name, parts in self._of_chunk(unwrapped_chunk(chunk)):
                self._parts[f"{name[0]}.{prefix}{name[1]}"] = parts
        self._parts.update(self._generators.parts())

    def flashckpt_parts(self) -> dict[str, Sequence[TensorPart]]:
        """Return what this rank holds of weights and moments, and the states of Megatron's generators."""
        return self._parts

    def _of_chunk(self, module: torch.nn.Module) -> Iterator[tuple[tuple[str, str], Sequence[TensorPart]]]:
        for name, param in module.named_parameters():
            shape, master = tuple(param.shape), self._known.get(id(param))
            if master is None:
                if not self._is_dealt(param):
                    yield ("model", name), self._equal(param.detach(), is_fenced=bool(self.optimizers))
                continue
            yield ("model", name), self._of_master(master, master.tensor, shape)
            for key, tensor in beside(master.inner, master.tensor).items():
                yield ("optimizer", f"{name}.{key}"), self._of_master(master, tensor, shape)
        for name, buffers, key in persistent_buffers(module):
            yield ("model", name), self._equal(buffers[key], is_fenced=False)

    def _is_dealt(self, param: torch.Tensor) -> bool:
        """Whether other ranks have all pieces of a parameter."""
        return any(
            hasattr(one, "gbuf_ranges") and any(param in buffer.param_index_map for buffer in one.buffers)
            for one in self.optimizers
        )

    def _of_master(self, master: _Master, tensor: torch.Tensor, shape: tuple[int, ...]) -> Sequence[TensorPart]:
        if master.start is None:
            return self._equal(tensor.detach(), is_fenced=True)
        return cut(tensor.detach().view(-1), master.start, shape, is_fenced=True)

    def _equal(self, tensor: torch.Tensor, *, is_fenced: bool) -> Sequence[TensorPart]:
        shape = tuple(tensor.shape)
        whole = (0,) * len(shape)
        return (
            TensorPart(
                tensor=tensor, global_shape=shape, offsets=whole, ranks=self._where.equal, is_fenced=is_fenced
            ),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of each group, the numbers that moments have beside them, and the loss scales."""
        return {"optimizers": [_settings(one) for one in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each group its settings and numbers, and the model its weights. Collective.

        Raises:
            ConfigError: The optimizers have other groups than they had.
        """
        recorded = state_dict["optimizers"]
        found = [len(one.optimizer.param_groups) for one in self.optimizers]
        expected = [len(one["groups"]) for one in recorded]
        if found != expected:
            raise ConfigError(
                "the optimizer has other groups of parameters than in the snapshot",
                found=f"{found} in its parts",
                expected=f"{expected}",
                state=HALF_RESTORED,
                remedy="make the optimizer as it was",
            )
        for one, settings in zip(self.optimizers, recorded, strict=True):
            _set(one, settings)
        self._generators.set()
        self._refresh()

    def _refresh(self) -> None:
        """Copy the weights that the optimizer updates into those that the model computes with, on every rank."""
        for one in self.optimizers:
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()  # noqa: SLF001 -- as its step() does
        for chunk in self._chunks:
            if any(hasattr(one, "gbuf_ranges") for one in self.optimizers):
                chunk.start_param_sync(force_sync=True)


class _Generators:
    """Megatron's named states of random generators: equal on data-parallel ranks, as its own checkpoints have it."""

    def __init__(self, where: Coordinate) -> None:
        self._where = where
        self._held: dict[str, torch.Tensor] = {}

    def look(self) -> None:
        for name, state in _tracker().get_states().items():
            if name in self._held:
                self._held[name].copy_(state)
            else:
                self._held[name] = state.detach().cpu().clone()

    def parts(self) -> dict[str, Sequence[TensorPart]]:
        return {
            f"megatron_rng.{self._where.prefix}{name}": (
                TensorPart(
                    tensor=state, global_shape=tuple(state.shape), offsets=(0,) * state.dim(), ranks=self._where.equal
                ),
            )
            for name, state in self._held.items()
        }  # fmt: skip

    def set(self) -> None:
        if self._held:
            _tracker().set_states({name: state.clone() for name, state in self._held.items()})


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _make_moments(optimizer: Any) -> None:
    """Make the state of every tensor as the first step would, so that there is something to restore into."""
    inner = optimizer.optimizer
    if type(inner) in {torch.optim.Adam, torch.optim.AdamW}:
        for group in inner.param_groups:
            for tensor in group["params"]:
                make_state(inner, tensor, group)
    else:
        optimizer.init_state_fn(inner, optimizer.config)


def _masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, _Master]]:
    inner = optimizer.optimizer
    if hasattr(optimizer, "gbuf_ranges"):
        halves = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        wholes = zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)
        for params, shards in (*halves, *wholes):
            for param, shard in zip(params, shards, strict=True):
                start = optimizer._get_model_param_range_map(param)["param"].start  # noqa: SLF001 -- the only place that says so
                yield param, _Master(inner, shard, start)
        return
    if hasattr(optimizer, "float16_groups"):
        for params, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from ((param, _Master(inner, main)) for param, main in zip(params, mains, strict=True))
        for params in optimizer.fp32_from_fp32_groups:
            yield from ((param, _Master(inner, param)) for param in params)
        return
    for group in inner.param_groups:
        yield from ((param, _Master(inner, param)) for param in group["params"])


def _settings(optimizer: Any) -> dict[str, Any]:
    inner = optimizer.optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    numbers: dict[str, Any] = {}
    for tensor, state in inner.state.items():
        moments = beside(inner, tensor)
        own = {key: value for key, value in state.items() if key not in moments}
        numbers.update((k, v.item() if isinstance(v, torch.Tensor) else v) for k, v in own.items())
        break  # Megatron steps all of them at once
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = {} if scaler is None else scaler.state_dict()
    plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in scale.items()}
    return {"groups": groups, "numbers": numbers, "scale": plain}


def _set(optimizer: Any, recorded: Mapping[str, Any]) -> None:
    inner = optimizer.optimizer
    for group, settings in zip(inner.param_groups, recorded["groups"], strict=True):
        for key, value in settings.items():
            set_in(group, key, value)
    for state in inner.state.values():
        for key, value in recorded["numbers"].items():
            set_in(state, key, value)
    if (scaler := getattr(optimizer, "grad_scaler", None)) is not None and recorded["scale"]:
        scale = torch.tensor([recorded["scale"]["scale"]], dtype=torch.float)
        scaler.load_state_dict({**recorded["scale"], "scale": scale})
