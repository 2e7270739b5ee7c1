"""Dense decoders: Llama, Qwen2 / 2.5 and Qwen3 are one function of a config.

Layers are unrolled; parameters come packed (``params.pack``). The block's own K/V never touches the cache here: rows
are returned, and the step commits those that were accepted.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Rows, View, attend
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.layers import Norm, linear, logits_of, rms_norm, rope_table, split_heads
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


def decoder_layer(
    layer: Params,
    cfg: TargetConfig | DrafterConfig,
    index: int,
    x: Array,
    rope: tuple[Array, Array],
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array,
    window: int | None,
) -> tuple[Array, Array]:
    """Attention, then SwiGLU, each on top of the residual stream: x [B, T, D] -> x and its K/V [B, T, 2, G, H]."""
    apply, eps = partial(linear, implementation=view.kernels), cfg.rms_norm_eps
    qkv = apply(x, layer["qkv"], norm=Norm(layer["input_norm"], eps), bias=layer.get("qkv_bias"))
    norms = (layer["q_norm"], layer["k_norm"]) if "q_norm" in layer else None
    q, kv = split_heads(qkv, norms, eps, *rope, implementation=view.kernels)
    mixed = attend(view, index, q, kv, positions, valid, rule, window).reshape(*x.shape[:2], -1)
    x = apply(mixed, layer["o"].reshape(-1, x.shape[-1]), bias=layer.get("o_bias"), residual=x)
    norm = Norm(layer["post_norm"], eps)
    wide = apply(x, layer["gate_up"], norm=norm, bias=layer.get("gate_up_bias"), gated=True)
    return apply(wide, layer["down"], bias=layer.get("down_bias"), residual=x), kv


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
    rope = rope_table(cfg.rope, cfg.head_dim, positions)
    x = embed(params, cfg, tokens)
    rows, taps = [], {}
    for i, (layer, window) in enumerate(zip(params["layers"], cfg.windows(), strict=True)):
        x, kv = decoder_layer(layer, cfg, i, x, rope, positions, valid, view, rule, window)
        rows.append(kv[:, :, None])
        if i in cfg.target_layer_ids:
            taps[i] = x
    features = [taps[i] for i in cfg.target_layer_ids]
    return Hidden(
        final=rms_norm(x, params["final_norm"], cfg.rms_norm_eps),
        features=jnp.concatenate(features, axis=-1) if features else jnp.zeros((*x.shape[:2], 0), x.dtype),
        rows=Rows(kv=tuple(rows)),
    )
