"""Drawing and accepting: filters against sorting, noise against its law, draws against exact probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.laws import LEAST_P, chi_square
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_jax import row_key, row_sampling, sampling
from dflash_jax.verify import equality

VOCAB = 12
LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.0, -2.0, -6.0], np.float32)
draw = jax.jit(sampling.draw)
filtered = jax.jit(sampling.filtered)


def kept(logits: NDArray, top_k: int, top_p: float, min_p: float) -> tuple[NDArray[np.bool_], float]:
    """What min-p, top-k and top-p keep of scaled logits [V], by sorting, and how near a value comes to a threshold."""
    values = logits.astype(np.float64)
    stays, edge = np.ones(len(values), bool), np.inf
    if min_p > 0:
        relative = np.exp(values - values.max())
        stays, edge = relative >= min_p, np.abs(relative[relative < 1] - min_p).min(initial=np.inf)
    if top_k > 0:
        least = np.sort(values[stays])[::-1][:top_k][-1]
        stays &= values >= least
    if top_p < 1:
        probabilities = np.where(stays, np.exp(values - values.max()), 0)
        probabilities /= probabilities.sum()
        above = np.array([probabilities[values > value].sum() for value in values])
        edge = min(edge, np.abs(above - top_p).min())
        stays &= above < top_p
    return stays, edge


def law_of(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.float64]:
    """The exact probabilities of ``LOGITS`` under a row's sampling."""
    scaled = LOGITS.astype(np.float64) / temperature
    weights = np.where(kept(scaled, top_k, top_p, min_p)[0], np.exp(scaled - scaled.max()), 0)
    return weights / weights.sum()


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
        st.integers(-1, VOCAB + 3),
        st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6, 0.0]),
        st.sampled_from([0.0, 0.03, 0.2, 0.9, 1.0]),
    ),
    min_size=6,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_filters_equal_sorting(rows: list[tuple[list[int], int, float, float]]) -> None:
    """Quarter steps make ties: equals at a cut stay or go together."""
    logits = np.array([row[0] for row in rows], np.float32) / 4
    top_k, top_p, min_p = ([row[i] for row in rows] for i in (1, 2, 3))
    out = filtered(logits[:, None], row_sampling(6, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))[:, 0]
    for row, (_, k, p, m) in enumerate(rows):
        stays, edge = kept(logits[row], k, p, m)
        if p <= 0:  # nothing lies above the best: it stays, whatever top_p says
            stays = logits[row] == logits[row].max()
        if edge > 1e-5:
            np.testing.assert_array_equal(np.isfinite(out[row]), stays)
        np.testing.assert_array_equal(np.asarray(out[row])[np.isfinite(out[row])], logits[row][np.isfinite(out[row])])
        assert np.isfinite(out[row]).any()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8))
def test_ranks_keep_the_order_of_floats(values: list[float]) -> None:
    x = np.array(values, np.float32)
    rank = np.asarray(sampling.rank_of(jnp.asarray(x)))
    ordered = x[np.argsort(rank, kind="stable")]
    assert (ordered[1:] >= ordered[:-1]).all()
    np.testing.assert_array_equal(sampling.float_of(jnp.asarray(rank)), x)


def test_bisection_finds_the_largest_threshold() -> None:
    values = jnp.array([[3.0, -1.0, 3.0, 0.5, -jnp.inf]])
    for count, expected in ((1, 3.0), (2, 3.0), (3, 0.5), (4, -1.0), (5, -np.inf), (6, -np.inf)):
        found = sampling.largest_threshold(values, lambda at_least, n=count: at_least.sum(-1, keepdims=True) >= n)
        assert found.item() == expected


def test_noise_depends_on_row_key_position_and_token_alone() -> None:
    keys = jnp.array([[1, 2], [3, 4], [1, 2]], jnp.uint32)
    positions = jnp.array([[5, 6, 7], [5, 6, 7], [7, 5, 90]])
    ids = jnp.arange(50)
    noise = np.asarray(sampling.gumbel(keys, positions, ids))
    np.testing.assert_array_equal(noise, sampling.gumbel(keys, positions, jnp.arange(64))[..., :50])  # its padding
    np.testing.assert_array_equal(noise[:1, 1:2], sampling.gumbel(keys[:1], positions[:1, 1:2], ids))  # batch, block
    some = jnp.stack([jax.random.permutation(jax.random.key(i), ids)[:7] for i in range(9)]).reshape(3, 3, 7)
    few = sampling.gumbel(keys, positions, some)  # candidates
    np.testing.assert_array_equal(few, np.take_along_axis(noise, np.asarray(some), axis=-1))
    np.testing.assert_array_equal(noise[0, 0], noise[2, 1])  # row slot, place in the block
    np.testing.assert_array_equal(noise[0, 2], noise[2, 0])
    distinct = noise.reshape(-1, 50)[[0, 1, 2, 3, 4, 5, 8]]
    assert len(np.unique(distinct)) > 0.99 * distinct.size


