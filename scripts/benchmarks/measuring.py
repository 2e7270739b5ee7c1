"""What every measurement needs: the device's bandwidth, a count of compilations, tables, the prompts."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = ROOT / "models" / "smollm2-dflash"
PROMPTS = ROOT / "scripts" / "prompts"

# How the published DFlash numbers wrap a bare task.
WRAPPINGS = {
    "gsm8k_test": "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```",
    "mt_bench": "{}",
}

Dtype = Literal["float32", "bfloat16"]
T = TypeVar("T")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
compilations = 0


def count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    """Listens to JAX's own timing events."""
    global compilations
    compilations += event == "/jax/core/compile/backend_compile_duration"


def compiled(run: Callable[[], T]) -> T:
    """The result of a run in which nothing was compiled: repeats one that had to wait for XLA."""
    while True:
        before = compilations
        result = run()
        if compilations == before:
            return result


def bandwidth_of_device() -> float:
    """Bytes moved per second, what a byte floor is made of: the better of a copy (read + written) and a sum (read)."""
    size = (256 if jax.default_backend() == "cpu" else 4096) * 2**20 // 4
    x = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    return max(2 * x.nbytes / seconds_of(jax.jit(lambda x: x + 1), x), x.nbytes / seconds_of(jax.jit(jnp.sum), x))


def seconds_of(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Median seconds of ten calls, after one that compiles."""
    jax.block_until_ready(function(x))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def prompt_rows(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """(id, wrapped prompt) of a set."""
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["id"], WRAPPINGS[name].format(row["turns"][0])
