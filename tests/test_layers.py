"""Rotary embedding, norms and the drafter's attention against float64."""

import math
from dataclasses import replace
from functools import partial

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_models import DRAFTER

from dflash_jax import RopeConfig, cache
from dflash_jax.cache import PagedKV, View
from dflash_jax.drafters import TargetIO, dflash
from dflash_jax.layers import inverse_frequencies, linear, rms_norm, rope_table, rotate
from dflash_jax.params import init, pack

LINEAR = RopeConfig(1e4, "linear", factor=4.0)
LLAMA3 = RopeConfig(
    5e5, "llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeConfig(1e6, "yarn", factor=4.0, original_max_position_embeddings=32768)
OPEN_YARN = RopeConfig(
    1e4, "yarn", factor=2.0, original_max_position_embeddings=512, truncate=False, attention_factor=1.5
)


def frequency(rope: RopeConfig, i: int, head: int) -> float:
    """The inverse frequency of pair i, one formula a type, after the papers and transformers' documentation."""
    base = rope.rope_theta ** (-2 * i / head)
    if rope.rope_type == "linear":
        return base / rope.factor
    if rope.rope_type == "llama3":
        wave = 2 * math.pi / base
        if wave < rope.original_max_position_embeddings / rope.high_freq_factor:
            return base
        if wave > rope.original_max_position_embeddings / rope.low_freq_factor:
            return base / rope.factor
        smooth = rope.original_max_position_embeddings / wave - rope.low_freq_factor
        smooth /= rope.high_freq_factor - rope.low_freq_factor
        return (1 - smooth) * base / rope.factor + smooth * base
    if rope.rope_type == "yarn":
        ends = [
            head
            * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(rope.rope_theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
        low, high = max(low, 0), min(high, head - 1)
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        return base / rope.factor * stretched + base * (1 - stretched)
    return base


def scale_of(rope: RopeConfig) -> float:
    """YaRN's factor on cos and sin."""
    if rope.rope_type != "yarn":
        return 1.0
    return rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1


@pytest.mark.parametrize("rope", [RopeConfig(1e6), LINEAR, LLAMA3, YARN, OPEN_YARN], ids=lambda r: r.rope_type)
def test_rope_tables(rope: RopeConfig) -> None:
    """Row 8: cos and sin at positions 0, 1,000 and 40,000; angles are float32, so the bound grows with them."""
    head, positions = 128, np.array([0, 1000, 40000])
    cos, sin = rope_table(rope, head, jnp.asarray(positions))
    exact = np.array([frequency(rope, i, head) for i in range(head // 2)])
    frequencies, scale = inverse_frequencies(rope, head)
    np.testing.assert_allclose(frequencies, exact, rtol=1e-7)
    assert scale == pytest.approx(scale_of(rope), rel=1e-12)
    angles = positions[:, None] * exact
    bound = 1e-6 + angles * 2.0**-23  # two roundings of an angle
    assert (np.abs(np.asarray(cos) - np.cos(angles) * scale) <= bound * scale).all()
    assert (np.abs(np.asarray(sin) - np.sin(angles) * scale) <= bound * scale).all()


def test_all_three_zones_of_llama3_occur() -> None:
    plain = np.array([frequency(RopeConfig(5e5), i, 128) for i in range(64)])
    ratio = plain / inverse_frequencies(LLAMA3, 128)[0]
    assert ratio.min() == pytest.approx(1, abs=1e-6)
    assert ratio.max() == pytest.approx(8, abs=1e-5)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type 'dynamic' is not one of"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "llama3"}, "needs factor, original_max_position_embeddings, low_freq_factor, high_freq_factor"),
        ({"rope_theta": 0.0}, "rope_theta must be positive, got 0"),
    ],
)
def test_a_rope_that_is_not_whole_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**{"rope_theta": 1e4, **fields})


def test_norm_rotation_and_mlp() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 4, 12)), rng.normal(size=12)
    np.testing.assert_allclose(rms_norm(f32(x), f32(weight), 1e-5), float64.norm(x, weight, 1e-5), atol=1e-5)

    positions = np.array([[0, 1, 2], [7, 8, 30]])
    cos, sin = rope_table(RopeConfig(100.0), 12, jnp.asarray(positions))
    exact = np.stack([float64.rotated(x[b], positions[b], float64.plain_frequencies(100.0, 12)) for b in range(2)])
    np.testing.assert_allclose(rotate(f32(x), cos, sin), exact, atol=1e-5)

    gate, up, down = rng.normal(size=(12, 5)), rng.normal(size=(12, 5)), rng.normal(size=(5, 12))
    exact = (float64.silu(x @ gate + 1) * (x @ up + 2)) @ down + 3
    apply = partial(linear, implementation="reference")
    wide = apply(f32(x), f32(np.stack([gate, up], axis=1)), bias=f32([[1] * 5, [2] * 5]), gated=True)
    ours = apply(wide, f32(down), bias=f32([3] * 12))
    np.testing.assert_allclose(ours, exact, atol=1e-4)


def test_norm_statistics_are_float32_in_a_bfloat16_model() -> None:
    x = jnp.full((1, 4096), 300.0, jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-6), jnp.ones((1, 4096), jnp.bfloat16))


def f32(values: object) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize(
    ("context", "causal"),
    [(7, (True, False)), (8, (True, False)), (9, (True, False)), (40, (True, False)), (9, (False, True))],
)
def test_drafter_layers_equal_a_dense_mask(mesh: Mesh, context: int, causal: tuple[bool, bool]) -> None:
    """Row 8: layers [sliding, full] with a window of 8: context in pages (two pieces) against one dense mask."""
    cfg, rng = replace(DRAFTER, in_block_causal=causal), np.random.default_rng(context)
    plain = init(cfg, jax.random.key(5), jnp.float32, mesh)
    features, block = rng.normal(size=(40, 64)), rng.normal(size=(cfg.block_size, 32))
    exact = float64.draft_hidden(
        jax.tree.map(lambda a: np.asarray(a, np.float64), plain),
        features[:context],
        block,
        cfg.rope.rope_theta,
        list(cfg.in_block_causal),
        list(cfg.windows()),
    )
    kv, params = PagedKV(*[(jnp.full((48, 2, 12), jnp.nan),) * 2] * 2, page=16), pack(plain, cfg, mesh)
    table = jnp.array([[2, 0, 1]])
    for start, stop in ((0, 5), (5, context)):
        piece = np.zeros((1, 40, 64), np.float32)
        piece[0, : stop - start] = features[start:stop]
        kv = extended(params, View(kv, table, jnp.array([start]), "reference"), piece, np.array([stop - start]))
    view = View(kv, table, jnp.array([context]), "reference")
    hidden, _ = jax.jit(lambda p, x, v: dflash.block_hidden(p, cfg, x, v))(params, f32(block)[None], view)
    np.testing.assert_allclose(hidden[0], exact, atol=1e-4)


@jax.jit
def extended(params: object, view: View, features: jax.Array, valid: jax.Array) -> PagedKV:
    """The drafter's pool with valid [1] of features [1, C, K * D] injected."""
    nothing = TargetIO(embed=lambda tokens: tokens, head=lambda hidden: hidden)
    tokens = jnp.zeros(features.shape[:2], jnp.int32)
    rows, _ = dflash.extend(params, nothing, DRAFTER, features, tokens, valid, view, ())
    keep = jnp.arange(features.shape[1]) < valid[:, None]
    return cache.commit(view.kv, rows, cache.slots_of(view.kv, view.table, view.positions(features.shape[1]), keep))
