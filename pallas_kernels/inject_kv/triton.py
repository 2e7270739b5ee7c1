"""``inject_kv`` as one Triton kernel for all layers: raw rows are read once, finished K/V rows are written in place.

A program owns one token of one layer. Keys are handled as two halves, the pairs that a rotation turns.
"""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import backend


def inject_kv(
    pages: list[tuple[Array, Array]], rows: list[Array], slots: Array, finish: Any, *, interpret: bool = False
) -> list[tuple[Array, Array]]:
    """See ``pallas_kernels.inject_kv``."""
    pools = [pool for pair in pages for pool in pair]
    operands = [slots, *([] if finish is None else [finish.k_norm, finish.cos, finish.sin]), *rows]
    kernel = partial(
        inject,
        layers=[(group, layer) for group, kv in enumerate(rows) for layer in range(kv.shape[1])],
        kv_heads=rows[0].shape[3],
        head_dim=rows[0].shape[4],
        eps=None if finish is None else finish.eps,
    )
    written = backend.call(
        kernel,
        (len(pages), slots.size),
        [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        interpret=interpret,
        warps=4,
        stages=1,
        aliases={len(operands) + i: i for i in range(len(pools))},
        name="inject_kv",
    )(*operands, *pools)
    return list(zip(written[::2], written[1::2], strict=True))


def inject(
    slots: Any, *refs: Any, layers: list[tuple[int, int]], kv_heads: int, head_dim: int, eps: float | None
) -> None:
    """One program: grid (layers, tokens). ``layers``: the array of rows that holds each layer, and where."""
    row = pl.program_id(1)
    slot = slots[row]
    pools = refs[-2 * len(layers) :]
    arrays = refs if eps is None else refs[3:]
    head = backend.covering(kv_heads)[0][:, None]
    low, real = backend.covering(head_dim // 2)  # surplus heads and lanes repeat the last one
    high = low + head_dim // 2

    def write(layer: int) -> None:
        keys, values = pools[2 * layer : 2 * layer + 2]
        kv, at = arrays[layers[layer][0]], layers[layer][1]
        key = [kv[row, at, 0, head, lane[None, :]] for lane in (low, high)]
        if eps is not None:
            k_norm, cos, sin = refs[:3]
            key = backend.normed(key, [k_norm[layer, low], k_norm[layer, high]], real, head_dim, eps)
            key = backend.rotated(key, cos[row, low], sin[row, low])
        for lane, half in zip((low, high), key, strict=True):
            keys[slot, head, lane[None, :]] = half.astype(keys.dtype)
            values[slot, head, lane[None, :]] = kv[row, at, 1, head, lane[None, :]].astype(values.dtype)

    for layer in range(len(layers)):
        pl.when((pl.program_id(0) == layer) & (slot < pools[0].shape[0]))(partial(write, layer))
