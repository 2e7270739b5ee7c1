"""The mixture of experts against a loop over tokens and experts in float64."""

from dataclasses import dataclass
from functools import partial

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import GPT_OSS, MIXTURE

from dflash_jax.layers import rms_norm
from dflash_jax.params import expert_leaves, flatten, init, pack, unpack
from dflash_jax.sharding import make_mesh, sharding_of
from dflash_jax.targets import gpt_oss, moe

DIM, WIDTH, SHARED = 24, 20, 28


@dataclass(frozen=True)
class Router:
    """What the router reads of a config."""

    num_experts_per_tok: int
    norm_topk_prob: bool


def random_layer(experts, shared, seed=0):
    random = np.random.default_rng(seed)
    shapes = {
        "router": (DIM, experts),
        "expert_gate_up": (experts, DIM, 2, WIDTH),
        "expert_down": (experts, WIDTH, DIM),
    }
    if shared:
        shapes |= {"shared_gate_up": (DIM, 2, SHARED), "shared_down": (SHARED, DIM), "shared_gate": (DIM,)}
    return {name: random.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def by_loop(layer, cfg, x):
    """[N, D] in float64: every token on its own, its experts one after the other."""
    layer, x = {n: w.astype(np.float64) for n, w in layer.items()}, x.astype(np.float64)
    out = np.zeros(x.shape)
    for i, row in enumerate(x):
        scores = np.exp(row @ layer["router"])
        chances = scores / scores.sum()
        best = sorted(range(len(chances)), key=lambda e: (-chances[e], e))[: cfg.num_experts_per_tok]
        scale = sum(chances[e] for e in best) if cfg.norm_topk_prob else 1.0
        for e in best:
            gate, up = (row @ layer["expert_gate_up"][e, :, j] for j in (0, 1))
            out[i] += chances[e] / scale * ((float64.silu(gate) * up) @ layer["expert_down"][e])
        if "shared_gate" in layer:
            gate, up = (row @ layer["shared_gate_up"][:, j] for j in (0, 1))
            weight = 1 / (1 + np.exp(-row @ layer["shared_gate"]))
            out[i] += weight * ((float64.silu(gate) * up) @ layer["shared_down"])
    return out


def rows(count, seed=1):
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64])  # below and above the border between the two ways
@pytest.mark.parametrize("cfg", [Router(3, True), Router(2, False), Router(8, True)])
def test_experts_are_a_loop_over_tokens_and_experts(cfg, tokens, shared):
    layer, x = random_layer(8, shared), rows(tokens)
    ours = jax.jit(moe.experts, static_argnums=1)(layer, cfg, x[None])
    np.testing.assert_allclose(ours[0], by_loop(layer, cfg, x), atol=2e-5)


@pytest.mark.parametrize("tokens", [4, 60])
def test_padding_does_not_matter(tokens):
    """Whatever the rows of padding hold, NaN included, the others' results stay as they are, bit for bit."""
    layer, cfg, x = random_layer(8, shared=True), Router(3, True), rows(tokens)
    step = jax.jit(moe.experts, static_argnums=1)
    before = np.asarray(step(layer, cfg, x[None]))[0]
    for padding in (np.nan, np.inf, 1e4):
        spoilt = x.copy()
        spoilt[1::2] = padding
        np.testing.assert_array_equal(np.asarray(step(layer, cfg, spoilt[None]))[0, ::2], before[::2])


def test_ties_go_to_the_lower_expert():
    weights, ids = moe.route(jnp.array([[1.0, 3.0, 3.0, 1.0, 3.0]]), Router(2, True))
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_the_router_is_float32_whatever_the_model_is():
    """Two experts that bfloat16 logits would tie: 256.0 and 257.0 are one number there."""
    layer = {"router": jnp.array([[1.0, 1.0], [0.0, 1.0]], jnp.bfloat16)}
    logits = moe.router_logits(layer, jnp.array([[256.0, 1.0]], jnp.bfloat16))
    assert logits.tolist() == [[256.0, 257.0]]


