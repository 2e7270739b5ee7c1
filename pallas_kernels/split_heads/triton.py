"""``split_heads`` as one Triton kernel. A program owns one KV head of one token: its queries, its key, its value."""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import backend


def split_heads(
    qkv: Array, norms: tuple[Array, Array] | None, eps: float, cos: Array, sin: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """See ``pallas_kernels.split_heads``."""
    rows, block, kv_heads, group, head_dim = qkv.shape
    tokens, heads = rows * block, kv_heads * (group - 2)
    q, kv = backend.call(
        partial(split, group=group - 2, head_dim=head_dim, eps=None if norms is None else eps),
        (kv_heads, tokens),
        (
            jax.ShapeDtypeStruct((tokens, heads, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct((tokens, 2, kv_heads, head_dim), qkv.dtype),
        ),
        interpret=interpret,
        warps=2,
        stages=1,
        name="split_heads",
    )(qkv.reshape(tokens, *qkv.shape[2:]), cos.reshape(tokens, -1), sin.reshape(tokens, -1), *(norms or ()))
    return q.reshape(rows, block, heads, head_dim), kv.reshape(rows, block, 2, kv_heads, head_dim)


def split(qkv: Any, cos: Any, sin: Any, *refs: Any, group: int, head_dim: int, eps: float | None) -> None:
    """One program: grid (KV heads, tokens)."""
    head, token = pl.program_id(0), pl.program_id(1)
    q, kv = refs[-2:]
    low, real = backend.covering(head_dim // 2)  # surplus lanes and heads repeat the last one
    high = low + head_dim // 2
    members = backend.covering(group)[0][:, None]
    c, s = cos[token, low], sin[token, low]

    queries = [qkv[token, head, members, lane[None, :]] for lane in (low, high)]
    keys = [qkv[token, head, group, lane] for lane in (low, high)]
    if eps is not None:
        queries, keys = (
            backend.normed(x, [weight[low], weight[high]], real, head_dim, eps)
            for x, weight in ((queries, refs[0]), (keys, refs[1]))
        )
    for lane, query, key in zip((low, high), backend.rotated(queries, c, s), backend.rotated(keys, c, s), strict=True):
        q[token, head * group + members, lane[None, :]] = query
        kv[token, 0, head, lane] = key
        kv[token, 1, head, lane] = qkv[token, head, group + 1, lane]
