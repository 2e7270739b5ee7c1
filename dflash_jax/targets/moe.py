"""Mixture of experts: every token goes through a few of many SwiGLU maps, which a router chooses (Qwen3-MoE).

The router is float32 whatever the model's dtype, since near-tied experts would otherwise flip. Nothing is dropped and
no token looks at another: a row of the result depends on that row of x alone, so rows of padding do not matter.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from dflash_jax.layers import Activation, Experts, Norm, Normed, exact, expert_mlp, linear, norm_of
from dflash_jax.targets import dense
from dflash_jax.targets.dense import cache_shape, embed, head, state_shape

Params = dict[str, Any]

__all__ = ["cache_shape", "embed", "experts", "forward", "head", "state_shape"]


class Routed(Protocol):
    """The part of a config that the router reads."""

    @property
    def num_experts_per_tok(self) -> int:
        """Experts a token goes through."""

    @property
    def norm_topk_prob(self) -> bool:
        """Whether the weights of the chosen experts are scaled to sum to one."""


def experts(layer: Params, cfg: Routed, x: Array, kernels: str = "reference") -> Array:
    """The feed-forward of a mixture layer without its residual.

    Args:
        layer: router [D, E], expert_gate_up [E, D, 2, F], expert_down [E, F, D]; with a shared expert also
            shared_gate_up [D, 2, Fs], shared_down [Fs, D] and shared_gate [D].
        cfg: how many experts a token takes, and whether their weights are scaled to sum to one.
        x: [B, T, D] normed.
        kernels: implementation of the ops.

    Returns:
        [B, T, D] in x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, ids = route(router_logits(layer, rows), cfg)
    out = mixture(layer, rows, weights, ids, swiglu, kernels).reshape(x.shape)
    return out + shared_expert(layer, x, kernels) if "shared_gate" in layer else out


def router_logits(layer: Params, x: Array) -> Array:
    """x [N, D] -> float32 [N, E], with router_bias [E] where the layer has one."""
    wide, router = x.astype(jnp.float32), layer["router"].astype(jnp.float32)
    logits = jnp.matmul(wide, router, precision=exact(wide.dtype))
    return logits + layer["router_bias"].astype(jnp.float32) if "router_bias" in layer else logits


def route(logits: Array, cfg: Routed) -> tuple[Array, Array]:
    """Softmax over all experts, then the best: weights float32 and ids int32, both [N, k]. Ties go to the lower id."""
    weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), cfg.num_experts_per_tok)
    return weights / weights.sum(axis=-1, keepdims=True) if cfg.norm_topk_prob else weights, ids


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


def mixture(
    layer: Params, x: Array, weights: Array, ids: Array, activation: Activation, kernels: str = "reference"
) -> Array:
    """The sum of the chosen experts of every token, times their weights; accumulated in float32.

    Args:
        layer: expert_gate_up [E, D, 2, F], expert_down [E, F, D], perhaps expert_gate_up_bias [E, 2, F] and
            expert_down_bias [E, D].
        x: [N, D].
        weights, ids: float32 and int32 [N, k].
        activation: what stands between the two maps of an expert.
        kernels: implementation of ``expert_mlp``.

    Returns:
        [N, D] in x's dtype.
    """
    biases = layer.get("expert_gate_up_bias"), layer.get("expert_down_bias")
    held = Experts(layer["expert_gate_up"], layer["expert_down"], *biases)
    outs = expert_mlp(x, ids, held, activation, implementation=kernels)
    return (outs.astype(jnp.float32) * weights[..., None]).sum(axis=1).astype(x.dtype)


def shared_expert(layer: Params, x: Array, kernels: str) -> Array:
    """The expert of every token [B, T, D] -> [B, T, D], scaled by a sigmoid of one number a token."""
    wide = linear(x, layer["shared_gate_up"], gated=True, implementation=kernels)
    gate = jnp.einsum("...d,d->...", x, layer["shared_gate"], precision=exact(x.dtype))
    return jax.nn.sigmoid(gate)[..., None] * linear(wide, layer["shared_down"], implementation=kernels)


def feed_forward(layer: Params, cfg: Any, x: Array, normed: Normed, norm: Norm, kernels: str) -> tuple[Array, Normed]:
    """See ``dense.FeedForward``."""
    x = x + experts(layer, cfg, normed.array(), kernels)
    return x, norm_of(x, norm)


forward = partial(dense.forward, feed_forward=feed_forward)
