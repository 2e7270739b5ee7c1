"""The few formulas that kernels fuse and models also use plainly, each written once."""

import jax.numpy as jnp
from jax import Array, lax


def exact(dtype: jnp.dtype) -> lax.Precision | None:
    """The matmul precision of a dtype: float32 means float32, with no TF32 and no bf16 passes."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis, statistics in float32. A weight of x's dtype multiplies after the cast back (Llama's
    order), a wider one before it (``scaled``)."""
    wide = x.astype(jnp.float32)
    return scaled(wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps), weight, x.dtype)


def scaled(unit: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """A float32 normed array times its weight, in ``dtype``: the weight's dtype says whether it multiplies before the
    cast (float32: zero-centred norms, gpt-oss) or after it."""
    if weight.dtype == dtype:
        return weight * unit.astype(dtype)
    return (weight.astype(jnp.float32) * unit).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotary embedding in float32: x [*R, ..., H] with cos, sin float32 [*R, r / 2]; x's dtype. Dimensions
    from r on pass as they are (partial rotary)."""
    between = tuple(range(cos.ndim - 1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    turning = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if turning == x.shape[-1] else jnp.concatenate([turned, x[..., turning:]], axis=-1)
