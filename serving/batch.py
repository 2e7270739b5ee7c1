"""Answers a file of prompts: JSON lines in, JSON lines out, in the same order.

A line that cannot be answered gets an error of its own. After Ctrl-C, what has begun is finished and written; --resume
goes on from there, and from a kill at any time. In float32 the same seed repeats a file to the byte, resumed or not.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serving import blocks, command, lines
from serving.config import EngineConfig
from serving.llm import LLM
from serving.offline import Answer, Output, answers
from serving.request import SamplingParams
from serving.runner import use_compilation_cache
from serving.stats import StepStats

QUIET_S = 30.0  # between two lines of progress where there is no terminal
SHOWN_ERRORS = 10  # on the terminal; the output has them all
SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it, and could not bring it back if it were stopped at once
FINISHING = b"\nfinishing what has begun; once more to stop at once\n"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass
class Summary:
    """What this run did. total: lines of the input; skipped: those that a run before had answered."""

    total: int
    skipped: int
    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    acceptance_length: float = 1.0
    prefix_hit_rate: float = 0.0
    preemptions: int = 0
    interrupted: bool = False

    @property
    def done(self) -> int:
        """Lines that are answered."""
        return self.skipped + self.lines

    def add(self, answer: Answer, seconds: float, stats: StepStats) -> None:
        """Count an answer."""
        self.lines += 1
        self.errors += answer.error is not None
        self.prompt_tokens += answer.prompt_tokens
        self.output_tokens += answer.output_tokens
        self.seconds = seconds
        self.tokens_per_second = self.output_tokens / seconds
        self.acceptance_length = stats.acceptance_length
        self.prefix_hit_rate = stats.hit_rate
        self.preemptions = stats.preemptions

    def progress(self) -> str:
        """How it goes, in a few words."""
        errors = f", {self.errors:,} errors" if self.errors else ""
        return f"{self.tokens_per_second:,.0f} tokens/s, {self.acceptance_length:.2f} a round{errors}"

    def table(self) -> Table:
        """The last words."""
        table = Table("", show_header=False)
        rows = {
            "lines": f"{self.lines:,}" + (f" (and {self.skipped:,} before)" if self.skipped else ""),
            "left": f"{self.total - self.done:,}",
            "errors": f"{self.errors:,}",
            "prompt tokens": f"{self.prompt_tokens:,}",
            "output tokens": f"{self.output_tokens:,}",
            "seconds": f"{self.seconds:,.1f}",
            "tokens/s": f"{self.tokens_per_second:,.1f}",
            "acceptance length": f"{self.acceptance_length:.2f}",
            "prefix hit rate": f"{self.prefix_hit_rate:.1%}",
            "preemptions": f"{self.preemptions:,}",
        }
        table.add_column(justify="right")
        for name, value in rows.items():
            table.add_row(name, value)
        return table


@contextmanager
def faults() -> Iterator[None]:
    """Turns what is wrong with files and options into one line and exit status 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM; a second one ends the process as if nobody had listened."""
    signals = (signal.SIGINT, signal.SIGTERM)
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + FINISHING)  # print might be at work on a line itself
        for each in signals:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, note) for each in signals}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def shown(summary: Summary) -> Iterator[Callable[[Answer], None]]:
    """Shows progress on stderr: a bar on a terminal, else a line now and then; errors as they come, the first ones."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = said = perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=summary.total, completed=summary.skipped)

        def show(answer: Answer) -> None:
            nonlocal said
            if answer.error is not None and summary.errors <= SHOWN_ERRORS:
                more = "; further errors are in the output only" if summary.errors == SHOWN_ERRORS else ""
                console.print(f"{answer.error}{more}", markup=False)
            bar.update(task, advance=1, description=summary.progress())
            now = perf_counter()
            if not console.is_terminal and now - said > QUIET_S:
                said = now
                left = (summary.total - summary.done) * (now - start) / summary.lines
                console.print(f"{summary.done:,} of {summary.total:,} lines, {summary.progress()}, {left:,.0f} s left")

        yield show


def checked_paths(source: Path, output: Path, stats: Path | None, resume: bool, overwrite: bool) -> None:
    """Raises ValueError where the files do not fit together."""
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude one another")
    if not source.is_file():
        raise ValueError(f"the input {source} is no file")
    named = {"output": output} | ({} if stats is None else {"stats": stats})
    for name, path in named.items():
        if not path.parent.is_dir():
            raise ValueError(f"the folder of the {name}, {path.parent}, does not exist")
        if path.exists() and not path.is_file():
            raise ValueError(f"the {name} {path} is no file")
        if path.exists() and path.samefile(source):
            raise ValueError(f"the {name} {path} is the input {source}")
    if stats is not None and stats.resolve() == output.resolve():
        raise ValueError(f"the stats {stats} are the output {output}")


