"""Published model shapes with random weights: what a step costs does not depend on their values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import Model, ModelParams, config
from dflash_jax.config import DrafterConfig, LayerType, RopeConfig, TargetConfig
from dflash_jax.params import init, pack


def dense(
    model_type: str,
    layers: int,
    dim: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool = False,
    qk_norm: bool = False,
) -> TargetConfig:
    """A target of these sizes."""
    full: LayerType = "full_attention"
    return TargetConfig(
        model_type=model_type,
        vocab_size=vocab,
        vocab_rows=vocab,
        hidden_size=dim,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        tie_word_embeddings=tied,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        layer_types=(full,) * layers,
        sliding_window=None,
    )


TARGETS = {
    "qwen3-8b": dense("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-4b": dense("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, qk_norm=True, tied=True),
    "llama-3.1-8b": dense("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    "smollm2": dense("llama", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
}
TAPS = {
    "qwen3-8b": (1, 9, 17, 25, 33),
    "qwen3-4b": (1, 9, 17, 25, 33),
    "llama-3.1-8b": (1, 8, 15, 22, 29),
    "smollm2": (1, 7, 14, 20, 27),
}


def drafter_of(shape: str, layers: int = 5, block_size: int = 16) -> DrafterConfig:
    """The DFlash drafter of a shape: five layers like the target's, with head norms."""
    target = TARGETS[shape]
    full: LayerType = "full_attention"
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=target.rope,
        attention_bias=False,
        layer_types=(full,) * layers,
        sliding_window=None,
        in_block_causal=(False,) * layers,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=TAPS[shape],
        num_target_layers=target.num_hidden_layers,
    )


def random_pair(shape: str, dtype: str, mesh: Mesh, kernels: str) -> tuple[ModelParams, Model]:
    """A pair of a published shape with random weights, packed on the mesh."""
    drafter = drafter_of(shape)
    target = config.pair(TARGETS[shape], drafter)
    keys, kind = jax.random.split(jax.random.key(0)), jnp.dtype(dtype)
    params = ModelParams(
        target=pack(init(target, keys[0], kind, mesh), target, mesh, consume=True),
        drafter=pack(init(drafter, keys[1], kind, mesh), drafter, mesh, consume=True),
    )
    return params, Model(target, drafter, kernels)


def alone(params: ModelParams, model: Model) -> tuple[ModelParams, Model]:
    """The target without its drafter, for plain decoding: the same weights, no taps."""
    return ModelParams(params.target), replace(model, target=replace(model.target, target_layer_ids=()), drafter=None)
