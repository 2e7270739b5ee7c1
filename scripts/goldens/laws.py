"""The laws of sampled tokens: what speculative sampling draws against the exact joint law, by chi-square."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.stats import chi2

from dflash_jax import Model, ModelParams, decode_step, make_mesh, new_state, prefill_step, row_sampling
from dflash_jax.reference import full_pass
from dflash_jax.sampling import RowSampling
from dflash_jax.step import PrefillInputs, StepInputs, block_of
from goldens.case import Case, Verdict

# A law holds unless its p-value is below LEAST_P; cells that expect fewer than LEAST_EXPECTED are pooled. Fixed seeds.
SAMPLES, TEMPERATURES, LEAST_EXPECTED, LEAST_P = 1024, (1.0, 0.7), 5.0, 1e-3
PAGE = 8


def check_laws(case: Case, params: ModelParams, model: Model, bound: float, verdict: Verdict) -> None:
    """The first two tokens of speculative sampling against their exact joint law, by chi-square."""
    prefixes = case.several(r"law(\d+)\.prefix_ids")
    if not prefixes:
        return
    padded = np.zeros((len(prefixes), max(map(len, prefixes))), np.int32)
    for j, prefix in enumerate(prefixes):
        padded[j, : len(prefix)] = prefix
    _, logits = full_pass(params.target, model.target, padded)
    worst = 1.0
    for j, prefix in enumerate(prefixes):
        ours = logits[j, : len(prefix), : model.target.vocab_size]
        verdict.close("law logits", ours, case.arrays.get(f"law{j}.logits"), bound)
        first, second = case.arrays[f"law{j}.next_logits"], case.arrays[f"law{j}.second_logits"]
        for temperature in TEMPERATURES:
            law = softmax(first / temperature)[:, None] * softmax(second / temperature)
            sampling = row_sampling(SAMPLES, temperature=temperature, seed=j)
            pairs = sampled_pairs(params, model, prefix.tolist(), padded.shape[1], sampling, make_mesh())
            p, cells = chi_square(pairs, law)
            worst = min(worst, p)
            if p < LEAST_P:
                verdict.misses.append(f"law{j} at T = {temperature}: p = {p:.1e} over {cells} cells, bound {LEAST_P}")
    verdict.notes.append(
        f"laws: smallest p {worst:.3f} (>= {LEAST_P}) of {len(prefixes)} at T {TEMPERATURES}, n {SAMPLES}"
    )


def sampled_pairs(
    params: ModelParams, model: Model, prefix: list[int], longest: int, sampling: RowSampling, mesh: Mesh
) -> NDArray:
    """The first two new tokens [n, 2] of n rows behind one prefix: the prefill's draw and the first of a round.

    The rows share the pages that the prefix fills, as behind a prefix hit. All laws have the shapes of the ``longest``.
    """
    rows, block = len(sampling.key), block_of(model.drafter, None)
    own, most, shared = -(-(PAGE + 1 + block) // PAGE), longest // PAGE, (len(prefix) - 1) // PAGE
    table = np.zeros((rows, most + own), np.int32)
    table[:, :shared] = np.arange(shared)
    table[:, shared : shared + own] = most + np.arange(rows * own).reshape(rows, own)
    state = new_state(model, rows, most + rows * own, PAGE, jnp.dtype(jnp.float32), mesh)

    everyone, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    for start in range(0, shared * PAGE, PAGE):
        chunk = np.array([prefix[start : start + PAGE]], np.int32)
        inputs = PrefillInputs(everyone[:1], table[:1], chunk, ones[:1] * start, ones[:1] * PAGE, row_sampling(1))
        state, _ = prefill_step(params, model, state, inputs)
    rest = prefix[shared * PAGE :]
    tail = np.zeros((rows, PAGE), np.int32)
    tail[:, : len(rest)] = rest
    inputs = PrefillInputs(everyone, table, tail, ones * (shared * PAGE), ones * len(rest), sampling)
    state, first = prefill_step(params, model, state, inputs)
    _, second = decode_step(params, model, block, state, StepInputs(everyone, table, ones, ones * block, sampling))
    return np.stack([np.asarray(first.tokens)[:, 0], np.asarray(second.tokens)[:, 0]], axis=1)


def softmax(logits: NDArray) -> NDArray:
    """Over the last axis, float64."""
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probabilities: NDArray = wide / wide.sum(axis=-1, keepdims=True)
    return probabilities


def chi_square(samples: NDArray, law: NDArray) -> tuple[float, int]:
    """p-value of samples [n, d] against a joint law of d axes, and how many cells it took.

    Cells with an expected count below ``LEAST_EXPECTED`` are pooled.
    """
    expected = law.reshape(-1) * len(samples)
    flat = np.ravel_multi_index(tuple(samples.T), law.shape)
    observed = np.bincount(flat, minlength=expected.size)
    large = expected >= LEAST_EXPECTED
    counts = np.append(observed[large], observed[~large].sum())
    means = np.append(expected[large], expected[~large].sum())
    if means[-1] < LEAST_EXPECTED:  # too little is left for a cell of its own: it joins the smallest
        smallest = int(means[:-1].argmin())
        counts[smallest] += counts[-1]
        means[smallest] += means[-1]
        counts, means = counts[:-1], means[:-1]
    statistic = float(((counts - means) ** 2 / means).sum())
    return float(chi2.sf(statistic, len(means) - 1)), len(means)
