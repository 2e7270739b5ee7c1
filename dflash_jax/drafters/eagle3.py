"""EAGLE-3 (arXiv 2503.01840): a small decoder on fused taps of the target, whose first layer also sees the token.

The first layer's queries, keys and values come from [normed embedding ; normed hidden], twice as wide as the residual
stream; layers above it, where there are any, are plain. ``chain`` says how it extends and drafts.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import View
from dflash_jax.config import Eagle3Config
from dflash_jax.drafters.chain import Chain, Pass
from dflash_jax.drafters.interface import TargetIO, over_target_ids
from dflash_jax.layers import Normed, linear, logits_of, rms_norm, rope_table
from dflash_jax.targets.dense import decoder_layer, swiglu
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]

__all__ = ["DRAFTER", "entry", "fuse", "head_logits", "rows", "scores"]


def reads(cfg: Eagle3Config, hidden: Hidden) -> Array:
    """The taps [B, T, K * Dt]."""
    return hidden.features


def fuse(params: Params, cfg: Eagle3Config, features: Array, kernels: str) -> Array:
    """Taps [B, T, K * Dt] -> [B, T, D], normed before where the drafter was trained so."""
    if cfg.norm_before_fc:
        features = rms_norm(features, params["taps_norm"], cfg.rms_norm_eps)
    if cfg.fc_norm:
        taps = jnp.split(features, cfg.taps, axis=-1)
        normed = [rms_norm(tap, params[f"tap{i}_norm"], cfg.rms_norm_eps) for i, tap in enumerate(taps)]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params["fc"], implementation=kernels)


def entry(params: Params, target_io: TargetIO, cfg: Eagle3Config, tokens: Array, hidden: Array) -> tuple[Array, Array]:
    """What the first layer gets of tokens [B, T] and hidden [B, T, D]: its input [B, T, 2D], embedding first, and the
    residual stream [B, T, D]."""
    embedded = params["embed"].at[tokens].get(mode="clip") if cfg.own_embedding else target_io.embed(tokens)
    first, eps = params["layers"][0], cfg.rms_norm_eps
    normed = rms_norm(hidden, first["hidden_norm"], eps)
    wide = jnp.concatenate([rms_norm(embedded, first["input_norm"], eps), normed], axis=-1)
    return wide, normed if cfg.norm_before_residual else hidden


def rows(
    params: Params,
    target_io: TargetIO,
    cfg: Eagle3Config,
    tokens: Array,
    hidden: Array,
    positions: Array,
    valid: Array,
    view: View,
    rule: bool | Array = True,
) -> Pass:
    """One pass over tokens int32 [B, T] at ``positions`` with the hidden states before them [B, T, D]."""
    rope = rope_table(cfg.rope, cfg.head_dim, positions)
    normed: Array | Normed
    normed, x = entry(params, target_io, cfg, tokens, hidden)
    layers = params["layers"]
    followings = [*(layer["input_norm"] for layer in layers[1:]), params["final_norm"]]
    stream, kvs = [], []
    for i, (layer, following, window) in enumerate(zip(layers, followings, cfg.windows(), strict=True)):
        x, normed, kv = decoder_layer(
            layer, cfg, i, x, normed, following, rope, positions, valid, view, rule, window, swiglu
        )
        stream.append(x)
        kvs.append(kv)
    assert isinstance(normed, Normed)
    final = normed.array()
    return Pass(final if cfg.norm_output else x, final, stream, kvs)


def head_logits(params: Params, target_io: TargetIO, cfg: Eagle3Config, final: Array) -> Array:
    """[..., D] -> float32 [..., Vd] over the draft vocabulary."""
    return logits_of(final, params["head"]) if cfg.own_head else target_io.head(final)


def scores(params: Params, target_io: TargetIO, cfg: Eagle3Config, final: Array) -> Array:
    """[..., D] -> float32 [..., V] over the target's ids; those that the drafter does not know are -inf."""
    logits = head_logits(params, target_io, cfg, final)
    return over_target_ids(logits, params["d2t"], cfg.vocab_size) if "d2t" in params else logits


DRAFTER = Chain(reads, fuse, rows, scores)
