"""``benchmark.py step``: what a step costs against the least that it can cost, on random weights and K/V.

Steps are the engine's own (``Runner.compiled``) and are enqueued ahead, so that the host is not timed. Every case
stands beside its floor (``floors``), whose bandwidth and rate of products are measured in the same run, and a plain
step beside the same step by transformers.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import Array, lax
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.floors import Phase, decode_phases, floor_of, prefill_phases
from benchmarks.measuring import (
    Dtype,
    Kernel,
    bandwidth_of_device,
    console,
    idle_share,
    kernels_of,
    matmul_rate_of_device,
    median_seconds,
    traced,
    write_rows,
)
from benchmarks.shapes import TARGETS, alone, random_pair
from dflash_jax import Model, make_mesh, verify
from dflash_jax.cache import bytes_of, resolve
from dflash_jax.config import DrafterConfig
from serving.request import SamplingParams
from serving.runner import GPU_OPTIONS, PREFIX, Runner, sampling_bits
from serving.shapes import DecodeShape, PrefillShape, Shapes

PAGE = 16
HERE = Path(__file__).parent
PROFILED_STEPS = 4
Kind = Literal["plain", "dflash", "prefill"]


@dataclass(frozen=True)
class Case:
    """A step of ``rows`` rows with ``tokens`` tokens each, on average behind ``context`` cached ones. A decode step
    keeps ``rate`` tokens; ``ahead`` of them run between two resets."""

    kind: Kind
    rows: int
    tokens: int
    context: int
    rate: float
    ahead: int

    @property
    def kept(self) -> float:
        """Tokens that a step writes, a row."""
        return self.tokens if self.kind == "prefill" else min(self.rate, self.tokens)

    @property
    def start(self) -> int:
        """Cached tokens at a reset: lengths reach the context in the middle of a round."""
        moved = 0 if self.kind == "prefill" else self.kept * (self.ahead - 1) / 2
        return max(0, self.context - round(moved))

    @property
    def pages(self) -> int:
        """Pages of a row: what it holds at the end of a round, and the last block."""
        last = self.start if self.kind == "prefill" else self.start + math.ceil(self.kept) * self.ahead
        return -(-(last + self.tokens) // PAGE)

    @property
    def shape(self) -> DecodeShape | PrefillShape:
        """What it is compiled for."""
        return (PrefillShape if self.kind == "prefill" else DecodeShape)(self.rows, self.tokens, self.pages)

    def phases(self, model: Model, itemsize: int) -> list[Phase]:
        """Its floor. Raises ValueError for a drafter whose floor is not known."""
        if not isinstance(model.drafter, DrafterConfig | None):
            raise ValueError(f"the floor of {model.drafter.title} drafters is not known")
        if self.kind == "prefill":
            return prefill_phases(model.target, model.drafter, self.rows, self.tokens, self.start, itemsize)
        mean = self.start + self.kept * (self.ahead - 1) / 2
        return decode_phases(model.target, model.drafter, self.rows, self.tokens, mean, self.kept, itemsize)

    def packed(self, vocab: int, params: SamplingParams) -> np.ndarray:
        """The step's plan as the runner packs it; pages shuffled, rows draw with different keys."""
        draw = np.random.default_rng(0)
        packed = np.zeros((self.rows, PREFIX), np.int32)
        packed[:, 0], packed[:, 1] = np.arange(self.rows), self.tokens if self.kind == "prefill" else 1
        packed[:, 2], packed[:, 3] = self.start if self.kind == "prefill" else self.tokens, -1
        packed[:, 5:PREFIX] = [sampling_bits(params, (row, 0)) for row in range(self.rows)]
        table = draw.permutation(self.rows * self.pages).reshape(self.rows, self.pages)
        prompt = draw.integers(0, vocab, (self.rows, self.tokens if self.kind == "prefill" else 0))
        return np.concatenate([packed, table, prompt], axis=1, dtype=np.int32)


@dataclass(frozen=True)
class Row:
    """One measurement. rate: tokens kept a row and step. bytes and flops are the floor's; temp_bytes is what the
    executable needs beside its arguments, peak_bytes the process's peak so far (None where the device does not say).
    idle and top: of a profile."""

    shape: str
    dtype: str
    kernels: str
    decoding: str
    sampling: str
    rows: int
    block: int
    context: int
    rate: float
    ms: float
    floor_ms: float
    ratio: float
    bound: str
    bytes: float
    flops: float
    tokens_per_second: float
    transformers_ms: float | None
    bandwidth: float
    matmul_rate: float
    temp_bytes: int | None
    peak_bytes: int | None
    device: str
    jax: str
    idle: float | None = None
    top: list[Kernel] | None = None


