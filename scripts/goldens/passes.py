"""The passes behind ``check_goldens``: the step's own parts, with everything on the way in sight.

A ``Runner`` does what prefill and verify do for a target, a ``Drafter`` what extend and draft do from given features.
Pools start as NaN with their pages in no order, so that a slot read before it was written shows.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray

from convert.hf_config import read_json
from convert.load import read_tensor
from convert.tensors import open_shelf
from dflash_jax import Model, ModelParams, StepState, cache, new_state, row_sampling, targets
from dflash_jax.cache import PagedKV, View
from dflash_jax.config import DrafterConfig
from dflash_jax.drafters import TargetIO, dflash
from dflash_jax.layers import Norm, linear_and_norm, logits_of
from dflash_jax.step import PrefillInputs, commit, view_of

PAGE = 8


@struct.dataclass
class Seen:
    """What a pass shows at each position: logits [.., V], final [.., D] after the final norm, features [.., K * D]."""

    logits: Any
    final: Any
    features: Any


@partial(jax.jit, static_argnames="model", donate_argnames="state")
def observed_step(
    params: ModelParams, model: Model, state: StepState, inputs: PrefillInputs, keep: Array
) -> tuple[StepState, Seen]:
    """``prefill_step`` that shows every position; it commits ``keep`` int32 [B] rows, so it is a forced verify too."""
    view = view_of(model, state, inputs, inputs.start)
    positions = view.positions(inputs.tokens.shape[1])
    target = targets.of(model.target)
    hidden = target.forward(params.target, model.target, inputs.tokens, positions, inputs.valid, view, True)
    kept = jnp.arange(inputs.tokens.shape[1]) < keep[:, None]
    state = commit(params, model, state, inputs, hidden, inputs.tokens, positions, kept, inputs.start)
    return state, Seen(target.head(params.target, model.target, hidden.final), hidden.final, hidden.features)


class Runner:
    """A target behind its paged cache, in blocks of one shape [rows, chunk]."""

    def __init__(self, params: ModelParams, model: Model, mesh: Mesh, rows: int, tokens: int, chunk: int) -> None:
        self.params, self.model, self.mesh, self.rows, self.chunk = params, model, mesh, rows, chunk
        pages = -(-tokens // PAGE)
        order = np.random.default_rng(0).permutation(rows * pages)
        self.table = order.astype(np.int32).reshape(rows, pages)
        self.reset()

    def reset(self) -> None:
        """Back to an empty cache."""
        state = new_state(self.model, self.rows, self.table.size, PAGE, jnp.dtype(jnp.float32), self.mesh)
        pools, states = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), (state.target, state.recurrent))
        self.state = state.replace(target=pools, recurrent=states)
        self.lengths = np.zeros(self.rows, np.int32)

    def step(self, blocks: list[NDArray], keep: list[int]) -> list[Seen]:
        """One block of each of the first rows behind what is cached; what each of its positions shows."""
        tokens, valid, kept = (
            np.zeros((self.rows, self.chunk), np.int32),
            np.zeros(self.rows, np.int32),
            self.lengths * 0,
        )
        for row, block in enumerate(blocks):
            tokens[row, : len(block)] = block
            valid[row], kept[row] = len(block), keep[row]
        ids = np.where(valid > 0, np.arange(self.rows), self.rows).astype(np.int32)
        inputs = PrefillInputs(ids, self.table, tokens, self.lengths.copy(), valid, row_sampling(self.rows))
        self.state, seen = observed_step(self.params, self.model, self.state, inputs, kept)
        self.lengths += kept
        shown = [np.asarray(a) for a in (seen.logits, seen.final, seen.features)]
        return [Seen(*(a[row, : len(block)] for a in shown)) for row, block in enumerate(blocks)]

    def prefill(self, prompts: list[NDArray]) -> list[Seen]:
        """Prompts in chunks, one a row."""
        parts = []
        for start in range(0, max(map(len, prompts)), self.chunk):
            blocks = [prompt[start : start + self.chunk] for prompt in prompts]
            parts.append(self.step(blocks, [len(block) for block in blocks]))
        return [
            jax.tree.map(lambda *pieces: np.concatenate(pieces), *[p[row] for p in parts])
            for row in range(len(prompts))
        ]

    def verify(self, block: NDArray, keep: int) -> Seen:
        """One block of the first row, of which ``keep`` rows stay."""
        return self.step([block], [keep])[0]


def borrowed_tables(target: Path) -> dict[str, Array]:
    """A target's embedding and head, float32, by their names in its files; the head without rows of padding. A head in
    the files counts even where the config says tied: it is a copy, or it is not tied."""
    names = [n for n in open_shelf(target).tensors if not n.startswith(("mtp.", "model.visual."))]
    (embed,) = (name for name in names if name.endswith("embed_tokens.weight"))
    config = read_json(target / "config.json")
    text = {**config, **config.get("text_config", {})}
    heads = [name for name in names if name.endswith("lm_head.weight")]
    head = heads[0] if heads or not text.get("tie_word_embeddings", False) else embed
    return {
        "embed": jnp.asarray(read_tensor(target, embed).astype(np.float32)),
        "head": jnp.asarray(read_tensor(target, head).astype(np.float32)[: text["vocab_size"]]),
    }


def borrow(tables: dict[str, Array]) -> TargetIO:
    """What a target lends, from its tables alone."""
    return TargetIO(embed=lambda tokens: tables["embed"][tokens], head=lambda hidden: logits_of(hidden, tables["head"]))


@struct.dataclass
class Block:
    """A drafted block: noise [T, D] (embedded), residuals [L, T, D], hidden [T, D], logits [T, V], positions [T],
    drafts [T - 1]."""

    noise: Any
    residuals: Any
    hidden: Any
    logits: Any
    positions: Any
    drafts: Any


@partial(jax.jit, static_argnames="cfg")
def inject(
    params: Any, tables: dict[str, Array], cfg: DrafterConfig, view: View, features: Array, valid: Array
) -> PagedKV:
    """The pool with valid [1] of features [1, C, K * D] injected behind ``view.lengths``."""
    tokens = jnp.zeros(features.shape[:2], jnp.int32)
    rows, _ = dflash.extend(params, borrow(tables), cfg, features, tokens, valid, view, ())
    keep = jnp.arange(features.shape[1]) < valid[:, None]
    slots = cache.slots_of(view.kv, view.table, view.positions(features.shape[1]), keep)
    return cache.commit(view.kv, rows, slots, view.kernels)


@partial(jax.jit, static_argnames="cfg")
def drafted(params: Any, tables: dict[str, Array], cfg: DrafterConfig, view: View, tokens: Array) -> Block:
    """The block tokens [1, T] behind ``view``; its drafts come from ``draft`` itself, which builds its own masks."""
    lent = borrow(tables)
    noise = lent.embed(tokens)
    hidden, stream = dflash.block_hidden(params, cfg, noise, view)
    cfg = dflash.with_block(cfg, tokens.shape[1])
    block = dflash.draft(
        params, lent, cfg, tokens[:, 0], view.lengths, view, (), lambda logits, positions: jnp.argmax(logits, axis=-1)
    )
    residuals = jnp.stack([x[0] for x in stream])
    logits = dflash.scores_of(params, lent, cfg, hidden)
    return Block(noise[0], residuals, hidden[0], logits[0], view.positions(tokens.shape[1])[0], block[0, 1:])


@partial(jax.jit, static_argnames="cfg")
def projected(params: Any, cfg: DrafterConfig, features: Array) -> Array:
    """The drafter's context [1, C, D] of features [1, C, K * D]."""
    norm = Norm(params["hidden_norm"], cfg.rms_norm_eps)
    _, context = linear_and_norm(features, params["fc"], norm, implementation="reference")
    return context.array()


