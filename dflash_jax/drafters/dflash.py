"""DFlash: a block-diffusion drafter conditioned by KV injection (arXiv 2602.06036, section 4).

Every committed token's target features are projected once, c = hidden_norm(fc f), and from there straight into the K/V
of every drafter layer: that is ``extend``. ``draft`` feeds [anchor, MASK, ...] once; the block attends to the injected
context and to itself, and slot k predicts the token at *its own* position. The block's K/V is never kept.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Finish, Rows, View
from dflash_jax.config import DrafterConfig
from dflash_jax.drafters.interface import Draw, TargetIO, over_target_ids
from dflash_jax.layers import Norm, linear, linear_and_norm, logits_of, rope_table
from dflash_jax.targets.dense import cache_shape, decoder
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]

__all__ = ["block_hidden", "cache_shape", "carry_width", "draft", "extend", "reads", "with_block"]


def carry_width(cfg: DrafterConfig) -> int:
    """Nothing is carried: a row of the cache depends on its own position alone."""
    return 0


def reads(cfg: DrafterConfig, hidden: Hidden) -> Array:
    """The taps [B, T, K * Dt]."""
    return hidden.features


def with_block(cfg: DrafterConfig, block: int) -> DrafterConfig:
    """The same drafter drafting blocks of ``block`` tokens, anchor included."""
    return dataclasses.replace(cfg, block_size=block)


def extend(
    params: Params,
    target_io: TargetIO,
    cfg: DrafterConfig,
    features: Array,
    tokens: Array,
    valid: Array,
    view: View,
    carry: tuple[()],
) -> tuple[Rows, tuple[()]]:
    """KV injection: features [B, T, K * Dt] -> raw K/V of all layers in one matmul; norm and rotation on the way in.

    The context skips the layers' input norms; its keys get k_norm and RoPE, its values nothing.
    """
    norm = Norm(params["hidden_norm"], cfg.rms_norm_eps)
    _, context = linear_and_norm(features, params["fc"], norm, implementation=view.kernels)
    kv = linear(context, params["context_kv"], bias=params.get("context_kv_bias"), implementation=view.kernels)
    cos, sin = rope_table(cfg.rope, cfg.head_dim, view.positions(features.shape[1]))
    return Rows(kv=(kv,), finish=Finish(params["context_k_norm"], cos, sin, cfg.rms_norm_eps)), carry


def block_hidden(params: Params, cfg: DrafterConfig, x: Array, view: View) -> tuple[Array, list[Array]]:
    """Embedded block [B, T, D] behind the injected context -> [B, T, D] after the drafter's final norm, and the
    residual stream after every layer."""
    rows, block = x.shape[:2]
    valid = jnp.full((rows,), block, jnp.int32)
    final, stream, _ = decoder(params, cfg, x, view.positions(block), valid, view, cfg.in_block_causal)
    return final, stream


def scores_of(params: Params, target_io: TargetIO, cfg: DrafterConfig, hidden: Array) -> Array:
    """Draft logits float32 [..., V]: the target's head, or the own head scattered to target ids through d2t."""
    if not cfg.own_head:
        return target_io.head(hidden)
    return over_target_ids(logits_of(hidden, params["head"]), params["d2t"], cfg.vocab_size)


def draft(
    params: Params,
    target_io: TargetIO,
    cfg: DrafterConfig,
    anchor: Array,
    lengths: Array,
    view: View,
    carry: tuple[()],
    draw: Draw,
) -> Array:
    """anchor int32 [B] at positions lengths [B] -> block int32 [B, cfg.block_size]. The context ends before it."""
    masks = jnp.full((anchor.shape[0], cfg.block_size - 1), cfg.mask_token_id, anchor.dtype)
    block = jnp.concatenate([anchor[:, None], masks], axis=1)
    hidden, _ = block_hidden(params, cfg, target_io.embed(block), view)
    positions = view.positions(cfg.block_size)
    drafts = draw(scores_of(params, target_io, cfg, hidden[:, 1:]), positions[:, 1:])
    return jnp.concatenate([anchor[:, None], drafts], axis=1)
