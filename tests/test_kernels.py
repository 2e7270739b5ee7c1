"""Both kernels against float64, every implementation: interpreted on a CPU, compiled on a GPU."""

from dataclasses import dataclass

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels import backend, block_attention, inject_kv, linear, linear_and_norm, resolve, split_heads
from pallas_kernels.inject_kv import Finish
from pallas_kernels.linear import Norm

PLATFORM = jax.default_backend()
HERE = [name for name, platforms in backend.IMPLEMENTED.items() if platforms is None or PLATFORM in platforms]


@dataclass(frozen=True)
class Case:
    """Rows of several lengths; ``causal`` True, False or "tree" (a given mask), ``window`` None or a width."""

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
    queries: int | None = None  # the last ones of the block (None: all)
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
    Case(5, (0, 1, 34), queries=1, since=1),
    Case(7, (0, 20, 1), since=1, page=8, valid=(7, 3, 1)),
    Case(6, (12, 2), queries=2, since=1, window=5, head_dim=80, page=8, share=3),
    Case(4, (40, 3), queries=1, since=1, dtype="bfloat16", share=8, kv_heads=1),
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
    skipped = case.block - (case.queries or case.block)
    q = rng.normal(size=(rows, case.block, heads, case.head_dim)).astype(case.dtype)
    kv = rng.normal(size=(rows, case.block, 2, case.kv_heads, case.head_dim)).astype(case.dtype)
    for row in range(rows):  # rows that do not exist may hold anything
        kv[row, valid[row] :] = np.nan
        kv[row, : max(case.since - lengths[row], 0)] = np.nan  # and so may rows that nobody sees
    parents = [-1, 0, 0, 1, 1, 2, 3, 5, 5, 7, 8, 9, 9, 11, 12, 14][: case.block]
    tree = tree_mask(parents)
    depth = tree.sum(axis=1) - 1 if case.causal == "tree" else np.arange(case.block)
    positions = (lengths[:, None] + depth).astype(np.int32)

    rule = jnp.asarray(tree) if case.causal == "tree" else bool(case.causal)
    call = jax.jit(
        lambda *args: block_attention(
            *args, page=case.page, causal=rule, window=case.window, since=case.since, implementation=implementation
        )
    )
    out = call(q[:, skipped:], kv, *pool, table, lengths, valid, positions)
    assert out.dtype == jnp.dtype(case.dtype)
    assert out.shape == q[:, skipped:].shape
    for row in range(rows):
        n, s, size = valid[row], positions[row][: valid[row], None], lengths[row]
        key_positions = np.concatenate([np.arange(size), positions[row, :n]])[None]
        inside = {True: positions[row, :n] <= s, False: np.ones((n, n), bool), "tree": tree[:n, :n]}[case.causal]
        visible = np.concatenate([np.ones((n, size), bool), inside], axis=1)
        if case.window is not None:
            visible &= key_positions > s - case.window
        visible &= key_positions >= case.since
        keys = np.concatenate([kept[row][0], kv[row, :n, 0].astype(np.float64)])
        values = np.concatenate([kept[row][1], kv[row, :n, 1].astype(np.float64)])
        exact = float64.attention(q[row, :n].astype(np.float64), keys, values, visible)
        bound = 2e-5 if case.dtype == "float32" else 2e-2
        np.testing.assert_allclose(np.asarray(out[row, : n - skipped], np.float64), exact[skipped:], atol=bound)


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