class Drafter:
    """A drafter fed with given features, for one row of up to ``context`` tokens."""

    def __init__(self, params: Any, tables: dict[str, Array], cfg: DrafterConfig, kernels: str, context: int) -> None:
        self.params, self.tables, self.cfg, self.kernels, self.capacity = params, tables, cfg, kernels, context
        pages = -(-context // PAGE) + 1
        self.table = np.random.default_rng(1).permutation(pages).astype(np.int32)[None]
        self.reset()

    def reset(self) -> None:
        """Back to an empty pool."""
        layers, kv_heads, head_dim = dflash.cache_shape(self.cfg)
        pool = jnp.full((self.table.size * PAGE, kv_heads, head_dim), jnp.nan, jnp.float32)
        self.kv = PagedKV(k=(pool,) * layers, v=(pool,) * layers, page=PAGE)
        self.length = 0

    @property
    def view(self) -> View:
        """The pool as a step sees it."""
        return View(self.kv, jnp.asarray(self.table), jnp.array([self.length], jnp.int32), self.kernels)

    def padded(self, features: NDArray) -> NDArray:
        """Features [n, F] as [1, capacity, F]."""
        return np.pad(features, ((0, self.capacity - len(features)), (0, 0)))[None]

    def context(self, features: NDArray) -> NDArray:
        """Features [n, K * D] -> [n, D]."""
        return np.asarray(projected(self.params, self.cfg, self.padded(features)))[0, : len(features)]

    def inject(self, features: NDArray) -> None:
        """Features [n, K * D] of the next n tokens."""
        valid = np.array([len(features)], np.int32)
        self.kv = inject(self.params, self.tables, self.cfg, self.view, self.padded(features), valid)
        self.length += len(features)

    def injected(self) -> tuple[list[NDArray], list[NDArray]]:
        """K and V [n, G, H] of every layer, from the pages."""
        at = np.arange(self.length)
        slots = self.table[0, at // PAGE] * PAGE + at % PAGE
        return [np.asarray(k)[slots] for k in self.kv.k], [np.asarray(v)[slots] for v in self.kv.v]

    def block(self, tokens: NDArray) -> Block:
        """A block [T] behind everything injected so far."""
        block = drafted(self.params, self.tables, self.cfg, self.view, tokens[None])
        return jax.tree.map(np.asarray, block)
