"""The feed-forward of a mixture of experts: every token goes through the experts that were chosen for it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jax import Array

from pallas_kernels.expert_mlp import reference, triton

Activation = Callable[[Array, Array], Array]  # (gate, up) -> what goes down, element by element


class Experts(NamedTuple):
    """The weights of E experts: gate_up [E, C, 2, F] and down [E, F, C], perhaps biases [E, 2, F] and [E, C]."""

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference.expert_mlp,
    "triton": triton.expert_mlp,
    "interpreted": partial(triton.expert_mlp, interpret=True),
}


def expert_mlp(x: Array, ids: Array, experts: Experts, activation: Activation, *, implementation: str) -> Array:
    """down_e(activation(gate_e x, up_e x)) of each chosen expert e.

    Args:
        x: [N, C].
        ids: int32 [N, k], the experts of each token, no expert twice.
        experts: their weights.
        activation: what stands between the two maps of an expert.
        implementation: a key of ``IMPLEMENTATIONS``.

    Returns:
        [N, k, C] in x's dtype. A row depends on its own row of x alone.
    """
    return IMPLEMENTATIONS[implementation](x, ids, experts, activation)
