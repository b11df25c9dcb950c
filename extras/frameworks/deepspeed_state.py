"""The state of a DeepSpeed engine as a Checkpointer tracks it: tensors by the name of their parameter, and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flashckpt.core.records import digest
from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.integrations.deepspeed_fragments import Fragment, all_ranks, fragments_of, share_of_partitioned
from flashckpt.state.parts import TensorPart, cut

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_HALF_RESTORED = "Weights and moments were restored, settings were not: train nothing with them."


class Trained:
    """The tensors of an engine, found again where DeepSpeed has given some other memory.

    Args:
        engine: One that `refuse_unsupported` let pass.

    Attributes:
        inner: The torch optimizer that updates the fp32 weights.
        fragments: This rank's share of every trained parameter.
        owners: The tensors that these lie in, each once.
        parts: Of the fp32 weights, of parameters that are not trained, and of buffers (`model.<name>`); and of the state of
            the optimizer (`optimizer.<name>.<key>`).
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.inner: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.fragments: list[Fragment] = []
        self.owners: list[torch.Tensor] = []
        self.parts: dict[str, Sequence[TensorPart]] = {}
        self._buffers: list[tuple[str, dict[str, Any], str]] = []
        self._known: list[tuple[int, int]] = []

    def look(self) -> None:
        """Find the tensors; a cheap comparison where they lie where they were found before.

        Raises:
            UnsupportedStateError: The optimizer makes its state in its first step, in a way that is not known here.
        """
        held = self._held() if self.fragments else []
        if held and held == self._known:
            return
        names = {id(param): name for name, param in self._engine.module.named_parameters()}
        self.fragments = fragments_of(self._engine, names)
        groups = {fragment.owner: self.inner.param_groups[fragment.group] for fragment in self.fragments}
        for owner, group in groups.items():
            make_state(self.inner, owner, group)
        self.owners, self._buffers = list(groups), list(persistent_buffers(self._engine.module))
        self.parts.clear()
        self.parts.update((f"model.{name}", parts) for name, parts in self._weights().items() if parts)
        self.parts.update((f"optimizer.{name}", parts) for name, parts in self._moments().items() if parts)
        self._known = self._held()

    def _held(self) -> list[tuple[int, int]]:
        """Return what tells each tensor from one that would be in its place."""
        tensors = [*self.owners, *(value for owner in self.owners for value in beside(self.inner, owner).values())]
        tensors += [buffers[key] for _, buffers, key in self._buffers]
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    def _weights(self) -> dict[str, Sequence[TensorPart]]:
        found: dict[str, Sequence[TensorPart]] = {one.name: one.parts(one.owner) for one in self.fragments}
        for name, param in self._engine.module.named_parameters():
            if name not in found:
                found[name] = _frozen(param)
        for name, buffers, key in self._buffers:
            found[name] = _equal(buffers[key])
        return found

    def _moments(self) -> dict[str, Sequence[TensorPart]]:
        return {
            f"{fragment.name}.{key}": fragment.parts(tensor)
            for fragment in self.fragments
            for key, tensor in beside(self.inner, fragment.owner).items()
        }


