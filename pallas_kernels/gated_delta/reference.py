"""``gated_delta`` and ``fold_delta`` in plain JAX, float32 throughout. Chunks of 64 rows where a block is longer.

Inside a chunk the deltas u solve a unit lower triangular system, by forward substitution: the doubling of
(I - A)(I + A^2)... cancels badly where keys are alike.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

CHUNK = 64
SOLVED = 16  # rows that are substituted one by one; larger chunks are solved in parts of so many


def gated_delta(
    q: Array, k: Array, v: Array, beta: Array, decay: Array, states: Array, slots: Array, started: Array
) -> tuple[Array, tuple[Array, Array, Array, int, Array | None]]:
    """See ``pallas_kernels.gated_delta``."""
    rows, block, groups, _ = k.shape
    share = v.shape[2] // groups
    size = block if block <= SOLVED else min(CHUNK, -(-block // SOLVED) * SOLVED)
    count = -(-block // size)

    def chunked(x: Array, heads: tuple[int, ...]) -> Array:
        """[B, T, heads, ...] -> [count, B, *heads, size, ...]; rows of padding are zero."""
        padded = jnp.pad(x, ((0, 0), (0, count * size - block), *((0, 0),) * (x.ndim - 2)))
        parts = padded.reshape(rows, count, size, *heads, *x.shape[3:])
        return jnp.moveaxis(parts, (1, 2), (0, 2 + len(heads)))

    few, many = (groups,), (groups, share)
    q, k, v, beta = chunked(q, few), chunked(k, few), chunked(v, many), chunked(beta, many)
    total = jnp.cumsum(chunked(decay, many), axis=-1)
    ahead = jnp.arange(size)[:, None] - jnp.arange(size)
    fading = jnp.exp(jnp.where(ahead >= 0, total[..., :, None] - total[..., None, :], -jnp.inf))
    alike = product("cbgtk,cbgsk->cbgts", k, k)[:, :, :, None]
    mixing = jnp.where(ahead > 0, beta[..., None] * fading * alike, 0)
    seeing = fading * product("cbgtk,cbgsk->cbgts", q, k)[:, :, :, None]
    inverse = mixing if size <= SOLVED else inverted(mixing)
    state = start_of(states, slots, started).reshape(rows, groups, share, *states.shape[2:])

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        q, k, v, beta, total, inverse, seeing = chunk
        grown = jnp.exp(total)[..., None]
        missing = beta[..., None] * (v - grown * product("bgtk,bgskv->bgstv", k, state))
        u = substituted(inverse, missing) if size <= SOLVED else product("bgsij,bgsjv->bgsiv", inverse, missing)
        out = grown * product("bgtk,bgskv->bgstv", q, state) + product("bgsij,bgsjv->bgsiv", seeing, u)
        return folded(state, k, u, total, total[..., -1:]), (out, u, state)

    chunks = (q, k, v, beta, total, inverse, seeing)
    if count == 1:
        _, (out, u, _) = step(state, jax.tree.map(lambda x: x[0], chunks))
        out, base = out[None], None
    else:
        _, (out, deltas, bases) = lax.scan(step, state, chunks)
        u, base = deltas[-1], bases[-1].reshape(rows, *states.shape[1:])
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, count * size, states.shape[1], -1)[:, :block]
    last = k[-1].transpose(0, 2, 1, 3), heads_last(u), heads_last(total[-1][..., None])[..., 0]
    return out, (*last, (count - 1) * size, base)


def fold_delta(
    states: Array,
    slots: Array,
    started: Array,
    into: Array,
    k: Array,
    u: Array,
    total: Array,
    start: int,
    base: Array | None,
    count: Array,
) -> Array:
    """See ``pallas_kernels.gated_delta``."""
    rows, size, groups, _ = k.shape
    state = start_of(states, slots, started) if base is None else base
    number = jnp.clip(count - start, 0, size)
    last = jnp.take_along_axis(total, jnp.maximum(number - 1, 0)[:, None, None], axis=1)  # [B, 1, N]
    last = jnp.where(number[:, None, None] > 0, last, 0)
    kept = jnp.arange(size) < number[:, None]
    u = jnp.where(kept[..., None, None], u, 0)
    total = jnp.where(kept[..., None], total, last)
    split = (rows, size, groups, -1)
    deltas, totals = u.reshape(*split, u.shape[-1]).transpose(0, 2, 3, 1, 4), total.reshape(split).transpose(0, 2, 3, 1)
    ends = last.reshape(rows, groups, -1, 1)
    new = folded(state.reshape(rows, groups, -1, *state.shape[2:]), k.transpose(0, 2, 1, 3), deltas, totals, ends)
    where = jnp.where(count > 0, into, states.shape[0])
    return states.at[where].set(new.reshape(state.shape), mode="drop")


def folded(state: Array, k: Array, u: Array, total: Array, last: Array) -> Array:
    """state [B, G, s, K, V] behind rows k [B, G, t, K], u [B, G, s, t, V] and total [B, G, s, t], last [B, G, s, 1]."""
    return jnp.exp(last)[..., None] * state + product("bgtk,bgstv->bgskv", k, jnp.exp(last - total)[..., None] * u)


def start_of(states: Array, slots: Array, started: Array) -> Array:
    """The rows' states [B, N, K, V]."""
    return jnp.where(started[:, None, None, None], states.at[slots].get(mode="clip"), 0)


def substituted(lower: Array, right: Array) -> Array:
    """x with (I + lower) x = right: lower [..., n, n] strictly lower triangular, right [..., n, m]."""
    solved = right[..., :1, :]
    for i in range(1, right.shape[-2]):
        known = product("...ij,...jm->...im", lower[..., i : i + 1, :i], solved)
        solved = jnp.concatenate([solved, right[..., i : i + 1, :] - known], axis=-2)
    return solved


def inverted(lower: Array) -> Array:
    """(I + lower)^-1 [..., n, n]: its blocks on the diagonal by substitution, all at once, the others from them."""
    size = lower.shape[-1]
    parts = [slice(at, at + SOLVED) for at in range(0, size, SOLVED)]
    diagonal = jnp.stack([lower[..., part, part] for part in parts], axis=-3)
    blocks = substituted(diagonal, jnp.broadcast_to(jnp.eye(SOLVED, dtype=lower.dtype), diagonal.shape))
    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    above = lower[..., :0, :]
    for i, part in enumerate(parts):
        right = identity[..., part, :] - product("...ij,...jm->...im", lower[..., part, : part.start], above)
        above = jnp.concatenate([above, product("...ij,...jm->...im", blocks[..., i, :, :], right)], axis=-2)
    return above


def heads_last(x: Array) -> Array:
    """[B, G, s, t, V] -> [B, t, N, V]."""
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def product(letters: str, x: Array, y: Array) -> Array:
    """A true float32 product."""
    return jnp.einsum(letters, x, y, precision=lax.Precision.HIGHEST)
