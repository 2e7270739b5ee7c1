"""The device side of the engine: parameters, caches and the jitted steps. Plans come in as ids, results go out as
numpy.

``submit`` only enqueues; ``collect`` is the one call that waits for the device.
"""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from convert.load import Loaded
from dflash_jax.params import pack
from dflash_jax.sampling import RowSampling
from dflash_jax.sharding import Mesh
from dflash_jax.step import (
    Model,
    ModelParams,
    PrefillInputs,
    StepInputs,
    StepOutput,
    StepState,
    decode_step,
    new_state,
    prefill_step,
)
from serving.config import EngineConfig
from serving.request import MAX_LOGPROBS, Request


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of prompts: for each row its tokens (perhaps none) behind ``start`` cached ones."""

    start: int
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DecodePlan:
    """One draft-verify round of ``block`` tokens; width[row] of them may be used, 0 for a finished row."""

    block: int
    width: tuple[int, ...]


@dataclass(frozen=True)
class Pending:
    """A step that was enqueued."""

    output: StepOutput


@dataclass(frozen=True)
class StepResult:
    """One row of a step on the host: emitted ids, their {id: log-probability} (own id first), whether logits were
    finite.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    finite: bool


class Runner:
    """Owns the packed parameters; ``begin`` opens a batch."""

    def __init__(self, loaded: Loaded, mesh: Mesh, kernels: str, config: EngineConfig, max_model_len: int) -> None:
        self.model = Model(loaded.target, loaded.drafter, kernels)
        self.params = ModelParams(
            target=pack(loaded.target_params, loaded.target, mesh, consume=True),
            drafter=loaded.drafter and pack(loaded.drafter_params or {}, loaded.drafter, mesh, consume=True),
        )
        self.mesh, self.page_size, self.prefill_chunk = mesh, config.page_size, config.prefill_chunk
        self.max_model_len = max_model_len

    def begin(self, requests: list[Request], block: int) -> "Batch":
        """Fresh caches for a batch. Rows and pages a row are powers of two, so that few shapes compile."""
        longest = max(len(r.prompt) + r.limit for r in requests)
        pages = min(power_of_two(self.pages(longest + block)), self.pages(self.max_model_len + block))
        rows = power_of_two(len(requests))
        top = MAX_LOGPROBS if any(r.params.logprobs for r in requests) else 0
        model = dataclasses.replace(self.model, top_logprobs=min(top, self.model.target.vocab_size))
        dtype = self.params.target["embed"].dtype
        table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        # Once a batch, not once a step: neither changes while it runs.
        table, sampling = jax.device_put(
            (table, sampling_of(requests, rows)), NamedSharding(self.mesh, PartitionSpec())
        )
        return Batch(
            params=self.params,
            model=model,
            state=new_state(model, rows, rows * pages, self.page_size, dtype, self.mesh),
            table=table,
            sampling=sampling,
            prefill_chunk=self.prefill_chunk,
        )

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)


@dataclass
class Batch:
    """The rows of one batch on the device. Batches share parameters and nothing else, so any number may be open."""

    params: ModelParams
    model: Model
    state: StepState
    table: jax.Array
    sampling: RowSampling
    prefill_chunk: int

    def submit(self, plan: PrefillPlan | DecodePlan) -> Pending:
        """Enqueue a step."""
        return Pending(self.prefill(plan) if isinstance(plan, PrefillPlan) else self.decode(plan))

    def prefill(self, plan: PrefillPlan) -> StepOutput:
        """One chunk of every row's prompt."""
        rows = len(self.table)
        tokens, valid = np.zeros((rows, self.prefill_chunk), np.int32), np.zeros(rows, np.int32)
        for row, piece in enumerate(plan.tokens):
            tokens[row, : len(piece)], valid[row] = piece, len(piece)
        start = np.full(rows, plan.start, np.int32)
        inputs = PrefillInputs(present(valid), self.table, tokens, start, valid, self.sampling)
        self.state, output = prefill_step(self.params, self.model, self.state, inputs)
        return output

    def decode(self, plan: DecodePlan) -> StepOutput:
        """One draft-verify round."""
        width = np.zeros(len(self.table), np.int32)
        width[: len(plan.width)] = plan.width
        valid = (width > 0).astype(np.int32)
        inputs = StepInputs(present(valid), self.table, valid, width, self.sampling)
        self.state, output = decode_step(self.params, self.model, plan.block, self.state, inputs)
        return output

    def collect(self, pending: Pending) -> list[StepResult]:
        """Wait for a step and copy its results; one entry a row."""
        out = jax.device_get(pending.output)
        return [row_result(out, row) for row in range(len(self.table))]


def present(valid: np.ndarray) -> np.ndarray:
    """Row slots of a step; rows that take no part get the sentinel and keep their state."""
    return np.where(valid > 0, np.arange(len(valid)), len(valid)).astype(np.int32)


def row_result(out: StepOutput, row: int) -> StepResult:
    """One row of a step's output, cut to what it emitted."""
    count = int(out.count[row])
    tokens = out.tokens[row, :count].tolist()
    logprobs = [
        {token: own} | dict(zip(ids, tops, strict=True))
        for token, own, ids, tops in zip(
            tokens,
            out.logprob[row, :count].tolist(),
            out.top_tokens[row, :count].tolist(),
            out.top_logprob[row, :count].tolist(),
            strict=True,
        )
    ]
    return StepResult(tokens, logprobs, bool(out.finite[row]))


def sampling_of(requests: list[Request], rows: int) -> RowSampling:
    """RowSampling of a batch as numpy, padded with greedy rows."""
    padding = rows - len(requests)

    def column(values: list, fill: object, dtype: type) -> np.ndarray:
        return np.array(values + [fill] * padding, dtype)

    params = [r.params for r in requests]
    return RowSampling(
        temperature=column([p.temperature for p in params], 0, np.float32),
        top_k=column([min(p.top_k, 2**31 - 1) for p in params], 0, np.int32),
        top_p=column([p.top_p for p in params], 1, np.float32),
        min_p=column([p.min_p for p in params], 0, np.float32),
        key=column([r.key for r in requests], (0, 0), np.uint32),
    )


def power_of_two(n: int) -> int:
    """The smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
