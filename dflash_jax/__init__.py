"""dflash_jax: the DFlash method as pure functions over pytrees.

Letters of array shapes, used everywhere:
B rows of a step, R row slots, T tokens of a block (anchor included), C tokens of a prefill chunk, S cached tokens, P
pages of a row, V vocabulary, Vd draft vocabulary, D hidden, Dt the target's hidden, F MLP width, N query heads, G KV
heads, H head_dim, L layers, K tapped target layers.
"""

from dflash_jax.config import (
    DrafterConfig,
    GptOssConfig,
    HybridConfig,
    HybridMoeConfig,
    MoeConfig,
    RopeConfig,
    TargetConfig,
    pair,
)
from dflash_jax.generate import Generation, generate, row_key, row_sampling
from dflash_jax.sharding import make_mesh
from dflash_jax.step import Model, ModelParams, StepState, decode_step, new_state, prefill_step

__all__ = [
    "DrafterConfig",
    "Generation",
    "GptOssConfig",
    "HybridConfig",
    "HybridMoeConfig",
    "Model",
    "ModelParams",
    "MoeConfig",
    "RopeConfig",
    "StepState",
    "TargetConfig",
    "decode_step",
    "generate",
    "make_mesh",
    "new_state",
    "pair",
    "prefill_step",
    "row_key",
    "row_sampling",
]
