"""Drives prefill and decode steps by hand: rows in any slots, padding rows full of rubbish, what each step said."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from tiny_models import Pair

from dflash_jax import decode_step, new_state, prefill_step
from dflash_jax.sampling import RowSampling
from dflash_jax.step import PrefillInputs, StepInputs, StepOutput

SLOTS, PAGES, PAGE, CHUNK = 8, 4, 16, 32


@dataclass
class Driven:
    """What one row emitted, whether each step found it finite, and each round's count."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def take(self, out: StepOutput, row: int) -> None:
        count = int(out.count[row])
        self.tokens += np.asarray(out.tokens)[row, :count].tolist()
        self.logprobs += np.asarray(out.logprob)[row, :count].tolist()
        self.top_tokens += np.asarray(out.top_tokens)[row, :count].tolist()
        self.top_logprobs += np.asarray(out.top_logprob)[row, :count].tolist()
        self.finite.append(bool(out.finite[row]))
        self.counts.append(count)


def drive(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: RowSampling,
    steps: int,
    *,
    block: int,
    batch: int,
    slots: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
) -> list[Driven]:
    """``steps`` rounds of prompts of at most ``CHUNK`` tokens, in a batch padded to ``batch`` rows with -1 and NaN.

    ``sampling`` has a row a prompt; ``slots`` are where each prompt lives (default: in order), ``widths`` what it may
    use of the block.
    """
    slots = list(range(len(prompts)) if slots is None else slots)
    n = len(prompts)

    def padded(values: np.ndarray, rubbish: float) -> np.ndarray:
        rest = np.full((batch - n, *values.shape[1:]), rubbish, np.float32).astype(values.dtype)
        return np.concatenate([values, rest])

    table = np.arange(SLOTS * PAGES, dtype=np.int32).reshape(SLOTS, PAGES)[slots]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((n, CHUNK), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    rows, table = padded(np.array(slots, np.int32), SLOTS), padded(table, -1)
    sampling = RowSampling(
        temperature=padded(np.asarray(sampling.temperature), np.nan),
        top_k=padded(np.asarray(sampling.top_k), -1),
        top_p=padded(np.asarray(sampling.top_p), np.nan),
        min_p=padded(np.asarray(sampling.min_p), np.nan),
        key=padded(np.asarray(sampling.key), 1),
    )
    state = new_state(pair.model, SLOTS, SLOTS * PAGES, PAGE, jnp.dtype(jnp.float32), pair.mesh)
    start = padded(np.zeros(n, np.int32), -1)
    inputs = PrefillInputs(rows, table, padded(tokens, -1), start, padded(lengths, 0), sampling)
    state, out = prefill_step(pair.params, pair.model, state, inputs)
    driven = [Driven() for _ in prompts]
    valid = padded(np.ones(n, np.int32), 0)
    width = padded(np.array([block] * n if widths is None else widths, np.int32), -1)
    for step in range(steps + 1):
        for row, result in enumerate(driven):
            result.take(out, row)
        assert all(int(count) == 0 for count in out.count[n:])
        if step < steps:
            state, out = decode_step(
                pair.params, pair.model, block, state, StepInputs(rows, table, valid, width, sampling)
            )
    return driven
