"""``expert_mlp`` as two launches of one Triton kernel: gate and up with the activation, then down.

(token, expert) pairs that share an expert stand together in tiles of rows, so that an expert's weights are read about
once, and those of experts that nobody chose never. A program owns a tile of pairs and some columns; it picks its rows
of x by index, so nothing is sorted or padded in memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import exact
from pallas_kernels.expert_mlp import reference


class Tiles(NamedTuple):
    """Pairs in tiles: pair int32 [n, height], the index of the pair in each row (>= the count of pairs: none), and
    expert int32 [n] of each tile (>= the count of experts: no pair in it)."""

    pair: Array
    expert: Array


@dataclass(frozen=True)
class Tiling:
    """Pairs and columns a program, input features a step, warps, stages."""

    pairs: int
    columns: int
    features: int
    warps: int
    stages: int


def tiling_of(pairs: int, experts: int, features: int, columns: int, gated: bool) -> Tiling | None:
    """Tiles as high as an expert has pairs on average; None where no power of two from 16 on divides the weight, or
    its elements are more than an int32 counts."""
    height = min(max(16, pl.next_power_of_2(pl.cdiv(pairs, experts))), 64)
    wide, deep = math.gcd(columns, 64), math.gcd(features, 64 if gated else 128)
    if min(wide, deep) < 16 or experts * features * columns * (2 if gated else 1) >= 2**31:
        return None
    return Tiling(height, wide, deep, warps=4, stages=4)


def tiles_of(ids: Array, experts: int, height: int) -> Tiles:
    """Chosen experts int32 [N, k] -> tiles, by counting: a sort costs a GPU more."""
    flat = ids.reshape(-1)
    count = flat.size
    chosen = flat[:, None] == jnp.arange(experts)
    place = jnp.take_along_axis(jnp.cumsum(chosen, axis=0, dtype=jnp.int32), flat[:, None], axis=1)[:, 0] - 1
    needed = (chosen.sum(axis=0, dtype=jnp.int32) + height - 1) // height
    first = jnp.cumsum(needed) - needed
    tile = first[flat] + place // height
    most = pl.cdiv(count, height) + min(experts, count)
    return Tiles(
        pair=jnp.full((most, height), count, jnp.int32)
        .at[tile, place % height]
        .set(jnp.arange(count, dtype=jnp.int32)),
        expert=jnp.full((most,), experts, jnp.int32).at[tile].set(flat),
    )


def expert_mlp(
    x: Array, ids: Array, experts: Any, activation: Callable[[Array, Array], Array], *, interpret: bool = False
) -> Array:
    """See ``pallas_kernels.expert_mlp``."""
    count, features, _, width = experts.gate_up.shape
    up, down = (
        tiling_of(ids.size, count, features, width, gated=True),
        tiling_of(ids.size, count, width, features, gated=False),
    )
    if up is None or down is None:
        return reference.expert_mlp(x, ids, experts, activation)
    tiles = tiles_of(ids, count, up.pairs)
    wide = multiply(x, ids, tiles, experts.gate_up, experts.gate_up_bias, activation, up, interpret)
    out = multiply(wide, ids, tiles, experts.down[:, :, None], experts.down_bias, None, down, interpret)
    return out.reshape(*ids.shape, features)


def multiply(
    x: Array,
    ids: Array,
    tiles: Tiles,
    weight: Array,
    bias: Array | None,
    activation: Callable[[Array, Array], Array] | None,
    tiling: Any,
    interpret: bool,
) -> Array:
    """x [N, C] or [N * k, C] with weight [E, C, j, O] of the pairs' experts -> [N * k, O]."""
    experts, features, halves, columns = weight.shape
    operands = [x, weight, *tiles, *([] if bias is None else [bias.reshape(experts, halves, columns)])]
    kernel = partial(
        one_tile,
        tiling=tiling,
        pairs=ids.size,
        share=ids.size // x.shape[0],
        experts=experts,
        features=features,
        halves=halves,
        activation=activation,
    )
    out: Array = backend.call(
        kernel,
        (columns // tiling.columns, tiles.expert.size),
        jax.ShapeDtypeStruct((ids.size, columns), x.dtype),
        interpret=interpret,
        warps=tiling.warps,
        stages=tiling.stages,
        name="expert_mlp",
    )(*operands)
    return out


def one_tile(
    x: Any, weight: Any, pair: Any, expert: Any, *refs: Any,
    tiling: Tiling, pairs: int, share: int, experts: int, features: int, halves: int, activation: Any,
) -> None:  # fmt: skip
    """One program: grid (column tiles, tiles of pairs). ``share``: pairs that read one row of x."""
    *bias, out = refs
    tile = pl.program_id(1)
    owner = expert[tile]
    row = pair[tile, jnp.arange(tiling.pairs)]
    real = row < pairs
    mine = jnp.minimum(owner, experts - 1)
    column = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns)

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        feature = i * tiling.features + jnp.arange(tiling.features)
        there = jnp.broadcast_to(real[:, None], (tiling.pairs, tiling.features))
        rows = backend.load(x.at[lax.div(row, share)[:, None], feature[None, :]], there)
        return tuple(
            total
            + lax.dot_general(
                rows, weight[mine, feature[:, None], half, column[None, :]], (((1,), (0,)), ((), ())),
                precision=exact(rows.dtype), preferred_element_type=jnp.float32,
            )
            for half, total in enumerate(sums)
        )  # fmt: skip

    zeros = jnp.zeros((tiling.pairs, tiling.columns), jnp.float32)
    steps = (owner < experts).astype(jnp.int32) * (features // tiling.features)  # a tile of no pair reads nothing
    sums = lax.fori_loop(0, steps, step, (zeros,) * halves)
    for ref in bias:
        sums = tuple(s + ref[mine, half, column].astype(jnp.float32)[None, :] for half, s in enumerate(sums))
    total = sums[0] if activation is None else activation(*sums)
    backend.store(
        out.at[row[:, None], column[None, :]], total.astype(out.dtype), jnp.broadcast_to(real[:, None], total.shape)
    )