def beside(inner: torch.optim.Optimizer, owner: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a tensor that has its shape, by key."""
    state = inner.state.get(owner, {})
    return {key: v for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and v.shape == owner.shape}


def make_state(inner: torch.optim.Optimizer, owner: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Make the state of one tensor as the first step would, so that there is something to restore into.

    Raises:
        UnsupportedStateError: That is not known of this optimizer.
    """
    if inner.state.get(owner):
        return
    kind = type(inner)
    is_fused_adam = (kind.__module__, kind.__qualname__) == ("deepspeed.ops.adam.fused_adam", "FusedAdam")
    if kind not in {torch.optim.Adam, torch.optim.AdamW} and not is_fused_adam:
        raise UnsupportedStateError(
            "this optimizer creates its state in step 1, so there is nothing to restore into",
            found=f"{kind.__module__}.{kind.__qualname__}",
            expected="torch.optim.AdamW or Adam, or DeepSpeed's FusedAdam",
            state="Nothing was tracked.",
            remedy='deepspeed.initialize(optimizer=torch.optim.AdamW(...)), with "zero_allow_untested_optimizer": true',
        )
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
    moments = {key: torch.zeros_like(owner, requires_grad=False) for key in keys}
    on_device = group.get("capturable") or group.get("fused")
    step: Any = 0 if is_fused_adam else torch.tensor(0.0, device=owner.device if on_device else "cpu")
    inner.state[owner].update({"step": step, **moments})


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the persistent buffers: a name, the dict that holds the buffer, and its key there."""
    for prefix, part in module.named_modules():
        transient = part._non_persistent_buffers_set  # noqa: SLF001 -- the only place that says so
        for key, buffer in part._buffers.items():  # noqa: SLF001 -- to see one that is replaced
            if buffer is not None and key not in transient:
                yield f"{prefix}.{key}" if prefix else key, part._buffers, key  # noqa: SLF001 -- as above


def _frozen(param: Any) -> tuple[TensorPart, ...]:
    """Return the parts of a parameter that is not trained."""
    if not hasattr(param, "ds_tensor"):
        return _equal(param.detach(), is_fenced=True)
    share = share_of_partitioned(param)
    return cut(param.ds_tensor[: share["count"]], share["start"], tuple(param.ds_shape), is_fenced=True)


def _equal(tensor: torch.Tensor, *, is_fenced: bool = False) -> tuple[TensorPart, ...]:
    """Return a tensor that every rank has as a whole."""
    shape = tuple(tensor.shape)
    whole = (0,) * len(shape)
    return (TensorPart(tensor=tensor, global_shape=shape, offsets=whole, ranks=all_ranks(), is_fenced=is_fenced),)


class EngineState:
    """All state of an engine: one for all ranks, but for the parts of tensors.

    Args:
        engine: One that `refuse_unsupported` let pass.
        trained: Its tensors.
    """

    flashckpt_replicated = True

    def __init__(self, engine: Any, trained: Trained) -> None:
        self._engine, self._trained = engine, trained

    def flashckpt_parts(self) -> dict[str, Sequence[TensorPart]]:
        """Return what this rank holds of weights and moments."""
        return self._trained.parts

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of each group, what the optimizer and the engine count, and the loss scale."""
        groups, known = [], {id(owner): self._numbers(owner) for owner in self._trained.owners}
        for members, group in zip(self._members(), self._trained.inner.param_groups, strict=True):
            settings = {k: v for k, v in group.items() if k != "params" and not k.startswith("_ds_")}
            numbers = [(fragment.name, known[id(fragment.owner)]) for fragment in members]
            usual = numbers[0][1] if numbers else {}
            others = {name: own for name, own in numbers if own != usual}
            groups.append({"members": _digest(members), "settings": settings, "numbers": usual, "others": others})
        return {"groups": groups, **counted(self._engine)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each group its settings and numbers, and count on.

        Raises:
            ConfigError: The parameters are in other groups than they were.
        """
        recorded = {group["members"]: group for group in state_dict["groups"]}
        for members, group in zip(self._members(), self._trained.inner.param_groups, strict=True):
            if (found := recorded.get(_digest(members))) is None:
                raise ConfigError(
                    "the groups of the optimizer have other parameters than in the snapshot",
                    found=f"a group of {len(members)} parameters that was none",
                    expected=f"{len(recorded)} groups as they were",
                    state=_HALF_RESTORED,
                    remedy="make the groups as they were, or restore the weights alone: restore(only='model.*')",
                )
            for key, value in found["settings"].items():
                set_in(group, key, value)
            for fragment in members:
                state = self._trained.inner.state[fragment.owner]
                for key, value in found["others"].get(fragment.name, found["numbers"]).items():
                    set_in(state, key, value)
        count_on(self._engine, state_dict)

    def _members(self) -> list[list[Fragment]]:
        """Return the fragments of each group."""
        found: list[list[Fragment]] = [[] for _ in self._trained.inner.param_groups]
        for fragment in self._trained.fragments:
            found[fragment.group].append(fragment)
        return found

    def _numbers(self, owner: torch.Tensor) -> dict[str, Any]:
        """Return the state of a tensor that has not its shape."""
        state, moments = self._trained.inner.state[owner], beside(self._trained.inner, owner)
        numbers = {key: value for key, value in state.items() if key not in moments}
        return {k: v.item() if isinstance(v, torch.Tensor) and not v.dim() else v for k, v in numbers.items()}


def _digest(members: Sequence[Fragment]) -> int:
    return digest("\n".join(sorted(fragment.name for fragment in members)).encode())


def set_in(where: Any, key: str, value: Any) -> None:
    """Set a number or a setting: in place where it is a tensor, as a tuple where it is one."""
    live = where.get(key)
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            live.copy_(torch.as_tensor(value))
    else:
        where[key] = tuple(value) if isinstance(live, tuple) else value


def counted(engine: Any) -> dict[str, Any]:
    """Return the steps, samples and micro-batches of an engine, and its loss scale."""
    counts = {name: int(getattr(engine, name)) for name in (*_COUNTERS, "micro_steps")}
    scaler = _scaler(engine)
    scale = {key: value for key in _SCALE if (value := getattr(scaler, key, None)) is not None}
    return {**counts, "accumulation": engine.gradient_accumulation_steps(), "loss_scale": scale}


def count_on(engine: Any, state: Mapping[str, Any]) -> None:
    """Let an engine continue from what `counted` returned: micro-batches as if all had been of this many ranks."""
    for name in _COUNTERS:
        setattr(engine, name, state[name])
    accumulation = engine.gradient_accumulation_steps()
    steps, rest = divmod(state["micro_steps"], state["accumulation"])
    engine.micro_steps = steps * accumulation + (rest if accumulation == state["accumulation"] else 0)
    scaler = _scaler(engine)
    if is_dynamic(scaler):
        for key, value in state["loss_scale"].items():
            setattr(scaler, key, value)


def _scaler(engine: Any) -> Any:
    """Return what holds the loss scale; None where there is none."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def is_dynamic(scaler: Any) -> bool:
    """Whether a loss scale changes during training."""
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


class OneSchedule:
    """A scheduler of the learning rate: one state for all ranks."""

    flashckpt_replicated = True

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._scheduler.load_state_dict(dict(state_dict))
