"""``linear`` in plain JAX: what XLA makes of it is close to the limit where tokens are many."""

from typing import Any

import jax
from jax import Array, lax

from pallas_kernels.arithmetic import exact, rms_norm


def linear(x: Array, weight: Array, *, norm: Any, bias: Array | None, gated: bool, residual: Array | None) -> Array:
    """See ``pallas_kernels.linear``."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), precision=exact(x.dtype))
    if bias is not None:
        out = out + bias
    if gated:
        out = jax.nn.silu(out[..., 0, :]) * out[..., 1, :]
    return out if residual is None else residual + out
