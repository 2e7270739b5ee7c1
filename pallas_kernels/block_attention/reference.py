"""``block_attention`` in plain JAX: gathers the row's pages and masks. The definition that kernels are tested with."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.arithmetic import exact

MASKED = -1e30


def block_attention(
    q: Array,
    kv: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    lengths: Array,
    valid: Array,
    positions: Array,
    *,
    page: int,
    causal: bool | Array,
    window: int | None,
    sinks: Array | None = None,
    since: int = 0,
) -> Array:
    """See ``pallas_kernels.block_attention``."""
    rows, queries, heads, head_dim = q.shape
    block, _, kv_heads, _ = kv.shape[1:]
    k, v = kv[:, :, 0], kv[:, :, 1]
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, head_dim)
    asking = positions[:, block - queries :]  # [B, T] of the queries

    slots = (table[:, :, None] * page + jnp.arange(page)).reshape(rows, -1)
    context = slots.shape[1]
    in_pages = (jnp.arange(context) < lengths[:, None]) & (jnp.arange(context) >= since)  # [B, S]
    in_block = (jnp.arange(block) < valid[:, None]) & (positions >= since)  # [B, T]

    # 0 x NaN is NaN: values that no query may see are zeroed, not only given weight zero.
    page_values = jnp.where(in_pages[..., None, None], v_pages.at[slots].get(mode="clip"), 0)
    block_values = jnp.where(in_block[..., None, None], v, 0)
    page_mask = jnp.broadcast_to(in_pages[:, None], (rows, queries, context))
    block_mask = jnp.broadcast_to(in_block[:, None] & block_rule(causal, positions, asking), (rows, queries, block))
    if window is not None:
        page_mask &= jnp.arange(context) > asking[..., None] - window
        block_mask &= positions[:, None, :] > asking[..., None] - window

    scores = jnp.concatenate([product(grouped, k_pages.at[slots].get(mode="clip")), product(grouped, k)], axis=-1)
    mask = jnp.concatenate([page_mask, block_mask], axis=-1)[:, None, None]  # [B, 1, 1, T, S + T]
    scores = jnp.where(mask, scores * head_dim**-0.5, MASKED)
    peak, sunk = scores.max(axis=-1, keepdims=True), jnp.zeros(())
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        peak = jnp.maximum(peak, sink)
        sunk = jnp.exp(sink - peak)
    weights = jnp.where(mask, jnp.exp(scores - peak), 0)
    weights = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True) + sunk, 1e-30)).astype(v.dtype)
    out = average(weights[..., :context], page_values) + average(weights[..., context:], block_values)
    return out.astype(q.dtype).reshape(rows, queries, heads, head_dim)


def block_rule(causal: bool | Array, positions: Array, asking: Array) -> Array:
    """What the queries may see of the rows in hand: bool, broadcastable to [B, T, S]."""
    if causal is True:
        return positions[:, None, :] <= asking[..., None]
    if causal is False:
        return jnp.ones((1, 1, positions.shape[1]), bool)
    return causal[None]


def product(q: Array, k: Array) -> Array:
    """[B, T, G, Q, H] x [B, S, G, H] -> [B, G, Q, T, S] float32."""
    return jnp.einsum("btgqh,bsgh->bgqts", q, k, precision=exact(q.dtype), preferred_element_type=jnp.float32)


def average(weights: Array, v: Array) -> Array:
    """[B, G, Q, T, S] x [B, S, G, H] -> [B, T, G, Q, H] float32."""
    return jnp.einsum("bgqts,bsgh->btgqh", weights, v, precision=exact(v.dtype), preferred_element_type=jnp.float32)
