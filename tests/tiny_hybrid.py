"""Tiny random hybrid targets: two gated delta nets and an attention layer, dense or with experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tiny_models import DRAFTER, Pair, target_params

from dflash_jax import HybridConfig, HybridMoeConfig, Model, ModelParams, RopeConfig, pair
from dflash_jax.params import init, pack

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHAPE = {
    "vocab_size": 90,
    "vocab_rows": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope": RopeConfig(10000.0, partial_rotary_factor=0.25),
    "tie_word_embeddings": False,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "layer_types": ("linear_attention", "full_attention", "linear_attention"),
    "sliding_window": None,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, HybridConfig] = {
    "qwen3_5": HybridConfig(model_type="qwen3_5", **SHAPE, **DELTA),
    "qwen3_next": HybridMoeConfig(model_type="qwen3_next", **SHAPE, **DELTA, **EXPERTS),
    "qwen3_5_moe": HybridMoeConfig(model_type="qwen3_5_moe", **SHAPE, **DELTA, **EXPERTS),
}


def hybrid_pair(mesh: Mesh, family: str = "qwen3_next") -> Pair:
    """A random hybrid and a random drafter, which is hardly ever right."""
    cfg = pair(CONFIGS[family], replace(DRAFTER, max_position_embeddings=2048))
    drafts = init(DRAFTER, jax.random.key(1), jnp.float32, mesh)
    params = ModelParams(pack(target_params(cfg, mesh), cfg, mesh), pack(drafts, DRAFTER, mesh))
    return Pair(params, Model(cfg, DRAFTER, "reference"), mesh)
