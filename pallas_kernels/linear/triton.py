"""``linear`` as Triton kernels.

Few tokens: one kernel a map. Weights are read once, at the speed of memory, and nothing else is: a program owns some
columns and walks down all input features, so that no sums are left to add. Many tokens are bound by arithmetic, where
XLA's matmul is hard to beat; what follows it, residual and norm, is one kernel more.
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
from pallas_kernels.arithmetic import exact, scaled
from pallas_kernels.linear.normed import Norm, Normed, plain
from pallas_kernels.linear.reference import product

FEW = 32  # tokens up to which one kernel does it all


@dataclass(frozen=True)
class Tiling:
    """Columns a program, input features a step, warps, stages."""

    columns: int
    features: int
    warps: int
    stages: int


def tiling_of(tokens: int, features: int, columns: int, gated: bool) -> Tiling | None:
    """A tiling that divides the weight; None where XLA's matmul is as fast: for many tokens, and for maps that narrow,
    whose few columns leave too few programs; and where no power of two from 16 on divides the weight."""
    wide, deep = math.gcd(columns, 64), math.gcd(features, 64 if gated else 128)
    if tokens > FEW or columns <= features or min(wide, deep) < 16:
        return None
    return Tiling(wide, deep, warps=4, stages=4 if gated else 6)


def linear(
    x: Array | Normed,
    weight: Array,
    *,
    bias: Array | None,
    gated: bool,
    residual: Array | None,
    norm: Norm | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Array, Normed | None]:
    """See ``pallas_kernels.linear``."""
    given = x if isinstance(x, Normed) else Normed(x)
    features = weight.shape[0]
    tokens = given.x.size // features
    columns = weight.size // features // (2 if gated else 1)
    tiling = tiling or tiling_of(tokens, features, columns, gated)
    if tiling is None:
        return finished(product(plain(x), weight, bias, gated), residual, norm, interpret)

    shape = (*given.x.shape[:-1], *weight.shape[2 if gated else 1 :])
    flat = jax.ShapeDtypeStruct((tokens, columns), given.x.dtype)
    parts = jax.ShapeDtypeStruct((columns // tiling.columns, tokens), jnp.float32)
    extras = {
        "squares": given.squares,
        "bias": None if bias is None else bias.reshape(-1, columns),
        "residual": None if residual is None else residual.reshape(flat.shape),
        "norm": None if norm is None else norm.weight,
    }
    names = tuple(name for name, array in extras.items() if array is not None)
    call = backend.call(
        partial(multiply, tiling=tiling, tokens=tokens, features=features, gated=gated, extras=names, eps=given.eps),
        (columns // tiling.columns,),
        flat if norm is None else (flat, flat, parts),
        interpret=interpret,
        warps=tiling.warps,
        stages=tiling.stages,
        name="linear",
    )
    matrix = weight.reshape(features, -1, columns)
    out = call(given.x.reshape(tokens, features), matrix, *(extras[name] for name in names))
    if norm is None:
        return out.reshape(shape), None
    return out[0].reshape(shape), Normed(out[1].reshape(shape), out[2], norm.eps)


def multiply(
    x: Any, weight: Any, *refs: Any,
    tiling: Tiling, tokens: int, features: int, gated: bool, extras: tuple[str, ...], eps: float,
) -> None:  # fmt: skip
    """One program: grid (column tiles,)."""
    optional, results = dict(zip(extras, refs, strict=False)), refs[len(extras) :]
    height = max(16, pl.next_power_of_2(tokens))
    token = jnp.arange(height)
    real = token < tokens
    column = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns)

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        feature = i * tiling.features + jnp.arange(tiling.features)
        there = jnp.broadcast_to(real[:, None], (height, tiling.features))
        tile = backend.load(x.at[token[:, None], feature[None, :]], there)
        return tuple(
            total
            + lax.dot_general(
                tile, weight[feature[:, None], half, column[None, :]], (((1,), (0,)), ((), ())),
                precision=exact(tile.dtype), preferred_element_type=jnp.float32,
            )
            for half, total in enumerate(sums)
        )  # fmt: skip

    zeros = jnp.zeros((height, tiling.columns), jnp.float32)
    sums = lax.fori_loop(0, features // tiling.features, step, (zeros, zeros) if gated else (zeros,))
    if "squares" in optional:
        part, counts = backend.covering(optional["squares"].shape[0])
        squares = backend.load(optional["squares"].at[part[:, None], token[None, :]], counts[:, None] & real[None, :])
        factor = lax.rsqrt(squares.sum(axis=0) / features + eps)
        sums = tuple(total * factor[:, None] for total in sums)
    if "bias" in optional:
        sums = tuple(
            total + optional["bias"][half, column].astype(jnp.float32)[None, :] for half, total in enumerate(sums)
        )
    total = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if gated else sums[0]
    there = jnp.broadcast_to(real[:, None], total.shape)
    if "residual" in optional:
        total += backend.load(optional["residual"].at[token[:, None], column[None, :]], there).astype(jnp.float32)
    out = total.astype(results[0].dtype)
    backend.store(results[0].at[token[:, None], column[None, :]], out, there)
    if "norm" in optional:
        wide = out.astype(jnp.float32)
        weighed = (wide * optional["norm"][column].astype(jnp.float32)[None, :]).astype(out.dtype)
        backend.store(results[1].at[token[:, None], column[None, :]], weighed, there)
        backend.store(results[2].at[pl.program_id(0), token], (wide * wide).sum(axis=1), real)


def finished(out: Array, residual: Array | None, norm: Norm | None, interpret: bool) -> tuple[Array, Normed | None]:
    """residual + out [..., C], and its norm, in one kernel."""
    if norm is None:
        return out if residual is None else residual + out, None
    size = out.shape[-1]
    flat = jax.ShapeDtypeStruct((out.size // size, size), out.dtype)
    operands = [norm.weight, out.reshape(flat.shape), *([] if residual is None else [residual.reshape(flat.shape)])]
    total, normed = backend.call(
        partial(add_and_norm, size=size, eps=norm.eps),
        (flat.shape[0],),
        (flat, flat),
        interpret=interpret,
        warps=4,
        stages=1,
        name="add_and_norm",
    )(*operands)
    return total.reshape(out.shape), Normed(normed.reshape(out.shape))


def add_and_norm(weight: Any, *refs: Any, size: int, eps: float) -> None:
    """One program: grid (tokens,). Adds the operands, all refs but the two results."""
    *operands, total, normed = refs
    row = pl.program_id(0)
    lane, real = backend.covering(size)
    values = [ref[row, lane] for ref in operands]
    out = sum(value.astype(jnp.float32) for value in values[1:]) + values[0].astype(jnp.float32)
    out = out.astype(total.dtype)
    wide = out.astype(jnp.float32)
    factor = lax.rsqrt(jnp.where(real, wide * wide, 0).sum() / size + eps)
    total[row, lane] = out  # surplus lanes repeat the last one
    normed[row, lane] = scaled(wide * factor, weight[lane], out.dtype)
