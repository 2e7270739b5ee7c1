"""``block_attention`` as a Triton kernel: one pass of online softmax over a row's pages, then over the block in hand.

A program owns one KV head of one row, a tile of queries and a share of the pages. The queries of a whole group are the
rows of one matrix, so that tensor cores have work where a block has few tokens. Where rows are few, the pages of a row
are split over programs and a second pass merges their parts. Indices are clamped, not masked: whatever a program
loads was written, and what it loads twice has weight zero.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import backend, tuning
from pallas_kernels.arithmetic import exact

LOWEST = -1e30  # score of a masked key
UNSEEN = -1e29  # running maximum before any key: above a masked score, whose weight is then exactly zero
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """How the kernel is cut: query rows (tokens x group) a program, keys a tile, splits of the pages, warps, stages."""

    queries: int
    keys: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """What is static about a call. B rows, T queries a row, S keys in hand, G KV heads, Q heads a group, H, P pages."""

    rows: int
    queries: int
    keys: int
    kv_heads: int
    group: int
    head_dim: int
    pages: int
    page: int
    slots: int

    @property
    def context(self) -> int:
        """Tokens that a row's pages can hold."""
        return self.pages * self.page


def key_of(sizes: Sizes, dtype: Any) -> str:
    """What a measured tiling is kept under; rows and context round up to powers of two."""
    rows, context = pl.next_power_of_2(sizes.rows), pl.next_power_of_2(max(sizes.context, 1))
    heads = f"{sizes.kv_heads}x{sizes.group}x{sizes.head_dim}"
    return f"{rows} rows, {sizes.queries} of {sizes.keys} behind {context}, {heads}, {jnp.dtype(dtype).name}"


def tiling_of(sizes: Sizes, dtype: Any) -> Tiling:
    """The measured tiling of a shape, or one by rule of thumb."""
    measured = tuning.lookup("block_attention", key_of(sizes, dtype))
    return rule(sizes, dtype) if measured is None else Tiling(**measured)


def rule(sizes: Sizes, dtype: Any) -> Tiling:
    """Programs for the whole machine, tiles that fit its registers."""
    most = 64 if sizes.head_dim > 128 or dtype == jnp.float32 else 128
    queries = max(16, pl.next_power_of_2(sizes.group), min(pl.next_power_of_2(sizes.queries * sizes.group), most))
    keys = 32 if dtype == jnp.float32 or sizes.head_dim > 128 else 128 if queries <= 32 else 64
    programs = sizes.rows * sizes.kv_heads * pl.cdiv(sizes.queries, tokens_of(queries, sizes.group))
    splits = 1
    while programs * splits < 256 and splits * 2 * 128 <= sizes.context:
        splits *= 2
    return Tiling(queries, keys, splits, warps=8 if queries > 64 else 4, stages=2 if queries > 64 else 3)


