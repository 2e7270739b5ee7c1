"""Measures tilings of the kernels on the device in use and writes the best into pallas_kernels/tuned.

    python scripts/tune_kernels.py --op linear --op block_attention [--only 8b]

Each shape of ``pallas_kernels/specs.py`` is timed with every candidate, as ``benchmark.py kernels`` times ops; a
candidate whose results are off is out. For ``linear`` XLA's own matmul is a candidate, written as null. Shapes that the
file has and this run does not measure stay.
"""

import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import typer
from benchmarks.kernels import Op, Spec, built, compiled, difference, lowered, operands_of, seconds_of
from benchmarks.measuring import console
from rich.progress import track
from rich.table import Table

from pallas_kernels import tuning
from pallas_kernels.block_attention import triton as attention
from pallas_kernels.linear import triton as linear
from pallas_kernels.specs import DECODE, DRAFT, LINEAR, PREFILL, AttentionSpec, LinearSpec

SHAPES: dict[str, tuple[Spec, ...]] = {"linear": LINEAR, "block_attention": (*DECODE, *DRAFT, *PREFILL)}
SHARED = 200 * 2**10  # bytes of shared memory that a program's tiles in flight may take
OFF = 0.1  # a result further than this share of the largest value from the reference is wrong


def sizes_of(spec: AttentionSpec) -> attention.Sizes:
    """The static half of a call as the kernel sees it."""
    pages = max(1, -(-spec.context // spec.page))
    slots = spec.rows * pages * spec.page
    return attention.Sizes(
        spec.rows, spec.block, spec.block, spec.kv_heads, spec.group, spec.head_dim, pages, spec.page, slots
    )


def key_of(spec: Spec) -> str:
    """What the measured tiling is kept under."""
    if isinstance(spec, AttentionSpec):
        return attention.key_of(sizes_of(spec), spec.dtype)
    assert isinstance(spec, LinearSpec)
    return linear.key_of(spec.tokens, spec.features, spec.columns, spec.gated, spec.norm, spec.dtype)


def candidates(spec: Spec) -> Iterator[Any]:
    """Tilings worth a try."""
    if isinstance(spec, AttentionSpec):
        yield from attention_candidates(spec)
    else:
        assert isinstance(spec, LinearSpec)
        yield None
        yield from linear_candidates(spec)


def attention_candidates(spec: AttentionSpec) -> Iterator[attention.Tiling]:
    """Splits round the rule's, and tiles that fit."""
    rule = rule_of(spec)
    queries = sorted({rule.queries, min(rule.queries, 64)})
    splits = sorted({1, max(1, rule.splits // 2), rule.splits, rule.splits * 2} if spec.context else {1})
    for tile, keys, parts, warps, stages in itertools.product(queries, (32, 64, 128), splits, (4, 8), (2, 3, 4)):
        in_flight = 2 * keys * spec.head_dim * 2 * (stages - 1)
        if in_flight <= SHARED // 2 and keys * parts <= max(spec.context, keys) and (warps == 4 or tile * keys > 2048):
            yield attention.Tiling(tile, keys, parts, warps, stages)


def linear_candidates(spec: LinearSpec) -> Iterator[linear.Tiling]:
    """Enough programs for the machine, enough bytes on their way to each."""
    halves, height = (2 if spec.gated else 1), max(16, spec.tokens)
    shapes = itertools.product((32, 64), (64, 128, 256), (1, 2, 4), (4,), (4, 6))
    for columns, features, splits, warps, stages in shapes:
        if spec.columns % columns or spec.features % features or (splits > 1 and not spec.norm):
            continue
        programs = spec.columns // columns * splits
        in_flight = (halves * columns + height) * features * 2 * (stages - 1)
        if 64 <= programs <= 800 and 24 * 2**10 <= in_flight <= SHARED // 2 and columns * features >= 2048 * warps // 4:
            yield linear.Tiling(columns, features, splits, warps, stages)


def op_of(spec: Spec, tiling: Any) -> Op:
    """The op with a tiling."""
    if isinstance(spec, AttentionSpec):
        return partial(attention.block_attention, tiling=tiling)
    return linear.by_xla if tiling is None else partial(linear.linear, tiling=tiling)


def tuned(spec: Spec) -> list[tuple[float, Any]]:
    """(us, tiling) of all candidates that are right, the fastest first."""
    tilings = list(candidates(spec))
    traces = [lowered(spec, op_of(spec, tiling), chain=True) for tiling in tilings]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(fitting, traces))
    right = compiled(spec, "reference", chain=True)(*arguments(spec))
    scale = max(float(jnp.abs(leaf.astype(jnp.float32)).max()) for leaf in jax.tree.leaves(right))
    measured = []
    for tiling, program in zip(tilings, programs, strict=True):
        if program is not None and difference(program(*arguments(spec)), right) <= OFF * scale:
            measured.append((1e6 * seconds_of(program, operands_of(spec)), tiling))
    return sorted(measured, key=lambda entry: entry[0])


def fitting(trace: Any) -> Any:
    """The compiled program, None where a candidate does not fit the device."""
    try:
        return built(trace)
    except jax.errors.JaxRuntimeError:
        return None


def arguments(spec: Spec) -> tuple[Any, Any, Any]:
    """What a program takes; it donates the first."""
    operands = operands_of(spec)
    return operands.moved, operands.turns, operands.shared


def main(
    op: Annotated[
        list[Literal["linear", "block_attention"]] | None, typer.Option(help="repeatable; default all")
    ] = None,
    only: Annotated[str, typer.Option(help="only shapes whose name contains this")] = "",
    write: Annotated[bool, typer.Option(help="write the table of this kind of device")] = True,
) -> None:
    """Time candidates and write the best."""
    kind = jax.devices()[0].device_kind
    file = tuning.file_of(kind)
    record: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in tuning.table(kind).items()}
    todo = [(name, spec) for name in op or SHAPES for spec in SHAPES[name] if only in spec.name]
    table = Table(title=f"{kind}, jax {jax.__version__}: us")
    for header in ("shape", "best", "tiling", "by rule", "xla", "tried"):
        table.add_column(header, justify="left" if header in ("shape", "tiling") else "right")
    for name, spec in track(todo, "tuning", console=console, transient=True, disable=not console.is_terminal):
        results = tuned(spec)
        if not results:
            console.print(f"{spec.name}: no candidate is right", style="red")
            continue
        us, best = results[0]
        times = {json.dumps(tiling and asdict(tiling)): t for t, tiling in results}
        record.setdefault(name, {})[key_of(spec)] = asdict(best) if best else {}
        if write:  # each time: a run that is cut short has lost nothing
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        cells = [times.get(json.dumps(t and asdict(t))) for t in (rule_of(spec), None)]
        shown = "xla" if best is None else ", ".join(f"{k} {v}" for k, v in asdict(best).items())
        row = [f"{us:.1f}", shown, *("" if t is None else f"{t:.1f}" for t in cells), str(len(results))]
        table.add_row(spec.name, *row)
        console.print(f"{spec.name}: {' | '.join(row)}", style="dim")
    console.print(table)


def rule_of(spec: Spec) -> Any:
    """The tiling by rule of thumb."""
    if isinstance(spec, AttentionSpec):
        return attention.rule(sizes_of(spec), jnp.dtype(spec.dtype))
    assert isinstance(spec, LinearSpec)
    return linear.rule(spec.tokens, spec.features, spec.columns, spec.gated)


if __name__ == "__main__":
    typer.run(main)
