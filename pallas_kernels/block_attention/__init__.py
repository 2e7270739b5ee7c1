"""Attention of a block of queries over paged K/V and over the dense block in hand: the op that reads the cache."""

from collections.abc import Callable
from functools import partial

from jax import Array

from pallas_kernels.block_attention import reference, triton

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference.block_attention,
    "triton": triton.block_attention,
    "interpreted": partial(triton.block_attention, interpret=True),
}


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
    window: int | None = None,
    sinks: Array | None = None,
    since: int = 0,
    implementation: str,
) -> Array:
    """softmax(q [K_pages ; k]^T / sqrt(H) + mask) [V_pages ; v], grouped-query, softmax in float32.

    Args:
        q: [B, T, N, H] queries of the block.
        kv: [B, S, 2, G, H] keys and values in hand, not yet in the pages; N is a multiple of G. S = T, or more: a
            sequential drafter asks for its last rows only.
        k_pages, v_pages: [slots, G, H] the pool, token-major; slot = page id * page + offset.
        table: int32 [B, P] page ids of each row in order; entries past the row's pages may be anything.
        lengths: int32 [B] tokens of each row in the pages; what lies behind them is never looked at (it may be NaN).
        valid: int32 [B] leading rows of kv that exist; keys behind them are masked, queries behind them give noise.
        positions: int32 [B, S] absolute positions of the rows in hand, those of the queries being the last T; they
            ascend where the block is causal.
        page: tokens a page.
        causal: the rule inside the block: True (key position <= query position), False (every row sees every row), or a
            bool [T, S] mask (query, key) for trees.
        window: sliding window W counting the current token: a key at t is visible to a query at s only if t > s - W.
        sinks: float [N] a score per head that takes part in the softmax and has no value (gpt-oss).
        since: keys at positions below are never seen: drafters that pair a feature with the next token have no row 0.
        implementation: a key of ``IMPLEMENTATIONS``.

    Returns:
        [B, T, N, H] in q's dtype. Queries that see nothing give zeros.
    """
    return IMPLEMENTATIONS[implementation](
        q,
        kv,
        k_pages,
        v_pages,
        table,
        lengths,
        valid,
        positions,
        page=page,
        causal=causal,
        window=window,
        sinks=sinks,
        since=since,
    )