def test_noise_is_that_of_jax_random() -> None:
    """Its generator, element by element: what a seed writes is pinned to it."""
    key, position, size = jnp.array([[3, 2**32 - 1]], jnp.uint32), 2**31 - 1, 70_001
    folded = jax.random.fold_in(jax.random.wrap_key_data(key[0], impl="threefry2x32"), position)
    noise = sampling.gumbel(key, jnp.array([[position]]), jnp.arange(size))
    np.testing.assert_array_equal(noise[0, 0], sampling.gumbel_of(jax.random.bits(folded, (size,), jnp.uint32)))


@pytest.mark.parametrize("bits", [0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1])
def test_noise_is_finite_for_all_bits(bits: int) -> None:
    assert np.isfinite(sampling.gumbel_of(jnp.uint32(bits)))


def test_noise_has_the_moments_of_a_gumbel() -> None:
    noise = np.asarray(
        sampling.gumbel(jnp.array([[9, 9]], jnp.uint32), jnp.arange(200)[None], jnp.arange(1000)), np.float64
    )
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    for at in (-1.0, 0.0, 2.0, 6.0):  # its distribution function
        assert (noise < at).mean() == pytest.approx(np.exp(-np.exp(-at)), abs=0.005)


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_k among equals": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
}
SAMPLES = 4000


def sampled(**options: float) -> NDArray[np.int32]:
    """One draw [n, 1] of each of many seeds."""
    rows = row_sampling(SAMPLES, **{"temperature": 1.0, **options}, seed=11)
    logits = np.broadcast_to(LOGITS, (SAMPLES, 1, VOCAB))
    return np.asarray(draw(logits, rows, np.full((SAMPLES, 1), 42, np.int32)))


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_exact_law(name: str) -> None:
    """Row 5: chi-square of the plain sampler; what the filters remove never comes."""
    options = SETTINGS[name]
    law, samples = law_of(**{"temperature": 1.0, **options}), sampled(**options)
    assert law[samples].all()
    p, cells = chi_square(samples, law)
    assert cells == (law > 0).sum() or law[law > 0].min() * SAMPLES < 5
    assert p > LEAST_P


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [({"temperature": 1.3}, {"temperature": 1.0}), ({"top_k": 4}, {"top_k": 5}), ({"min_p": 0.2}, {"min_p": 0.1})],
)
def test_a_wrong_law_is_seen(drawn: dict[str, float], claimed: dict[str, float]) -> None:
    """The negative control of the test above."""
    assert chi_square(sampled(**drawn), law_of(**{"temperature": 1.0, **claimed}))[0] < 1e-4


def test_greedy_rows_ignore_filters_and_noise() -> None:
    """The lowest of equal ids, whatever hot rows share the batch."""
    logits = np.array([[[1, 3, 3, 0]], [[0, 0, 0, 0]], [[5, 0, 0, 0]]], np.float32)
    rows = row_sampling(3, temperature=[0, 0, 1], top_k=[1, 3, 1], top_p=[0.1, 1, 1], seed=1)
    np.testing.assert_array_equal(draw(logits, rows, np.zeros((3, 1), np.int32)), [[1], [0], [0]])


# Rows of one batch: temperature, top_k, top_p, min_p.
MIXED = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 20, 0.5, 0.3),
    (0.7, 20, 0.95, 0.0),
    (0.7, 20, 0.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.5, sampling.BEST - 1, 0.5, 0.01),
    (1.0, sampling.BEST, 0.95, 0.0),
    (1.0, 2000, 0.95, 0.0),
    (1.0, 10**6, 0.95, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 0.9, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, -1, 0.95, 1.0),
]
KINDS = ["peaked", "flat", "even", "tied", "padded", "almost nothing", "in one chunk"]


