"""The mixture of experts against a loop over tokens and experts in float64."""

from dataclasses import dataclass

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.targets import moe

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


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_both_ways_of_the_matmul_agree(tokens, biased):
    """Experts that nobody chose and experts that everybody chose included."""
    layer, random = random_layer(16, shared=False), np.random.default_rng(2)
    if biased:
        layer |= {"expert_gate_up_bias": random.normal(size=(16, 2, WIDTH)).astype(np.float32)}
        layer |= {"expert_down_bias": random.normal(size=(16, DIM)).astype(np.float32)}
    ids = np.stack([random.permutation(11)[:3] for _ in range(tokens)]).astype(np.int32)
    ids[:, 0] = 15
    ways = [jax.jit(way, static_argnums=3)(layer, rows(tokens), ids, moe.swiglu) for way in (moe.gathered, moe.grouped)]
    np.testing.assert_allclose(*ways, atol=1e-5)


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
