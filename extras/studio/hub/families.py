"""The families of models and their tensors: our names, theirs, and shapes. Torch-free.

Nothing is permuted: rotary halves, gates and the order of weights (out, in) are Hugging Face's own. A tensor of ours
that holds all experts is one tensor of theirs per expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.model import ModelConfig

Row = tuple[str, str, str]
"""Our name, theirs, and the shape of theirs in the words of `_sizes`. {e} in their name: one per expert."""

_EMBEDDING: Row = ("tok_embeddings.weight", "model.embed_tokens.weight", "vocab dim")
_NORM: Row = ("norm.weight", "model.norm.weight", "dim")
_HEAD: Row = ("output.weight", "lm_head.weight", "vocab dim")
# The rest is per layer: `layers.{i}.` stands before our names, `model.layers.{i}.` before theirs.
_ATTENTION: tuple[Row, ...] = (
    ("attention_norm.weight", "input_layernorm.weight", "dim"),
    ("attention.wq.weight", "self_attn.q_proj.weight", "queries dim"),
    ("attention.wk.weight", "self_attn.k_proj.weight", "keys dim"),
    ("attention.wv.weight", "self_attn.v_proj.weight", "keys dim"),
    ("attention.wo.weight", "self_attn.o_proj.weight", "dim queries"),
    ("ffn_norm.weight", "post_attention_layernorm.weight", "dim"),
)
_BIASES: tuple[Row, ...] = (
    ("attention.wq.bias", "self_attn.q_proj.bias", "queries"),
    ("attention.wk.bias", "self_attn.k_proj.bias", "keys"),
    ("attention.wv.bias", "self_attn.v_proj.bias", "keys"),
)
_HEAD_NORMS: tuple[Row, ...] = (
    ("attention.q_norm.weight", "self_attn.q_norm.weight", "head"),
    ("attention.k_norm.weight", "self_attn.k_norm.weight", "head"),
)
_DENSE: tuple[Row, ...] = (
    ("feed_forward.w1.weight", "mlp.gate_proj.weight", "ffn dim"),
    ("feed_forward.w3.weight", "mlp.up_proj.weight", "ffn dim"),
    ("feed_forward.w2.weight", "mlp.down_proj.weight", "dim ffn"),
)
_MIXTRAL: tuple[Row, ...] = (
    ("feed_forward.router.weight", "block_sparse_moe.gate.weight", "experts dim"),
    ("feed_forward.experts.w1", "block_sparse_moe.experts.{e}.w1.weight", "ffn dim"),
    ("feed_forward.experts.w3", "block_sparse_moe.experts.{e}.w3.weight", "ffn dim"),
    ("feed_forward.experts.w2", "block_sparse_moe.experts.{e}.w2.weight", "dim ffn"),
)
_QWEN_EXPERTS: tuple[Row, ...] = (
    ("feed_forward.router.weight", "mlp.gate.weight", "experts dim"),
    ("feed_forward.experts.w1", "mlp.experts.{e}.gate_proj.weight", "ffn dim"),
    ("feed_forward.experts.w3", "mlp.experts.{e}.up_proj.weight", "ffn dim"),
    ("feed_forward.experts.w2", "mlp.experts.{e}.down_proj.weight", "dim ffn"),
)
_SHARED: tuple[Row, ...] = (
    ("feed_forward.shared.w1.weight", "mlp.shared_expert.gate_proj.weight", "shared dim"),
    ("feed_forward.shared.w3.weight", "mlp.shared_expert.up_proj.weight", "shared dim"),
    ("feed_forward.shared.w2.weight", "mlp.shared_expert.down_proj.weight", "dim shared"),
    ("feed_forward.shared_gate.weight", "mlp.shared_expert_gate.weight", "one dim"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a family has; a model that has something else is of another one.

    Attributes:
        name: Hugging Face's `model_type`.
        architecture: Its class there.
        rows: Tensors of a layer.
        windows: "none", "all" (layers have it or not, together) or "from" (from one layer on).
        any_width: Whether heads x head_dim may differ from dim in a way that dim / heads has a remainder.
    """

    name: str
    architecture: str
    rows: tuple[Row, ...]
    windows: str = "none"
    any_width: bool = True

    def misfit(self, config: ModelConfig) -> str:
        """Return the first setting of a model that this family cannot have, or ""."""
        wanted = {
            "qkv_bias": (config.qkv_bias, _BIASES[0] in self.rows),
            "qk_norm": (config.qk_norm, _HEAD_NORMS[0] in self.rows),
            "experts": (config.experts > 0, _DENSE[0] not in self.rows),
            "shared_ffn": (config.shared_ffn > 0, _SHARED[0] in self.rows),
        }
        wrong = [name for name, (has, can) in wanted.items() if has != can]
        wrong += ["window"] if config.window and self.windows == "none" else []
        wrong += ["window_from"] if config.window_from and self.windows != "from" else []
        wrong += ["normalize_experts"] if self.name == "mixtral" and not config.normalize_experts else []
        wrong += ["dim"] if not self.any_width and config.dim % config.heads else []
        return wrong[0] if wrong else ""


