"""``expert_mlp`` in plain JAX, in two ways with the same result.

For few tokens the weights of their experts are gathered, one matmul a (token, expert) pair; for many, pairs are sorted
by expert and each expert's weights are read once (``ragged_dot``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arithmetic import exact

# At most so many (token, expert) pairs are gathered. Above it, pairs share experts and sorting reads fewer bytes.
GATHERED_PAIRS = 64
# [pairs, C] x [E, C, ..] -> [pairs, ..]. Gate and up stay apart: folded into one axis, XLA gathers a split of it first.
BY_EXPERT = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def expert_mlp(x: Array, ids: Array, experts: Any, activation: Callable[[Array, Array], Array]) -> Array:
    """See ``pallas_kernels.expert_mlp``."""
    return (gathered if ids.size <= GATHERED_PAIRS else grouped)(x, ids, experts, activation)


def gathered(x: Array, ids: Array, experts: Any, activation: Callable[[Array, Array], Array]) -> Array:
    """A matmul of its own for each pair."""
    product = partial(jnp.einsum, precision=exact(x.dtype))
    wide = product("nd,nkdjf->nkjf", x, experts.gate_up[ids])
    if experts.gate_up_bias is not None:
        wide = wide + experts.gate_up_bias[ids]
    out = product("nkf,nkfd->nkd", activation(wide[..., 0, :], wide[..., 1, :]), experts.down[ids])
    return out if experts.down_bias is None else out + experts.down_bias[ids]


def grouped(x: Array, ids: Array, experts: Any, activation: Callable[[Array, Array], Array]) -> Array:
    """The same, over pairs sorted by expert."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    expert, sizes = flat[order], jnp.bincount(flat, length=experts.down.shape[0])
    product = partial(
        lax.ragged_dot_general,
        group_sizes=sizes,
        ragged_dot_dimension_numbers=BY_EXPERT,
        precision=exact(x.dtype),
    )
    wide = product(x[order // ids.shape[1]], experts.gate_up)
    if experts.gate_up_bias is not None:
        wide = wide + experts.gate_up_bias[expert]
    out = product(activation(wide[:, 0], wide[:, 1]), experts.down)
    if experts.down_bias is not None:
        out = out + experts.down_bias[expert]
    return out[jnp.argsort(order)].reshape(*ids.shape, -1)