@partial(jax.jit, static_argnames=("like", "sharding"))
def noise(key: Array, like: jax.ShapeDtypeStruct, sharding: Any) -> Array:
    """A pool of random K or V, made where it lives."""
    return lax.with_sharding_constraint(jax.random.normal(key, like.shape, like.dtype), sharding)


def fill(runner: Runner) -> None:
    """Random numbers in every page, one pool after the other: memory never holds the cache twice."""
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves((runner.state.target, runner.state.drafter)))))

    def filled(pool: Array) -> Array:
        like, sharding = jax.ShapeDtypeStruct(pool.shape, pool.dtype), pool.sharding
        pool.delete()
        return noise(next(keys), like, sharding)

    state = runner.state
    runner.state = state.replace(target=jax.tree.map(filled, state.target), drafter=jax.tree.map(filled, state.drafter))


def launcher(runner: Runner, step: Any, packed: np.ndarray) -> Callable[[], Any]:
    """Enqueues a step and returns what it will give."""

    def launch() -> Any:
        runner.state, out = step(runner.params, runner.state, packed)
        return out

    return launch


def rewound(runner: Runner, case: Case) -> None:
    """Every row behind the case's first length again."""
    lengths = np.full(runner.state.lengths.shape, case.start, np.int32)
    runner.state = runner.state.replace(lengths=jax.device_put(lengths, runner.replicated))


def measured(runner: Runner, case: Case, packed: np.ndarray, repeats: int) -> tuple[float, float]:
    """The median ms of a step over rounds of steps enqueued ahead, and the tokens that it kept a row."""
    launch = launcher(runner, runner.step(case.shape), packed)
    ms = 1e3 * median_seconds(launch, case.ahead, repeats, before=partial(rewound, runner, case))
    lengths = np.asarray(runner.state.lengths)[: case.rows]
    return ms, case.kept if case.kind == "prefill" else float(lengths.mean() - case.start) / case.ahead


def profiled(runner: Runner, case: Case, packed: np.ndarray) -> tuple[float | None, list[Kernel]]:
    """The idle share of the steps as they are timed, and the kernels of steps without command buffers: those hide
    which kernels run, but without them each kernel is a launch of the host, so that only its own time means much."""

    def run(step: Any) -> None:
        launch = launcher(runner, step, packed)
        rewound(runner, case)
        for _ in range(PROFILED_STEPS):
            out = launch()
        jax.block_until_ready(out)

    idle = idle_share(traced(partial(run, runner.step(case.shape))))
    with patch.dict(GPU_OPTIONS, {"xla_gpu_enable_command_buffer": ""}):
        named = runner.compiled(case.shape)
    run(named)
    return idle, kernels_of(traced(partial(run, named)), PROFILED_STEPS)


