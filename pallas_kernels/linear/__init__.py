"""The linear maps of a decoder with what stands around them: norm before; bias, gate and residual after."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jax import Array

from pallas_kernels.linear import reference, triton


class Norm(NamedTuple):
    """RMSNorm over the input of a linear map: weight [C], eps."""

    weight: Array
    eps: float


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference.linear,
    "triton": triton.linear,
    "interpreted": partial(triton.linear, interpret=True),
}


def linear(
    x: Array,
    weight: Array,
    *,
    norm: Norm | None = None,
    bias: Array | None = None,
    gated: bool = False,
    residual: Array | None = None,
    implementation: str,
) -> Array:
    """residual + gate(norm(x) @ weight + bias): one sublayer's matmul and all that is element-wise around it.

    Args:
        x: [..., C].
        weight: [C, *O]; [C, 2, F] where gated.
        norm: applied to x first.
        bias: [*O].
        gated: the product is [..., 2, F]: silu of the first half times the second (SwiGLU), [..., F].
        residual: [..., *O] added at the end.
        implementation: a key of ``IMPLEMENTATIONS``.

    Returns:
        [..., *O] in x's dtype; accumulated in float32.
    """
    return IMPLEMENTATIONS[implementation](x, weight, norm=norm, bias=bias, gated=gated, residual=residual)
