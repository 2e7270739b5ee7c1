"""``inject_kv`` in plain JAX: one scatter a layer."""

from typing import Any

from jax import Array

from pallas_kernels.arithmetic import rms_norm, rotate


def inject_kv(pages: list[tuple[Array, Array]], kv: Array, slots: Array, finish: Any) -> list[tuple[Array, Array]]:
    """See ``pallas_kernels.inject_kv``."""
    keys, values = kv[:, :, 0], kv[:, :, 1]  # [n, L, G, H]
    if finish is not None:
        keys = rotate(rms_norm(keys, finish.k_norm[:, None, :], finish.eps), finish.cos, finish.sin)
    return [
        (
            k.at[slots].set(keys[:, layer].astype(k.dtype), mode="drop"),
            v.at[slots].set(values[:, layer].astype(v.dtype), mode="drop"),
        )
        for layer, (k, v) in enumerate(pages)
    ]
