"""Hybrid decoders: Qwen3-Next and Qwen3.5, dense or with experts. Three layers in four are gated delta nets.

A gated delta net keeps a state of fixed size a row instead of K/V. A block is computed in closed form behind the state
without touching it; ``records`` say what each layer needs to fold the accepted prefix in, which the step does. The
other layers are attention with a rotary embedding on a part of each head and a sigmoid gate on its output. Norms are
zero-centred: packed weights are 1 + w in float32. Text only, so the three position axes of M-RoPE are one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Delta, Record, Rows, View, attend, delta_rule, recent
from dflash_jax.config import HybridConfig, HybridMoeConfig, MTPConfig
from dflash_jax.layers import Norm, Normed, linear, linear_and_norm, norm_of, rms_norm, rope_table, rotate
from dflash_jax.targets import dense, moe
from dflash_jax.targets.dense import embed, head
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]

__all__ = ["cache_shape", "embed", "forward", "head", "state_shape"]


def cache_shape(cfg: HybridConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim) of the paged K/V, which only attention layers have."""
    return cfg.layer_types.count("full_attention"), cfg.num_key_value_heads, cfg.head_dim


def state_shape(cfg: HybridConfig) -> Delta:
    """The recurrent state of a row."""
    return Delta(
        layers=cfg.layer_types.count("linear_attention"),
        groups=cfg.linear_num_key_heads,
        heads=cfg.linear_num_value_heads,
        key=cfg.linear_key_head_dim,
        value=cfg.linear_value_head_dim,
        kernel=cfg.linear_conv_kernel_dim,
    )


def attention(
    layer: Params,
    cfg: HybridConfig | MTPConfig,
    index: int,
    normed: Normed,
    rope: tuple[Array, Array],
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array,
) -> tuple[Array, Array]:
    """Attention times the sigmoid of its gate [B, T, N * H], and the block's K/V [B, T, 2, G, H]; ``index`` counts
    attention layers."""
    qkv = linear(normed, layer["qkv"], implementation=view.kernels)  # [B, T, G, 2 N/G + 2, H]
    rows, block, eps = *qkv.shape[:2], cfg.rms_norm_eps
    both = qkv[..., :-2, :].reshape(rows, block, cfg.num_attention_heads, 2, cfg.head_dim)
    q = rotate(rms_norm(both[..., 0, :], layer["q_norm"], eps), *rope)
    k = rotate(rms_norm(qkv[..., -2, :], layer["k_norm"], eps), *rope)
    kv = jnp.stack([k, qkv[..., -1, :]], axis=2)
    mixed = attend(view, index, q, kv, positions, valid, rule, None)
    return (mixed * jax.nn.sigmoid(both[..., 1, :])).reshape(rows, block, -1), kv


def delta_net(
    layer: Params, cfg: HybridConfig, index: int, normed: Normed, valid: Array, view: View
) -> tuple[Array, Record]:
    """The gated delta net [B, T, N * V] and its record; ``index`` counts delta nets.

    One map makes, a key head each: its query, its key, the values of its heads, their output gates z, and their b and
    a, of which come beta and the decay.
    """
    shape = state_shape(cfg)
    mixed = linear(normed, layer["delta_in"], implementation=view.kernels)  # [B, T, G, 2 K + s (2 V + 2)]
    rows, block, share = *mixed.shape[:2], shape.heads // shape.groups
    wide = share * shape.value
    raw = mixed[..., : shape.channels]
    z, b, a = jnp.split(mixed[..., shape.channels :], [wide, wide + share], axis=-1)

    q, k, v = jnp.split(convolved(layer, raw, recent(view, index)), [shape.key, 2 * shape.key], axis=-1)
    there = (jnp.arange(block) < valid[:, None])[..., None]
    beta, a = (x.reshape(rows, block, -1).astype(jnp.float32) for x in (b, a))
    beta = jnp.where(there, jax.nn.sigmoid(beta), 0)
    rate = jnp.exp(layer["a_log"].astype(jnp.float32))
    decay = jnp.where(there, -rate * jax.nn.softplus(a + layer["dt_bias"].astype(jnp.float32)), 0)
    q, k, v = (jnp.where(there[..., None], x, 0) for x in (q, k, v))
    out, record = delta_rule(
        view, index, unit(q) * shape.key**-0.5, unit(k), v.reshape(rows, block, -1, shape.value), beta, decay
    )
    gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
    gated = rms_norm(out, layer["delta_norm"], cfg.rms_norm_eps) * gate
    return gated.astype(raw.dtype).reshape(rows, block, -1), Record(raw, record)


def convolved(layer: Params, raw: Array, before: Array) -> Array:
    """silu of a causal convolution of each channel: raw [B, T, G, c] behind [B, kernel - 1, G, c], in float32."""
    weight = layer["delta_conv"].astype(jnp.float32)  # [G, c, kernel]
    block, kernel = raw.shape[1], weight.shape[-1]
    rows = jnp.concatenate([before.astype(raw.dtype), raw], axis=1).astype(jnp.float32)
    return jax.nn.silu(sum(weight[..., j] * rows[:, j : j + block] for j in range(kernel)))


def unit(x: Array) -> Array:
    """x [..., K] over its length; the epsilon stands under the root."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def forward(
    params: Params,
    cfg: HybridConfig,
    tokens: Array,
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array = True,
) -> Hidden:
    """One pass over a block that follows the cached tokens. Arguments as ``dense.forward``; the view holds the states.

    Returns:
        Hidden, with a ``Record`` a delta net.

    Raises:
        ValueError: a ``rule`` other than causal: a state follows one path.
    """
    if rule is not True:
        raise ValueError("recurrent layers process a block in its order: the rule inside it must be causal (True)")
    x, kernels, layers = embed(params, cfg, tokens), view.kernels, params["layers"]
    feed_forward = moe.feed_forward if isinstance(cfg, HybridMoeConfig) else dense.swiglu
    rope = rope_table(cfg.rope, cfg.head_dim, positions)
    normed = norm_of(x, Norm(layers[0]["input_norm"], cfg.rms_norm_eps))
    followings = [*(layer["input_norm"] for layer in layers[1:]), params["final_norm"]]
    stream: list[Array] = []
    rows: list[Array] = []
    records: list[Record] = []
    for layer, following, kind in zip(layers, followings, cfg.layer_types, strict=True):
        if kind == "linear_attention":
            mixed, record = delta_net(layer, cfg, len(records), normed, valid, view)
            out = layer["delta_out"]
            records.append(record)
        else:
            mixed, kv = attention(layer, cfg, len(rows), normed, rope, positions, valid, view, rule)
            out = layer["o"]
            rows.append(kv)
        post = Norm(layer["post_norm"], cfg.rms_norm_eps)
        x, normed = linear_and_norm(mixed, out.reshape(-1, x.shape[-1]), post, residual=x, implementation=kernels)
        x, normed = feed_forward(layer, cfg, x, normed, Norm(following, cfg.rms_norm_eps), kernels)
        stream.append(x)
    final = normed.array()
    features = [stream[i] for i in cfg.target_layer_ids]
    return Hidden(
        final=final,
        features=jnp.concatenate(features, axis=-1) if features else final[..., :0],
        rows=Rows(kv=tuple(kv[:, :, None] for kv in rows)),
        records=tuple(records),
    )
