"""The ops that models are made of. Arrays in, arrays out.

``block_attention`` reads K/V, ``inject_kv`` writes it; ``gated_delta`` reads recurrent states, ``fold_delta`` writes
them; ``linear``, ``split_heads`` and ``expert_mlp`` are what lies between.
"""

from pallas_kernels.backend import resolve
from pallas_kernels.block_attention import block_attention
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.gated_delta import fold_delta, gated_delta
from pallas_kernels.inject_kv import inject_kv
from pallas_kernels.linear import linear, linear_and_norm
from pallas_kernels.split_heads import split_heads

__all__ = [
    "block_attention",
    "expert_mlp",
    "fold_delta",
    "gated_delta",
    "inject_kv",
    "linear",
    "linear_and_norm",
    "resolve",
    "split_heads",
]