def tokens_of(queries: int, group: int) -> int:
    """Query tokens of a tile of ``queries`` rows."""
    return max(1, queries // group)


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
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """See ``pallas_kernels.block_attention``."""
    if k_pages.size >= 2**31:  # offsets are int32, and beyond it they would wrap in silence
        raise ValueError(f"a layer's K pool has {k_pages.size:,} elements, the kernel counts to {2**31 - 1:,}")
    rows, queries, heads, head_dim = q.shape
    keys, kv_heads = kv.shape[1], kv.shape[3]
    sizes = Sizes(rows, queries, keys, kv_heads, heads // kv_heads, head_dim, table.shape[1], page, k_pages.shape[0])
    tiling = tiling or tiling_of(sizes, q.dtype)
    tokens = tokens_of(tiling.queries, sizes.group)
    tiles = pl.cdiv(queries, tokens)
    extras = {"rule": None if isinstance(causal, bool) else causal.astype(jnp.int32), "sinks": sinks}
    names = [name for name, array in extras.items() if array is not None]

    parts = (*q.shape[:3], tiling.splits) if tiling.splits > 1 else q.shape[:3]
    out = jax.ShapeDtypeStruct((*parts, head_dim), q.dtype)
    weight = jax.ShapeDtypeStruct(parts, jnp.float32)
    kernel = partial(
        attend,
        sizes=sizes,
        tiling=tiling,
        tokens=tokens,
        causal=causal is True,
        window=window,
        since=since,
        extras=tuple(names),
    )
    result = backend.call(
        kernel,
        (tiles * tiling.splits, kv_heads, rows),
        out if tiling.splits == 1 else (out, weight),
        interpret=interpret,
        warps=tiling.warps,
        stages=tiling.stages,
        name="block_attention",
    )(table, lengths, valid, positions, q, kv, k_pages, v_pages, *(extras[name] for name in names))
    return result if tiling.splits == 1 else merge(*result)


def attend(
    table: Any, lengths: Any, valid: Any, positions: Any, q: Any, kv: Any, k_pages: Any, v_pages: Any,
    *refs: Any, sizes: Sizes, tiling: Tiling, tokens: int, causal: bool, window: int | None, since: int,
    extras: tuple[str, ...],
) -> None:  # fmt: skip
    """One program: grid (query tiles x splits, KV heads, rows)."""
    optional = dict(zip(extras, refs, strict=False))
    out, weight = refs[len(extras)], refs[len(extras) + 1 :]
    split, tile = pl.program_id(0) % tiling.splits, pl.program_id(0) // tiling.splits
    head, row = pl.program_id(1), pl.program_id(2)
    length, existing = lengths[row], valid[row]

    # Rows of the query tile: token t, head n of the group. Surplus rows repeat the last one and write the same again.
    within = jnp.minimum(jnp.arange(tiling.queries), tokens * sizes.group - 1)
    t = jnp.minimum(tile * tokens + within // sizes.group, sizes.queries - 1)
    n = head * sizes.group + within % sizes.group
    lane, real = backend.covering(sizes.head_dim)
    lanes = lane.size

    def load(ref: Any, *index: Any) -> Array:
        """Rows of head_dim values; lanes beyond it repeat the last one."""
        return ref[(*(i[:, None] if getattr(i, "ndim", 0) else i for i in index), lane[None, :])]

    queries = jnp.where(real[None, :], load(q, row, t, n), 0)
    at = positions[row, sizes.keys - sizes.queries + t]
    scale = sizes.head_dim**-0.5 * LOG2_E

    def absorb(keys: Array, values: Array, visible: Array, carry: tuple[Array, Array, Array]) -> Any:
        """Online softmax over one tile of keys, base 2."""
        peak, total, mixed = carry
        scores = product(queries, keys, 1) * scale
        scores = jnp.where(visible, scores, LOWEST)
        higher = jnp.maximum(peak, scores.max(axis=1))
        shrink = jnp.exp2(peak - higher)
        weights = jnp.exp2(scores - higher[:, None])
        mixed = mixed * shrink[:, None] + product(weights.astype(values.dtype), values, 0)
        return higher, total * shrink + weights.sum(axis=1), mixed

    def seen_since(position: Array, keys: Array, values: Array, visible: Array, carry: Any) -> Any:
        """``absorb`` without the keys that nobody sees, which may hold anything."""
        if not since:
            return absorb(keys, values, visible, carry)
        there = position >= since
        return absorb(keys, jnp.where(there[:, None], values, 0), visible & there[None, :], carry)

    def pages(step: Array, carry: Any) -> Any:
        position = step * tiling.keys + jnp.arange(tiling.keys)
        inside = jnp.minimum(position, length - 1)  # the loop runs only where length > 0
        slot = table[row, inside // sizes.page] * sizes.page + inside % sizes.page
        visible = (position < length)[None, :]
        if window is not None:
            visible &= position[None, :] > at[:, None] - window
        return seen_since(inside, load(k_pages, slot, head), load(v_pages, slot, head), visible, carry)

    def block(step: Array, carry: Any) -> Any:
        index = step * size + jnp.arange(size)
        inside = jnp.minimum(index, existing - 1)
        key_at = positions[row, inside]
        visible = (index < existing)[None, :]
        if causal:
            visible &= key_at[None, :] <= at[:, None]
        if "rule" in optional:
            visible &= optional["rule"][t[:, None], inside[None, :]] != 0
        if window is not None:
            visible &= key_at[None, :] > at[:, None] - window
        return seen_since(key_at, load(kv, row, inside, 0, head), load(kv, row, inside, 1, head), visible, carry)

    first = 0 if window is None else jnp.maximum(at.min() - window + 1, 0) // tiling.keys
    many = pl.cdiv(length, tiling.keys) - first
    share = pl.cdiv(many, tiling.splits)
    last = split == tiling.splits - 1

    peak = jnp.full((tiling.queries,), UNSEEN, jnp.float32)
    total = jnp.zeros((tiling.queries,), jnp.float32)
    if "sinks" in optional:
        peak = jnp.where(last, optional["sinks"][n].astype(jnp.float32) * LOG2_E, peak)
        total = jnp.where(last, jnp.ones_like(total), total)
    carry = (peak, total, jnp.zeros((tiling.queries, lanes), jnp.float32))
    carry = lax.fori_loop(first + split * share, first + jnp.minimum((split + 1) * share, many), pages, carry)

    size = min(tiling.keys, max(16, pl.next_power_of_2(sizes.keys)))
    seen = existing
    if causal and sizes.keys == sizes.queries:  # later keys are invisible to the whole tile
        seen = jnp.minimum(seen, (tile + 1) * tokens)
    peak, total, mixed = lax.fori_loop(0, jnp.where(last, pl.cdiv(seen, size), 0), block, carry)

    mixed = (mixed / jnp.maximum(total, 1e-30)[:, None]).astype(out.dtype)
    part = () if tiling.splits == 1 else (split,)
    out[(row, t[:, None], n[:, None], *part, lane[None, :])] = mixed  # surplus lanes repeat the last one here too
    if weight:
        weight[0][(row, t, n, split)] = peak + jnp.log2(jnp.maximum(total, 1e-30))


def product(a: Array, b: Array, axis: int) -> Array:
    """a [M, C] with ``axis`` of b contracted -> float32."""
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=exact(a.dtype), preferred_element_type=jnp.float32
    )


def merge(parts: Array, weight: Array) -> Array:
    """Normalised parts [B, T, N, S, H] with log2 of their weights [B, T, N, S] -> [B, T, N, H]."""
    share = jnp.exp2(weight - weight.max(axis=-1, keepdims=True))
    mixed = jnp.einsum("btns,btnsh->btnh", share, parts.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return (mixed / share.sum(axis=-1)[..., None]).astype(parts.dtype)
