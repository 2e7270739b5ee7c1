"""Acceptance: how many drafts of a block the target's own draws confirm, by the equality rule.

Every emitted token is the target's draw at its position and the drafts never are, so the output cannot depend on the
drafter, at any temperature. An ``accept`` function is static in the step: scripts may pass a scripted acceptance.
"""

from collections.abc import Callable

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