def steady_blocks(llm: LLM) -> None:
    """One block size for the whole run, the best one for a full batch: blocks that follow what was lately accepted
    would leave the text alone, but acceptance lengths would depend on where a run was resumed."""
    scheduler = llm.engine.scheduler
    if not scheduler.policy.fixed:
        block = scheduler.policy.blocks[llm.config.max_num_seqs]
        scheduler.policy = blocks.fixed(scheduler.shapes.rows, block)
        print(f"block {block} throughout, so that a resumed run repeats", file=sys.stderr)


def run(
    load: Callable[[], LLM],
    source: Path,
    output: Path,
    sampling: dict[str, Any],
    *,
    resume: bool,
    overwrite: bool,
    token_ids: bool,
) -> tuple[Summary, int]:
    """Answers the lines of a file; what was done, and the number of the signal that stopped it or 0. The model is
    loaded once all else is in order."""
    with source.open("rb") as file, Output(output) as out:
        if not (resume or overwrite or out.empty):
            raise ValueError(f"the output {output} exists: --resume goes on with it, --overwrite throws it away")
        total = sum(1 for raw in file if raw.strip())
        file.seek(0)
        source_lines = lines.lines_of(file)
        skipped, left = out.resume(source_lines) if resume else (0, source_lines)
        summary = Summary(total, skipped)
        if skipped == total:
            out.start()
            return summary, 0
        llm = load()
        defaults = replace(llm.default_sampling_params(), **sampling)
        out.start()
        start = perf_counter()
        with interruptible() as caught, shown(summary) as show:
            for answer in answers(llm, left, defaults, token_ids=token_ids, stopping=lambda: bool(caught)):
                out.write(answer.record)
                summary.add(answer, perf_counter() - start, llm.engine.stats)
                show(answer)
        summary.interrupted = bool(caught) and summary.done < total
        return summary, caught[0] if summary.interrupted else 0


@app.command(help=f"{__doc__}\n{lines.__doc__}")
def batch(
    target: command.Target,
    source: Annotated[Path, typer.Option("--input", help="the lines to answer")],
    output: Annotated[Path, typer.Option(help="where the records go")],
    drafter: command.Drafter = None,
    tokenizer: command.TokenizerFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on behind what the output has")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="throw away what the output has")] = False,
    stats: Annotated[Path | None, typer.Option(help="write the summary as JSON")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="plain records name their tokens")] = False,
    max_tokens: Annotated[int, typer.Option(help="longest answer of a line that names none")] = 256,
    temperature: Annotated[float | None, typer.Option(help="these defaults: generation_config.json's")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    n: Annotated[int | None, typer.Option(help="samples a line")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    logprobs: Annotated[int | None, typer.Option(help="log-probabilities of so many tokens a place")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on behind end-of-sequence ids")] = False,
    seed: Annotated[int, typer.Option(help="of lines that bring none")] = 0,
    dtype: command.Dtype = "auto",
    block_size: Annotated[int | None, typer.Option(help="tokens a round; default: the best for a full batch")] = None,
    max_num_seqs: command.MaxNumSeqs = EngineConfig.max_num_seqs,
    max_model_len: command.MaxModelLen = None,
    page_size: command.PageSize = EngineConfig.page_size,
    num_pages: command.NumPages = None,
    prefill_chunk: command.PrefillChunk = EngineConfig.prefill_chunk,
    prefix_cache: command.PrefixCache = True,
    overlap: command.Overlap = True,
    kernels: command.Kernels = EngineConfig.kernels,
    tensor_parallel_size: command.TensorParallelSize = 1,
    warm_up: Annotated[bool, typer.Option(help="compile everything before the first line")] = True,
    compilation_cache: command.CompilationCache = None,
) -> None:
    """The command; ``--help`` shows the docstrings of this module and of ``serving.lines``."""
    options = command.engine_options(locals())
    wanted = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "n": n, "stop": stop}
    sampling: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    sampling |= {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "logprobs": logprobs}

    def load() -> LLM:
        use_compilation_cache(compilation_cache)
        llm = LLM(target, drafter, tokenizer=tokenizer, **options)
        steady_blocks(llm)
        if warm_up:
            llm.warm_up()
        return llm

    with faults():
        checked_paths(source, output, stats, resume, overwrite)
        EngineConfig(**options)
        SamplingParams(**sampling)
        summary, stopped = run(load, source, output, sampling, resume=resume, overwrite=overwrite, token_ids=token_ids)
        Console().print(summary.table())
        if stats is not None:
            stats.write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    if stopped:
        raise typer.Exit(128 + stopped)


if __name__ == "__main__":
    app()