def baseline(shape: str, dtype: str, cases: Sequence[tuple[int, int]], wanted: bool | None) -> dict[Any, float]:
    """ms of transformers' plain step by (rows, context), in a process that is gone before JAX takes the device.

    wanted None: where torch and a GPU are there. Raises ValueError where it is wanted and torch is missing.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if wanted is False or not cases or (wanted is None and missing):
        return {}
    if missing:
        raise ValueError(f"--transformers needs {' and '.join(missing)}")
    cfg = TARGETS[shape]
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    names = (*sizes.split(), "head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps")
    job = {
        "model_type": cfg.model_type,
        "config": {name: getattr(cfg, name) for name in names},
        "dtype": dtype,
        "cases": cases,
    }
    # -P: without this folder on its path, whose kernels.py transformers would take for a package that it uses.
    command = [sys.executable, "-P", str(HERE / "transformers_step.py"), json.dumps(job), "any" if wanted else "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        if wanted:
            raise ValueError(f"transformers: {last}")
        console.print(f"transformers was not measured: {last}", style="red", markup=False)
        return {}
    found = json.loads(done.stdout.splitlines()[-1])
    return {} if found is None else dict(zip(cases, found, strict=True))


def bound_of(phases: Sequence[Phase], bandwidth: float, rate: float) -> str:
    """What limits the phases, each by name where they differ."""
    bounds = [phase.bound(bandwidth, rate) for phase in phases]
    if len(set(bounds)) == 1:
        return bounds[0]
    return ", ".join(f"{phase.name} {bound}" for phase, bound in zip(phases, bounds, strict=True))


def show(rows: Sequence[Row], bandwidth: float, rate: float) -> None:
    """Print the table."""
    first = rows[0]
    table = Table(
        title=f"{first.device}, jax {first.jax}, {first.shape}, {first.dtype}, kernels {first.kernels}; measured "
        f"{bandwidth / 1e9:,.0f} GB/s, {rate / 1e12:,.1f} TFLOP/s; steps enqueued ahead"
    )
    headers = "decoding sampling rows context block ms floor ratio bound GB tokens/s transformers gain"
    for header in headers.split():
        table.add_column(header, justify="left" if header in ("decoding", "sampling", "bound") else "right")
    for r in rows:
        table.add_row(
            r.decoding,
            r.sampling,
            str(r.rows),
            f"{r.context:,}",
            str(r.block),
            f"{r.ms:.3f}",
            f"{r.floor_ms:.3f}",
            f"{r.ratio:.2f}",
            r.bound,
            f"{r.bytes / 1e9:.2f}",
            f"{r.tokens_per_second:,.0f}",
            "" if r.transformers_ms is None else f"{r.transformers_ms:.2f}",
            "" if r.transformers_ms is None else f"{r.transformers_ms / r.ms:.1f}x",
        )
    console.print(table)


def show_kernels(row: Row, kernels: Sequence[Kernel], count: int) -> None:
    """Print the kernels of a step, the longest first."""
    if not kernels:
        console.print("no profile: this device traces no kernels", style="dim")
        return
    total, idle = sum(k.us for k in kernels), "unknown" if row.idle is None else f"{row.idle:.1%}"
    console.print(
        f"idle {idle}. Without command buffers, which hide kernels (so that launches count in a step, not in these "
        f"times): {sum(k.count for k in kernels):.0f} kernels, {total / 1e3:.3f} ms a step"
    )
    table = Table()
    for header in ("kernel", "a step", "us a step", "us each", "share"):
        table.add_column(header, justify="left" if header == "kernel" else "right", no_wrap=header != "kernel")
    rest = kernels[count:]
    others = [Kernel(f"{len(rest)} others", sum(k.count for k in rest), sum(k.us for k in rest), 0.0)] if rest else []
    for k in [*kernels[:count], *others]:
        name = k.name if len(k.name) <= 90 else f"{k.name[:60]}...{k.name[-27:]}"
        table.add_row(escape(name), f"{k.count:g}", f"{k.us:.1f}", f"{k.us / k.count:.2f}", f"{k.us / total:.1%}")
    console.print(table)


def step(
    shape: Annotated[str, typer.Option(help=f"random weights, one of {', '.join(TARGETS)}")],
    rows: Annotated[list[int] | None, typer.Option(min=1, help="repeatable; default 1 8 32")] = None,
    block: Annotated[list[int] | None, typer.Option(min=1, help="repeatable; 1: plain; default 1 8 16")] = None,
    context: Annotated[list[int] | None, typer.Option(min=0, help="repeatable; default 1024")] = None,
    prefill: Annotated[list[int] | None, typer.Option(min=1, help="also a chunk of so many tokens of one row")] = None,
    rate: Annotated[float, typer.Option(min=1, help="scripted tokens a drafting step")] = 6.5,
    temperature: Annotated[float | None, typer.Option(min=0, help="also time steps that sample")] = None,
    top_k: Annotated[int, typer.Option(help="of these")] = 0,
    top_p: Annotated[float, typer.Option(help="of these")] = 1.0,
    dtype: Dtype = "bfloat16",
    kernels: Annotated[str, typer.Option(help="reference, triton or auto")] = "auto",
    ahead: Annotated[int, typer.Option(min=1, help="steps enqueued before each wait")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="rounds of them")] = 9,
    transformers: Annotated[
        bool | None, typer.Option(help="transformers' plain step; default: with torch and a GPU", show_default=False)
    ] = None,
    profile: Annotated[int, typer.Option(min=0, help="print so many kernels of every step (GPUs only)")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here as they come")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the ratios to the floor here")] = None,
) -> None:
    """Milliseconds of a decode or prefill step against its floor, and against transformers."""
    if shape not in TARGETS:
        raise ValueError(f"there is no shape {shape!r}; choose one of {', '.join(TARGETS)}")
    if temperature is None and (top_k > 0 or top_p < 1):
        raise ValueError("--top-k and --top-p need --temperature")
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install -e '.[plot]'")
    counts, contexts = sorted(rows or (1, 8, 32)), sorted(context or (1024,))
    of_kind: dict[Kind, list[Case]] = {"plain": [], "dflash": [], "prefill": []}
    for size in sorted(block or (1, 8, 16)):
        kind: Kind = "plain" if size == 1 else "dflash"
        of_kind[kind] += [Case(kind, n, size, c, rate if size > 1 else 1.0, ahead) for c in contexts for n in counts]
    of_kind["prefill"] = [Case("prefill", 1, n, c, 1.0, ahead) for n in prefill or () for c in contexts]

    theirs = baseline(shape, dtype, [(case.rows, case.context) for case in of_kind["plain"]], transformers)

    mesh, device = make_mesh(), jax.devices()[0]
    bandwidth, products = bandwidth_of_device(), matmul_rate_of_device(dtype)
    params, model = random_pair(shape, dtype, mesh, resolve(kernels, jax.default_backend()))
    drawn = [("greedy", SamplingParams(temperature=0.0))]
    if temperature is not None:
        label = f"T {temperature:g}" + (f", top-k {top_k}" if top_k > 0 else "") + (f", top-p {top_p:g}" * (top_p < 1))
        drawn.append((label, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)))
    table: list[Row] = []
    for cases, pair in ((of_kind["plain"], alone(params, model)), (of_kind["dflash"] + of_kind["prefill"], None)):
        if not cases:
            continue
        shapes = Shapes(max(c.rows for c in cases), max(c.pages for c in cases), 0, PAGE, narrow=False)
        pages = max(c.rows * c.pages for c in cases)
        runner = Runner(*(pair or (params, model)), mesh, shapes, pages, verify.scripted(rate))
        fill(runner)
        start, wanted = time.perf_counter(), sorted({case.shape for case in cases}, key=str)
        runner.warm_up(wanted, lambda: None)
        console.print(
            f"{len(wanted)} steps compiled in {time.perf_counter() - start:.0f} s; weights "
            f"{bytes_of(runner.params) / 1e9:.2f} GB, cache {runner.cache_bytes / 1e9:.2f} GB",
            style="dim",
        )
        todo = [(case, label, sampling) for case in cases for label, sampling in drawn]
        for case, label, sampling in track(
            todo, "measuring", console=console, transient=True, disable=not console.is_terminal
        ):
            packed = case.packed(model.target.vocab_size, sampling)
            ms, kept = measured(runner, case, packed, repeats)
            phases = case.phases(runner.model, jnp.dtype(dtype).itemsize)
            floor_ms = 1e3 * floor_of(phases, bandwidth, products)
            idle, top = profiled(runner, case, packed) if profile else (None, [])
            memory: Any = runner.steps[case.shape]
            analysis = memory.memory_analysis()
            row = Row(
                shape=shape,
                dtype=dtype,
                kernels=model.kernels,
                decoding=case.kind,
                sampling=label,
                rows=case.rows,
                block=case.tokens,
                context=case.context,
                rate=kept,
                ms=ms,
                floor_ms=floor_ms,
                ratio=ms / floor_ms,
                bound=bound_of(phases, bandwidth, products),
                bytes=sum(p.bytes for p in phases),
                flops=sum(p.flops for p in phases),
                tokens_per_second=1e3 * case.rows * kept / ms,
                transformers_ms=theirs.get((case.rows, case.context)) if case.kind == "plain" else None,
                bandwidth=bandwidth,
                matmul_rate=products,
                temp_bytes=analysis and analysis.temp_size_in_bytes,
                peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
                device=device.device_kind,
                jax=jax.__version__,
                idle=idle,
                top=top[: profile or None] or None,
            )
            table.append(row)
            write_rows(json_file, [asdict(r) for r in table])
            console.print(
                f"{case.kind}, {case.rows} rows, block {case.tokens}, context {case.context:,}, {label}: {ms:.3f} ms, "
                f"floor {floor_ms:.3f}, ratio {row.ratio:.2f}",
                style="dim",
            )
            if profile:
                show_kernels(row, top, profile)
        for leaf in jax.tree.leaves(runner.state):  # the next cache takes its place
            leaf.delete()
    show(table, bandwidth, products)
    if plot is not None:
        records = json.dumps([asdict(r) for r in table])
        subprocess.run([sys.executable, str(HERE / "plot_steps.py"), str(plot)], input=records, text=True, check=True)
