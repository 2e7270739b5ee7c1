"""Which implementation of the ops runs, chosen out loud, and the only place that knows the Triton backend of Pallas.

``triton`` is compiled for NVIDIA GPUs; ``interpreted`` is the same kernels on a CPU, for tests; ``reference`` is plain
JAX and runs everywhere. A bare ``pallas_call`` means another backend in each version of JAX: here it is always named.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.arithmetic import scaled

# implementation -> platforms (jax.default_backend()) that run it; None: all of them.
IMPLEMENTED: dict[str, tuple[str, ...] | None] = {"triton": ("gpu",), "interpreted": ("cpu",), "reference": None}


def resolve(kernels: str, platform: str, devices: int = 1) -> str:
    """The implementation behind ``kernels`` ("auto" or a name) on a mesh of ``devices`` of ``platform``: "cpu", "gpu".

    Raises:
        ValueError: a name that is not implemented, or not on this mesh. Nothing is ever swapped in silence.
    """
    if kernels == "auto":
        return "triton" if platform == "gpu" and devices == 1 else "reference"
    if kernels not in IMPLEMENTED:
        raise ValueError(f"kernels={kernels!r} is not implemented; choose auto or one of {', '.join(IMPLEMENTED)}")
    platforms = IMPLEMENTED[kernels]
    if platforms is not None and platform not in platforms:
        raise ValueError(f"kernels={kernels!r} runs on {', '.join(platforms)}, not on {platform!r}")
    if platforms is not None and devices > 1:
        raise ValueError(f"kernels={kernels!r} runs on 1 device, the mesh has {devices}")
    return kernels


def call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out_shape: Any,
    *,
    interpret: bool,
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
    name: str,
) -> Callable[..., Any]:
    """A Triton kernel over whole arrays: refs of all operands, then of all results; ``aliases`` operand -> result."""
    return pl.pallas_call(
        kernel,
        out_shape,
        grid=grid,
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
    )


def covering(size: int) -> tuple[Array, Array]:
    """Indices int32 [n] of an axis, n the power of two at or above its size (kernels know no other), and which are
    real, bool [n]; surplus ones repeat the last. Without surplus the compiler sees that they are contiguous."""
    wide = pl.next_power_of_2(size)
    index = jnp.arange(wide)
    return (index if wide == size else jnp.minimum(index, size - 1)), index < size


def load(ref: Any, where: Array) -> Array:
    """What a ref with indices holds, zero where not ``where``."""
    return triton.load(ref, mask=where, other=0)


def store(ref: Any, values: Array, where: Array) -> None:
    """Writes a ref with indices where ``where``."""
    triton.store(ref, values, mask=where)


def normed(halves: list[Array], weights: list[Array], real: Array, size: int, eps: float) -> list[Array]:
    """``arithmetic.rms_norm``, casts included, of [..., size] in two halves; only ``real`` lanes count."""
    wide = [half.astype(jnp.float32) for half in halves]
    squares = sum(jnp.where(real, half * half, 0).sum(axis=-1, keepdims=True) for half in wide)
    inverse = lax.rsqrt(squares / size + eps)
    return [
        scaled(half * inverse, weight, plain.dtype) for half, plain, weight in zip(wide, halves, weights, strict=True)
    ]


def rotated(halves: list[Array], cos: Array, sin: Array) -> list[Array]:
    """``arithmetic.rotate`` of [..., H] in two halves by cos, sin float32 [H / 2]."""
    x, y = (half.astype(jnp.float32) for half in halves)
    return [(x * cos - y * sin).astype(halves[0].dtype), (y * cos + x * sin).astype(halves[0].dtype)]


def device_kind() -> str:
    """The kind of the device that kernels run on, the key of its tuned tiles."""
    return jax.devices()[0].device_kind
