"""Checks of settings, alone and in combination. On plain values; torch-free.

A setting that would have no effect in the run is an error, not ignored: the user who set it expects an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config.log import DISPLAYS, WANDB_MODES
from flashckpt.trainer.config.optim import DECAY_SHAPES, MUON_RATES, OPTIMIZERS, SCHEDULES

Values: TypeAlias = Mapping[str, Mapping[str, Any]]

CHOICES = {
    "parallel.data_parallel": ("fsdp", "ddp"),
    "parallel.zero": (-1, 0, 1, 2, 3),
    "parallel.offload": ("none", "state"),
    "parallel.reduce_dtype": ("float32", "bfloat16"),
    "train.precision": ("auto", "float32", "bfloat16", "float16"),
    "train.float8": ("off", "tensorwise", "rowwise"),
    "train.attention": ("auto", "sdpa", "flex"),
    "train.device": ("auto", "cpu", "cuda", "xpu", "npu"),
    "parallel.cp_exchange": ("gather", "ring"),
    "optim.name": OPTIMIZERS,
    "optim.schedule": SCHEDULES,
    "optim.decay_shape": DECAY_SHAPES,
    "optim.muon_rate": MUON_RATES,
    "model.family": ("", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    "model.rope_scaling": ("none", "linear", "ntk", "yarn", "llama3"),
    "guard.on_spike": ("warn", "skip", "rollback"),
    "data.packing": ("stream", "best-fit"),
    "log.display": DISPLAYS,
    "log.wandb_mode": WANDB_MODES,
}
MINIMUM: Mapping[str, float] = {
    "train.steps": 1, "train.seq_len": 2, "train.global_batch": 1, "train.micro_batch": 1, "train.loss_chunk": 0,
    "model.vocab": 2, "model.dim": 2, "model.layers": 1, "model.heads": 1, "model.kv_heads": 1, "model.ffn": 1,
    "model.rope_base": 1.0, "model.norm_eps": 0.0, "model.experts": 0, "model.experts_per_token": 1,
    "model.head_dim": 0, "model.window": 0, "model.window_from": 0, "model.context": 0, "model.shared_ffn": 0,
    "model.rope_factor": 1.0, "model.rope_context": 0, "model.rope_low": 0.0, "model.rope_high": 0.0,
    "model.rope_beta_fast": 0.0, "model.rope_beta_slow": 0.0, "model.rope_attention": 0.0,
    "model.router_aux_loss": 0.0, "model.router_z_loss": 0.0, "model.router_bias_rate": 0.0,
    "parallel.cp": 1, "parallel.ep": 0, "parallel.timeout_s": 1.0, "parallel.bucket_mb": 0.001,
    "parallel.sync_every": 0, "parallel.outer_rate": 0.0, "parallel.groups": 0, "parallel.group": 0, "parallel.sync_wait_s": 0.0,
    "optim.lr": 0.0, "optim.min_lr": 0.0, "optim.warmup_steps": 0, "optim.decay_steps": 0, "optim.weight_decay": 0.0,
    "optim.eps": 0.0, "ema.every": 1, "optim.clip_norm": 0.0, "optim.clip_value": 0.0,
    "data.holdout_every": 2, "data.bpe": 0, "data.read_ahead": 0, "guard.window": 4, "guard.max_interventions": 0, "guard.spike_mads": 0.0, "guard.norm_mads": 0.0,
    "eval.every": 0, "eval.batches": 1, "log.every": 1, "log.peak_tflops": 0.0,
}  # fmt: skip
BELOW_ONE = ("model.dropout", "optim.beta1", "optim.beta2", "optim.momentum", "ema.decay", "parallel.outer_momentum")


@dataclass(frozen=True, slots=True)
class Need:
    """What a setting needs to have any effect."""

    key: str
    what: str
    holds: Callable[[Values], bool]


def _scales(values: Values, *kinds: str) -> bool:
    return values["model"]["rope_scaling"] in kinds


NEEDS = (
    Need("model.experts_per_token", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.normalize_experts", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.shared_ffn", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.router_aux_loss", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.router_z_loss", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.router_bias_rate", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("model.window_from", "a model.window", lambda v: v["model"]["window"] > 0),
    Need("model.rope_factor", "a model.rope_scaling", lambda v: v["model"]["rope_scaling"] != "none"),
    Need(
        "model.rope_context", "model.rope_scaling = ntk, yarn or llama3", lambda v: _scales(v, "ntk", "yarn", "llama3")
    ),
    Need("model.rope_low", "model.rope_scaling = llama3", lambda v: _scales(v, "llama3")),
    Need("model.rope_high", "model.rope_scaling = llama3", lambda v: _scales(v, "llama3")),
    Need("model.rope_beta_fast", "model.rope_scaling = yarn", lambda v: _scales(v, "yarn")),
    Need("model.rope_beta_slow", "model.rope_scaling = yarn", lambda v: _scales(v, "yarn")),
    Need("model.rope_attention", "model.rope_scaling = yarn", lambda v: _scales(v, "yarn")),
    Need("parallel.loss_parallel", "parallel.tp of 2 or more", lambda v: v["parallel"]["tp"] > 1),
    Need("parallel.ep", "model.experts of 1 or more", lambda v: v["model"]["experts"] > 0),
    Need("parallel.cp_exchange", "parallel.cp of 2 or more", lambda v: v["parallel"]["cp"] > 1),
    Need("parallel.bucket_mb", "parallel.data_parallel = ddp", lambda v: v["parallel"]["data_parallel"] == "ddp"),
    Need("parallel.outer_rate", "parallel.sync_every of 1 or more", lambda v: v["parallel"]["sync_every"] > 0),
    Need("parallel.outer_momentum", "parallel.sync_every of 1 or more", lambda v: v["parallel"]["sync_every"] > 0),
    Need("parallel.groups", "parallel.sync_every of 1 or more", lambda v: v["parallel"]["sync_every"] > 0),
    *(
        Need(f"parallel.{name}", "parallel.groups of 2 or more", lambda v: v["parallel"]["groups"] > 1)
        for name in ("group", "sync_wait_s", "sync_address")
    ),
    Need("parallel.schedule", "parallel.pp of 2 or more", lambda v: v["parallel"]["pp"] > 1),
    Need("parallel.stages_per_rank", "parallel.pp of 2 or more", lambda v: v["parallel"]["pp"] > 1),
    Need("train.float8_emulate", "a train.float8", lambda v: v["train"]["float8"] != "off"),
    Need("optim.decay_steps", "an optim.schedule that decays", lambda v: v["optim"]["schedule"] != "constant"),
    Need("optim.min_lr", "an optim.schedule that decays", lambda v: v["optim"]["schedule"] != "constant"),
    Need("log.wandb_run", "a project: log.wandb", lambda v: bool(v["log"]["wandb"])),
    Need("log.wandb_mode", "a project: log.wandb", lambda v: bool(v["log"]["wandb"])),
    Need("checkpoint.replicate", "a checkpoint.root", lambda v: bool(v["checkpoint"]["root"])),
    Need("checkpoint.replicate_every", "checkpoint.replicate of 1 or 2", lambda v: v["checkpoint"]["replicate"] > 0),
    Need("checkpoint.replicate_rate", "checkpoint.replicate of 1 or 2", lambda v: v["checkpoint"]["replicate"] > 0),
    Need("eval.batches", "eval.every of 1 or more", lambda v: v["eval"]["every"] > 0),
)


def check_values(values: Values, defaults: Values) -> None:
    """Reject values out of range and settings that would have no effect.

    Args:
        values: Every setting of the run.
        defaults: The default of every setting.

    Raises:
        ConfigError: a value is out of range, or would have no effect.
        LayoutError: a setting of [parallel] would have no effect.
    """
    for key, choices in CHOICES.items():
        if _get(values, key) not in choices:
            raise ConfigError(
                f"{key} has no such choice", found=repr(_get(values, key)), expected=" | ".join(map(str, choices))
            )
    _check_ranges(values)
    for need in NEEDS:
        if _get(values, need.key) != _get(defaults, need.key) and not need.holds(values):
            raise (LayoutError if need.key.startswith("parallel.") else ConfigError)(
                f"{need.key} would have no effect in this run",
                found=f"{need.key} = {_get(values, need.key)!r}",
                expected=need.what,
                state="Nothing was started.",
                remedy=f"omit {need.key}, or set what it needs",
            )
    if _scales(values, "ntk", "yarn", "llama3") and not _get(values, "model.rope_context"):
        raise ConfigError(
            f"model.rope_scaling = {_get(values, 'model.rope_scaling')} needs a length to scale from",
            found="model.rope_context = 0",
            expected="the tokens that the model was made for before",
            state="Nothing was started.",
            remedy="set model.rope_context (original_max_position_embeddings in a config.json)",
        )
    if _get(values, "guard.on_spike") == "rollback" and not _get(values, "checkpoint.root"):
        raise ConfigError(
            "guard.on_spike = rollback has nothing to roll back to",
            found="checkpoint.root is empty: no snapshots are taken",
            expected="a checkpoint root",
            state="Nothing was started.",
            remedy='set checkpoint.root, or guard.on_spike = "skip" or "warn"',
        )


def _check_ranges(values: Values) -> None:
    for section, content in values.items():
        for name, value in content.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{section}.{name} is not a number", found=str(value), expected="a finite number")
    for key, least in MINIMUM.items():
        if _get(values, key) < least:
            raise ConfigError(f"{key} is too small", found=str(_get(values, key)), expected=f"{least} or more")
    for key in BELOW_ONE:
        if not 0.0 <= _get(values, key) < 1.0:
            raise ConfigError(
                f"{key} is out of range", found=str(_get(values, key)), expected="0.0 up to, not including, 1.0"
            )


def _get(values: Values, key: str) -> Any:
    section, _, name = key.partition(".")
    return values[section][name]
