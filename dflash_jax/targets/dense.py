"""Dense decoders: Llama, Qwen2 / 2.5 and Qwen3 are one function of a config.

Layers are unrolled; parameters come packed (``params.pack``). The block's own K/V never touches the cache here: rows
are returned, and the step commits those that were accepted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Delta, Rows, View, attend
from dflash_jax.config import DrafterConfig, Eagle3Config, TargetConfig
from dflash_jax.layers import Norm, Normed, linear, linear_and_norm, logits_of, norm_of, rope_table, split_heads
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]
# (layer, cfg, stream x [B, T, D], x normed, the norm that reads the stream next, kernels) -> x and normed after it.
FeedForward = Callable[[Params, Any, Array, Normed, Norm, str], tuple[Array, Normed]]


def cache_shape(cfg: TargetConfig | DrafterConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim) of the paged K/V."""
    return cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim


def state_shape(cfg: TargetConfig) -> Delta:
    """No layer is recurrent."""
    return Delta()


def embed(params: Params, cfg: TargetConfig, tokens: Array) -> Array:
    """Token ids int32 [B, T] -> [B, T, D]."""
    return params["embed"].at[tokens].get(mode="clip")


def head(params: Params, cfg: TargetConfig, final: Array) -> Array:
    """[..., D] -> float32 logits [..., V]; ids that the config does not have are -inf."""
    logits = logits_of(final, params["embed" if cfg.tie_word_embeddings else "head"])
    if cfg.vocab_rows == cfg.vocab_size:
        return logits
    return jnp.where(jnp.arange(cfg.vocab_rows) < cfg.vocab_size, logits, -jnp.inf)


def swiglu(layer: Params, cfg: Any, x: Array, normed: Normed, norm: Norm, kernels: str) -> tuple[Array, Normed]:
    """The dense ``FeedForward``."""
    wide = linear(normed, layer["gate_up"], bias=layer.get("gate_up_bias"), gated=True, implementation=kernels)
    bias = layer.get("down_bias")
    return linear_and_norm(wide, layer["down"], norm, bias=bias, residual=x, implementation=kernels)


def decoder_layer(
    layer: Params,
    cfg: TargetConfig | DrafterConfig | Eagle3Config,
    index: int,
    x: Array,
    normed: Array | Normed,
    following: Array,
    rope: tuple[Array, Array],
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array,
    window: int | None,
    feed_forward: FeedForward,
) -> tuple[Array, Normed, Array]:
    """Attention, then the feed-forward, each on top of the residual stream.

    Args:
        x, normed: [B, T, D] the stream, and normed by the layer's input norm (or [B, T, C], where the layer's queries,
            keys and values read something else).
        following: [D] the norm's weight that reads the stream after the layer.

    Returns:
        x and normed after the layer, and the block's K/V [B, T, 2, G, H].
    """
    eps, kernels = cfg.rms_norm_eps, view.kernels
    qkv = linear(normed, layer["qkv"], bias=layer.get("qkv_bias"), implementation=kernels)
    norms = (layer["q_norm"], layer["k_norm"]) if "q_norm" in layer else None
    q, kv = split_heads(qkv, norms, eps, *rope, implementation=kernels)
    mixed = attend(view, index, q, kv, positions, valid, rule, window, layer.get("sinks")).reshape(*x.shape[:2], -1)
    out, norm = layer["o"].reshape(-1, x.shape[-1]), Norm(layer["post_norm"], eps)
    x, normed = linear_and_norm(mixed, out, norm, bias=layer.get("o_bias"), residual=x, implementation=kernels)
    x, normed = feed_forward(layer, cfg, x, normed, Norm(following, eps), kernels)
    return x, normed, kv


def decoder(
    params: Params,
    cfg: TargetConfig | DrafterConfig,
    x: Array,
    positions: Array,
    valid: Array,
    view: View,
    rules: Sequence[bool | Array],
    feed_forward: FeedForward = swiglu,
) -> tuple[Array, list[Array], list[Array]]:
    """All layers over an embedded block x [B, T, D], ``rules`` being each layer's rule inside the block.

    Returns:
        [B, T, D] after the final norm, the residual stream after each layer, and each layer's K/V [B, T, 2, G, H].
    """
    rope = rope_table(cfg.rope, cfg.head_dim, positions)
    layers = params["layers"]
    normed = norm_of(x, Norm(layers[0]["input_norm"], cfg.rms_norm_eps))
    followings = [*(layer["input_norm"] for layer in layers[1:]), params["final_norm"]]
    stream, rows = [], []
    for i, (layer, following, rule, window) in enumerate(zip(layers, followings, rules, cfg.windows(), strict=True)):
        x, normed, kv = decoder_layer(
            layer, cfg, i, x, normed, following, rope, positions, valid, view, rule, window, feed_forward
        )
        stream.append(x)
        rows.append(kv)
    return normed.array(), stream, rows


def forward(
    params: Params,
    cfg: TargetConfig,
    tokens: Array,
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array = True,
    feed_forward: FeedForward = swiglu,
) -> Hidden:
    """One pass over a block that follows the cached tokens.

    Args:
        params: packed parameters.
        cfg: its ``target_layer_ids`` are the layers to tap.
        tokens, positions: int32 [B, T].
        valid: int32 [B] leading tokens of each row that exist.
        view: the pages before the block.
        rule: inside the block, causal (True) or a bool [T, T] mask for trees.
        feed_forward: what follows the attention of a layer.

    Returns:
        Hidden; features are the residual stream after each tapped layer, before any later norm.
    """
    rules = (rule,) * cfg.num_hidden_layers
    x = embed(params, cfg, tokens)
    final, stream, rows = decoder(params, cfg, x, positions, valid, view, rules, feed_forward)
    features = [stream[i] for i in cfg.target_layer_ids]
    return Hidden(
        final=final,
        features=jnp.concatenate(features, axis=-1) if features else final[..., :0],
        rows=Rows(kv=tuple(kv[:, :, None] for kv in rows)),
    )
