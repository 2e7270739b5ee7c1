"""``benchmark.py tune-block``: what a step costs at every row count and block, and the block that follows from it."""

import json
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.progress import track
from rich.table import Table

from benchmarks.measuring import DRAFTER, ROOT, Dtype, console
from benchmarks.shapes import TARGETS, random_pair
from convert.load import open_checkpoint
from dflash_jax import make_mesh
from dflash_jax.cache import resolve
from serving.blocks import USUAL, adaptive, block_sizes, expected
from serving.build import build_engine, packed
from serving.config import EngineConfig
from serving.shapes import DecodeShape


def tune_block(
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder of a target", exists=True)] = None,
    drafter: Annotated[Path, typer.Option(help="its drafter", exists=True)] = DRAFTER,
    shape: Annotated[str | None, typer.Option(help=f"instead: random weights, one of {', '.join(TARGETS)}")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="repeatable; default 1 4 16 32 64")] = None,
    dtype: Dtype = "bfloat16",
    context: Annotated[int, typer.Option(min=64, help="tokens that a row may hold")] = 512,
    write: Annotated[
        bool, typer.Option("--write", help="make it the default table of this kind of device (serving/tuned)")
    ] = False,
) -> None:
    """Milliseconds of a decode step by rows and block; the best block a row count at the usual acceptance."""
    mesh = make_mesh()
    kernels = resolve("auto", jax.default_backend())
    if (target is None) == (shape is None):
        raise ValueError("give either --target or --shape")
    if shape is not None:
        params, model = random_pair(shape, dtype, mesh, kernels)
    else:
        assert target is not None
        params, model = packed(open_checkpoint(target, drafter).place(dtype, mesh), mesh, kernels)
    assert model.drafter is not None
    counts = sorted(rows or (1, 4, 16, 32, 64))
    config = EngineConfig(dtype=dtype, max_num_seqs=counts[-1], max_model_len=context)
    built = build_engine(params, model, mesh, config, context)
    runner, blocks = built.runner, block_sizes(model.drafter.block_size)
    pages = runner.shapes.max_pages
    wanted = [DecodeShape(n, block, pages) for n in counts for block in blocks]
    runner.warm_up(wanted, lambda: None)
    ms: dict[int, dict[int, float]] = {n: {} for n in counts}
    for s in track(wanted, "measuring", console=console, transient=True, disable=not console.is_terminal):
        ms[s.rows][s.block] = round(runner.ms_of(s, ahead=16), 4)
    policy = adaptive(counts, blocks[0], ms)
    device, name = jax.devices()[0].device_kind, shape or target.name  # type: ignore[union-attr]
    table = Table(title=f"{device}, {name}, {dtype}: ms a step (tokens a round at the usual {USUAL:.0%} in brackets)")
    for header in ("rows", *(f"block {b} ({expected(USUAL, b):.2f})" for b in reversed(blocks)), "best"):
        table.add_column(header, justify="right")
    for n in counts:
        table.add_row(str(n), *(f"{ms[n][b]:.2f}" for b in reversed(blocks)), str(policy.blocks[n]))
    console.print(table)
    if write:
        file = ROOT / "serving" / "tuned" / f"{device.lower().replace(' ', '-')}.json"
        record = {"device": device, "model": name, "dtype": dtype, "ms": ms}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {file.relative_to(ROOT)}")
