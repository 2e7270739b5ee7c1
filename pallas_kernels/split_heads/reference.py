"""``split_heads`` in plain JAX."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.arithmetic import rms_norm, rotate


def split_heads(
    qkv: Array, norms: tuple[Array, Array] | None, eps: float, cos: Array, sin: Array
) -> tuple[Array, Array]:
    """See ``pallas_kernels.split_heads``."""
    q, k, v = qkv[..., :-2, :].reshape(*qkv.shape[:2], -1, qkv.shape[-1]), qkv[..., -2, :], qkv[..., -1, :]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return rotate(q, cos, sin), jnp.stack([rotate(k, cos, sin), v], axis=2)
