"""``linear`` for few tokens as one Triton kernel: weights are read once, at the speed of memory, and nothing else is.

A program owns some columns and walks down all input features, so nothing is left to reduce. The norm's factor is one
number a token: it multiplies the finished product, while the squares add up beside it. Many tokens are bound by
arithmetic; XLA's matmul is there.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import exact
from pallas_kernels.linear import reference

FEW = 32  # tokens up to which the kernel runs


@dataclass(frozen=True)
class Tiling:
    """Columns a program, input features a step, warps, stages."""

    columns: int
    features: int
    warps: int
    stages: int


def tiling_of(tokens: int, features: int, columns: int, gated: bool) -> Tiling | None:
    """A tiling that divides the weight, None where no power of two from 16 on does."""
    wide = math.gcd(columns, 32)
    deep = math.gcd(features, 128)
    return None if min(wide, deep) < 16 else Tiling(wide, deep, 4, 5 if not gated else 4)


def linear(
    x: Array,
    weight: Array,
    *,
    norm: Any,
    bias: Array | None,
    gated: bool,
    residual: Array | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """See ``pallas_kernels.linear``."""
    features = weight.shape[0]
    tokens = x.size // features
    columns = weight.size // features // (2 if gated else 1)
    tiling = tiling or tiling_of(tokens, features, columns, gated)
    if tokens > FEW or tiling is None:
        return reference.linear(x, weight, norm=norm, bias=bias, gated=gated, residual=residual)

    out_shape = (*x.shape[:-1], *weight.shape[2 if gated else 1 :])
    flat = (tokens, columns)
    extras = {
        "norm": None if norm is None else norm.weight,
        "bias": None if bias is None else bias.reshape(-1, columns),
        "residual": None if residual is None else residual.reshape(flat),
    }
    names = tuple(name for name, array in extras.items() if array is not None)
    kernel = partial(
        multiply,
        tiling=tiling,
        tokens=tokens,
        features=features,
        gated=gated,
        extras=names,
        eps=None if norm is None else norm.eps,
    )
    call = backend.call(
        kernel,
        (columns // tiling.columns,),
        jax.ShapeDtypeStruct(flat, x.dtype),
        interpret=interpret,
        warps=tiling.warps,
        stages=tiling.stages,
        name="linear",
    )
    matrix = weight.reshape(features, -1, columns)
    out = call(x.reshape(tokens, features), matrix, *(extras[name] for name in names))
    return out.reshape(out_shape)


def multiply(
    x: Any, weight: Any, *refs: Any,
    tiling: Tiling, tokens: int, features: int, gated: bool, extras: tuple[str, ...], eps: float | None,
) -> None:  # fmt: skip
    """One program: grid (column tiles,)."""
    optional, out = dict(zip(extras, refs, strict=False)), refs[-1]
    # Surplus tokens repeat the last one and write the same again.
    token = jnp.minimum(jnp.arange(max(16, pl.next_power_of_2(tokens))), tokens - 1)
    column = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns)
    halves = 2 if gated else 1

    def step(i: Array, carry: Any) -> Any:
        sums, squares = carry
        feature = i * tiling.features + jnp.arange(tiling.features)
        tile = x[token[:, None], feature[None, :]]
        if eps is not None:
            wide = tile.astype(jnp.float32)
            squares += (wide * wide).sum(axis=1)
            tile = (wide * optional["norm"][feature].astype(jnp.float32)[None, :]).astype(tile.dtype)
        sums = tuple(
            total
            + lax.dot_general(
                tile, weight[feature[:, None], half, column[None, :]], (((1,), (0,)), ((), ())),
                precision=exact(tile.dtype), preferred_element_type=jnp.float32,
            )
            for half, total in enumerate(sums)
        )  # fmt: skip
        return sums, squares

    zeros = jnp.zeros((token.size, tiling.columns), jnp.float32)
    sums, squares = lax.fori_loop(
        0, features // tiling.features, step, ((zeros,) * halves, jnp.zeros((token.size,), jnp.float32))
    )
    if eps is not None:
        factor = lax.rsqrt(squares / features + eps)[:, None]
        sums = tuple(total * factor for total in sums)
    if "bias" in optional:
        sums = tuple(
            total + optional["bias"][half, column].astype(jnp.float32)[None, :] for half, total in enumerate(sums)
        )
    total = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if gated else sums[0]
    if "residual" in optional:
        total += optional["residual"][token[:, None], column[None, :]].astype(jnp.float32)
    out[token[:, None], column[None, :]] = total.astype(out.dtype)
