"""What every measurement needs: the device's ceilings, a count of compilations, traces, tables, the prompts."""

import glob
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console

from dflash_jax.layers import exact

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


def matmul_rate_of_device(dtype: str) -> float:
    """Operations per second of a large square product of random numbers, products enqueued ahead."""
    size = 8192 if jax.default_backend() == "gpu" else 1024
    a, b = (jax.random.normal(key, (size, size), jnp.dtype(dtype)) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(lambda a, b: jnp.dot(a, b, precision=exact(a.dtype)))
    return 2 * size**3 / median_seconds(lambda: product(a, b), ahead=8, repeats=5)


def median_seconds(
    launch: Callable[[], Any], ahead: int, repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of a launch, ``ahead`` of them enqueued in a round before its wait; the first round is not
    counted. ``before`` runs before each round, untimed."""
    times = []
    for _ in range(repeats + 1):
        before()
        start = time.perf_counter()
        for _ in range(ahead):
            out = launch()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / ahead)
    return statistics.median(times[1:])


IDLE_GAP_US = (
    20.0  # a gap between kernels is the host's fault from here on; kernels of one launch follow within some us
)


@dataclass(frozen=True)
class Span:
    """One kernel, or one copy, of a trace of the first GPU."""

    name: str
    start_ns: float
    stop_ns: float


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a trace: launches and us a step, share of the time that kernels ran."""

    name: str
    count: float
    us: float
    share: float


def traced(run: Callable[[], object]) -> list[Span]:
    """What ran on the first GPU during a run, in order; empty on other devices."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the host must not be slower than it is
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(file).planes
        spans = [
            Span(event.name, event.start_ns, event.start_ns + event.duration_ns)
            for plane in planes
            if plane.name.startswith("/device:GPU:0")
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]
    return sorted(spans, key=lambda span: span.start_ns)


def idle_share(spans: Sequence[Span], gap_us: float = IDLE_GAP_US) -> float | None:
    """The share of a trace in which no kernel ran for longer than ``gap_us``, None for an empty one. The default is
    longer than kernels of one launch lie apart; 0 counts every gap."""
    if not spans:
        return None
    idle, end = 0.0, spans[0].stop_ns
    for span in spans:
        gap = span.start_ns - end
        idle += gap if gap > 1e3 * gap_us else 0
        end = max(end, span.stop_ns)
    return idle / (end - spans[0].start_ns)


def kernels_of(spans: Sequence[Span], steps: int) -> list[Kernel]:
    """The kernels of a trace of ``steps`` steps by name, the longest first."""
    ns: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        ns[span.name].append(span.stop_ns - span.start_ns)
    total = sum(map(sum, ns.values()))
    rows = [Kernel(name, len(t) / steps, sum(t) / steps / 1e3, sum(t) / total) for name, t in ns.items()]
    return sorted(rows, key=lambda kernel: -kernel.us)


def write_rows(file: Path | None, rows: Sequence[Any]) -> None:
    """All records so far as JSON, if a file is wanted: a long run that is cut short has lost nothing."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def prompt_rows(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """(id, wrapped prompt) of a set."""
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["id"], WRAPPINGS[name].format(row["turns"][0])
