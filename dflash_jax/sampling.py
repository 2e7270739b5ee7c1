"""Drawing a token: the same function for the verifier and for a drafter that shares its noise.

The noise of a candidate depends only on (row key, position, token id): a Gumbel variable from a counter-based
generator (threefry), so a draw does not change with the batch, the block size, vocabulary padding or sharding. A row
key is a hash of (seed, sample index). Order of filters: temperature, min-p, top-k, top-p. Thresholds are found by
bisection on counts and masses instead of sorting the vocabulary.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

# numpy where the host fills it in, a traced Array inside the step.
HostArray: TypeAlias = Any


class RowSampling(struct.PyTreeNode):
    """How each row draws: temperature float32 [B] (0: argmax), top_k int32 [B] (<= 0: off), top_p float32 [B] (>= 1:
    off), min_p float32 [B] (0: off), key uint32 [B, 2]."""

    temperature: HostArray
    top_k: HostArray
    top_p: HostArray
    min_p: HostArray
    key: HostArray


def draw(logits: Array, row: RowSampling, positions: Array) -> Array:
    """Token ids int32 [B, T] for absolute positions int32 [B, T] from float32 logits [B, T, V].

    Greedy rows take the argmax (the lowest id of equals); the others argmax(filtered logits / temperature + noise).
    """
    hot = row.temperature > 0

    def sampled(logits: Array) -> Array:
        scaled = logits / jnp.where(hot, row.temperature, 1.0)[:, None, None]
        filtering = hot & ((row.min_p > 0) | (row.top_k > 0) | (row.top_p < 1))
        kept = lax.cond(filtering.any(), lambda x: filtered(x, row), lambda x: x, scaled)
        return jnp.where(hot[:, None, None], kept + gumbel(row.key, positions, logits.shape[-1]), logits)

    return jnp.argmax(lax.cond(hot.any(), sampled, lambda x: x, logits), axis=-1).astype(jnp.int32)


def gumbel(key: Array, positions: Array, vocab: int) -> Array:
    """Standard Gumbel noise float32 [B, T, V] of (key uint32 [B, 2], position [B, T], token id)."""
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(
        jax.random.wrap_key_data(key, impl="threefry2x32"), positions
    )
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (vocab,), jnp.uint32)))(keys)
    # u strictly inside (0, 1): the largest would round to 1, whose noise is infinite. log1p keeps the small
    # exponentials, which win the argmax, exact to 2^-25.
    u = jnp.minimum(((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def filtered(logits: Array, row: RowSampling) -> Array:
    """Scaled logits [B, T, V] with what min-p, then top-k, then top-p remove at -inf."""
    peak = logits.max(axis=-1, keepdims=True)
    floor = jnp.log(jnp.clip(row.min_p, 0, 1))[:, None, None]  # min_p 0: -inf
    logits = jnp.where(logits >= peak + floor, logits, -jnp.inf)

    size = logits.shape[-1]
    k = jnp.where((row.top_k > 0) & (row.top_k < size), row.top_k, size)[:, None, None]
    kth = largest_threshold(logits, lambda at_least: at_least.sum(axis=-1, keepdims=True) >= k)
    logits = jnp.where(logits >= kth, logits, -jnp.inf)

    # A token stays while the mass strictly above it is below top_p; so the cut is the largest value whose own mass and
    # everything above it reach top_p.
    weights = jax.nn.softmax(logits, axis=-1)
    p = jnp.where(row.top_p < 1, jnp.maximum(row.top_p, 1e-30), 2.0)[:, None, None]  # top_p 0 keeps the best
    cut = largest_threshold(logits, lambda at_least: jnp.where(at_least, weights, 0).sum(-1, keepdims=True) >= p)
    return jnp.where(logits >= cut, logits, -jnp.inf)


def largest_threshold(values: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest float t per row [..., 1] with ``enough(values >= t)``; -inf where none is.

    ``enough`` must be monotone: true for a set stays true for a larger one. Bisects the 2^32 floats in order.
    """
    shape = (*values.shape[:-1], 1)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low, not at high
        middle = low + (high - low) // 2
        good = enough(values >= float_of(middle))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low = jnp.full(shape, rank_of(jnp.float32(-jnp.inf)), jnp.uint32)
    high = jnp.full(shape, rank_of(jnp.float32(jnp.inf)), jnp.uint32)
    return float_of(lax.fori_loop(0, 32, halve, (low, high))[0])


def rank_of(x: Array) -> Array:
    """float32 -> uint32 in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def float_of(rank: Array) -> Array:
    """The inverse of ``rank_of``."""
    bits = jnp.where(rank >> 31 == 1, rank & jnp.uint32((1 << 31) - 1), ~rank)
    return lax.bitcast_convert_type(bits, jnp.float32)


def log_probabilities(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """Log-probability [B, T] of tokens [B, T] under the plain softmax of logits [B, T, V] (no temperature, no filters),
    and whether the row's normaliser is finite: NaN or infinite logits show here."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - norm, jnp.isfinite(norm)
