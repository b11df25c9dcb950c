"""config.json of Hugging Face <-> ModelConfig. Torch-free.

What a model of ours cannot do (another activation, dense layers among sparse ones, an unknown scaling of positions) is
refused: weights that load and compute something else would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.families import FAMILIES, family_of

_SCALINGS = {"default": "none", "linear": "linear", "dynamic": "ntk", "yarn": "yarn", "llama3": "llama3"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None), "attention_bias": (False, None), "mlp_bias": (False, None), "layer_norm_type": (None,),
    "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None), "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None), "clip_qkv": (None,), "attn_logit_softcapping": (None,),
}  # fmt: skip
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_POSITIONS = frozenset({
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor",
})  # fmt: skip
"""What may be among the settings of positions; any other key is refused, since it would change what is computed."""
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen2_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 16, "sliding_window": 4096},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
}
"""What transformers takes for a key that is not there, where it is not what all families take."""


def from_hub(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a config.json describes.

    Raises:
        ConfigError: The family is not known, a key is missing, or it asks for something that our model cannot do.
    """
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where} is of a family that is not known", found=repr(kind), expected=", ".join(FAMILIES),
            state="Nothing was read.",
        )  # fmt: skip
    values = {**_ABSENT[kind], **values}
    for key, allowed in _NEUTRAL.items():
        if key in values and values[key] not in allowed:
            raise _refused(where, key, values[key], " or ".join(repr(one) for one in allowed if one is not None))
    try:
        found = _sizes(values, kind) | _rope(values, where) | _choices(values, kind, where)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{where} has a setting that cannot be read", found=str(error)[:100], expected="the numbers of a model"
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"{where} lacks a setting of {kind}", found=f"no {error.args[0]!r}", expected="a complete config.json"
        ) from error
    try:
        return from_values({"model": found}).model  # refuses wrong types and values
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.problem}", found=error.found, expected=error.expected) from error


