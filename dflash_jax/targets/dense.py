"""Dense decoders: Llama, Qwen2 / 2.5 and Qwen3 are one function of a config.

Layers are unrolled; parameters come packed (``params.pack``). The block's own K/V never touches the cache here: rows
are returned, and the step commits those that were accepted.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Rows, View, attend
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.layers import linear, logits_of, rms_norm, rope_table, rotate, swiglu
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]


def cache_shape(cfg: TargetConfig | DrafterConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim) of the paged K/V."""
    return cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim


def embed(params: Params, cfg: TargetConfig, tokens: Array) -> Array:
    """Token ids int32 [B, T] -> [B, T, D]."""
    return params["embed"].at[tokens].get(mode="clip")


def head(params: Params, cfg: TargetConfig, final: Array) -> Array:
    """[..., D] -> float32 logits [..., V]; ids that the config does not have are -inf."""
    logits = logits_of(final, params["embed" if cfg.tie_word_embeddings else "head"])
    if cfg.vocab_rows == cfg.vocab_size:
        return logits
    return jnp.where(jnp.arange(cfg.vocab_rows) < cfg.vocab_size, logits, -jnp.inf)


def heads_of(
    layer: Params, cfg: TargetConfig | DrafterConfig, x: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """Normed and rotated q [B, T, N, H], k [B, T, G, H] and plain v of a normed input x [B, T, D]."""
    qkv = linear(x, layer["qkv"], layer.get("qkv_bias"))  # [B, T, G, N/G + 2, H]
    q, k, v = qkv[..., :-2, :].reshape(*x.shape[:2], -1, cfg.head_dim), qkv[..., -2, :], qkv[..., -1, :]
    if "q_norm" in layer:
        q, k = rms_norm(q, layer["q_norm"], cfg.rms_norm_eps), rms_norm(k, layer["k_norm"], cfg.rms_norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def feed_forward(layer: Params, cfg: TargetConfig | DrafterConfig, x: Array) -> Array:
    """The residual MLP sublayer: x + SwiGLU(norm(x))."""
    u = rms_norm(x, layer["post_norm"], cfg.rms_norm_eps)
    return x + swiglu(u, layer["gate_up"], layer["down"], layer.get("gate_up_bias"), layer.get("down_bias"))


def forward(
    params: Params,
    cfg: TargetConfig,
    tokens: Array,
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array = True,
) -> Hidden:
    """One pass over a block that follows the cached tokens.

    Args:
        params: packed parameters.
        cfg: its ``target_layer_ids`` are the layers to tap.
        tokens, positions: int32 [B, T].
        valid: int32 [B] leading tokens of each row that exist.
        view: the pages before the block.
        rule: inside the block, causal (True) or a bool [T, T] mask for trees.

    Returns:
        Hidden; features are the residual stream after each tapped layer, before any later norm.
    """
    cos, sin = rope_table(cfg.rope, cfg.head_dim, positions)
    x = embed(params, cfg, tokens)
    rows, taps = [], {}
    for i, (layer, window) in enumerate(zip(params["layers"], cfg.windows(), strict=True)):
        q, k, v = heads_of(layer, cfg, rms_norm(x, layer["input_norm"], cfg.rms_norm_eps), cos, sin)
        mixed = attend(view, i, q, k, v, positions, valid, rule, window)
        x = feed_forward(layer, cfg, x + linear(mixed, layer["o"], layer.get("o_bias"), contract=2))
        rows.append(jnp.stack([k, v], axis=2)[:, :, None])
        if i in cfg.target_layer_ids:
            taps[i] = x
    features = [taps[i] for i in cfg.target_layer_ids]
    return Hidden(
        final=rms_norm(x, params["final_norm"], cfg.rms_norm_eps),
        features=jnp.concatenate(features, axis=-1) if features else jnp.zeros((*x.shape[:2], 0), x.dtype),
        rows=Rows(kv=tuple(rows)),
    )
