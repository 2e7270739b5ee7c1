"""``linear`` as Triton kernels.

Few tokens: weights are read once, at the speed of memory, and nothing else is. A program owns some columns and walks
down all input features, or a share of them where columns are few: then a second kernel adds the shares up. Many tokens
are bound by arithmetic, where XLA's matmul is hard to beat. What follows a product of either kind, residual and norm,
is one kernel too.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import backend, tuning
from pallas_kernels.arithmetic import exact, scaled
from pallas_kernels.linear.normed import Norm, Normed, plain
from pallas_kernels.linear.reference import product

FEW = 32  # tokens up to which one kernel does it all


@dataclass(frozen=True)
class Tiling:
    """Columns a program, input features a step, splits of the features, warps, stages."""

    columns: int
    features: int
    splits: int
    warps: int
    stages: int


def key_of(tokens: int, features: int, columns: int, gated: bool, norm: bool, dtype: Any) -> str:
    """What a measured tiling is kept under; tokens round up to powers of two from 16 on, the least rows of a tile."""
    parts = f"{'gated, ' if gated else ''}{'norm, ' if norm else ''}{jnp.dtype(dtype).name}"
    return f"{height_of(tokens)} tokens, {features} to {columns}, {parts}"


def height_of(tokens: int) -> int:
    """Rows of a tile of tokens: a power of two that tensor cores take."""
    return max(16, pl.next_power_of_2(tokens))


def tiling_of(tokens: int, features: int, columns: int, gated: bool, norm: bool, dtype: Any) -> Tiling | None:
    """The measured tiling of a map, or one by rule of thumb; None where XLA's matmul is better."""
    measured = tuning.lookup("linear", key_of(tokens, features, columns, gated, norm, dtype))
    if measured is not None:
        return Tiling(**measured) if measured else None
    return rule(tokens, features, columns, gated)


