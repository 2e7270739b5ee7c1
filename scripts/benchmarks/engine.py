"""``benchmark.py engine``: many requests at once, plain and with DFlash, with and without overlap."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from rich.table import Table

from benchmarks.measuring import DRAFTER, PROMPTS, Dtype, console, idle_share, prompt_rows, traced
from benchmarks.shapes import TARGETS, alone, random_pair
from convert.load import open_checkpoint
from dflash_jax import make_mesh, verify
from dflash_jax.cache import resolve
from serving.build import build_engine, measure_costs, packed
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import Request, SamplingParams
from serving.shapes import DecodeShape
from serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class Row:
    """One line of the table.

    bare_ms: the same step enqueued ahead by a loop that does nothing else, and of_bare the tokens/s over that loop's
    (None: the block changes). idle: share of the decode loop in which no kernel ran, from a trace at the most rows
    (None: no trace).
    """

    model: str
    rows: int
    decoding: str
    overlap: bool
    accept: float
    tokens_per_second: float
    ms_per_step: float
    bare_ms: float | None
    of_bare: float | None
    idle: float | None
    host_ms: float
    wait_ms: float
    first_token_ms: float
    prefill_tokens_per_second: float


def requests_of(prompts: Sequence[Sequence[int]], count: int, max_tokens: int) -> list[Request]:
    """``count`` greedy requests that never stop early, over the prompts in turn."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(i, 0, tuple(prompts[i % len(prompts)]), params, (i, 0), max_tokens, frozenset(), None)
        for i in range(count)
    ]


