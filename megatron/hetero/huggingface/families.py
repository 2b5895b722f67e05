"""The families of models that can be converted: what their config.json says in our arguments.

All are decoders with RMSNorm, SwiGLU and RoPE. What `ANY` and a family's `fixed` leave open is read
from config.json. No files, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANY: Mapping[str, Any] = {
    "swiglu": True,
    "squared_relu": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "apply_query_key_layer_scaling": False,
    "mtp_num_layers": None,
}
"""Arguments that are the same for every model of every family."""

_PLAIN: Mapping[str, Any] = {
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_layernorm_across_heads": False,
    "reordered_norm": False,
    "rotary_percent": 1.0,
    "softmax_scale": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_experts": None,
    "multi_latent_attention": False,
}
"""The same arguments of a plain LLaMA; a family may have others, or leave them open."""


@dataclass(frozen=True)
class Experts:
    """A family's mixtures of experts: their keys in config.json and the names of their tensors."""

    counts: tuple[str, ...]
    """The names of the key with the number of experts, of which transformers writes any."""
    loss: str
    """The key of the auxiliary loss's coefficient."""
    sequence_loss: str | None = None
    """The key that says whether that loss is one of each sequence."""
    width: str = "moe_intermediate_size"
    """The key of an expert's inner width."""
    dense_layers: str | None = None
    """The key that says which layers have no experts, if there may be any."""
    scores: str = "softmax"
    """The function that makes scores of the router's logits."""
    normalized: bool | None = None
    """Whether the scores of a token's experts add up to 1; None if norm_topk_prob says."""
    router_dtype: str | None = None
    """The router's precision if it is not the model's, as of --moe-router-dtype."""
    bias: bool = False
    """True if a bias of each expert's score takes part in the choice."""
    scaled: bool = False
    """True if routed_scaling_factor is a factor of the scores."""
    shared: bool = False
    """True if there are experts that every token passes."""
    of_a_group: int = 0
    """How many experts of a group decide whether it is chosen; 0 without groups."""
    methods: tuple[str, ...] = ()
    """Values of topk_method, the last of which chooses by groups; none if all models do."""
    module: str = "mlp"
    """The name of the module in a layer."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """An expert's tensors: gate, up and down."""


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    name: str
    """The name by which people know it."""
    model_type: str
    architecture: str
    own: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are not a plain LLaMA's."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its further keys in config.json, by the argument that has the same value."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json does not have, where they differ from LLaMA's."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the model, with the value that has no effect and is the default."""
    windows: str | None = None
    """When attention may have a window: "always", or "switched" on by use_sliding_window."""
    scalings: tuple[str, ...] = ("default", "linear", "llama3")
    """RoPE scalings that transformers supports for this family and that we have flags for."""
    fused_projections: bool = False
    """True if queries, keys and values are one tensor, and gate and up projection another."""
    experts: Experts | None = None
    """Its mixtures of experts; None if its models are dense."""
    further_tokens: str | None = None
    """The key with the number of layers that predict further tokens, which are left out."""

    @property
    def latent_attention(self) -> bool:
        return bool(self.own.get("multi_latent_attention"))

    @property
    def fixed(self) -> dict[str, Any]:
        """The arguments that are the same for each of its models."""
        fixed = {**ANY, **_PLAIN, **self.own}
        if self.experts is not None:
            del fixed["num_experts"]
        return {name: value for name, value in fixed.items() if name not in self.settings}


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_SOME_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}

_LATENT = {"multi_latent_attention": True, "qk_layernorm": True}
_LATENT_WIDTHS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES = (
    Family("LLaMA", "llama", "LlamaForCausalLM", required=_NO_BIAS),
    Family(
        "Qwen2",
        "qwen2",
        "Qwen2ForCausalLM",
        own={"add_qkv_bias": True},
        defaults=_SOME_DEFAULTS,
        windows="switched",
    ),
    Family(
        "Qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        own={"qk_layernorm": True},
        defaults={**_SOME_DEFAULTS, "head_dim": 128},
        required={"attention_bias": False},
        windows="switched",
    ),
    Family(
        "Mistral",
        "mistral",
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows="always",
    ),
    Family(
        "OLMo-2",
        "olmo2",
        "Olmo2ForCausalLM",
        own={
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "reordered_norm": True,
        },
        defaults={"rms_norm_eps": 1e-5},
        required={"attention_bias": False},
    ),
    Family(
        "Phi-3",
        "phi3",
        "Phi3ForCausalLM",
        settings={"rotary_percent": "partial_rotary_factor"},
        defaults={"rms_norm_eps": 1e-5},
        required={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        windows="always",
        scalings=("default",),
        fused_projections=True,
    ),
    Family(
        "Granite",
        "granite",
        "GraniteForCausalLM",
        settings={
            "softmax_scale": "attention_multiplier",
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_scaling": "logits_scaling",
        },
        required=_NO_BIAS,
    ),
    Family(
        "Qwen3-MoE",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        own={"qk_layernorm": True},
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 1e-3,
        },
        required={"attention_bias": False},
        windows="switched",
        experts=Experts(
            counts=("num_experts", "num_local_experts"),
            loss="router_aux_loss_coef",
            dense_layers="mlp_only_layers",
        ),
    ),
    Family(
        "Mixtral",
        "mixtral",
        "MixtralForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 1e-3,
        },
        required={"router_jitter_noise": 0.0},
        windows="always",
        experts=Experts(
            counts=("num_local_experts", "num_experts"),
            loss="router_aux_loss_coef",
            width="intermediate_size",
            normalized=True,
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        own=_LATENT,
        defaults={
            **_LATENT_WIDTHS,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
        required={**_NO_BIAS, "scoring_func": "softmax", "moe_layer_freq": 1},
        scalings=("default", "yarn"),
        experts=Experts(
            counts=("n_routed_experts", "num_experts"),
            loss="aux_loss_alpha",
            sequence_loss="seq_aux",
            dense_layers="first_k_dense_replace",
            normalized=False,
            router_dtype="fp32",
            scaled=True,
            shared=True,
            of_a_group=1,
            methods=("greedy", "group_limited_greedy"),
        ),
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        own=_LATENT,
        defaults={
            **_LATENT_WIDTHS,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
        },
        required={
            "attention_bias": False,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        scalings=("default", "yarn"),
        experts=Experts(
            counts=("n_routed_experts", "num_local_experts", "num_experts"),
            loss="aux_loss_alpha",
            sequence_loss="seq_aux",
            dense_layers="first_k_dense_replace",
            scores="sigmoid",
            router_dtype="fp32",
            bias=True,
            scaled=True,
            shared=True,
            of_a_group=2,
        ),
        further_tokens="num_nextn_predict_layers",
    ),
)
"""In the order in which an export looks for the one that its flags describe."""

BY_TYPE: Mapping[str, Family] = {family.model_type: family for family in FAMILIES}


def names_of_all() -> str:
    *names, last = (family.name for family in FAMILIES)
    return f"{', '.join(names)} and {last}"
