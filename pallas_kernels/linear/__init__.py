"""The linear maps of a decoder with what stands around them: norm before; bias, gate and residual after."""

from collections.abc import Callable
from functools import partial

from jax import Array

from pallas_kernels.linear import reference, triton
from pallas_kernels.linear.normed import Norm, Normed, norm_of

__all__ = ["IMPLEMENTATIONS", "Norm", "Normed", "linear", "linear_and_norm", "norm_of"]

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Normed | None]]] = {
    "reference": reference.linear,
    "triton": triton.linear,
    "interpreted": partial(triton.linear, interpret=True),
}


def linear(
    x: Array | Normed,
    weight: Array,
    *,
    bias: Array | None = None,
    gated: bool = False,
    residual: Array | None = None,
    implementation: str,
) -> Array:
    """residual + gate(x @ weight + bias).

    Args:
        x: [..., C], or normed: what ``linear_and_norm`` or ``norm_of`` returned.
        weight: [C, *O]; [C, 2, F] where gated.
        bias: [*O].
        gated: the product is [..., 2, F]: silu of the first half times the second (SwiGLU), [..., F].
        residual: [..., *O] added at the end.
        implementation: a key of ``IMPLEMENTATIONS``.

    Returns:
        [..., *O] in x's dtype, accumulated in float32.
    """
    return IMPLEMENTATIONS[implementation](x, weight, bias=bias, gated=gated, residual=residual, norm=None)[0]


def linear_and_norm(
    x: Array | Normed,
    weight: Array,
    norm: Norm,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    implementation: str,
) -> tuple[Array, Normed]:
    """``linear`` to [..., D], and its RMSNorm for the map that comes next."""
    out, normed = IMPLEMENTATIONS[implementation](x, weight, bias=bias, gated=False, residual=residual, norm=norm)
    assert normed is not None
    return out, normed
