"""An RMS-normed array whose factor may still be missing: one number a token, which multiplies a product as well.

A kernel that makes some columns of an array cannot know the squares of the others. It passes on the columns times the
norm's weight, and its part of the squares; the map that reads them scales its result instead of its input.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arithmetic import rms_norm


class Norm(NamedTuple):
    """An RMSNorm: weight [C], eps."""

    weight: Array
    eps: float


class Normed(NamedTuple):
    """x [..., C] normed, or times the norm's weight only, with partial sums of squares float32 [P, tokens]."""

    x: Array
    squares: Array | None = None
    eps: float = 0.0

    def array(self) -> Array:
        """The normed array [..., C]."""
        if self.squares is None:
            return self.x
        factor = lax.rsqrt(self.squares.sum(axis=0) / self.x.shape[-1] + self.eps).reshape(*self.x.shape[:-1], 1)
        return (self.x.astype(jnp.float32) * factor).astype(self.x.dtype)


def norm_of(x: Array, norm: Norm) -> Normed:
    """x [..., C] normed."""
    return Normed(rms_norm(x, norm.weight, norm.eps))


def plain(x: Array | Normed) -> Array:
    """The array behind either."""
    return x.array() if isinstance(x, Normed) else x
