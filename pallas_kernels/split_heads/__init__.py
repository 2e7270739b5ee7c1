"""From a fused projection to heads: queries and keys normed and rotated, K beside V as they go into the cache."""

from collections.abc import Callable
from functools import partial

from jax import Array

from pallas_kernels.split_heads import reference, triton

Heads = tuple[Array, Array]

IMPLEMENTATIONS: dict[str, Callable[..., Heads]] = {
    "reference": reference.split_heads,
    "triton": triton.split_heads,
    "interpreted": partial(triton.split_heads, interpret=True),
}


def split_heads(
    qkv: Array,
    norms: tuple[Array, Array] | None,
    eps: float,
    cos: Array,
    sin: Array,
    *,
    implementation: str,
) -> Heads:
    """qkv [B, T, G, N/G + 2, H] -> q [B, T, N, H], kv [B, T, 2, G, H].

    Args:
        qkv: each KV head's queries, then its key and its value.
        norms: RMSNorm weights [H] of queries and keys, None without.
        eps: of the norms.
        cos, sin: float32 [B, T, H / 2] of the tokens' positions; queries and keys are rotated in float32.
        implementation: a key of ``IMPLEMENTATIONS``.
    """
    return IMPLEMENTATIONS[implementation](qkv, norms, eps, cos, sin)
