"""``benchmark.py kernels``: every op alone against the bytes that it must move, and against its reference.

One compiled call chains many launches over different pools, each launch waiting for the one before, and such calls are
enqueued ahead: neither a launch's cost on the host nor what the L2 cache holds of the launch before is timed. Only
small injections stay within the cache, as they do in a step.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import Array
from rich.progress import track
from rich.table import Table

from benchmarks.measuring import bandwidth_of_device, console, matmul_rate_of_device, median_seconds, write_rows
from pallas_kernels import resolve
from pallas_kernels.backend import IMPLEMENTED
from pallas_kernels.block_attention import IMPLEMENTATIONS as ATTENTION
from pallas_kernels.inject_kv import IMPLEMENTATIONS as INJECT
from pallas_kernels.inject_kv import Finish
from pallas_kernels.linear import IMPLEMENTATIONS as LINEAR
from pallas_kernels.linear import Norm
from pallas_kernels.specs import SETS, AttentionSpec, InjectSpec, LinearSpec
from serving.runner import GPU_OPTIONS

COLD_BYTES = 256 * 2**20  # pools of a chain together: several times an H200's L2 cache
CHAIN, MOST_POOLS = 24, 64  # launches of a call at least, and at most
AHEAD, REPEATS = 4, 7
POOL_TOKENS = 4096  # slots of a pool that rows are written to, at least

Spec = AttentionSpec | InjectSpec | LinearSpec
Op = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One implementation on one shape; error is the largest difference from the reference implementation."""

    name: str
    spec: dict[str, Any]
    implementation: str
    us: float
    floor_us: float
    ratio: float
    bound: str
    bytes: float
    flops: float
    error: float
    bandwidth: float
    matmul_rate: float
    device: str
    jax: str


@dataclass(frozen=True)
class Operands:
    """What launches work on: ``moved`` is what one returns for the next, ``turns`` what differs from one to the next
    (in turn), ``shared`` all else."""

    moved: Any
    turns: list[Any]
    shared: Any


jax.tree_util.register_dataclass(Operands, ["moved", "turns", "shared"], [])


@partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Random numbers, made on the device."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def turns_of(size: float) -> int:
    """How many operands of ``size`` bytes leave nothing of the first in the cache."""
    return int(np.clip(-(-COLD_BYTES // size), 2, MOST_POOLS)) if size and jax.default_backend() == "gpu" else 2


def attention_operands(spec: AttentionSpec) -> Operands:
    """Layers in turn, each with its own pool; the output of one is the query of the next."""
    dtype, draw = jnp.dtype(spec.dtype), np.random.default_rng(0)
    pages = max(1, -(-spec.context // spec.page))
    pool = (spec.rows * pages * spec.page, spec.kv_heads, spec.head_dim)
    count = turns_of(spec.pool_values * dtype.itemsize)
    return Operands(
        moved=normal(1, (spec.rows, spec.block, spec.kv_heads * spec.group, spec.head_dim), dtype),
        turns=[(normal(3 + 2 * i, pool, dtype), normal(4 + 2 * i, pool, dtype)) for i in range(count)],
        shared={
            "kv": normal(2, (spec.rows, spec.block, 2, spec.kv_heads, spec.head_dim), dtype),
            "table": jnp.asarray(draw.permutation(spec.rows * pages).reshape(spec.rows, pages), jnp.int32),
            "lengths": jnp.full((spec.rows,), spec.context, jnp.int32),
            "valid": jnp.full((spec.rows,), spec.block, jnp.int32),
            "positions": jnp.tile(spec.context + jnp.arange(spec.block, dtype=jnp.int32), (spec.rows, 1)),
        },
    )


def attend(spec: AttentionSpec, op: Op, q: Array, pool: tuple[Array, Array], shared: Any) -> Array:
    """One launch of ``block_attention``."""
    k, v = pool
    out: Array = op(q, k_pages=k, v_pages=v, **shared, page=spec.page, causal=spec.causal, window=spec.window)
    return out


def inject_operands(spec: InjectSpec) -> Operands:
    """Rows in turn into the same pools, in place."""
    dtype, draw = jnp.dtype(spec.dtype), np.random.default_rng(0)
    slots = max(POOL_TOKENS, 2 * spec.tokens)
    row, pool = (spec.layers, 2, spec.kv_heads, spec.head_dim), (slots, spec.kv_heads, spec.head_dim)
    angles = normal(2, (spec.tokens, spec.head_dim // 2), jnp.dtype("float32"))
    return Operands(
        moved=[(normal(3 + 2 * i, pool, dtype), normal(4 + 2 * i, pool, dtype)) for i in range(spec.layers)],
        turns=[normal(1000 + i, (spec.tokens, *row), dtype) for i in range(turns_of(spec.values * dtype.itemsize / 2))],
        shared={
            "slots": jnp.asarray(draw.permutation(slots)[: spec.tokens], jnp.int32),
            "k_norm": 1 + 0.1 * normal(1, (spec.layers, spec.head_dim), dtype),
            "cos": jnp.cos(angles),
            "sin": jnp.sin(angles),
        },
    )


def inject(spec: InjectSpec, op: Op, pages: Any, rows: Array, shared: Any) -> Any:
    """One launch of ``inject_kv``."""
    finish = Finish(shared["k_norm"], shared["cos"], shared["sin"], 1e-6) if spec.raw else None
    return op(pages, [rows], shared["slots"], finish)


def linear_operands(spec: LinearSpec) -> Operands:
    """Layers in turn, each with its own weight, onto one residual."""
    dtype, parts = jnp.dtype(spec.dtype), (2,) if spec.gated else ()
    return Operands(
        moved=normal(1, (1, spec.tokens, spec.columns), dtype),
        turns=[
            normal(3 + i, (spec.features, *parts, spec.columns), dtype) * dtype.type(spec.features**-0.5)
            for i in range(turns_of(spec.weights * dtype.itemsize))
        ],
        shared={"x": normal(2, (1, spec.tokens, spec.features), dtype), "scale": jnp.ones((spec.columns,), dtype)},
    )


def multiply(spec: LinearSpec, op: Op, moved: Array, weight: Array, shared: Any) -> Array:
    """One launch of ``linear`` onto the launch before: the residual keeps the order."""
    norm = Norm(shared["scale"], 1e-6) if spec.norm else None
    out: Array = op(shared["x"], weight, bias=None, gated=spec.gated, residual=moved, norm=norm)[0]
    return out


OPERANDS: dict[type, Callable[[Any], Operands]] = {
    AttentionSpec: attention_operands,
    InjectSpec: inject_operands,
    LinearSpec: linear_operands,
}
LAUNCHES: dict[type, Callable[..., Any]] = {AttentionSpec: attend, InjectSpec: inject, LinearSpec: multiply}
OPS: dict[type, Mapping[str, Op]] = {
    AttentionSpec: ATTENTION,
    InjectSpec: INJECT,
    LinearSpec: LINEAR,
}


def operands_of(spec: Spec) -> Operands:
    """The same for every implementation."""
    return OPERANDS[type(spec)](spec)


def lowered(spec: Spec, op: Op, chain: bool) -> Any:
    """A program (moved, turns, shared) -> moved of one launch, or of a chain over all turns that reuses the memory of
    ``moved``: what is written is written in place. Traced, not compiled."""
    launch = jax.jit(partial(LAUNCHES[type(spec)], spec, op))  # a function of its own: a chain traces it once
    shapes = jax.eval_shape(partial(operands_of, spec))
    count = launches_of(shapes) if chain else 1

    def run(moved: Any, turns: Any, shared: Any) -> Any:
        for i in range(count):
            moved = launch(moved, turns[i % len(turns)], shared)
        return moved

    program = jax.jit(run, donate_argnums=0 if chain else ())
    return program.lower(shapes.moved, shapes.turns, shapes.shared)


def built(program: Any) -> Any:
    """A lowered program compiled as steps are."""
    return program.compile(compiler_options=GPU_OPTIONS if jax.default_backend() == "gpu" else None)


def compiled(spec: Spec, implementation: str, chain: bool) -> Any:
    """The program of a named implementation."""
    return built(lowered(spec, OPS[type(spec)][implementation], chain))


def launches_of(operands: Operands) -> int:
    """Launches of a chain."""
    return max(CHAIN, len(operands.turns))


def difference(mine: Any, right: Any) -> float:
    """The largest absolute difference of two trees; not a number where one is not."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    return float(np.max([jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() for a, b in pairs]))


def seconds_of(chain: Any, operands: Operands) -> float:
    """Median seconds of a launch; what the operands move is gone afterwards."""
    moved = operands.moved

    def call() -> Any:
        nonlocal moved
        moved = chain(moved, operands.turns, operands.shared)
        return moved

    return median_seconds(call, AHEAD, REPEATS) / launches_of(operands)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    first = rows[0]
    table = Table(
        title=f"{first.device}, jax {first.jax}; measured {first.bandwidth / 1e9:,.0f} GB/s, "
        f"{first.matmul_rate / 1e12:,.1f} TFLOP/s"
    )
    for header in ("shape", "kernels", "us", "floor us", "ratio", "bound", "MB", "GB/s", "max error"):
        table.add_column(header, justify="left" if header in ("shape", "kernels", "bound") else "right")
    for r in rows:
        table.add_row(
            r.name,
            r.implementation,
            f"{r.us:,.1f}",
            f"{r.floor_us:,.2f}",
            f"{r.ratio:,.2f}",
            r.bound,
            f"{r.bytes / 1e6:,.1f}",
            f"{r.bytes / r.us / 1e3:,.0f}",
            f"{r.error:.1e}",
        )
    console.print(table)


def kernels(
    which: Annotated[
        list[str] | None, typer.Option("--set", help=f"repeatable, of {', '.join(SETS)}; default all, small on a CPU")
    ] = None,
    only: Annotated[str, typer.Option(help="only shapes whose name contains this")] = "",
    implementation: Annotated[
        list[str] | None, typer.Option("--kernels", help="repeatable; default all that are meant for this device")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here as they come")] = None,
) -> None:
    """Microseconds of the ops alone, their floor, and their distance from the reference implementation."""
    platform, device = jax.default_backend(), jax.devices()[0].device_kind
    unknown = sorted(set(which or ()) - set(SETS))
    if unknown:
        raise ValueError(f"there is no set {unknown}; choose of {', '.join(SETS)}")
    sets = which or ([name for name in SETS if name != "small"] if platform == "gpu" else ["small"])
    specs = [spec for name in sets for spec in SETS[name] if only in spec.name]
    if not specs:
        raise ValueError(f"no shape of {', '.join(sets)} has {only!r} in its name")
    meant = [n for n, places in IMPLEMENTED.items() if n != "interpreted" and (places is None or platform in places)]
    names = [resolve(name, platform) for name in implementation or meant]

    once = [(spec, name, False) for spec in specs for name in {*names, "reference"}]
    chains = [(spec, name, True) for spec in specs for name in names]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # nothing is timed while XLA tunes its own kernels
        programs = {key: pool.submit(compiled, *key) for key in once + chains}
    failed = {key[:2]: error for key, program in programs.items() if (error := program.exception())}
    for (spec, name), error in failed.items():
        console.print(f"{spec.name}, {name} was not compiled: {error}", style="red", markup=False)
    bandwidth = bandwidth_of_device()
    rates = {dtype: matmul_rate_of_device(dtype) for dtype in sorted({spec.dtype for spec in specs})}
    rows: list[Row] = []
    todo = [(s, n) for s in specs for n in names if not failed.keys() & {(s, n), (s, "reference")}]
    for spec, name in track(todo, "measuring", console=console, transient=True, disable=not console.is_terminal):
        operands = operands_of(spec)
        arguments = (operands.moved, operands.turns, operands.shared)
        mine, right = (programs[spec, n, False].result()(*arguments) for n in (name, "reference"))
        distance = difference(mine, right)
        us = 1e6 * seconds_of(programs[spec, name, True].result(), operands)
        del operands, arguments, mine, right
        moved, rate = spec.values * jnp.dtype(spec.dtype).itemsize, rates[spec.dtype]
        flops = 0.0 if isinstance(spec, InjectSpec) else spec.flops
        floor_us = 1e6 * max(moved / bandwidth, flops / rate)
        row = Row(
            name=spec.name,
            spec=asdict(spec),
            implementation=name,
            us=us,
            floor_us=floor_us,
            ratio=us / floor_us,
            bound="bytes" if moved / bandwidth >= flops / rate else "FLOPs",
            bytes=moved,
            flops=flops,
            error=distance,
            bandwidth=bandwidth,
            matmul_rate=rate,
            device=device,
            jax=jax.__version__,
        )
        rows.append(row)
        write_rows(json_file, [asdict(r) for r in rows])
        line = f"{spec.name}, {name}: {us:,.1f} us, floor {floor_us:,.2f}, ratio {row.ratio:,.2f}, error {distance:.1e}"
        console.print(line, style="dim")
    if rows:
        show(rows)
    if failed:
        raise ValueError(f"{len(failed)} of {len(programs)} programs were not compiled")
