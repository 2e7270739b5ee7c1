"""``inject_kv`` in plain JAX: one scatter a layer."""

from typing import Any

from jax import Array

from pallas_kernels.arithmetic import rms_norm, rotate


def inject_kv(
    pages: list[tuple[Array, Array]], rows: list[Array], slots: Array, finish: Any
) -> list[tuple[Array, Array]]:
    """See ``pallas_kernels.inject_kv``."""
    layers = [kv[:, layer] for kv in rows for layer in range(kv.shape[1])]  # [n, 2, G, H] each
    written = []
    for layer, ((k, v), kv) in enumerate(zip(pages, layers, strict=True)):
        keys = kv[:, 0]
        if finish is not None:
            keys = rotate(rms_norm(keys, finish.k_norm[layer], finish.eps), finish.cos, finish.sin)
        written.append(
            (k.at[slots].set(keys.astype(k.dtype), mode="drop"), v.at[slots].set(kv[:, 1].astype(v.dtype), mode="drop"))
        )
    return written