FAMILIES = {
    family.name: family
    for family in (
        Family(name="llama", architecture="LlamaForCausalLM", rows=_ATTENTION + _DENSE, any_width=False),
        Family(name="mistral", architecture="MistralForCausalLM", rows=_ATTENTION + _DENSE, windows="all"),
        Family(name="qwen2", architecture="Qwen2ForCausalLM", rows=_ATTENTION + _BIASES + _DENSE, windows="from"),
        Family(name="qwen3", architecture="Qwen3ForCausalLM", rows=_ATTENTION + _HEAD_NORMS + _DENSE, windows="from"),
        Family(name="mixtral", architecture="MixtralForCausalLM", rows=_ATTENTION + _MIXTRAL, windows="all"),
        Family(
            name="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            rows=_ATTENTION + _BIASES + _QWEN_EXPERTS + _SHARED,
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            rows=_ATTENTION + _HEAD_NORMS + _QWEN_EXPERTS,
            windows="all",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubTensor:
    """One tensor of a Hugging Face folder and what it is of ours.

    Attributes:
        ours, theirs: Names.
        shape: Of theirs.
        expert: Which slice of ours it is along the first dimension; None: all of it.
        whole: Shape of ours.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    expert: int | None
    whole: tuple[int, ...]


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model: the one it names, or the first that has all it has.

    Raises:
        ConfigError: No family, or not the one that is named, has what the model has.
    """
    if not config.family:
        fitting = [family for family in FAMILIES.values() if not family.misfit(config)]
        if fitting:
            return fitting[0]
        nearest = "; ".join(f"{name}: model.{family.misfit(config)}" for name, family in FAMILIES.items())
        raise ConfigError(
            "no family of Hugging Face has all that this model has",
            found=f"what does not fit, family by family: {nearest}",
            expected="a model of one of " + ", ".join(FAMILIES),
            state="Nothing was written.",
        )
    family = FAMILIES[config.family]
    if wrong := family.misfit(config):
        raise ConfigError(
            f"model.{wrong} does not go with model.family = {config.family}",
            found=f"model.{wrong} = {getattr(config, wrong)}",
            expected=f"what {family.architecture} has",
            remedy='change it, or leave the family open: model.family = ""',
        )
    return family


def tensors_of(config: ModelConfig) -> list[HubTensor]:
    """Return every tensor of a model, in their order; a tied head is there, under the name of the embedding."""
    sizes = _sizes(config)
    found = [_tensor(_EMBEDDING, "", "", sizes)]
    for layer in range(config.layers):
        for row in family_of(config).rows:
            ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
            if "{e}" in row[1]:
                found += [_tensor(row, ours, theirs, sizes, expert) for expert in range(config.experts)]
            else:
                found.append(_tensor(row, ours, theirs, sizes))
    head = (_HEAD[0], _EMBEDDING[1], _HEAD[2]) if config.tied_embeddings else _HEAD
    return [*found, _tensor(_NORM, "", "", sizes), _tensor(head, "", "", sizes)]


def router_biases(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each bias of a router by its name; no family of Hugging Face has one."""
    if not config.router_bias_rate:
        return {}
    return {f"layers.{layer}.feed_forward.router_bias": (config.experts,) for layer in range(config.layers)}


def _tensor(row: Row, ours: str, theirs: str, sizes: dict[str, int], expert: int | None = None) -> HubTensor:
    shape = tuple(sizes[word] for word in row[2].split())
    whole = shape if expert is None else (sizes["experts"], *shape)
    name = theirs + row[1].replace("{e}", str(expert))
    return HubTensor(ours=ours + row[0], theirs=name, shape=shape, expert=expert, whole=whole)


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "vocab": config.vocab, "dim": config.dim, "head": config.head_size, "queries": config.heads * config.head_size,
        "keys": config.kv_heads * config.head_size, "ffn": config.ffn, "experts": config.experts,
        "shared": config.shared_ffn, "one": 1,
    }  # fmt: skip
