"""Acceptance: how many drafts of a block the target's own draws confirm, by the equality rule.

Every emitted token is the target's draw at its position and the drafts never are, so the output cannot depend on the
drafter, at any temperature. An ``accept`` function is static in the step: scripts may pass a scripted acceptance.
"""

from collections.abc import Callable
from functools import cache

import jax.numpy as jnp
from jax import Array

# accept(block [B, T], draws [B, T], width [B]) -> accepted drafts int32 [B], each below width
Accept = Callable[[Array, Array, Array], Array]


def equality(block: Array, draws: Array, width: Array) -> Array:
    """Accepted drafts int32 [B]: leading i with block[:, i + 1] == draws[:, i], at most width - 1.

    block int32 [B, T] holds the anchor and the drafts; draws [B, T] are the target's tokens for the positions after
    each of them; width int32 [B] is what each row may use of the block (0: a padding row).
    """
    matches = (block[:, 1:] == draws[:, :-1]) & (jnp.arange(1, block.shape[1]) < width[:, None])
    return jnp.cumprod(matches, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


@cache
def scripted(rate: float) -> Accept:
    """An acceptance rule for measurements with random weights, which accept nothing: rounds emit ``rate`` tokens on
    average, whatever was drafted, as far as the row's width goes. A fractional rate alternates by the tokens drawn.

    Raises ValueError for a rate below 1.
    """
    if rate < 1:
        raise ValueError(f"an acceptance length is at least 1, got {rate}")
    drafts = int(rate) - 1
    percent = round(100 * (rate - 1 - drafts))

    def accept(block: Array, draws: Array, width: Array) -> Array:
        more = (draws.sum(axis=1) % 100 < percent).astype(jnp.int32)
        return jnp.clip(drafts + more, 0, jnp.maximum(width - 1, 0))

    return accept
