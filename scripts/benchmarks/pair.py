"""``benchmark.py pair``: one request at a time on real prompts, plain and with DFlash."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import track
from rich.table import Table

from benchmarks.measuring import DRAFTER, PROMPTS, WRAPPINGS, Dtype, bandwidth_of_device, compiled, console, prompt_rows
from dflash_jax.cache import bytes_of
from serving import LLM, Completion, SamplingParams

AUTHORS_MAX_TOKENS = 256  # the limit behind acceptance.json; under another one the lengths are not comparable


@dataclass(frozen=True)
class Sample:
    """One answer: decoding only, from the first token's arrival to the last one's."""

    completion: Completion
    seconds: float

    @property
    def rounds(self) -> int:
        """Steps taken; plain decoding takes one a token."""
        return len(self.completion.acceptance_lengths)


def decode(llm: LLM, content: str, max_tokens: int) -> Sample:
    """Answer one user message greedily, against the clock."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    chunks = iter(llm.stream([{"role": "user", "content": content}], params))
    last = next(chunks)
    start = time.perf_counter()
    for chunk in chunks:
        last = chunk
    seconds = time.perf_counter() - start
    assert last.completion is not None
    return Sample(last.completion, seconds)


@dataclass(frozen=True)
class Row:
    """One line of the table: a prompt set at a block size (1: plain)."""

    prompts: str
    count: int
    block_size: int
    acceptance_length: float
    authors: float | None
    tokens_per_second: float
    ms_per_step: float
    floor_ms: float
    identical: int


def floor_bytes(llm: LLM, block: int) -> int:
    """Bytes that one step must read: the target's weights once and, when drafting, the drafter's and the head again."""
    runner = llm.engine.runner
    target = bytes_of(runner.params.target)
    if block == 1:
        return target
    head = runner.params.target["embed" if runner.model.target.tie_word_embeddings else "head"]
    return target + bytes_of(runner.params.drafter) + head.nbytes


def summary(
    name: str, block: int, samples: list[Sample], plain: list[Sample], authors: float | None, floor_ms: float
) -> Row:
    """Totals of one prompt set; the acceptance length is the mean over samples of each sample's mean."""
    seconds = sum(s.seconds for s in samples)
    same = sum(s.completion.token_ids == p.completion.token_ids for s, p in zip(samples, plain, strict=True))
    return Row(
        prompts=name,
        count=len(samples),
        block_size=block,
        acceptance_length=statistics.mean(s.completion.acceptance_length for s in samples),
        authors=authors,
        tokens_per_second=sum(s.completion.output_tokens - 1 for s in samples) / seconds,
        ms_per_step=1e3 * seconds / sum(s.rounds for s in samples),
        floor_ms=floor_ms,
        identical=same,
    )


def authors_tau(records: list[dict[str, Any]], name: str, block: int, ids: list[str]) -> float | None:
    """The published loop's acceptance length on exactly these prompts, None where it was not recorded."""
    means = {r["id"]: statistics.mean(r["acc"]) for r in records if r["set"] == name and r["B"] == block}
    return statistics.mean(means[i] for i in ids) if all(i in means for i in ids) else None


def show(rows: list[Row], bandwidth: float, device: str) -> None:
    """Print the table."""
    table = Table(title=f"{device}, bandwidth {bandwidth / 1e9:,.0f} GB/s, one request at a time, greedy")
    for header in (
        "prompts",
        "n",
        "block",
        "accept. length",
        "authors'",
        "tokens/s",
        "speed-up",
        "ms/step",
        "floor",
        "ratio",
        "same ids",
    ):
        table.add_column(header, justify="right" if header != "prompts" else "left")
    plain: dict[str, float] = {}
    for row in rows:
        if row.block_size == 1:
            plain[row.prompts] = row.tokens_per_second
        table.add_row(
            row.prompts,
            str(row.count),
            "plain" if row.block_size == 1 else str(row.block_size),
            f"{row.acceptance_length:.2f}",
            "" if row.authors is None else f"{row.authors:.2f}",
            f"{row.tokens_per_second:,.1f}",
            f"{row.tokens_per_second / plain[row.prompts]:.2f}",
            f"{row.ms_per_step:.2f}",
            f"{row.floor_ms:.3f}",
            f"{row.ms_per_step / row.floor_ms:.1f}",
            f"{row.identical}/{row.count}",
        )
    console.print(table)


def pair(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target", exists=True, file_okay=False)],
    drafter: Annotated[
        Path, typer.Option(help="its drafter", exists=True, file_okay=False, show_default="models/smollm2-dflash")
    ] = DRAFTER,
    block_size: Annotated[list[int] | None, typer.Option(min=2, help="repeatable; default 16 and 8")] = None,
    dtype: Dtype = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=2, help="the authors' lengths are shown at 256 only")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first prompts of each set")] = None,
    prompts: Annotated[
        Path, typer.Option(help="folder with the prompt sets", exists=True, show_default="scripts/prompts")
    ] = PROMPTS,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the rows here")] = None,
) -> None:
    """Plain decoding and DFlash on real prompts: tokens/s, acceptance length beside the authors', ms a step, floor."""
    known = drafter / "acceptance.json"
    comparable = known.exists() and max_tokens == AUTHORS_MAX_TOKENS
    records = json.loads(known.read_text(encoding="utf-8"))["rows"] if comparable else []
    engines = {1: LLM(target, dtype=dtype, max_num_seqs=1)} | {
        block: LLM(target, drafter, dtype=dtype, block_size=block, max_num_seqs=1) for block in block_size or (16, 8)
    }
    bandwidth = bandwidth_of_device()
    rows = []
    for name in WRAPPINGS:
        texts = dict(list(prompt_rows(prompts, name))[:limit])
        plain: dict[str, Sample] = {}
        for block, llm in engines.items():
            recorded = [i for i in texts if authors_tau(records, name, block, [i]) is not None]
            ids = recorded or list(texts)
            samples = [
                compiled(partial(decode, llm, texts[i], max_tokens))
                for i in track(
                    ids, f"{name}, block {block}", console=console, transient=True, disable=not console.is_terminal
                )
            ]
            if block == 1:
                plain = dict(zip(ids, samples, strict=True))
            tau = authors_tau(records, name, block, ids)
            floor_ms = 1e3 * floor_bytes(llm, block) / bandwidth
            rows.append(summary(name, block, samples, [plain[i] for i in ids], tau, floor_ms))
    show(rows, bandwidth, jax.devices()[0].device_kind)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