def mixed(rows: list[tuple[float, int, float, float]] = MIXED, seed: int = 1) -> sampling.RowSampling:
    temperature, top_k, top_p, min_p = map(list, zip(*rows, strict=True))
    return row_sampling(len(rows), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def logits_of(kind: str, vocab: int, rows: int, seed: int = 0) -> NDArray[np.float32]:
    """[rows, 3, vocab]: three shapes of a distribution a row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3, vocab))
    ids = np.arange(vocab)
    changed = {
        "peaked": x * 2 + 12 * (rng.random(x.shape) < 8 / vocab),
        "flat": x * 0.1,
        "even": x * 0,
        "tied": np.round(2 * x) / 2,
        "padded": np.where(ids < max(1, vocab - 100), 3 * x, -np.inf),
        "almost nothing": np.where(ids % max(1, vocab // 3) == 0, x, -np.inf),
        "in one chunk": 3 * x + 15 * (ids // 128 == vocab // 256),
    }
    return changed[kind].astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 12, 128, 20_011])
def test_every_way_to_a_token_finds_the_same(vocab: int) -> None:
    """The bisection of the whole vocabulary is the specification; draws are its tokens, alone or among others."""
    every, best, noisy = map(jax.jit, (sampling.among_all, sampling.among_best, sampling.among_noisy))
    row, positions = mixed(), np.array([[5, 6, 700]] * len(MIXED), np.int32)
    for kind in KINDS:
        logits = logits_of(kind, vocab, len(MIXED))
        tokens = every(logits, row, positions)
        np.testing.assert_array_equal(draw(logits, row, positions), tokens, err_msg=kind)
        for way in (best, noisy):
            found, sure = way(logits, row, positions)
            np.testing.assert_array_equal(found[sure], tokens[sure], err_msg=kind)
            assert ((found >= 0) & (found < vocab)).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS))
def test_draws_are_those_of_the_whole_vocabulary(seed: int, kind: str) -> None:
    logits, row, positions = (
        logits_of(kind, 1000, len(MIXED), seed),
        mixed(seed=seed),
        np.full((len(MIXED), 3), seed % 999),
    )
    np.testing.assert_array_equal(draw(logits, row, positions), jax.jit(sampling.among_all)(logits, row, positions))


def test_the_usual_settings_never_need_the_whole_vocabulary() -> None:
    """Top-k below BEST needs the best only, whatever the logits, but for ties; a row without top-k one look at all."""
    best, noisy = jax.jit(sampling.among_best), jax.jit(sampling.among_noisy)
    positions = np.arange(96).reshape(32, 3)
    for kind, limited, free in (("peaked", 1, 1), ("flat", 1, 0.9), ("in one chunk", 1, 0.9), ("even", 0, 1)):
        logits = logits_of(kind, 20_011, 32)
        for setting in ((0.7, 20, 0.95, 0.0), (1.0, sampling.BEST - 1, 1.0, 0.0), (0.0, 0, 1.0, 0.0)):
            assert np.mean(best(logits, mixed([setting] * 32), positions)[1]) == limited, (kind, setting)
        for setting in ((1.0, 0, 1.0, 0.0), (0.6, 0, 0.9, 0.0)):
            assert np.mean(noisy(logits, mixed([setting] * 32), positions)[1]) >= free, (kind, setting)
    for setting in ((1.0, 20, 0.9, 0.0), (0.0, 0, 1.0, 0.0)):
        assert not noisy(logits, mixed([setting] * 32), positions)[1].any()


def test_a_vocabulary_below_the_best_needs_no_more() -> None:
    logits, positions = logits_of("padded", sampling.BEST - 1, len(MIXED)), np.zeros((len(MIXED), 3), np.int32)
    assert jax.jit(sampling.among_best)(logits, mixed(), positions)[1].all()


@pytest.mark.parametrize("size", [40, 128, 2049, 20_011])
@pytest.mark.parametrize("count", [8, 128])
def test_the_best_are_the_largest_in_order(size: int, count: int) -> None:
    values = logits_of("flat", size, 2)
    top, ids = sampling.best(jnp.asarray(values), count)
    order = np.argsort(-values, axis=-1)[..., :count]
    found = order.shape[-1]
    np.testing.assert_array_equal(ids[..., :found], order)
    np.testing.assert_array_equal(top[..., :found], np.take_along_axis(values, order, axis=-1))
    assert np.isneginf(top[..., found:]).all()


def test_row_keys_are_hashes_that_stay() -> None:
    """Seeds of any size and sign; pinned, because a release must not change what a seed writes."""
    assert row_key(7, 0) == (4254246047, 3819181281)
    keys = [row_key(seed, sample) for seed in (0, 1, -1, 7, 2**64, 2**64 + 1, 10**30) for sample in range(3)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= part < 2**32 for key in keys for part in key)


def test_row_sampling_gives_rows_their_samples() -> None:
    one, several = row_sampling(2, seed=5), row_sampling(2, seed=[5, 5])
    np.testing.assert_array_equal(one.key, [row_key(5, 0), row_key(5, 1)])
    np.testing.assert_array_equal(several.key, [row_key(5, 0)] * 2)


def test_log_probabilities_and_what_is_finite() -> None:
    logits = jnp.array([[[0.0, 1.0, -jnp.inf], [jnp.nan, 1.0, 2.0], [jnp.inf, 0.0, 0.0], [-jnp.inf] * 3]])
    logprob, finite = sampling.log_probabilities(logits, jnp.array([[1, 0, 0, 0]]))
    assert logprob[0, 0] == pytest.approx(1 - np.log(1 + np.e))
    np.testing.assert_array_equal(finite, [[True, False, False, False]])


@pytest.mark.parametrize(
    ("drafts", "draws", "width", "accepted"),
    [
        ([4, 5, 6], [4, 5, 6, 7], 4, 3),
        ([4, 5, 6], [4, 5, 0, 7], 4, 2),
        ([4, 5, 6], [0, 5, 6, 7], 4, 0),  # a later match does not count
        ([4, 5, 6], [4, 5, 6, 7], 2, 1),
        ([4, 5, 6], [4, 5, 6, 7], 1, 0),
        ([4, 5, 6], [4, 5, 6, 7], 0, 0),
        ([], [4], 1, 0),
    ],
)
def test_acceptance_is_the_matching_prefix(drafts: list[int], draws: list[int], width: int, accepted: int) -> None:
    block = jnp.array([[9, *drafts]])
    assert equality(block, jnp.array([draws]), jnp.array([width])).tolist() == [accepted]
