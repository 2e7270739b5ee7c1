"""Drawing a token: the same function for the verifier and for a drafter that shares its noise.

The noise of a candidate depends only on (row key, position, token id): a Gumbel variable from a counter-based
generator (threefry), so a draw does not change with the batch, the block size, vocabulary padding or sharding. A row
key is a hash of (seed, sample index). Order of filters: temperature, min-p, top-k, top-p. The specification is
``among_all``: thresholds by bisection on counts and masses of the whole vocabulary. ``among_best`` and ``among_noisy``
find the same token among a few candidates, and know when they have.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

# numpy where the host fills it in, a traced Array inside the step.
HostArray: TypeAlias = Any

BEST = 128  # the likeliest tokens that a draw looks at first: enough for top-k below it
TRIED = 8  # tokens, in order of noise, that a row without top-k tries: top-p removes all in (1 - top-p)^8 of draws


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
    Three ways to find it, from cheap to dear. A row takes the first that is sure of its token, so what other rows of
    the batch need decides about time, not about tokens.
    """

    def sampled() -> Array:
        tokens, sure = among_best(logits, row, positions)
        return lax.cond(sure.all(), lambda: tokens, lambda: searched(tokens, sure))

    def searched(tokens: Array, sure: Array) -> Array:
        found, safe = among_noisy(logits, row, positions)
        tokens, sure = jnp.where(sure, tokens, found), sure | safe
        return lax.cond(sure.all(), lambda: tokens, lambda: jnp.where(sure, tokens, among_all(logits, row, positions)))

    return lax.cond((row.temperature > 0).any(), sampled, lambda: likeliest(logits))