def test_gpt_oss_experts_are_a_loop_with_clamps_and_biases():
    """Activations on both sides of the limit; the weight of an expert multiplies its bias too."""
    layer, random, x = random_layer(6, shared=False), np.random.default_rng(5), rows(9)
    layer |= {"router_bias": random.normal(size=6).astype(np.float32)}
    layer |= {"expert_gate_up_bias": random.normal(size=(6, 2, WIDTH)).astype(np.float32)}
    layer |= {"expert_down_bias": random.normal(size=(6, DIM)).astype(np.float32)}
    wide = {name: value.astype(np.float64) for name, value in layer.items()}
    limit, expected, clamped = 1.5, np.zeros(x.shape), [0, 0, 0]
    for i, row in enumerate(x.astype(np.float64)):
        logits = row @ wide["router"] + wide["router_bias"]
        best = np.argsort(-logits)[:2]
        scores = np.exp(logits[best])
        for e, weight in zip(best, scores / scores.sum(), strict=True):
            gate, up = (row @ wide["expert_gate_up"][e, :, j] + wide["expert_gate_up_bias"][e, j] for j in (0, 1))
            clamped = [n + int(c.sum()) for n, c in zip(clamped, (gate > limit, up > limit, up < -limit), strict=True)]
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            expected[i] += weight * (inner @ wide["expert_down"][e] + wide["expert_down_bias"][e])
    assert min(clamped) > 0
    weights, ids = gpt_oss.route(moe.router_logits(layer, x), 2)
    ours = moe.mixture(layer, jnp.asarray(x), weights, ids, partial(gpt_oss.clamped_swiglu, limit=limit))
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_norms_of_gpt_oss_multiply_before_the_cast(mesh):
    """In bfloat16 the order of the cast shows; weights come back from the packed layout as they were."""
    random = np.random.default_rng(0)
    plain = init(GPT_OSS, jax.random.key(0), jnp.bfloat16, mesh)
    plain["final_norm"] = jnp.asarray(random.normal(size=32), jnp.bfloat16)
    packed = pack(plain, GPT_OSS, mesh)
    x = jnp.asarray(random.normal(size=(200, 32)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(plain["final_norm"], np.float64)
    ours = rms_norm(x, packed["final_norm"], 1e-5)
    assert ours.dtype == jnp.bfloat16
    once = np.asarray(jnp.asarray(exact, jnp.bfloat16))
    assert (np.asarray(ours) == once).mean() > 0.999
    assert (np.asarray(rms_norm(x, plain["final_norm"], 1e-5)) == once).mean() < 0.9  # the other order rounds twice
    back = unpack(packed, GPT_OSS)
    for name, leaf in flatten(plain).items():
        np.testing.assert_array_equal(np.asarray(flatten(back)[name]), np.asarray(leaf), err_msg=name)


@pytest.mark.devices(2)
@pytest.mark.parametrize("tokens", [3, 60])
def test_a_split_over_devices_moves_no_weights(tokens):
    """Each device multiplies its slice of every expert; the sums of the slices are all that travels."""
    mesh, cfg = make_mesh(2), Router(3, True)
    axes = {name: leaf.axes for name, leaf in expert_leaves(MIXTURE, bias=False).items()}
    layer = {n: jax.device_put(w, sharding_of(axes[n], w.shape, mesh)) for n, w in random_layer(6, False).items()}
    x = jax.device_put(rows(tokens)[None], sharding_of(("rows", "slots", "embed"), (1, tokens, DIM), mesh))
    step = jax.jit(moe.experts, static_argnums=1, out_shardings=x.sharding)
    text = step.lower(layer, cfg, x).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    np.testing.assert_allclose(step(layer, cfg, x)[0], by_loop(random_layer(6, False), cfg, rows(tokens)), atol=2e-5)
