"""The multi-token-prediction head of Qwen3-Next and Qwen3.5: one more decoder layer, which the target brings along.

It joins the token's embedding with the target's final hidden state of the position before, both normed, and predicts
through the target's own head; what it feeds back to itself is the hidden state that the head scored. As in the target,
norms multiply by 1 + w, attention is gated and rotates a part of each head. ``chain`` says how it extends and drafts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dflash_jax.cache import View, attend
from dflash_jax.config import MTPConfig
from dflash_jax.drafters.chain import Chain, Pass
from dflash_jax.drafters.interface import TargetIO
from dflash_jax.layers import linear, rope_table, rotate
from dflash_jax.targets.hidden import Hidden
from dflash_jax.targets.moe import experts

Params = dict[str, Any]

__all__ = ["DRAFTER", "joined", "rows"]


def reads(cfg: MTPConfig, hidden: Hidden) -> Array:
    """The target's hidden state [B, T, D]: after its final norm, or its last layer's where the head was trained so."""
    return hidden.final if cfg.mtp_hidden == "post_norm" else hidden.features


def fuse(params: Params, cfg: MTPConfig, features: Array, kernels: str) -> Array:
    """The hidden state as it is."""
    return features


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm that multiplies by 1 + weight, in float32; x's dtype."""
    wide = x.astype(jnp.float32)
    unit = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (unit * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def joined(params: Params, target_io: TargetIO, cfg: MTPConfig, tokens: Array, hidden: Array) -> Array:
    """The input of fc [B, T, 2D]: the normed embedding of tokens [B, T], then the normed hidden [B, T, D]."""
    embedded = norm(target_io.embed(tokens), params["embedding_norm"], cfg.rms_norm_eps)
    return jnp.concatenate([embedded, norm(hidden, params["hidden_norm"], cfg.rms_norm_eps)], axis=-1)


def rows(
    params: Params,
    target_io: TargetIO,
    cfg: MTPConfig,
    tokens: Array,
    hidden: Array,
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array = True,
) -> Pass:
    """One pass over tokens int32 [B, T] at ``positions`` with the hidden states before them [B, T, D]."""
    x = linear(joined(params, target_io, cfg, tokens, hidden), params["fc"], implementation=view.kernels)
    layer = params["layers"][0]
    normed = norm(x, layer["input_norm"], cfg.rms_norm_eps)
    mixed, kv = gated_attention(layer, cfg, normed, positions, valid, view, rule)
    x = x + mixed
    x = x + feed_forward(layer, cfg, norm(x, layer["post_norm"], cfg.rms_norm_eps), view.kernels)
    final = norm(x, params["final_norm"], cfg.rms_norm_eps)
    return Pass(final, final, [x], [kv])


def gated_attention(
    layer: Params, cfg: MTPConfig, normed: Array, positions: Array, valid: Array, view: View, rule: bool | Array
) -> tuple[Array, Array]:
    """normed [B, T, D] -> [B, T, D] and K/V [B, T, 2, G, H]; each head's result is scaled by a sigmoid."""
    cos, sin = rope_table(cfg.rope, cfg.rotary_dim, positions)
    qkv = linear(normed, layer["qkv"], implementation=view.kernels)
    q = qkv[..., :-2, :].reshape(*qkv.shape[:2], -1, cfg.head_dim)
    k, v = qkv[..., -2, :], qkv[..., -1, :]

    def turned(heads: Array, weight: Array) -> Array:
        heads = norm(heads, weight, cfg.rms_norm_eps)
        first = rotate(heads[..., : cfg.rotary_dim], cos, sin)
        return jnp.concatenate([first, heads[..., cfg.rotary_dim :]], axis=-1)

    kv = jnp.stack([turned(k, layer["k_norm"]), v], axis=2)
    mixed = attend(view, 0, turned(q, layer["q_norm"]), kv, positions, valid, rule, None)
    gate = linear(normed, layer["q_gate"], implementation=view.kernels)
    mixed = (mixed * jax.nn.sigmoid(gate)).reshape(*normed.shape[:2], -1)
    return linear(mixed, layer["o"].reshape(-1, normed.shape[-1]), implementation=view.kernels), kv


def feed_forward(layer: Params, cfg: MTPConfig, normed: Array, kernels: str) -> Array:
    """SwiGLU, or a mixture of experts."""
    if cfg.num_experts:
        return experts(layer, cfg, normed, kernels)
    wide = linear(normed, layer["gate_up"], gated=True, implementation=kernels)
    return linear(wide, layer["down"], implementation=kernels)


def scores(params: Params, target_io: TargetIO, cfg: MTPConfig, final: Array) -> Array:
    """[..., D] -> float32 [..., V] through the target's head."""
    return target_io.head(final)


DRAFTER = Chain(reads, fuse, rows, scores)
