"""The few formulas that kernels fuse and models also use plainly, each written once."""

import jax.numpy as jnp
from jax import Array, lax


def exact(dtype: jnp.dtype) -> lax.Precision | None:
    """The matmul precision of a dtype: float32 means float32, with no TF32 and no bf16 passes."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Llama-order RMSNorm over the last axis, statistics in float32: the weight multiplies after the cast back."""
    wide = x.astype(jnp.float32)
    unit = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * unit.astype(x.dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotary embedding in float32: x [*R, ..., H] with cos, sin float32 [*R, H / 2]; x's dtype."""
    between = tuple(range(cos.ndim - 1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
