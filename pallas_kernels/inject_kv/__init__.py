"""K/V rows into pages at explicit slots: the op that writes the cache, for one layer or all of a drafter's at once."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jax import Array

from pallas_kernels.inject_kv import reference, triton

Pages = list[tuple[Array, Array]]


class Finish(NamedTuple):
    """What raw projected keys still need: head norm and rotation, in float32.

    k_norm [L, H] weights, cos and sin float32 [n, H / 2] of each row's position, eps of the norm.
    """

    k_norm: Array
    cos: Array
    sin: Array
    eps: float


IMPLEMENTATIONS: dict[str, Callable[..., Pages]] = {
    "reference": reference.inject_kv,
    "triton": triton.inject_kv,
    "interpreted": partial(triton.inject_kv, interpret=True),
}


def inject_kv(pages: Pages, rows: list[Array], slots: Array, finish: Finish | None, *, implementation: str) -> Pages:
    """Writes rows into the pages of L layers.

    Args:
        pages: L pairs (K, V) of [slots, G, H].
        rows: arrays [n, l, 2, G, H], keys (index 0) and values of n rows; their l add up to L, in order.
        slots: int32 [n] destination of each row; a slot >= the pool's size drops the row (the sentinel is the pool's
            size, never -1: negative indices wrap before they are dropped).
        finish: norm and rotation for raw keys, None where keys come finished.
        implementation: a key of ``IMPLEMENTATIONS``.

    Returns:
        The pages with the rows written, in the pages' dtype.
    """
    return IMPLEMENTATIONS[implementation](pages, rows, slots, finish)