def rule(tokens: int, features: int, columns: int, gated: bool) -> Tiling | None:
    """XLA's matmul for many tokens, for maps that narrow, and where no power of two from 16 on divides the weight."""
    wide, deep = math.gcd(columns, 64), math.gcd(features, 64 if gated else 128)
    if tokens > FEW or columns <= features or min(wide, deep) < 16:
        return None
    return Tiling(wide, deep, splits=1, warps=4, stages=4 if gated else 6)


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
    tiling = tiling or tiling_of(tokens, features, columns, gated, norm is not None, given.x.dtype)
    if tiling is None:
        return by_xla(x, weight, bias=bias, gated=gated, residual=residual, norm=norm, interpret=interpret)

    assert tiling.splits == 1 or not gated, "a gate needs whole sums"
    shape = (*given.x.shape[:-1], *weight.shape[2 if gated else 1 :])
    flat = jax.ShapeDtypeStruct((tokens, columns), given.x.dtype)
    whole = tiling.splits == 1  # else its parts are finished elsewhere
    extras = {
        "squares": given.squares,
        "bias": None if bias is None else bias.reshape(-1, columns),
        "residual": None if residual is None or not whole else residual.reshape(flat.shape),
        "norm": None if norm is None or not whole else norm.weight,
    }
    names = tuple(name for name, array in extras.items() if array is not None)
    results: Any = flat
    if not whole:
        results = jax.ShapeDtypeStruct((tiling.splits, tokens, columns), jnp.float32)
    elif norm is not None:
        results = flat, flat, jax.ShapeDtypeStruct((columns // tiling.columns, tokens), jnp.float32)
    call = backend.call(
        partial(multiply, tiling=tiling, tokens=tokens, features=features, gated=gated, extras=names, eps=given.eps),
        (columns // tiling.columns, tiling.splits),
        results,
        interpret=interpret,
        warps=tiling.warps,
        stages=tiling.stages,
        name="linear",
    )
    matrix = weight.reshape(features, -1, columns)
    out = call(given.x.reshape(tokens, features), matrix, *(extras[name] for name in names))
    if not whole:
        return finished(out.reshape(tiling.splits, *shape), residual, norm, interpret, given.x.dtype)
    if norm is None:
        return out.reshape(shape), None
    return out[0].reshape(shape), Normed(out[1].reshape(shape), out[2], norm.eps)


def by_xla(
    x: Array | Normed,
    weight: Array,
    *,
    bias: Array | None,
    gated: bool,
    residual: Array | None,
    norm: Norm | None,
    interpret: bool = False,
) -> tuple[Array, Normed | None]:
    """The same with XLA's matmul."""
    return finished(product(plain(x), weight, bias, gated)[None], residual, norm, interpret)


def multiply(
    x: Any, weight: Any, *refs: Any,
    tiling: Tiling, tokens: int, features: int, gated: bool, extras: tuple[str, ...], eps: float,
) -> None:  # fmt: skip
    """One program: grid (column tiles, splits)."""
    optional, results = dict(zip(extras, refs, strict=False)), refs[len(extras) :]
    height = height_of(tokens)
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
    # Without splits the loop's bounds are constants, which the compiler's pipelining likes best.
    split, all_steps = pl.program_id(1) if tiling.splits > 1 else 0, features // tiling.features
    steps = pl.cdiv(all_steps, tiling.splits)
    end = jnp.minimum((split + 1) * steps, all_steps) if tiling.splits > 1 else all_steps
    sums = lax.fori_loop(split * steps, end, step, (zeros, zeros) if gated else (zeros,))
    if "squares" in optional:
        part, counts = backend.covering(optional["squares"].shape[0])
        squares = backend.load(optional["squares"].at[part[:, None], token[None, :]], counts[:, None] & real[None, :])
        factor = lax.rsqrt(squares.sum(axis=0) / features + eps)
        sums = tuple(total * factor[:, None] for total in sums)
    if "bias" in optional:
        biases = (optional["bias"][half, column].astype(jnp.float32) for half in range(len(sums)))
        sums = tuple(
            total + jnp.where(split == 0, bias, jnp.zeros_like(bias))[None, :]
            for total, bias in zip(sums, biases, strict=True)
        )
    total = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if gated else sums[0]
    there = jnp.broadcast_to(real[:, None], total.shape)
    if tiling.splits > 1:
        backend.store(results[0].at[split, token[:, None], column[None, :]], total, there)
        return
    if "residual" in optional:
        total += backend.load(optional["residual"].at[token[:, None], column[None, :]], there).astype(jnp.float32)
    out = total.astype(results[0].dtype)
    backend.store(results[0].at[token[:, None], column[None, :]], out, there)
    if "norm" in optional:
        wide = out.astype(jnp.float32)
        weighed = (wide * optional["norm"][column].astype(jnp.float32)[None, :]).astype(out.dtype)
        backend.store(results[1].at[token[:, None], column[None, :]], weighed, there)
        backend.store(results[2].at[pl.program_id(0), token], (wide * wide).sum(axis=1), real)


def finished(
    parts: Array, residual: Array | None, norm: Norm | None, interpret: bool, dtype: Any = None
) -> tuple[Array, Normed | None]:
    """residual + the sum of parts [S, ..., C], and its norm, in one kernel."""
    dtype = dtype or parts.dtype
    if norm is None:
        total = parts[0] if parts.shape[0] == 1 else parts.sum(axis=0).astype(dtype)
        return total if residual is None else residual + total, None
    shape, size = parts.shape[1:], parts.shape[-1]
    flat = jax.ShapeDtypeStruct((parts[0].size // size, size), dtype)
    operands = [norm.weight, parts.reshape(-1, *flat.shape)]
    if residual is not None:
        operands.append(residual.reshape(flat.shape))
    total, normed = backend.call(
        partial(add_and_norm, splits=parts.shape[0], size=size, eps=norm.eps),
        (flat.shape[0],),
        (flat, flat),
        interpret=interpret,
        warps=4,
        stages=1,
        name="add_and_norm",
    )(*operands)
    return total.reshape(shape), Normed(normed.reshape(shape))


def add_and_norm(weight: Any, parts: Any, *refs: Any, splits: int, size: int, eps: float) -> None:
    """One program: grid (tokens,). refs: the residual, if there is one, and the two results."""
    *residual, total, normed = refs
    row = pl.program_id(0)
    lane, real = backend.covering(size)
    wide = sum(parts[split, row, lane].astype(jnp.float32) for split in range(splits))
    for ref in residual:
        wide += ref[row, lane].astype(jnp.float32)
    out = wide.astype(total.dtype)
    wide = out.astype(jnp.float32)
    factor = lax.rsqrt(jnp.where(real, wide * wide, 0).sum() / size + eps)
    total[row, lane] = out  # surplus lanes repeat the last one
    normed[row, lane] = scaled(wide * factor, weight[lane], out.dtype)
