"""The gated delta ops against the recurrence, token by token, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels import fold_delta, gated_delta

SLOTS, GROUPS, SHARE, WIDE, TALL = 4, 2, 3, 16, 24  # TALL: key dim; value heads are GROUPS * SHARE


def recurrence(state: NDArray, q: NDArray, k: NDArray, v: NDArray, beta: NDArray, decay: NDArray) -> NDArray:
    """Outputs [T, N, V] of one row; ``state`` [N, K, V] float64 is moved on in place."""
    out = np.zeros(v.shape)
    for t in range(len(v)):
        for n in range(v.shape[1]):
            key, query = k[t, n // SHARE], q[t, n // SHARE]
            state[n] *= np.exp(decay[t, n])
            state[n] += np.outer(key, beta[t, n] * (v[t, n] - state[n].T @ key))
            out[t, n] = state[n].T @ query
    return out


def block(rng: np.random.Generator, size: int, alike: float) -> list[NDArray]:
    """q, k, v, beta, decay of three rows; ``alike``: how much keys have in common."""
    shape = (3, size, GROUPS, TALL)
    k = rng.normal(size=shape) * np.sqrt(1 - alike) + rng.normal(size=(3, 1, GROUPS, TALL)) * np.sqrt(alike)
    q = rng.normal(size=shape)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(3, size, GROUPS * SHARE, WIDE))
    beta = rng.uniform(0.9 if alike else 0, 1, size=v.shape[:3])
    decay = -rng.uniform(0, 0.05 if alike else 3, size=v.shape[:3])
    return [x.astype(np.float32) for x in (q * TALL**-0.5, k, v, beta, decay)]


@pytest.mark.parametrize("alike", [0.0, 0.99])
@pytest.mark.parametrize(
    ("size", "valid", "counts"),
    [
        (1, (1, 1, 1), [(1, 0, 1)]),
        (8, (8, 5, 8), [(8, 5, 0), (1, 3, 8)]),
        (16, (16, 16, 2), [(16, 7, 2)]),
        (40, (40, 33, 3), [(40, 20, 3)]),
        (64, (64, 17, 64), [(64, 17, 63)]),
        (200, (200, 131, 0), [(200, 131, 0)]),
    ],
)
def test_blocks_equal_the_recurrence(
    size: int, valid: tuple[int, ...], counts: list[tuple[int, ...]], alike: float
) -> None:
    """Outputs, and the state behind every prefix; slots out of order, a row that starts anew over NaN."""
    rng = np.random.default_rng(size)
    states = rng.normal(size=(SLOTS, GROUPS * SHARE, TALL, WIDE)).astype(np.float32)
    slots, started = np.array([2, 0, 3]), np.array([True, False, True])
    states[0] = np.nan
    q, k, v, beta, decay = block(rng, size, alike)
    for row, n in enumerate(valid):
        beta[row, n:] = decay[row, n:] = 0
    arrays = (q, k, v, beta, decay)
    out, record = jax.jit(lambda *a: gated_delta(*a, jnp.asarray(states), slots, started, implementation="reference"))(
        *arrays
    )
    bound = 1e-5 if alike == 0 else 3e-5
    for row, n in enumerate(valid):
        state = states[slots[row]].astype(np.float64) if started[row] else np.zeros(states.shape[1:])
        exact = recurrence(state, *(x[row, :n].astype(np.float64) for x in arrays))
        np.testing.assert_allclose(out[row, :n], exact, atol=bound)
    for chosen in counts:
        new = fold_delta(
            jnp.asarray(states), slots, started, slots, record, np.array(chosen, np.int32), implementation="reference"
        )
        for row, n in enumerate(chosen):
            state = states[slots[row]].astype(np.float64) if started[row] else np.zeros(states.shape[1:])
            recurrence(state, *(x[row, :n].astype(np.float64) for x in arrays))
            wanted = state if n else states[slots[row]]
            np.testing.assert_allclose(new[slots[row]], wanted, atol=bound)
        np.testing.assert_array_equal(new[1], states[1])


def test_a_slot_out_of_range_is_not_written() -> None:
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(SLOTS, GROUPS * SHARE, TALL, WIDE)), jnp.float32)
    slots, started, arrays = np.full(3, SLOTS), np.zeros(3, bool), block(rng, 4, 0.0)
    _, record = gated_delta(*arrays, states, slots, started, implementation="reference")
    new = fold_delta(states, slots, started, slots, record, np.full(3, 4, np.int32), implementation="reference")
    np.testing.assert_array_equal(new, states)


def test_many_folds_do_not_drift() -> None:
    """2,000 tokens in blocks of 8 of which some are kept: the state stays what the recurrence makes of them."""
    rng = np.random.default_rng(1)
    states = jnp.zeros((3, GROUPS * SHARE, TALL, WIDE), jnp.float32)
    exact = np.zeros(states.shape)
    slots = np.arange(3)

    @jax.jit
    def step(states: jax.Array, started: jax.Array, arrays: list[jax.Array], count: jax.Array) -> jax.Array:
        _, record = gated_delta(*arrays, states, slots, started, implementation="reference")
        return fold_delta(states, slots, started, slots, record, count, implementation="reference")

    for at in range(400):
        arrays, count = block(rng, 8, 0.9), rng.integers(1, 9, 3).astype(np.int32)
        states = step(states, np.full(3, at > 0), arrays, count)
        for row, n in enumerate(count):
            recurrence(exact[row], *(x[row, :n].astype(np.float64) for x in arrays))
    assert np.abs(np.asarray(states) - exact).max() < 2e-5
