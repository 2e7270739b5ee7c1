"""gpt-oss: the dense decoder with sinks and biases in its attention, and a mixture of clamped SwiGLU experts.

What differs is data: sinks and biases are parameters of a layer, sliding layers and YaRN are said by the config. Only
the router (softmax over the chosen logits) and the experts' activation are formulas of their own.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dflash_jax.config import GptOssConfig
from dflash_jax.layers import Norm, Normed, norm_of
from dflash_jax.targets import dense
from dflash_jax.targets.dense import cache_shape, embed, head, state_shape
from dflash_jax.targets.moe import mixture, router_logits

Params = dict[str, Any]

__all__ = ["cache_shape", "embed", "forward", "head", "state_shape"]

SHARPNESS = 1.702  # of the sigmoid: silu's place is taken by the sigmoid approximation of GELU


def route(logits: Array, count: int) -> tuple[Array, Array]:
    """The best ``count`` experts and the softmax over their logits: weights float32 and ids int32, both [N, k]."""
    chosen, ids = lax.top_k(logits, count)
    return jax.nn.softmax(chosen, axis=-1), ids


def clamped_swiglu(gate: Array, up: Array, limit: float) -> Array:
    """(up + 1) * gate * sigmoid(1.702 gate), gate clamped from above and up on both sides."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SHARPNESS * gate)


def feed_forward(
    layer: Params, cfg: GptOssConfig, x: Array, normed: Normed, norm: Norm, kernels: str
) -> tuple[Array, Normed]:
    """See ``dense.FeedForward``."""
    rows = normed.array().reshape(-1, x.shape[-1])
    weights, ids = route(router_logits(layer, rows), cfg.num_experts_per_tok)
    activation = partial(clamped_swiglu, limit=cfg.swiglu_limit)
    x = x + mixture(layer, rows, weights, ids, activation, kernels).reshape(x.shape)
    return x, norm_of(x, norm)


forward = partial(dense.forward, feed_forward=feed_forward)