def _sizes(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    heads, dim = values["num_attention_heads"], values["hidden_size"]
    size = values.get("head_dim") or dim // heads
    is_qwen_moe = kind in ("qwen2_moe", "qwen3_moe")
    experts = 0
    if is_qwen_moe or kind == "mixtral":  # one name or the other, by version
        experts = values["num_experts"] if "num_experts" in values else values["num_local_experts"]
    return {
        "family": kind,
        "vocab": values["vocab_size"],
        "dim": dim,
        "layers": values["num_hidden_layers"],
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": 0 if size * heads == dim else size,
        "ffn": values["moe_intermediate_size"] if is_qwen_moe else values["intermediate_size"],
        "context": values.get("max_position_embeddings") or 0,
        "norm_eps": float(values["rms_norm_eps"]),
        "experts": experts,
        "experts_per_token": values["num_experts_per_tok"] if experts else ModelConfig().experts_per_token,
        "shared_ffn": values["shared_expert_intermediate_size"] if kind == "qwen2_moe" else 0,
    }


def _choices(values: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    window, first = _window(values, kind, where)
    return {
        "qkv_bias": kind == "qwen2" or (kind == "qwen2_moe" and values.get("qkv_bias", True)),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
        "window": window,
        "window_from": first,
        "normalize_experts": bool(values.get("norm_topk_prob", False)) if "moe" in kind else True,
    }


def _window(values: Mapping[str, Any], kind: str, where: str) -> tuple[int, int]:
    """Return the window and the first layer that has it; (0, 0) without one."""
    asked = kind in ("mistral", "mixtral") or values.get("use_sliding_window", False)
    window = values.get("sliding_window") if asked else None
    if not window:
        return 0, 0
    layers = values["num_hidden_layers"]
    if kind == "qwen2_moe":
        raise _refused(where, "use_sliding_window", asked, "false: it would alternate between layers")
    first = values.get("max_window_layers", 28) if kind in ("qwen2", "qwen3") else 0
    if types := values.get("layer_types"):
        first = next((i for i, one in enumerate(types) if one == "sliding_attention"), layers)
        if list(types) != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
            raise _refused(where, "layer_types", types, "full attention up to a layer, windows from there on")
    return (window, first) if first < layers else (0, 0)


def _positions(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a config.json says of positions in one dict; a key that is not known is refused."""
    older, newer = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    found = {**older, **newer}
    for key, value in found.items():
        if key not in _POSITIONS:
            raise _refused(
                where, f"{'rope_parameters' if key in newer else 'rope_scaling'}.{key}", value, "no such key"
            )
        if older.get(key, value) != value:
            raise _refused(where, f"rope_scaling.{key}", older[key], f"{value!r}, as rope_parameters says")
    if "original_max_position_embeddings" in values:  # transformers prefers it
        found["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return found


def _rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of positions, from the keys of version 5 or those before it."""
    found = _positions(values, where)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in _SCALINGS or found.get("mscale") or found.get("truncate") is False:
        raise _refused(where, "rope_scaling", found, "one of " + ", ".join(_SCALINGS))
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(where, "partial_rotary_factor", found["partial_rotary_factor"], "1.0")
    base = found.get("rope_theta") or values.get("rope_theta")
    default = 1e6 if values["model_type"] == "mixtral" else 10000.0
    settings: dict[str, Any] = {"rope_base": float(base or default), "rope_scaling": _SCALINGS[kind]}
    if kind == "default":
        return settings
    settings["rope_factor"] = float(found["factor"])
    if kind == "dynamic":  # Hugging Face scales it from max_position_embeddings
        settings["rope_context"] = values["max_position_embeddings"]
    if kind in ("yarn", "llama3"):
        settings["rope_context"] = found.get("original_max_position_embeddings") or values["max_position_embeddings"]
    if kind == "llama3":
        settings |= {"rope_low": float(found["low_freq_factor"]), "rope_high": float(found["high_freq_factor"])}
    if kind == "yarn":
        settings |= {
            "rope_beta_fast": float(found.get("beta_fast") or 32),
            "rope_beta_slow": float(found.get("beta_slow") or 1),
        }
        settings["rope_attention"] = float(found.get("attention_factor") or 0.0)
    return settings


def _refused(where: str, key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"{where} uses a feature that the trainer's model does not support",
        found=f"{key} = {value!r}"[:200],
        expected=expected,
        state="Nothing was read.",
    )


def to_hub(config: ModelConfig, seq_len: int, dtype: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json of a model; versions 4 and 5 of transformers read it.

    Args:
        config: The model.
        seq_len: Its longest sequence, where the model does not say one.
        dtype: Of its tensors, as torch calls it.
        before: The config.json that the model came with: what we know nothing of (token ids, ...) is kept.

    Raises:
        ConfigError: No family has what the model has.
    """
    if config.router_bias_rate:
        raise ConfigError(
            "no family of Hugging Face has a bias in its routers, without which tokens would meet other experts",
            found=f"model.router_bias_rate = {config.router_bias_rate}",
            expected="a model without one: router_aux_loss balances experts that are to be exported",
            state="Nothing was written.",
        )
    family = family_of(config)
    kept = dict(before or {}) if (before or {}).get("model_type") == family.name else {}
    for key in (*_ROPE_KEYS, "layer_types", "torch_dtype", "transformers_version", "num_experts", "num_local_experts"):
        kept.pop(key, None)
    moe = family.name in ("qwen2_moe", "qwen3_moe")
    kept |= {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "moe_intermediate_size" if moe else "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": _context(config, seq_len),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "dtype": dtype,
        **_rope_to_hub(config),
        **_window_to_hub(config, family.name),
        **_experts_to_hub(config, family.name),
    }
    if not before:
        kept |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return kept


def _context(config: ModelConfig, seq_len: int) -> int:
    if config.rope_scaling == "ntk":
        return config.rope_context  # see _rope
    return config.context or max(seq_len, round(config.rope_context * config.rope_factor))


def _rope_to_hub(config: ModelConfig) -> dict[str, Any]:
    kind = next(theirs for theirs, ours in _SCALINGS.items() if ours == config.rope_scaling)
    if kind == "default":
        return {"rope_theta": config.rope_base, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rope_factor}
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = config.rope_context
    if kind == "llama3":
        scaling |= {"low_freq_factor": config.rope_low, "high_freq_factor": config.rope_high}
    if kind == "yarn":
        scaling |= {"beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow}
        scaling |= {"attention_factor": config.rope_attention} if config.rope_attention else {}
    return {"rope_theta": config.rope_base, "rope_scaling": scaling}


def _window_to_hub(config: ModelConfig, family: str) -> dict[str, Any]:
    window = config.window or None
    if family in ("qwen2", "qwen3"):
        first = config.window_from if window else config.layers
        return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
    if family in ("qwen2_moe", "qwen3_moe"):
        return {"use_sliding_window": window is not None, "sliding_window": window}
    return {"sliding_window": window} if family in ("mistral", "mixtral") else {}


def _experts_to_hub(config: ModelConfig, family: str) -> dict[str, Any]:
    if not config.experts:
        return {}
    if family == "mixtral":
        return {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    values = {
        "num_experts": config.experts, "num_experts_per_tok": config.experts_per_token, "decoder_sparse_step": 1,
        "norm_topk_prob": config.normalize_experts, "mlp_only_layers": [], "intermediate_size": config.ffn,
    }  # fmt: skip
    return values | (
        {"shared_expert_intermediate_size": config.shared_ffn, "qkv_bias": True} if config.shared_ffn else {}
    )
