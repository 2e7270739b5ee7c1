"""generate() on arrays: a fixed batch of token ids, for research, tests, notebooks. ``serving.LLM`` is the engine."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from dflash_jax import verify
from dflash_jax.sampling import RowSampling
from dflash_jax.step import (
    Model,
    ModelParams,
    PrefillInputs,
    StepInputs,
    StepOutput,
    block_of,
    decode_step,
    new_state,
    prefill_step,
)
from dflash_jax.verify import Accept


@dataclass(frozen=True)
class Generation:
    """One row's result.

    tokens: new ids, ending with the first stop id if one came. logprobs: of each token, under the target's plain
    softmax. acceptance_lengths: accepted drafts + 1 of each round, uncut (the prefill's token is in none).
    """

    tokens: list[int]
    logprobs: list[float]
    acceptance_lengths: list[int]

    def take(self, out: StepOutput, row: int) -> int:
        """Append what a step emitted for ``row``; its count."""
        count = int(out.count[row])
        self.tokens.extend(np.asarray(out.tokens)[row, :count].tolist())
        self.logprobs.extend(np.asarray(out.logprob)[row, :count].tolist())
        return count

    def cut(self, max_new_tokens: int, stops: frozenset[int]) -> bool:
        """Drop what lies behind the limit or the first stop id; whether the row is finished."""
        ends = (i + 1 for i, token in enumerate(self.tokens) if token in stops)
        end = min(next(ends, max_new_tokens), max_new_tokens)
        finished = len(self.tokens) >= end
        del self.tokens[end:], self.logprobs[end:]
        return finished


def row_key(seed: int | str, sample: int) -> tuple[int, int]:
    """Two uint32 of noise key for (seed, sample index); a seed is an integer of any size and sign, or a text."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def row_sampling(
    rows: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
) -> RowSampling:
    """RowSampling of ``rows`` rows as numpy; a single value serves every row, a single seed row i as its sample i.

    Raises ValueError for values out of range or another number of seeds.
    """
    seeds = [(s, 0) for s in seed] if isinstance(seed, Sequence) else [(seed, i) for i in range(rows)]
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds for {rows} rows")
    for name, values, low, high in (
        ("temperature", temperature, 0, 1e30),
        ("top_p", top_p, 0, 1),
        ("min_p", min_p, 0, 1),
        ("top_k", top_k, -1, 2**31 - 1),
    ):
        if not np.all((np.asarray(values) >= low) & (np.asarray(values) <= high)):
            raise ValueError(f"{name} must be in {low} .. {high}, got {values}")
    return RowSampling(
        temperature=np.broadcast_to(np.asarray(temperature, np.float32), (rows,)),
        top_k=np.broadcast_to(np.asarray(top_k, np.int32), (rows,)),
        top_p=np.broadcast_to(np.asarray(top_p, np.float32), (rows,)),
        min_p=np.broadcast_to(np.asarray(min_p, np.float32), (rows,)),
        key=np.array([row_key(s, i) for s, i in seeds], np.uint32).reshape(rows, 2),
    )


def generate(
    params: ModelParams,
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    mesh: Mesh,
    block_size: int | None = None,
    sampling: RowSampling | None = None,
    stop: Sequence[int] = (),
    page: int = 16,
    chunk: int = 64,
    accept: Accept = verify.equality,
) -> list[Generation]:
    """Continue every prompt by up to ``max_new_tokens`` tokens.

    Args:
        params, model: packed parameters and configs of the pair (``params.pack``, ``config.pair``).
        prompts: token ids, at least one each; any lengths in one batch.
        mesh: where the parameters live.
        block_size: tokens a round, the anchor included; default: the drafter's trained size, 1 without a drafter.
        sampling: one row a prompt (``row_sampling``); default greedy.
        stop: ids that end a row; they are kept in its tokens.
        page, chunk: tokens a page and a prefill chunk.
        accept: the acceptance rule; scripts may pass a scripted one.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a block without a drafter, or more tokens than the
            target has positions.
    """
    block = block_of(model.drafter, block_size)
    check_prompts(model, prompts, max_new_tokens)
    for name, value in (("page", page), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sampling is not None and len(sampling.key) != len(prompts):
        raise ValueError(f"sampling has {len(sampling.key)} rows for {len(prompts)} prompts")
    rows, longest = len(prompts), max(map(len, prompts))
    sampling = row_sampling(rows) if sampling is None else sampling
    per_row = -(-(longest + max_new_tokens + block) // page)
    table = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    state = new_state(model, rows, rows * per_row, page, params.target["embed"].dtype, mesh)
    results, stops = [Generation([], [], []) for _ in prompts], frozenset(stop)
    everyone = np.arange(rows, dtype=np.int32)

    for start in range(0, longest, chunk):
        tokens = np.zeros((rows, chunk), np.int32)
        valid = np.array([len(prompt[start : start + chunk]) for prompt in prompts], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : valid[row]] = prompt[start : start + chunk]
        rest = np.where(valid > 0, everyone, rows).astype(np.int32)  # finished prompts keep their state
        piece = PrefillInputs(rest, table, tokens, np.full(rows, start, np.int32), valid, sampling)
        state, out = prefill_step(params, model, state, piece)
        for row, prompt in enumerate(prompts):
            if start < len(prompt) <= start + chunk:
                results[row].take(out, row)

    alive = np.array([not r.cut(max_new_tokens, stops) for r in results])
    while alive.any():
        inputs = StepInputs(everyone, table, alive.astype(np.int32), np.full(rows, block, np.int32), sampling)
        state, out = decode_step(params, model, block, state, inputs, accept)
        for row in np.flatnonzero(alive).tolist():
            results[row].acceptance_lengths.append(results[row].take(out, row))
            alive[row] = not results[row].cut(max_new_tokens, stops)
    return results


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ValueError for the first prompt that cannot be continued."""
    limit, vocab = model.target.max_position_embeddings, model.target.vocab_rows
    if not len(prompts):
        raise ValueError("no prompts")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and asks for {max_new_tokens} more; "
                f"the target has {limit} positions"
            )
        if not np.issubdtype(np.asarray(prompt).dtype, np.integer):
            raise ValueError(f"prompt {i} holds {np.asarray(prompt).dtype}, not token ids")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"prompt {i} has ids outside 0 .. {vocab - 1}")
