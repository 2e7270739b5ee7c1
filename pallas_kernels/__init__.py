"""Two kernels for both models: ``block_attention`` reads K/V, ``inject_kv`` writes it. Arrays in, arrays out."""

from pallas_kernels.backend import resolve
from pallas_kernels.block_attention import block_attention
from pallas_kernels.inject_kv import inject_kv

__all__ = ["block_attention", "inject_kv", "resolve"]
