"""Both kernels against float64, every implementation: interpreted on a CPU, compiled on a GPU."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels import (
    backend,
    block_attention,
    expert_mlp,
    inject_kv,
    linear,
    linear_and_norm,
    resolve,
    split_heads,
    tuning,
)
from pallas_kernels.block_attention.triton import Sizes, Tiling, tiling_of
from pallas_kernels.expert_mlp import Experts
from pallas_kernels.inject_kv import Finish
from pallas_kernels.linear import Norm, triton

PLATFORM = jax.default_backend()
HERE = [name for name, platforms in backend.IMPLEMENTED.items() if platforms is None or PLATFORM in platforms]


@dataclass(frozen=True)
class Case:
    """Rows of several lengths; ``causal`` True, False or "tree" (a given mask), ``window`` None or a width.

    ``asking``: how many of the block's last rows are queries (None: all). sinks: whether heads have them. since: the
    first position that is seen.
    """

    block: int
    lengths: tuple[int, ...]
    kv_heads: int = 2
    share: int = 2
    head_dim: int = 64
    page: int = 16
    causal: bool | str = True
    window: int | None = None
    valid: tuple[int, ...] | None = None
    dtype: str = "float32"
    asking: int | None = None
    sinks: bool = False
    since: int = 0


CASES = [
    Case(1, (0, 1, 33)),
    Case(1, (5, 64), share=8, page=64, kv_heads=1),
    Case(2, (15, 16, 17), share=1, head_dim=80),
    Case(3, (40, 7), causal=False, page=8),
    Case(4, (9, 0, 31), causal="tree", share=4),
    Case(5, (6, 20), window=4, head_dim=80, page=8),
    Case(7, (0, 12), causal=False, window=5, page=8),
    Case(8, (30, 3, 0), valid=(8, 5, 0)),
    Case(8, (50, 1), causal=False, valid=(6, 8), share=3, kv_heads=3),
    Case(11, (64, 63), page=64, share=8, kv_heads=1, window=40),
    Case(16, (100, 0, 17, 16), share=5, kv_heads=1, page=16),
    Case(16, (70,), causal=False, window=16, head_dim=80, page=8, valid=(15,)),
    Case(16, (33, 80), causal="tree", page=64, valid=(16, 9)),
    Case(16, (33, 80), dtype="bfloat16", share=8, kv_heads=1),
    Case(32, (0, 64), page=16, valid=(32, 20)),
    Case(4, (700, 3)),  # few rows far behind: their pages are split over programs
    Case(2, (0, 600, 257), window=300, sinks=True, page=64),
    Case(6, (30, 5), asking=1),
    Case(9, (520, 17), asking=3, causal=False, share=3, kv_heads=1, valid=(9, 7)),
    Case(5, (20, 0), sinks=True, share=4, head_dim=80),
    Case(3, (40, 9), head_dim=256, dtype="bfloat16", share=1),
    Case(2, (40, 9), head_dim=96),
    Case(140, (130,), share=1, kv_heads=1),  # several tiles of queries
    Case(5, (0, 1, 34), asking=1, since=1),
    Case(7, (0, 20, 1), since=1, page=8, valid=(7, 3, 1)),
    Case(6, (12, 2), asking=2, since=1, window=5, head_dim=80, page=8, share=3),
    Case(4, (40, 3), asking=1, since=1, dtype="bfloat16", share=8, kv_heads=1),
]


def pools(case: Case, rng: np.random.Generator) -> tuple[list[NDArray], NDArray, list[NDArray]]:
    """K and V pools whose only numbers are the rows' own: NaN in unwritten slots and in pages of no row."""
    rows, most = len(case.lengths), max(1, -(-max(case.lengths) // case.page)) + 1
    order = rng.permutation(rows * most + 3)
    table = order[: rows * most].reshape(rows, most).astype(np.int32)
    pool = [np.full((order.size * case.page, case.kv_heads, case.head_dim), np.nan, np.float32) for _ in "kv"]
    kept: list[NDArray] = []
    for row, length in enumerate(case.lengths):
        at = np.arange(length)
        slots = table[row, at // case.page] * case.page + at % case.page
        values = rng.normal(size=(2, length, case.kv_heads, case.head_dim)).astype(case.dtype)
        values[:, : case.since] = np.nan  # nobody sees these
        for part, value in zip(pool, values, strict=True):
            part[slots] = value
        kept.append(values.astype(np.float64))
        table[row, -(-length // case.page) :] = rng.choice([-7, 10**6, 0])  # behind the row's pages: anything
    return [part.astype(case.dtype) for part in pool], table, kept


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_attention(case: Case, implementation: str) -> None:
    rng = np.random.default_rng(CASES.index(case))
    pool, table, kept = pools(case, rng)
    rows, heads = len(case.lengths), case.kv_heads * case.share
    lengths, valid = np.array(case.lengths, np.int32), np.array(case.valid or (case.block,) * rows, np.int32)
    asking = case.asking or case.block
    q = rng.normal(size=(rows, asking, heads, case.head_dim)).astype(case.dtype)
    kv = rng.normal(size=(rows, case.block, 2, case.kv_heads, case.head_dim)).astype(case.dtype)
    sinks = rng.normal(size=heads).astype(case.dtype) if case.sinks else None
    for row in range(rows):  # rows that do not exist may hold anything
        kv[row, valid[row] :] = np.nan
        kv[row, : max(case.since - lengths[row], 0)] = np.nan  # and so may rows that nobody sees
    parents = [-1, 0, 0, 1, 1, 2, 3, 5, 5, 7, 8, 9, 9, 11, 12, 14][: case.block]
    tree = tree_mask(parents) if case.causal == "tree" else np.ones((case.block, case.block), bool)
    depth = tree.sum(axis=1) - 1 if case.causal == "tree" else np.arange(case.block)
    positions = (lengths[:, None] + depth).astype(np.int32)

    rule = jnp.asarray(tree) if case.causal == "tree" else bool(case.causal)
    call = jax.jit(
        lambda *args: block_attention(
            *args, page=case.page, causal=rule, window=case.window, sinks=sinks, since=case.since,
            implementation=implementation,
        )
    )  # fmt: skip
    out = call(q, kv, *pool, table, lengths, valid, positions)
    np.testing.assert_array_equal(out, call(q, kv, *pool, table, lengths, valid, positions))  # the same each time
    assert out.dtype == jnp.dtype(case.dtype)
    assert out.shape == q.shape
    for row in range(rows):
        n, size, first = valid[row], lengths[row], case.block - asking
        s = positions[row, first:n, None]  # of the queries that exist
        key_positions = np.concatenate([np.arange(size), positions[row, :n]])[None]
        inside = {True: positions[row, :n] <= s, False: np.ones((len(s), n), bool), "tree": tree[first:n, :n]}
        visible = np.concatenate([np.ones((len(s), size), bool), inside[case.causal]], axis=1)
        if case.window is not None:
            visible &= key_positions > s - case.window
        visible &= key_positions >= case.since
        keys = np.concatenate([kept[row][0], kv[row, :n, 0].astype(np.float64)])
        values = np.concatenate([kept[row][1], kv[row, :n, 1].astype(np.float64)])
        wide = None if sinks is None else sinks.astype(np.float64)
        exact = float64.attention(q[row, : len(s)].astype(np.float64), keys, values, visible, wide)
        bound = 2e-5 if case.dtype == "float32" else 2e-2
        np.testing.assert_allclose(np.asarray(out[row, : len(s)], np.float64), exact, atol=bound)


def tree_mask(parents: list[int]) -> NDArray[np.bool_]:
    """[T, T]: every node sees its ancestors and itself."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.mark.parametrize("implementation", HERE)
def test_queries_that_see_nothing_give_zeros(implementation: str) -> None:
    zeros = jnp.zeros((1, 2, 1, 64))
    out = block_attention(
        zeros + 1, jnp.stack([zeros, zeros + 1], axis=2), zeros[0] * jnp.nan, zeros[0] * jnp.nan,
        jnp.zeros((1, 1), jnp.int32),
        jnp.array([0]), jnp.array([0]), jnp.array([[0, 1]]), page=2, causal=True, implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(out, zeros)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("layers", "kv_heads", "head_dim", "raw", "dtype"), [
    (1, 2, 64, False, "float32"),
    (3, 2, 80, True, "float32"),
    (2, 1, 64, True, "bfloat16"),
    (5, 8, 128, True, "float32"),
])  # fmt: skip
def test_inject_kv(layers: int, kv_heads: int, head_dim: int, raw: bool, dtype: str, implementation: str) -> None:
    rng, slots, n = np.random.default_rng(layers), 48, 9
    old = rng.normal(size=(2, layers, slots, kv_heads, head_dim)).astype(dtype)
    kv = rng.normal(size=(n, layers, 2, kv_heads, head_dim)).astype(dtype)
    # The sentinel (one past the end) and whatever lies beyond it drop; the last slot and slot 0 do not.
    to = np.array([5, slots, 47, 0, slots, 31, slots + 1000, 6, 2**30], np.int32)
    kv[np.flatnonzero(to >= slots)] = np.nan
    positions = np.arange(100, 100 + n)
    frequencies = float64.plain_frequencies(1e4, head_dim)
    angles = positions[:, None] * frequencies
    weight = 1 + 0.2 * rng.normal(size=(layers, head_dim))
    finish = Finish(
        jnp.asarray(weight, dtype), np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32), 1e-6
    )
    call = jax.jit(
        lambda pages, kv, to: inject_kv(
            pages,
            [kv[:, :1], kv[:, 1:]] if layers > 1 else [kv],
            to,
            finish if raw else None,
            implementation=implementation,
        )
    )
    out = call(list(zip(*old, strict=True)), kv, to)

    exact = old.astype(np.float64)
    for row in np.flatnonzero(to < slots):
        for layer in range(layers):
            key = kv[row, layer, 0].astype(np.float64)
            if raw:
                scaled = np.asarray(finish.k_norm[layer], np.float64)
                key = float64.rotated(float64.norm(key, scaled, 1e-6)[None], positions[row : row + 1], frequencies)[0]
            exact[0, layer, to[row]], exact[1, layer, to[row]] = key, kv[row, layer, 1]
    for layer, pair in enumerate(out):
        for part in (0, 1):
            assert pair[part].dtype == jnp.dtype(dtype)
            bound = 2e-5 if dtype == "float32" else 4e-2
            np.testing.assert_allclose(np.asarray(pair[part], np.float64), exact[part, layer], atol=bound)
            untouched = np.setdiff1d(np.arange(slots), to)
            np.testing.assert_array_equal(np.asarray(pair[part])[untouched], old[part, layer][untouched])


def test_an_implementation_is_chosen_out_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("reference", "cpu") == "reference"
    assert resolve("auto", "cpu") in backend.IMPLEMENTED
    with pytest.raises(
        ValueError, match="kernels='tritn' is not implemented; choose auto or one of triton, interpreted, reference"
    ):
        resolve("tritn", "cpu")
    assert resolve("auto", "gpu") == "triton"
    assert resolve("auto", "gpu", devices=8) == "reference"
    with pytest.raises(ValueError, match="kernels='triton' runs on 1 device, the mesh has 8"):
        resolve("triton", "gpu", devices=8)
    monkeypatch.setitem(backend.IMPLEMENTED, "abacus", ("desk",))
    assert resolve("abacus", "desk") == "abacus"
    with pytest.raises(ValueError, match="kernels='abacus' runs on desk, not on 'cpu'"):
        resolve("abacus", "cpu")


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("tokens", "features", "dim", "columns", "parts", "dtype"), [
    (1, 64, 48, (96,), "residual", "float32"),
    (3, 192, 576, (2, 5, 32), "bias residual", "float32"),
    (16, 128, 64, (64,), "residual gated", "float32"),
    (16, 256, 64, (64,), "bias gated", "bfloat16"),
    (32, 128, 32, (32,), "bias residual", "bfloat16"),
    (5, 40, 24, (24,), "bias gated residual", "float32"),  # no power of two divides these
    (70, 64, 48, (32,), "bias gated residual", "float32"),  # many tokens
])  # fmt: skip
def test_linear(
    tokens: int, features: int, dim: int, columns: tuple[int, ...], parts: str, dtype: str, implementation: str
) -> None:
    """Two maps with a norm between them, as a decoder has them."""
    rng, gated = np.random.default_rng(tokens), "gated" in parts
    shape = (2, *columns) if gated else columns
    arrays = {
        "x": rng.normal(size=(1, tokens, features)),
        "first": rng.normal(size=(features, dim)) * features**-0.5,
        "first_bias": rng.normal(size=dim),
        "residual": rng.normal(size=(1, tokens, dim)),
        "scale": rng.normal(size=dim),
        "second": rng.normal(size=(dim, *shape)) * dim**-0.5,
        "second_bias": rng.normal(size=shape),
    }
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}

    def chain(a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        biased, options = "bias" in parts, {"implementation": implementation}
        residual = a["residual"] if "residual" in parts else None
        bias = a["first_bias"] if biased else None
        x, normed = linear_and_norm(a["x"], a["first"], Norm(a["scale"], 1e-6), bias=bias, residual=residual, **options)
        out = linear(normed, a["second"], bias=a["second_bias"] if biased else None, gated=gated, **options)
        return x, normed.array(), out

    results = jax.jit(chain)(arrays)
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    x = wide["x"] @ wide["first"]
    if "bias" in parts:
        x = x + wide["first_bias"]
    if "residual" in parts:
        x = x + wide["residual"]
    normed = float64.norm(x, wide["scale"], 1e-6)
    out = np.tensordot(normed, wide["second"], axes=1)
    if "bias" in parts:
        out = out + wide["second_bias"]
    if gated:
        out = float64.silu(out[:, :, 0]) * out[:, :, 1]
    for ours, exact in zip(results, (x, normed, out), strict=True):
        assert ours.shape == exact.shape
        assert ours.dtype == jnp.dtype(dtype)
        bound = 2e-5 if dtype == "float32" else 6e-2
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("kv_heads", "share", "head_dim", "normed", "dtype"), [
    (2, 4, 64, True, "float32"),
    (3, 3, 80, False, "float32"),
    (1, 1, 128, True, "bfloat16"),
])  # fmt: skip
def test_split_heads(kv_heads: int, share: int, head_dim: int, normed: bool, dtype: str, implementation: str) -> None:
    rng, positions = np.random.default_rng(share), np.arange(7, 13)
    qkv = rng.normal(size=(2, 3, kv_heads, share + 2, head_dim)).astype(dtype)
    scales = rng.normal(size=(2, head_dim)).astype(dtype)
    frequencies = float64.plain_frequencies(1e4, head_dim)
    angles = (positions[:, None] * frequencies).reshape(2, 3, -1)
    q, kv = jax.jit(
        lambda qkv, scales, cos, sin: split_heads(
            qkv, (scales[0], scales[1]) if normed else None, 1e-6, cos, sin, implementation=implementation
        )
    )(qkv, scales, np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32))
    assert q.shape == (2, 3, kv_heads * share, head_dim)
    assert kv.shape == (2, 3, 2, kv_heads, head_dim)
    assert q.dtype == kv.dtype == jnp.dtype(dtype)

    exact = qkv.astype(np.float64).reshape(6, kv_heads, share + 2, head_dim)
    parts = [exact[:, :, :share].reshape(6, -1, head_dim), exact[:, :, share]]
    if normed:
        parts = [float64.norm(part, scale.astype(np.float64), 1e-6) for part, scale in zip(parts, scales, strict=True)]
    parts = [float64.rotated(part, positions, frequencies) for part in parts]
    bound = {"atol": 2e-5 if dtype == "float32" else 2e-2, "rtol": 1e-5 if dtype == "float32" else 2e-2}
    np.testing.assert_allclose(np.asarray(q, np.float64).reshape(6, -1, head_dim), parts[0], **bound)
    np.testing.assert_allclose(np.asarray(kv[:, :, 0], np.float64).reshape(6, kv_heads, head_dim), parts[1], **bound)
    np.testing.assert_array_equal(kv[:, :, 1], qkv[:, :, :, -1])


@pytest.mark.parametrize("implementation", [name for name in HERE if name != "reference"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_parts_of_a_product_add_up(tokens: int, implementation: str) -> None:
    """Where columns are few, programs share the features of a map."""
    rng = np.random.default_rng(tokens)
    sizes = {"x": (tokens, 176), "weight": (176, 48), "bias": (48,), "residual": (tokens, 48), "scale": (48,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}
    options = {"bias": arrays["bias"], "residual": arrays["residual"]}
    norm = Norm(arrays["scale"], 1e-6)
    right = linear_and_norm(arrays["x"], arrays["weight"], norm, implementation="reference", **options)
    parts = partial(
        triton.linear, tiling=triton.Tiling(16, 16, splits=3, warps=4, stages=2), interpret=PLATFORM == "cpu",
        gated=False, **options,
    )  # fmt: skip
    for ours in (
        parts(arrays["x"], arrays["weight"], norm=norm),
        (parts(arrays["x"], arrays["weight"], norm=None)[0],),
    ):
        np.testing.assert_allclose(ours[0], right[0], atol=1e-4)
        if len(ours) > 1:
            np.testing.assert_allclose(ours[1].array(), right[1].array(), atol=1e-4)


def test_measured_tilings_are_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = Sizes(rows=5, queries=8, keys=8, kv_heads=8, group=4, head_dim=128, pages=40, page=16, slots=640)
    by_rule = tiling_of(sizes, jnp.bfloat16)
    measured = {"queries": 32, "keys": 16, "splits": 3, "warps": 2, "stages": 5}
    key = triton.key_of(16, 4096, 4096, False, True, jnp.bfloat16)
    table = {
        "block_attention": {"8 rows, 8 of 8 behind 1024, 8x4x128, bfloat16": measured},
        "linear": {key: {"columns": 32, "features": 64, "splits": 2, "warps": 4, "stages": 6}, "other": {}},
    }
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.file_of("NVIDIA H200").write_text(json.dumps(table))
    tuning.table.cache_clear()
    monkeypatch.setattr(backend, "device_kind", lambda: "NVIDIA H200")
    assert tiling_of(sizes, jnp.bfloat16) == Tiling(**measured) != by_rule
    assert triton.tiling_of(3, 4096, 4096, False, True, jnp.bfloat16) == triton.Tiling(32, 64, 2, 4, 6)
    assert triton.tiling_of(40, 4096, 4096, False, True, jnp.bfloat16) is None
    monkeypatch.setattr(backend, "device_kind", lambda: "NVIDIA B200")
    assert tiling_of(sizes, jnp.bfloat16) == by_rule
    tuning.table.cache_clear()


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("tokens", "experts", "biased", "dtype"), [
    (1, 8, False, "float32"),
    (7, 8, True, "float32"),
    (40, 4, True, "float32"),  # many tokens an expert
    (40, 40, False, "bfloat16"),  # experts that nobody chose
])  # fmt: skip
def test_expert_mlp(tokens: int, experts: int, biased: bool, dtype: str, implementation: str) -> None:
    rng, dim, width, chosen = np.random.default_rng(tokens), 48, 32, 3
    shapes = {"gate_up": (experts, dim, 2, width), "down": (experts, width, dim)}
    if biased:
        shapes |= {"gate_up_bias": (experts, 2, width), "down_bias": (experts, dim)}
    arrays = {name: (rng.normal(size=shape) * 0.3).astype(dtype) for name, shape in shapes.items()}
    x = rng.normal(size=(tokens, dim)).astype(dtype)
    ids = np.stack([rng.permutation(experts - 1)[:chosen] for _ in range(tokens)]).astype(np.int32)
    ids[:, 0] = experts - 1  # everybody's

    def silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    call = jax.jit(partial(expert_mlp, activation=silu_times, implementation=implementation))
    out = call(x, ids, Experts(**arrays))
    assert out.shape == (tokens, chosen, dim)
    assert out.dtype == jnp.dtype(dtype)
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    exact = np.zeros(out.shape)
    for token, place in np.ndindex(tokens, chosen):
        e = ids[token, place]
        both = np.einsum("c,cjf->jf", x[token].astype(np.float64), wide["gate_up"][e])
        if biased:
            both = both + wide["gate_up_bias"][e]
        exact[token, place] = (float64.silu(both[0]) * both[1]) @ wide["down"][e]
        if biased:
            exact[token, place] += wide["down_bias"][e]
    bound = 2e-5 if dtype == "float32" else 0.15
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=bound, rtol=bound)

    spoilt = x.copy()
    spoilt[1::2] = np.nan  # whatever other rows hold
    np.testing.assert_array_equal(np.asarray(call(spoilt, ids, Experts(**arrays)))[::2], np.asarray(out)[::2])


def test_a_pool_that_int32_offsets_do_not_reach_is_refused() -> None:
    whole = jax.ShapeDtypeStruct
    pool, ids = whole((2**21, 8, 128), jnp.bfloat16), whole((1,), jnp.int32)
    q, kv = whole((1, 1, 8, 128), jnp.bfloat16), whole((1, 1, 2, 8, 128), jnp.bfloat16)
    table, positions = whole((1, 4), jnp.int32), whole((1, 1), jnp.int32)
    call = partial(block_attention, page=16, causal=True, implementation="interpreted")
    with pytest.raises(ValueError, match="2,147,483,648 elements, the kernel counts to 2,147,483,647"):
        jax.eval_shape(call, q, kv, pool, pool, table, ids, ids, positions)
