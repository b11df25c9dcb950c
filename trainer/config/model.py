"""What a Llama-like model is: sizes and the choices in which its families differ. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Llama-like model. `ffn` and `dim` count elements; `vocab`: tokens; bytes are 256.

    Attributes:
        family: Hugging Face's name of the model type ("llama", "qwen3", ...); empty: the one that fits, on export.
        head_dim: Elements of a head; 0: dim / heads.
        qkv_bias: Whether the projections to queries, keys and values have one (Qwen 2).
        qk_norm: Whether each head of queries and keys is normalised (Qwen 3).
        tied_embeddings: Whether the head is the embedding.
        window: Tokens that attention reaches back, itself included; 0: all. In layers from `window_from` on.
        context: Longest sequence that the model is made for, as an export says; 0: train.seq_len.
        rope_scaling: "none", "linear", "ntk" (Hugging Face's "dynamic"), "yarn" or "llama3".
        rope_factor: How many times longer than `rope_context` tokens sequences become.
        rope_low, rope_high: "llama3": wave lengths per `rope_context` between which it interpolates.
        rope_beta_fast, rope_beta_slow: "yarn": turns per `rope_context` between which it interpolates.
        rope_attention: "yarn": factor of queries and keys; 0: 0.1 ln(rope_factor) + 1.
        normalize_experts: Whether the weights of the chosen experts are made to add up to 1.
        shared_ffn: Size of a shared expert with a gate (Qwen 2 MoE), which every token meets; 0: none.
        router_aux_loss: Coefficient of the load-balancing loss of each layer (Switch Transformer); 0: none.
        router_z_loss: Coefficient of the squared log-sum-exp of each router's scores (ST-MoE); 0: none.
        router_bias_rate: By how much a step moves the bias with which each expert is chosen towards equal loads; 0: no bias.
    """

    family: str = ""
    vocab: int = 256
    dim: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    ffn: int = 192
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    window: int = 0
    window_from: int = 0
    context: int = 0
    rope_base: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_context: int = 0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_attention: float = 0.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 2
    normalize_experts: bool = True
    shared_ffn: int = 0
    router_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    router_bias_rate: float = 0.0

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.dim // self.heads
