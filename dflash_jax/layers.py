"""The arithmetic that every model shares: linear maps, norms, rotary embedding.

Products of float32 arrays are true float32 (no TF32); bfloat16 products accumulate in float32. Norm statistics, angles
and rotations are float32 whatever the model's dtype.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.config import RopeConfig
from pallas_kernels import expert_mlp, linear, linear_and_norm, split_heads
from pallas_kernels.arithmetic import exact, rms_norm, rotate
from pallas_kernels.expert_mlp import Activation, Experts
from pallas_kernels.linear import Norm, Normed, norm_of

__all__ = [
    "Activation",
    "Experts",
    "Norm",
    "Normed",
    "exact",
    "expert_mlp",
    "linear",
    "linear_and_norm",
    "logits_of",
    "norm_of",
    "rms_norm",
    "rope_table",
    "rotate",
    "split_heads",
]


def logits_of(x: Array, table: Array) -> Array:
    """x [..., D] against a table [V, D] -> float32 [..., V]."""
    return jnp.einsum("...d,vd->...v", x, table, precision=exact(x.dtype), preferred_element_type=jnp.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [H / 2] and the factor on cos and sin, as transformers computes them."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64)
    inverse = rope.rope_theta ** (-pairs / head_dim)
    scale = 1.0
    if rope.rope_type == "linear":
        assert rope.factor is not None
        inverse = inverse / rope.factor
    elif rope.rope_type == "llama3":
        inverse = llama3_frequencies(rope, inverse)
    elif rope.rope_type == "yarn":
        inverse = yarn_frequencies(rope, inverse, head_dim)
        assert rope.factor is not None
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
    return inverse.astype(np.float32), scale


def llama3_frequencies(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Llama 3's scaling: long waves are slowed by ``factor``, short ones kept, the middle blended."""
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    waves = 2 * math.pi / inverse
    blend = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return inverse * ((1 - blend) / rope.factor + blend)


def yarn_frequencies(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071): a ramp over the pair index between interpolated and kept frequencies."""
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings

    def pair_at(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = pair_at(rope.beta_fast), pair_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def rope_table(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 [..., r / 2], of absolute positions int32 [...]; r of the head's dimensions turn."""
    inverse, scale = inverse_frequencies(rope, int(head_dim * rope.partial_rotary_factor))
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
