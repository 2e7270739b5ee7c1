"""The arithmetic again in numpy and float64, written for clarity and from other sources than the code under test."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Seen = Callable[[int, int], bool]  # (query position, key position) -> visible


def attention(q: Array, k: Array, v: Array, visible: NDArray[np.bool_], sinks: Array | None = None) -> Array:
    """q [T, N, H] over k, v [S, G, H] where visible [T, S]; queries that see nothing give zeros. sinks [N]: scores
    that take their share and have no value."""
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        keys = np.flatnonzero(visible[t])
        for n in range(q.shape[1]):
            if len(keys):
                scores = k[keys, n // share] @ q[t, n] / np.sqrt(q.shape[2])
                if sinks is not None:
                    scores = np.append(scores, sinks[n])
                weights = np.exp(scores - scores.max())
                out[t, n] = (weights / weights.sum())[: len(keys)] @ v[keys, n // share]
    return out


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotated(x: Array, positions: NDArray[Any], frequencies: Array, scale: float = 1.0) -> Array:
    """x [T, heads, H]: the pair (i, i + H / 2) as a complex number, turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * scale * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def plain_frequencies(theta: float, head_dim: int) -> Array:
    return np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def draft_hidden(
    params: Mapping[str, Any],
    features: Array,
    block: Array,
    theta: float,
    causal: list[bool],
    windows: list[int | None],
) -> Array:
    """A DFlash drafter, dense: features [S, K * D] of the context and the embedded block [T, D] -> final hidden [T, D].

    ``params`` are plain (not packed): every layer sees all keys at once, [context ; block], with a mask.
    """
    count, size = len(features), len(block)
    positions = np.arange(count + size)
    frequencies = plain_frequencies(theta, params["layers"][0]["q"].shape[-1])
    context = norm(features @ params["fc"], params["hidden_norm"], 1e-6)
    x = block
    for layer, within, window in zip(params["layers"], causal, windows, strict=True):
        u = norm(x, layer["input_norm"], 1e-6)
        both = np.concatenate([context, u])
        q = norm(np.einsum("td,dnh->tnh", u, layer["q"]), layer["q_norm"], 1e-6)
        k = norm(np.einsum("td,dgh->tgh", both, layer["k"]), layer["k_norm"], 1e-6)
        v = np.einsum("td,dgh->tgh", both, layer["v"])
        s, t = positions[count:, None], positions[None]
        visible = (t < count) | (t <= s) if within else np.ones((size, count + size), bool)
        if window is not None:
            visible = visible & (t > s - window)
        mixed = attention(rotated(q, positions[count:], frequencies), rotated(k, positions, frequencies), v, visible)
        x = x + np.einsum("tnh,nhd->td", mixed, layer["o"])
        u = norm(x, layer["post_norm"], 1e-6)
        x = x + (silu(u @ layer["gate"]) * (u @ layer["up"])) @ layer["down"]
    return norm(x, params["final_norm"], 1e-6)
