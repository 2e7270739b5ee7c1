"""Puts an engine together: shapes, pages, block policy, scheduler and runner from one config; and warms it up."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from convert.load import Loaded
from dflash_jax import verify
from dflash_jax.config import AnyDrafterConfig
from dflash_jax.params import pack
from dflash_jax.sharding import Mesh
from dflash_jax.step import Model, ModelParams, block_of
from dflash_jax.verify import Accept
from serving import blocks
from serving.blocks import BlockPolicy
from serving.config import EngineConfig
from serving.engine import Engine
from serving.pages import PagePool
from serving.radix import RadixCache
from serving.request import MAX_LOGPROBS
from serving.runner import Runner, bytes_of_page, bytes_of_state, free_bytes
from serving.scheduler import Scheduler
from serving.shapes import DecodeShape, Shapes, sizes

KV_SHARE = 0.85  # of the free accelerator memory; the rest is for activations
CPU_KV_BYTES = 1 << 30
STATE_SHARE = 0.1  # of the free accelerator memory, for snapshots of recurrent states
CPU_STATE_BYTES = 1 << 28
SNAPSHOTS_A_ROW = 4.0


def packed(loaded: Loaded, mesh: Mesh, kernels: str) -> tuple[ModelParams, Model]:
    """The loaded pair as the step takes it; consumes the loaded parameters."""
    params = ModelParams(
        target=pack(loaded.target_params, loaded.target, mesh, consume=True),
        drafter=loaded.drafter and pack(loaded.drafter_params or {}, loaded.drafter, mesh, consume=True),
    )
    return params, Model(loaded.target, loaded.drafter, kernels, min(MAX_LOGPROBS, loaded.target.vocab_size))


def build_engine(
    params: ModelParams,
    model: Model,
    mesh: Mesh,
    config: EngineConfig,
    max_model_len: int,
    accept: Accept = verify.equality,
    policy: BlockPolicy | None = None,
) -> Engine:
    """An idle engine for a packed pair; ``policy`` None: ``policy_of`` its drafter.

    Raises ValueError where the memory does not hold the K/V of one request of ``max_model_len`` tokens.
    """
    longest = -(-max_model_len // config.page_size)
    page_bytes = bytes_of_page(model, params.target["embed"].dtype, config.page_size, mesh)
    free, state_bytes = free_bytes(mesh), bytes_of_state(model, params.target["embed"].dtype, mesh)
    snapshots = snapshots_that_fit(state_bytes, config, free) if config.prefix_cache else 0
    left = free and free - state_bytes * (config.max_num_seqs + snapshots)
    pages = config.num_pages or pages_that_fit(page_bytes, config, left, longest)
    shapes = Shapes(
        max_rows=config.max_num_seqs,
        max_pages=longest,
        chunk=config.prefill_chunk,
        page_size=config.page_size,
        narrow=model.kernels == "reference",
    )
    pool = PagePool(pages)
    # A recurrent state exists only where a row stands or a snapshot was taken: pages alone do not bring a prefix back.
    slots = range(config.max_num_seqs, config.max_num_seqs + snapshots) if model.recurrent else None
    cached = config.prefix_cache and (snapshots > 0 or not model.recurrent)
    tree = RadixCache(pool, config.page_size, slots) if cached else None
    scheduler = Scheduler(pool, tree, shapes, policy or policy_of(model.drafter, config, mesh))
    return Engine(scheduler, Runner(params, model, mesh, shapes, pages, accept, snapshots), config.overlap)


def policy_of(drafter: AnyDrafterConfig | None, config: EngineConfig, mesh: Mesh) -> BlockPolicy:
    """How blocks are chosen: as the config fixes them, else by what pays on this kind of device.

    Raises ValueError for a block without a drafter.
    """
    rows = sizes(config.max_num_seqs, 2)
    if drafter is None or config.block_size is not None:
        return blocks.fixed(rows, block_of(drafter, config.block_size))
    device = mesh.devices.flat[0]
    return blocks.adaptive(rows, drafter.block_size, blocks.costs_of(device.device_kind, device.platform))


def snapshots_that_fit(state_bytes: int, config: EngineConfig, free: int | None) -> int:
    """Snapshots of recurrent states for the prefix cache: a few a row, within a share of the ``free`` bytes (None: of a
    CPU's)."""
    if state_bytes == 0:
        return 0
    budget = CPU_STATE_BYTES if free is None else int(STATE_SHARE * free)
    return min(int(SNAPSHOTS_A_ROW * config.max_num_seqs), budget // state_bytes)


def pages_that_fit(page_bytes: int, config: EngineConfig, free: int | None, longest: int) -> int:
    """Pages of the pool: enough for every row at full length, or what ``free`` bytes hold (None: a CPU's, whose memory
    is the machine's), at least one such row."""
    wanted, page_bytes = config.max_num_seqs * longest, max(page_bytes, 1)
    if free is None:
        return min(wanted, max(longest, CPU_KV_BYTES // page_bytes))
    fit = int(KV_SHARE * free) // page_bytes
    if fit < longest:
        raise ValueError(
            f"the K/V of one request of {longest * config.page_size:,} tokens takes {longest * page_bytes / 1e9:.1f} "
            f"GB; {KV_SHARE * free / 1e9:.1f} GB are left for it on each device: lower max_model_len"
        )
    return min(wanted, fit)


def warm_up(engine: Engine, progress: bool | None = None) -> None:
    """Compile every step that can occur, and measure on the idle device when drafting pays."""
    scheduler, runner = engine.scheduler, engine.runner
    shapes, policy = scheduler.shapes, scheduler.policy
    every = shapes.all({n: sorted({block} if policy.fixed else {block, 1}) for n, block in policy.blocks.items()})
    with counting(len(every), progress, lambda: f"{runner.planned_bytes / 1e9:.2f} GB a device") as done:
        runner.warm_up(every, done)
    if not (policy.fixed or engine.busy or (scheduler.tree and scheduler.tree.pages)):
        measure_costs(engine, policy.blocks)


def measure_costs(engine: Engine, rows: Iterable[int]) -> None:
    """Time the steps that the policy chooses between, on an engine that holds nothing."""
    policy, pages = engine.scheduler.policy, engine.scheduler.shapes.pages[0]
    for n in rows:
        plain, drafting = (engine.runner.ms_of(DecodeShape(n, block, pages)) for block in (1, policy.blocks[n]))
        policy.cost[n] = drafting / plain


@contextmanager
def counting(steps: int, progress: bool | None, need: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Shows how many steps are compiled: a bar on a terminal, else a line before; at the end what they ``need``."""
    console, start = Console(stderr=True, highlight=False), perf_counter()
    columns = (TextColumn("compiling steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = console.is_terminal if progress is None else progress
    if not shown:
        console.print(f"compiling {steps} steps ...")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=steps)
        yield lambda: bar.advance(task)
    console.print(f"{steps} steps compiled in {perf_counter() - start:.0f} s; the largest needs {need()}")
