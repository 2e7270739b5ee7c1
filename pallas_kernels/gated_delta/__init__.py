"""The gated delta rule over a block of tokens, on states in slots: one op reads them, one writes them.

Per value head, with a state S [K, V] in float32: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q. A
block is computed in closed form and leaves the states alone; what it returns beside its output is enough to fold any
prefix of the block into them, so that a rejected draft leaves no trace.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from pallas_kernels.gated_delta import reference

CHUNK = reference.CHUNK


class Record(NamedTuple):
    """What folding needs of a block's last chunk of n rows; earlier chunks are folded already.

    k float32 [B, n, G, K], u float32 [B, n, N, V], total float32 [B, n, N]: log decay from the chunk's start through
    each row. start: rows before the chunk. base float32 [B, N, K, V]: the state at its start, None where the block is
    one chunk: then it is what the slot holds.
    """

    k: Array
    u: Array
    total: Array
    start: int
    base: Array | None


# Plain JAX everywhere: there is no Triton kernel of these yet.
BLOCKS: dict[str, Callable[..., tuple[Array, tuple[Array, Array, Array, int, Array | None]]]] = {
    "reference": reference.gated_delta,
    "triton": reference.gated_delta,
    "interpreted": reference.gated_delta,
}
FOLDS: dict[str, Callable[..., Array]] = {
    "reference": reference.fold_delta,
    "triton": reference.fold_delta,
    "interpreted": reference.fold_delta,
}


def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    decay: Array,
    states: Array,
    slots: Array,
    started: Array,
    *,
    implementation: str,
) -> tuple[Array, Record]:
    """The outputs of a block behind the states, which stay as they are.

    Args:
        q, k: float32 [B, T, G, K], normalised, q scaled too.
        v: float32 [B, T, N, V]; N is a multiple of G, value head n uses key head n // (N / G).
        beta, decay: float32 [B, T, N]; decay is g <= 0, the logarithm of the factor on the state. Both are 0 in rows
            that do not exist, which must come last; what q, k, v hold there must be finite.
        states: float32 [S, N, K, V].
        slots: int32 [B] the state of each row; out of range: any.
        started: bool [B] False: the row's state is zero, whatever its slot holds (it may be NaN).
        implementation: a key of ``BLOCKS``.

    Returns:
        float32 [B, T, N, V], and the record that ``fold_delta`` takes.
    """
    out, record = BLOCKS[implementation](q, k, v, beta, decay, states, slots, started)
    return out, Record(*record)


def fold_delta(
    states: Array, slots: Array, started: Array, into: Array, record: Record, count: Array, *, implementation: str
) -> Array:
    """The states with the first ``count`` rows of a block folded in.

    Args:
        states, slots, started: as they were given to ``gated_delta``.
        into: int32 [B] the slot that takes each row's new state, mostly the one it came from; >= S drops it.
        record: what ``gated_delta`` returned.
        count: int32 [B] rows to fold; 0 leaves the slots as they are. Of a block of more than ``CHUNK`` rows either all
            rows that exist are folded or none: it is a piece of a prompt.
        implementation: a key of ``FOLDS``.

    Returns:
        float32 [S, N, K, V]; in place where the states are donated.
    """
    return FOLDS[implementation](states, slots, started, into, *record, count)
