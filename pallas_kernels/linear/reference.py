"""``linear`` in plain JAX: what XLA makes of it is close to the limit where tokens are many."""

import jax
from jax import Array, lax

from pallas_kernels.arithmetic import exact
from pallas_kernels.linear.normed import Norm, Normed, norm_of, plain


def linear(
    x: Array | Normed, weight: Array, *, bias: Array | None, gated: bool, residual: Array | None, norm: Norm | None
) -> tuple[Array, Normed | None]:
    """See ``pallas_kernels.linear``."""
    out = product(plain(x), weight, bias, gated)
    if residual is not None:
        out = residual + out
    return out, None if norm is None else norm_of(out, norm)


def product(x: Array, weight: Array, bias: Array | None, gated: bool) -> Array:
    """gate(x @ weight + bias)."""
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), precision=exact(x.dtype))
    if bias is not None:
        out = out + bias
    return jax.nn.silu(out[..., 0, :]) * out[..., 1, :] if gated else out
