"""A tiny model pair for tests: sliding and full layers in both, rows of padding in the tables, taps out of order."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import DrafterConfig, GptOssConfig, Model, ModelParams, MoeConfig, RopeConfig, TargetConfig, pair
from dflash_jax.params import Params, init, pack


@dataclass(frozen=True)
class Pair:
    """A model pair, packed, on its mesh."""

    params: ModelParams
    model: Model
    mesh: Mesh

    @property
    def alone(self) -> tuple[ModelParams, Model]:
        """The target without its drafter."""
        return ModelParams(self.params.target), Model(self.model.target, None, self.model.kernels)


TARGET = TargetConfig(
    model_type="qwen3",
    vocab_size=90,
    vocab_rows=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    rope=RopeConfig(10000.0),
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    layer_types=("full_attention", "sliding_attention", "full_attention"),
    sliding_window=9,
)
DENSE = {field.name: getattr(TARGET, field.name) for field in fields(TARGET)}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MIXTURE = MoeConfig(**{**DENSE, "model_type": "qwen3_moe"}, **EXPERTS, shared_expert_intermediate_size=0)
BIASED = {"qkv_bias": True, "o_bias": True, "qk_norm": False, "model_type": "gpt_oss"}
GPT_OSS = GptOssConfig(**{**DENSE, **BIASED}, **EXPERTS, shared_expert_intermediate_size=0, swiglu_limit=0.5)
DRAFTER = DrafterConfig(
    vocab_size=90,
    draft_vocab_size=90,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    rope=RopeConfig(10000.0),
    attention_bias=False,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=8,
    in_block_causal=(True, False),
    block_size=8,
    mask_token_id=89,
    target_layer_ids=(2, 0),
    num_target_layers=3,
)


def target_params(cfg: TargetConfig, mesh: Mesh) -> Params:
    """Random parameters, not packed; the head's rows of padding would win every argmax, were they ids."""
    params = init(cfg, jax.random.key(0), jnp.float32, mesh)
    params["head"] = params["head"].at[cfg.vocab_size :].set(4.0)
    return params


def tiny_target(cfg: TargetConfig, mesh: Mesh) -> Pair:
    """A random target without a drafter; its biases are not zero."""
    params = target_params(cfg, mesh)
    for i, layer in enumerate(params["layers"]):
        for name in sorted(name for name in layer if name.endswith("bias")):
            layer[name] = jax.random.normal(jax.random.key(i), layer[name].shape) * 0.3
    return Pair(ModelParams(pack(params, cfg, mesh)), Model(cfg, None, "reference"), mesh)


def tiny_pair(mesh: Mesh, drafter: DrafterConfig = DRAFTER) -> Pair:
    """A random target and a random drafter, which is hardly ever right."""
    cfg = pair(TARGET, drafter)
    drafts = init(drafter, jax.random.key(1), jnp.float32, mesh)
    params = ModelParams(pack(target_params(cfg, mesh), cfg, mesh), pack(drafts, drafter, mesh))
    return Pair(params, Model(cfg, drafter, "reference"), mesh)