def prefilled(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Adds requests and steps until every one has its first token: mean seconds to it, prompt tokens per second."""
    start = time.perf_counter()
    arrived: dict[int, float] = {}

    def note(request: Request) -> None:
        arrived.setdefault(request.index, time.perf_counter() - start)

    for request in requests:
        request.notify = note
        engine.add(request)
    while len(arrived) < len(requests):
        engine.step()
    return statistics.mean(arrived.values()), sum(len(r.prompt) for r in requests) / max(arrived.values())


def decoded(engine: Engine, requests: list[Request], steps: int | None = None) -> tuple[float, int, int]:
    """Steps while every row is live, at most ``steps``: seconds, tokens emitted, decode steps."""
    stats, start = engine.stats, time.perf_counter()
    before, done = stats.emitted, stats.steps
    while not any(r.finished for r in requests) and (steps is None or stats.steps - done < steps):
        engine.step()
    return time.perf_counter() - start, stats.emitted - before, stats.steps - done


def drain(engine: Engine, requests: list[Request]) -> None:
    """Ends what still runs, and forgets cached prefixes, so that the next run starts like the first."""
    for request in requests:
        engine.abort(request)
    while engine.busy:
        engine.step()
    if engine.scheduler.tree:
        engine.scheduler.tree.evict(engine.scheduler.pool.total)


def bare_ms(engine: Engine, shape: DecodeShape) -> float:
    """ms of a decode step enqueued ahead without any host work."""
    return engine.runner.ms_of(shape, ahead=24)


def compile_for(engine: Engine, counts: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
    """Compile what these row counts need, side by side; an adaptive engine also measures when drafting pays."""
    scheduler, runner = engine.scheduler, engine.runner
    shapes, policy = scheduler.shapes, scheduler.policy
    width = shapes.pages[-1]
    blocks = {n: {policy.blocks[n]} if policy.fixed else {1, policy.blocks[n]} for n in counts}
    decode = {DecodeShape(n, block, width) for n in counts for block in blocks[n]}
    prefill = {shapes.prefill([len(p) for p in prompts[:n]], width, width) for n in counts}
    runner.warm_up([*decode, *prefill], lambda: None)
    if not policy.fixed:
        measure_costs(engine, counts)


def measure(
    name: str, decoding: str, engine: Engine, prompts: Sequence[Sequence[int]], rows: int, max_tokens: int
) -> list[Row]:
    """Overlap on and off on one engine; the first run of each is not timed."""
    out = []
    policy, width = engine.scheduler.policy, engine.scheduler.shapes.pages[-1]
    bare = bare_ms(engine, DecodeShape(rows, policy.blocks[rows], width)) if policy.fixed else None
    for engine.overlap in (True, False):
        requests = requests_of(prompts, rows, max_tokens)
        prefilled(engine, requests)
        decoded(engine, requests)
        drain(engine, requests)

        requests = requests_of(prompts, rows, max_tokens)
        first, prefill = prefilled(engine, requests)
        host, wait = engine.stats.host_s, engine.stats.wait_s
        seconds, tokens, steps = decoded(engine, requests)
        host, wait = engine.stats.host_s - host, engine.stats.wait_s - wait
        drain(engine, requests)

        idle = None
        if rows == engine.scheduler.shapes.max_rows:
            requests = requests_of(prompts, rows, max_tokens)
            prefilled(engine, requests)
            idle = idle_share(traced(partial(decoded, engine, requests, 12)))
            drain(engine, requests)
        ms = 1e3 * seconds / steps
        out.append(
            Row(
                model=name,
                rows=rows,
                decoding=decoding,
                overlap=engine.overlap,
                accept=tokens / (steps * rows),
                tokens_per_second=tokens / seconds,
                ms_per_step=ms,
                bare_ms=bare,
                of_bare=bare and bare / ms,
                idle=idle,
                host_ms=1e3 * host / steps,
                wait_ms=1e3 * wait / steps,
                first_token_ms=1e3 * first,
                prefill_tokens_per_second=prefill,
            )
        )
    return out


def show(rows: list[Row], device: str) -> None:
    """Print the table."""
    table = Table(title=f"{device}; greedy, every row live, after compilation")
    plain = {(r.model, r.rows, r.overlap): r.tokens_per_second for r in rows if r.decoding == "plain"}
    headers = "model rows decoding overlap accept. tokens/s of-plain ms/step bare of-bare idle host-ms wait-ms"
    for header in (*headers.split(), "first token", "prefill/s"):
        table.add_column(header, justify="left" if header in ("model", "decoding") else "right")
    for r in rows:
        table.add_row(
            r.model,
            str(r.rows),
            r.decoding,
            "on" if r.overlap else "off",
            f"{r.accept:.2f}",
            f"{r.tokens_per_second:,.0f}",
            f"{r.tokens_per_second / plain[r.model, r.rows, r.overlap]:.2f}",
            f"{r.ms_per_step:.2f}",
            "" if r.bare_ms is None else f"{r.bare_ms:.2f}",
            "" if r.of_bare is None else f"{r.of_bare:.0%}",
            "" if r.idle is None else f"{r.idle:.1%}",
            f"{r.host_ms:.2f}",
            f"{r.wait_ms:.2f}",
            f"{r.first_token_ms:.0f} ms",
            f"{r.prefill_tokens_per_second:,.0f}",
        )
    console.print(table)


def engine(
    target: Annotated[Path | None, typer.Option(help="Hugging Face folder of a target", exists=True)] = None,
    drafter: Annotated[Path, typer.Option(help="its drafter", exists=True)] = DRAFTER,
    shape: Annotated[str | None, typer.Option(help=f"instead: random weights, one of {', '.join(TARGETS)}")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="with --shape: scripted acceptance lengths")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="repeatable; default 1 4 8 16 32")] = None,
    block_size: Annotated[list[int] | None, typer.Option(help="repeatable; 0: adaptive; default 8 and 0")] = None,
    dtype: Dtype = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=16)] = 192,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the rows here")] = None,
) -> None:
    """Many requests at once: tokens/s of plain decoding and DFlash, overlap on and off, against the bare step loop."""
    mesh = make_mesh()
    kernels = resolve("auto", jax.default_backend())
    if (target is None) == (shape is None):
        raise ValueError("give either --target or --shape")
    if shape is not None:
        params, model = random_pair(shape, dtype, mesh, kernels)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, model.target.vocab_size, 100).tolist() for _ in range(64)]
    else:
        assert target is not None
        checkpoint = open_checkpoint(target, drafter)
        assert checkpoint.tokenizer is not None
        tokenizer = Tokenizer(checkpoint.tokenizer)
        texts = dict(prompt_rows(PROMPTS, "gsm8k_test")).values()
        prompts = [list(tokenizer.encode([{"role": "user", "content": text}], {})) for text in texts]
        params, model = packed(checkpoint.place(dtype, mesh), mesh, kernels)
    label = str(shape) if target is None else target.name
    longest = max(map(len, prompts)) + max_tokens
    assert model.drafter is not None
    counts = sorted(rows or (1, 4, 8, 16, 32))
    wanted: list[tuple[str, int | None, float | None]] = [("plain", None, None)]
    for size in block_size if block_size is not None else (8, 0):
        for r in (rate or [4.0]) if shape else [None]:
            wanted.append((f"{size or 'adaptive'}" + ("" if r is None else f", rate {r:g}"), size, r))
    table: list[Row] = []
    for name, block, r in wanted:
        pair = alone(params, model) if block is None else (params, model)
        accept = verify.equality if r is None else verify.scripted(r)
        config = EngineConfig(dtype=dtype, block_size=block or None, max_num_seqs=counts[-1], max_model_len=longest)
        built = build_engine(*pair, mesh, config, longest, accept)
        compile_for(built, counts, prompts)
        for count in counts:
            table += measure(label, name, built, prompts, count, max_tokens)
            console.print(f"{count} rows, {name}: {table[-2].tokens_per_second:,.0f} tokens/s", style="dim")
            if json_file is not None:  # each time: a long run that is cut short has lost nothing
                json_file.write_text(json.dumps([asdict(row) for row in table], indent=1) + "\n", encoding="utf-8")
    show(table, jax.devices()[0].device_kind)
