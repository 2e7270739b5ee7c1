"""The device side of the engine: parameters, caches and compiled steps. Plans of integers go in, integers come out.

A plan becomes one int32 matrix, so that a step costs one transfer each way; floats travel as their bits. ``submit``
only enqueues; ``collect`` is the one call that waits for the device.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled

from dflash_jax import verify
from dflash_jax.cache import bytes_of
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
from dflash_jax.verify import Accept
from serving.radix import NO_STATE
from serving.request import SamplingParams
from serving.scheduler import DecodePlan, Plan, PrefillPlan, StepResult
from serving.shapes import DecodeShape, PrefillShape, Shapes

SAMPLING = 6  # int32 columns of a row's sampling
STATES = 5 + SAMPLING  # the column of the recurrent state to begin from; behind it that of the one to keep
PREFIX = STATES + 2  # columns before a row's page table
TIMED_CONTEXT = 256  # cached tokens of each row when steps are timed
# XLA leaves conditionals out of CUDA graphs by default, and then a step's launch waits until the device has reached
# its condition: no step could be enqueued ahead. One H200, SmolLM2, 32 rows, block 8: 6.9 ms a step without, 3.1 with.
GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}


# What a step returns: int32 [B, 2 + 2 T] count, finite, tokens, bits of logprobs; and [B, T, 2 k] the top logprobs.
Packed = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Pending:
    """A step on its way: its plan and what will come."""

    plan: Plan
    launched: Future[Packed]


class Runner:
    """Owns packed parameters and device state, and runs plans on them.

    Args:
        params, model: the pair, packed, on ``mesh``.
        shapes: the table of step shapes.
        pages: of the pool; page ids from there on are "no page".
        accept: the acceptance rule; benchmarks may script it.
        snapshots: slots for states of prefixes behind those of the rows.
    """

    def __init__(
        self,
        params: ModelParams,
        model: Model,
        mesh: Mesh,
        shapes: Shapes,
        pages: int,
        accept: Accept = verify.equality,
        snapshots: int = 0,
    ) -> None:
        self.snapshots = snapshots
        self.params, self.model, self.mesh, self.shapes, self.pages, self.accept = (
            params,
            model,
            mesh,
            shapes,
            pages,
            accept,
        )
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.state = self.empty()
        self.steps: dict[DecodeShape | PrefillShape, Compiled] = {}
        # Launching a step of many small kernels takes as long as they run; meanwhile this thread plans the next one.
        self.launcher = ThreadPoolExecutor(1, "launcher")
        self.table = np.full((shapes.max_rows, shapes.max_pages), pages, np.int32)
        self.sampling = np.zeros((shapes.max_rows, SAMPLING), np.int32)

    def empty(self) -> StepState:
        """The state of an engine that holds nothing."""
        dtype = self.params.target["embed"].dtype
        rows, page = self.shapes.max_rows, self.shapes.page_size
        return new_state(self.model, rows, self.pages, page, dtype, self.mesh, self.snapshots)

    def reset(self) -> None:
        """Forget what steps have written, after one that failed: it may have taken the donated state with it."""
        self.launcher.submit(lambda: None).result()  # nothing is on its way to the device any more
        del self.state  # its memory first
        self.state = self.empty()

    @property
    def cache_bytes(self) -> int:
        """Bytes of both models' pages."""
        return bytes_of((self.state.target, self.state.drafter, self.state.carry_pages))

    @property
    def planned_bytes(self) -> int:
        """Bytes on each device when the largest step compiled so far runs: parameters, caches, its workspace."""
        work = [analysis for step in self.steps.values() if (analysis := step.memory_analysis()) is not None]
        most = max((w.temp_size_in_bytes + w.output_size_in_bytes - w.alias_size_in_bytes for w in work), default=0)
        return shard_bytes((self.params, self.state)) + int(most)

    # --- compilation

    def step(self, shape: DecodeShape | PrefillShape) -> Compiled:
        """The compiled step of a shape, compiled now where it is not."""
        if shape not in self.steps:
            self.steps[shape] = self.compiled(shape)
            self.shapes.ready.add(shape)
        return self.steps[shape]

    def compiled(self, shape: DecodeShape | PrefillShape) -> Compiled:
        """Compile a step from shapes alone; nothing runs."""
        model, accept, pages = self.model, self.accept, shape.pages

        def step(params: ModelParams, state: StepState, packed: jax.Array) -> tuple[StepState, Packed]:
            if isinstance(shape, PrefillShape):
                state, out = prefill_step(params, model, state, prefill_inputs(packed, pages))
            else:
                state, out = decode_step(params, model, shape.block, state, decode_inputs(packed), accept)
            return state, pack_output(out)

        columns = PREFIX + pages + (shape.chunk if isinstance(shape, PrefillShape) else 0)
        packed = jax.ShapeDtypeStruct((shape.rows, columns), jnp.int32, sharding=self.replicated)
        places = jax.tree.map(lambda x: x.sharding, self.state)
        step_of = jax.jit(step, donate_argnums=1, out_shardings=(places, self.replicated))
        options = GPU_OPTIONS if self.mesh.devices.flat[0].platform == "gpu" else None
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (self.params, self.state)
        )
        return step_of.lower(*shapes, packed).compile(compiler_options=options)

    def warm_up(self, shapes: Sequence[DecodeShape | PrefillShape], done: Callable[[], None]) -> None:
        """Compile shapes side by side; ``done`` is called after each."""
        missing = [s for s in shapes if s not in self.steps]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for future in as_completed([pool.submit(self.step, shape) for shape in missing]):
                future.result()
                done()

    def ms_of(self, shape: DecodeShape, repeats: int = 4, ahead: int = 8) -> float:
        """Milliseconds of a decode step of a shape, every row behind some hundred cached tokens: the median of some
        runs, ``ahead`` steps enqueued in each. The engine must be idle; overwrites pages that no request holds.
        """
        step = self.step(shape)
        packed = np.zeros((shape.rows, PREFIX + shape.pages), np.int32)
        packed[:, 0], packed[:, 1], packed[:, 2] = np.arange(shape.rows), 1, shape.block
        packed[:, PREFIX:] = np.arange(packed[:, PREFIX:].size).reshape(shape.rows, -1) % self.pages
        context = min(TIMED_CONTEXT, shape.pages * self.shapes.page_size // 2)
        times = []
        for _ in range(repeats):
            lengths = np.full(self.state.lengths.shape, context, np.int32)
            self.state = self.state.replace(lengths=jax.device_put(lengths, self.replicated))
            start = perf_counter()
            for _ in range(ahead):
                self.state, out = step(self.params, self.state, packed)
            jax.block_until_ready(out)
            times.append((perf_counter() - start) / ahead)
        return 1e3 * median(times[1:])

    # --- steps

    def submit(self, plan: Plan) -> Pending:
        """Enqueue a step and the copy of its results."""
        for grant in plan.grants:
            if grant.at == 0:
                self.table[grant.slot] = self.pages
            self.table[grant.slot, grant.at : grant.at + len(grant.pages)] = grant.pages
        if isinstance(plan, PrefillPlan):
            for admission in plan.admissions:
                self.sampling[admission.slot] = sampling_bits(admission.params, admission.key)
        packed = self.packed(plan)
        return Pending(plan, self.launcher.submit(self.launch, self.step(plan.shape), packed, plan.logprobs))

    def launch(self, step: Compiled, packed: np.ndarray, logprobs: bool) -> Packed:
        """Hand a step to the device, and ask for the copy of its results."""
        self.state, (rows, top) = step(self.params, self.state, packed)
        rows.copy_to_host_async()
        if logprobs:
            top.copy_to_host_async()
        return rows, top

    def packed(self, plan: Plan) -> np.ndarray:
        """A plan as one int32 matrix: per row slot, valid, width or start, anchor, logprobs, sampling, page table,
        tokens; rows of padding go to the slot behind the last.
        """
        shape, slots = plan.shape, list(plan.slots)
        used, wide = len(slots), PREFIX + shape.pages
        packed = np.zeros((shape.rows, wide + (shape.chunk if isinstance(shape, PrefillShape) else 0)), np.int32)
        packed[used:, 0] = len(self.table)
        packed[:used, 0] = slots
        packed[:used, 4] = plan.logprobs
        packed[:used, 5:STATES] = self.sampling[slots]
        packed[:, STATES], packed[:, STATES + 1] = packed[:, 0], len(self.table) + self.snapshots
        packed[:used, PREFIX:wide] = self.table[slots, : shape.pages]
        packed[used:, PREFIX:wide] = self.pages
        if isinstance(plan, DecodePlan):
            packed[:used, 1] = 1
            packed[:used, 2] = plan.widths
            return packed
        for row, piece in zip(packed, plan.pieces, strict=False):
            row[1], row[2] = len(piece.tokens), piece.start
            row[3] = piece.anchor if piece.last and piece.anchor is not None else -1
            row[wide : wide + len(piece.tokens)] = piece.tokens
            if piece.source != NO_STATE:
                row[STATES] = piece.source
            if piece.save != NO_STATE:
                row[STATES + 1] = piece.save
        return packed

    def collect(self, pending: Pending) -> list[StepResult]:
        """Wait for a step; one result a row of its plan."""
        launched = pending.launched.result()
        rows = np.asarray(launched[0])
        top = np.asarray(launched[1]) if pending.plan.logprobs else None
        block = (rows.shape[1] - 2) // 2
        logprobs = rows[:, 2 + block :].view(np.float32)
        counts, tokens = rows[:, 0].tolist(), rows[:, 2 : 2 + block].tolist()
        return [
            StepResult(
                tokens=tokens[i][: counts[i]],
                logprobs=entries(tokens[i], logprobs[i], None if top is None else top[i], counts[i]),
                finite=bool(rows[i, 1]),
            )
            for i in range(len(pending.plan.slots))
        ]


def bytes_of_state(model: Model, dtype: Any, mesh: Mesh) -> int:
    """Bytes on each device of one row's recurrent state."""
    leaves = jax.tree.leaves(new_state(model, 1, 1, 1, dtype, mesh).recurrent)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def bytes_of_page(model: Model, dtype: Any, page_size: int, mesh: Mesh) -> int:
    """Bytes on each device of one page of both models' K/V."""
    state = new_state(model, 1, 1, page_size, dtype, mesh)
    return shard_bytes((state.target, state.drafter, state.carry_pages))


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def free_bytes(mesh: Mesh) -> int | None:
    """The least free memory of the mesh's devices, None where they do not say (CPUs)."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if not all(stats):
        return None
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keep compiled steps in a folder, so that the next start need not wait for XLA. None: where JAX is told to keep
    them already, else in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = folder or jax.config.values["jax_compilation_cache_dir"] or home / "dflash-jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles many steps that take less


def sampling_bits(params: SamplingParams, key: tuple[int, int]) -> np.ndarray:
    """How a row draws as int32 [6]: temperature, top_p, min_p (bits), top_k, key."""
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    return np.concatenate([floats, [min(params.top_k, 2**31 - 1)], np.array(key, np.uint32).view(np.int32)])


def row_sampling(packed: jax.Array) -> RowSampling:
    """The inverse, on the device."""
    columns = packed[:, 5:STATES]
    floats = jax.lax.bitcast_convert_type(columns[:, :3], jnp.float32)
    key = jax.lax.bitcast_convert_type(columns[:, 4:6], jnp.uint32)
    return RowSampling(floats[:, 0], columns[:, 3], floats[:, 1], floats[:, 2], key)


def decode_inputs(packed: jax.Array) -> StepInputs:
    """A decode plan's matrix as the step takes it."""
    return StepInputs(
        rows=packed[:, 0],
        table=packed[:, PREFIX:],
        valid=packed[:, 1],
        width=packed[:, 2],
        sampling=row_sampling(packed),
        logprobs=packed[0, 4] > 0,
    )


def prefill_inputs(packed: jax.Array, pages: int) -> PrefillInputs:
    """A prefill plan's matrix as the step takes it."""
    return PrefillInputs(
        rows=packed[:, 0],
        table=packed[:, PREFIX : PREFIX + pages],
        tokens=packed[:, PREFIX + pages :],
        start=packed[:, 2],
        valid=packed[:, 1],
        sampling=row_sampling(packed),
        anchor=packed[:, 3],
        logprobs=packed[0, 4] > 0,
        source=packed[:, STATES],
        save=packed[:, STATES + 1],
    )


def pack_output(out: StepOutput) -> Packed:
    """A step's output as integers."""
    bits = jax.lax.bitcast_convert_type(out.logprob, jnp.int32)
    rows = [out.count[:, None], out.finite[:, None].astype(jnp.int32), out.tokens, bits]
    top = jax.lax.bitcast_convert_type(out.top_logprob, jnp.int32)
    return jnp.concatenate(rows, axis=1), jnp.concatenate([out.top_tokens, top], axis=-1)


def entries(tokens: list[int], own: np.ndarray, top: np.ndarray | None, count: int) -> list[dict[int, float]]:
    """{id: log-probability} of each emitted token, its own id first."""
    chosen = [{token: value} for token, value in zip(tokens[:count], own[:count].tolist(), strict=True)]
    if top is None:
        return chosen
    k = top.shape[-1] // 2
    ids, values = top[:count, :k].tolist(), np.ascontiguousarray(top[:count, k:]).view(np.float32).tolist()
    return [mine | dict(zip(i, v, strict=True)) for mine, i, v in zip(chosen, ids, values, strict=True)]