def likeliest(logits: Array) -> Array:
    """The argmax [B, T] of logits [B, T, V], the lowest id of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def among_best(logits: Array, row: RowSampling, positions: Array) -> tuple[Array, Array]:
    """Tokens [B, T] drawn from each position's BEST likeliest, and whether the rest could not matter.

    They cannot where min-p or top-k remove the last of the best, or it is -inf: all others are no better. A greedy row
    is one of top-k 1 without noise.
    """
    values, ids = best(logits, BEST)
    values, hot, size = scaled(values, row), row.temperature[:, None, None] > 0, logits.shape[-1]
    k = jnp.where(hot, limit(row.top_k, size), 1)
    higher = values[..., None, :] > values[..., None]  # [B, T, i, j]: j is better than i
    kept = (values > -jnp.inf) & (values >= values[..., :1] + least(row)) & (higher.sum(axis=-1) < k)
    sure = ~kept[..., -1]

    # Masses in 2^-24 of the best token's: sums of whole numbers have no order, so no shape can change a cut.
    weights = jnp.round(jnp.exp(values - values[..., :1]) * 2.0**24).astype(jnp.uint32)
    above = jnp.where(higher, weights[..., None, :], 0).sum(axis=-1).astype(jnp.float32)
    total = jnp.where(kept, weights, 0).sum(axis=-1, keepdims=True).astype(jnp.float32)
    kept &= above < share(row) * total
    noise = jnp.where(hot, gumbel(row.key, positions, ids), 0)
    return lowest(jnp.where(kept, values + noise, -jnp.inf), ids, size)[0], sure


def among_noisy(logits: Array, row: RowSampling, positions: Array) -> tuple[Array, Array]:
    """Tokens [B, T] of hot rows without top-k: the first in order of logits / temperature + noise that min-p and top-p
    keep, and whether it is among the TRIED first."""
    size = logits.shape[-1]
    values = scaled(logits, row)
    scores, ids = best(values + gumbel(row.key, positions, jnp.arange(size)), TRIED)
    tried = scaled(jnp.take_along_axis(logits, ids, axis=-1), row)
    peak = values.max(axis=-1, keepdims=True)
    weights = jnp.where(values >= peak + least(row), jnp.exp(values - peak), 0)
    above = [jnp.where(values > tried[..., i, None], weights, 0).sum(axis=-1) for i in range(TRIED)]
    nucleus = jnp.stack(above, axis=-1) < share(row) * weights.sum(axis=-1, keepdims=True)
    kept = nucleus & (tried >= peak + least(row))
    tokens, score = lowest(jnp.where(kept, scores, -jnp.inf), ids, size)
    free = (row.temperature > 0) & ((row.top_k <= 0) | (row.top_k >= size))
    return tokens, free[:, None] & (score > scores[..., -1])


def among_all(logits: Array, row: RowSampling, positions: Array) -> Array:
    """Tokens [B, T] of any row, by bisection over the vocabulary."""
    hot = row.temperature[:, None, None] > 0
    noise = gumbel(row.key, positions, jnp.arange(logits.shape[-1]))
    return likeliest(jnp.where(hot, filtered(scaled(logits, row), row) + noise, logits))


def scaled(logits: Array, row: RowSampling) -> Array:
    """Logits [B, T, N] over the temperature; of greedy rows as they are."""
    return logits / jnp.where(row.temperature > 0, row.temperature, 1.0)[:, None, None]


def best(values: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` <= 128 largest of values [B, T, N], falling, and their indices; -inf follows where N is less.

    They lie in the ``count`` chunks with the largest maxima, so that only short rows are sorted.
    """
    size = values.shape[-1]
    if size <= 2048:
        return lax.top_k(filled(values, max(size, count)), count)
    chunk = 128 if size > 2**14 else 16
    values = filled(values, -(-size // chunk) * chunk).reshape(*values.shape[:-1], -1, chunk)
    _, chosen = best(values.max(axis=-1), count)
    inside = jnp.take_along_axis(values, chosen[..., None], axis=-2)
    top, at = best(inside.reshape(*inside.shape[:-2], -1), count)
    return top, jnp.take_along_axis(chosen, at // chunk, axis=-1) * chunk + at % chunk


def filled(values: Array, size: int) -> Array:
    """Values [B, T, N] with -inf behind them, up to ``size``."""
    return jnp.pad(values, [(0, 0), (0, 0), (0, size - values.shape[-1])], constant_values=-jnp.inf)


def lowest(scores: Array, ids: Array, size: int) -> tuple[Array, Array]:
    """The lowest of ids [B, T, N] below size with the largest score, and that score [B, T].

    Not the first of them: on GPUs, top_k leaves equals in any order.
    """
    top = scores.max(axis=-1)
    return jnp.where(scores == top[..., None], ids, size - 1).min(axis=-1), top


def gumbel(key: Array, positions: Array, ids: Array) -> Array:
    """Standard Gumbel noise float32 [B, T, N] of (key uint32 [B, 2], position [B, T], token id [N] or [B, T, N])."""
    a, b = threefry(key[:, :1], key[:, 1:], positions)  # jax.random.fold_in
    x, y = threefry(a[..., None], b[..., None], ids)  # jax.random.bits
    return gumbel_of(x ^ y)


def gumbel_of(bits: Array) -> Array:
    """Uniform bits uint32 -> standard Gumbel float32, finite for all bits."""
    # u strictly inside (0, 1): the largest would round to 1, whose noise is infinite. log1p keeps the small
    # exponentials, which win the argmax, exact to 2^-25.
    u = jnp.minimum(((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def threefry(a: Array, b: Array, counter: Array) -> tuple[Array, Array]:
    """Threefry-2x32 of (0, counter) under the key (a, b), 20 rounds: as jax.random has it, for any counters alone."""
    keys = (a, b, a ^ b ^ jnp.uint32(0x1BD11BDA))
    x, y = a, b + counter.astype(jnp.uint32)
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = (y << turn | y >> (32 - turn)) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def least(row: RowSampling) -> Array:
    """How far below the best min-p lets a scaled logit lie, [B, 1, 1]; -inf for min-p 0."""
    return jnp.log(jnp.clip(row.min_p, 0, 1))[:, None, None]


def limit(top_k: Array, size: int) -> Array:
    """How many tokens top-k keeps of ``size``, [B, 1, 1]."""
    return jnp.where((top_k > 0) & (top_k < size), top_k, size)[:, None, None]


def share(row: RowSampling) -> Array:
    """The mass that the tokens above one may not reach, [B, 1, 1]: top-p, 2 where it is off; 0 keeps the best."""
    return jnp.where(row.top_p < 1, jnp.maximum(row.top_p, 1e-30), 2.0)[:, None, None]


def filtered(logits: Array, row: RowSampling) -> Array:
    """Scaled logits [B, T, V] with what min-p, then top-k, then top-p remove at -inf."""
    peak = logits.max(axis=-1, keepdims=True)
    logits = jnp.where(logits >= peak + least(row), logits, -jnp.inf)

    k = limit(row.top_k, logits.shape[-1])
    kth = largest_threshold(logits, lambda at_least: at_least.sum(axis=-1, keepdims=True) >= k)
    logits = jnp.where(logits >= kth, logits, -jnp.inf)

    # A token stays while the mass strictly above it is below top_p; so the cut is the largest value whose own mass and
    # everything above it reach top_p.
    weights = jax.nn.softmax(logits, axis=-1)
    cut = largest_threshold(
        logits, lambda at_least: jnp.where(at_least, weights, 0).sum(-1, keepdims=True) >= share(row)
    )
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
