"""The multi-token-prediction head of Qwen3-Next and Qwen3.5: one more decoder layer, which the target brings along.

It joins the token's embedding with the target's final hidden state of the position before, both normed, and predicts
through the target's own head; what it feeds back to itself is the hidden state that the head scored. The layer is the
target's attention layer (``targets.hybrid``). ``chain`` says how it extends and drafts.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import View
from dflash_jax.config import MTPConfig
from dflash_jax.drafters.chain import Chain, Pass
from dflash_jax.drafters.interface import TargetIO
from dflash_jax.layers import Norm, linear_and_norm, rms_norm, rope_table
from dflash_jax.targets import dense, moe
from dflash_jax.targets.hidden import Hidden
from dflash_jax.targets.hybrid import attention

Params = dict[str, Any]

__all__ = ["DRAFTER", "joined", "rows"]


def reads(cfg: MTPConfig, hidden: Hidden) -> Array:
    """The target's hidden state [B, T, D]: after its final norm, or its last layer's where the head was trained so."""
    return hidden.final if cfg.mtp_hidden == "post_norm" else hidden.features


def fuse(params: Params, cfg: MTPConfig, features: Array, kernels: str) -> Array:
    """The hidden state as it is."""
    return features


def joined(params: Params, target_io: TargetIO, cfg: MTPConfig, tokens: Array, hidden: Array) -> Array:
    """The input of fc [B, T, 2D]: the normed embedding of tokens [B, T], then the normed hidden [B, T, D]."""
    embedded = rms_norm(target_io.embed(tokens), params["embedding_norm"], cfg.rms_norm_eps)
    return jnp.concatenate([embedded, rms_norm(hidden, params["hidden_norm"], cfg.rms_norm_eps)], axis=-1)


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
    eps, kernels, layer = cfg.rms_norm_eps, view.kernels, params["layers"][0]
    both, norm = joined(params, target_io, cfg, tokens, hidden), Norm(layer["input_norm"], eps)
    x, normed = linear_and_norm(both, params["fc"], norm, implementation=kernels)
    rope = rope_table(cfg.rope, cfg.head_dim, positions)
    mixed, kv = attention(layer, cfg, 0, normed, rope, positions, valid, view, rule)
    out, norm = layer["o"].reshape(-1, x.shape[-1]), Norm(layer["post_norm"], eps)
    x, normed = linear_and_norm(mixed, out, norm, residual=x, implementation=kernels)
    feed_forward = moe.feed_forward if cfg.num_experts else dense.swiglu
    x, normed = feed_forward(layer, cfg, x, normed, Norm(params["final_norm"], eps), kernels)
    final = normed.array()
    return Pass(final, final, [x], [kv])


def scores(params: Params, target_io: TargetIO, cfg: MTPConfig, final: Array) -> Array:
    """[..., D] -> float32 [..., V] through the target's head."""
    return target_io.head(final)


DRAFTER = Chain(reads, fuse, rows, scores)
