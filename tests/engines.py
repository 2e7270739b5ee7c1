"""Engines for tests: built as ``serving.LLM`` builds them, round tiny pairs or round models whose texts are known.

The checksum pair computes its next token from *every* token before it, as it reads them in its pages: a page that is
lost, stale or somebody else's changes the text (the target's) or the acceptance (the drafter's), exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from tiny_models import Pair

from dflash_jax import Generation, Model, ModelParams, drafters, generate, targets, verify
from dflash_jax.cache import Delta, Rows, View
from dflash_jax.drafters import TargetIO
from dflash_jax.drafters.interface import Draw
from dflash_jax.generate import row_key, row_sampling
from dflash_jax.targets import Hidden
from dflash_jax.verify import Accept
from serving import SamplingParams
from serving.blocks import BlockPolicy
from serving.build import build_engine
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import Detokenizer, Request
from serving.shapes import DecodeShape, PrefillShape

VOCAB, LONGEST = 61, 1024


@dataclass(frozen=True)
class ChecksumTarget:
    """The config of a target whose next token is ``script[position]`` + ``mix`` x a checksum of all tokens before it.

    What it says is in its parameters, so that engines for all texts share their compiled steps.
    """

    vocab_size: int = VOCAB
    vocab_rows: int = VOCAB
    max_position_embeddings: int = LONGEST
    target_layer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChecksumDrafter:
    """The config of a drafter with the same rule, wrong at every ``period``-th position (1: everywhere, 0: nowhere).

    It draws with the verifier's noise, so at any temperature it is right where it is not wrong on purpose.
    """

    block_size: int
    vocab_size: int = VOCAB
    max_position_embeddings: int = LONGEST


def weights(positions: Array) -> Array:
    """What a token's weight is in the checksum."""
    return (positions * positions * 7 + positions * 3 + 1) % VOCAB


def cached_sum(view: View) -> Array:
    """The checksum int32 [B] of the tokens that a row finds in its pages."""
    page = view.kv.page
    slots = (view.table[:, :, None] * page + jnp.arange(page)).reshape(view.table.shape[0], -1)
    tokens = view.kv.k[0].at[slots, 0, 0].get(mode="fill", fill_value=0)
    positions = jnp.arange(slots.shape[1])
    kept = jnp.where(positions < view.lengths[:, None], tokens, 0).astype(jnp.int32)
    return (kept * weights(positions)).sum(axis=1) % VOCAB


def stored(tokens: Array) -> Rows:
    """Tokens [B, T] as K/V rows of one layer, a head of one."""
    row = tokens.astype(jnp.float32)[..., None, None, None]
    return Rows(kv=(jnp.stack([row, row], axis=3),))


def next_token(params: Any, total: Array, positions: Array) -> Array:
    """What stands at ``positions`` behind tokens with the checksum ``total``."""
    return (params["script"][positions] + params["mix"] * (total + 5 * positions)) % VOCAB


def logits_of(params: Any, token: Array) -> Array:
    """Logits [..., V] that have their peak at a token, and neighbours on both sides, round the end."""
    away = jnp.abs(jnp.arange(VOCAB) - token[..., None])
    return -params["sharpness"] * jnp.square(jnp.minimum(away, VOCAB - away).astype(jnp.float32))


class DrafterModule:
    """Meets ``drafters.interface.Drafter``."""

    def cache_shape(self, cfg: ChecksumDrafter) -> tuple[int, int, int]:
        return 1, 1, 1

    def with_block(self, cfg: ChecksumDrafter, block: int) -> ChecksumDrafter:
        return replace(cfg, block_size=block)

    def extend(
        self, params: Any, io: TargetIO, cfg: Any, features: Array, tokens: Array, valid: Array, view: View, carry: Any
    ) -> tuple[Rows, Any]:
        return stored(tokens), carry

    def draft(
        self, params: Any, io: TargetIO, cfg: Any, anchor: Array, lengths: Array, view: View, carry: Any, draw: Draw
    ) -> Array:
        def step(state: tuple[Array, Array], at: Array) -> tuple[tuple[Array, Array], Array]:
            token, total = state
            total = (total + token * weights(lengths + at)) % VOCAB
            positions = lengths + at + 1
            logits = logits_of(params, next_token(params, total, positions))
            token = draw(logits[:, None], positions[:, None])[:, 0]
            wrong = (params["period"] > 0) & (positions % jnp.maximum(params["period"], 1) == 0)
            return (token, total), jnp.where(wrong, (token + 1) % VOCAB, token)

        _, drafts = lax.scan(step, (anchor, cached_sum(view)), jnp.arange(cfg.block_size - 1))
        return jnp.concatenate([anchor[:, None], drafts.T.astype(jnp.int32)], axis=1)


class TargetModule:
    """A target of one layer whose final hidden state is the next token."""

    def cache_shape(self, cfg: ChecksumTarget) -> tuple[int, int, int]:
        return 1, 1, 1

    def state_shape(self, cfg: ChecksumTarget) -> Delta:
        return Delta()

    def embed(self, params: Any, cfg: ChecksumTarget, tokens: Array) -> Array:
        return jnp.zeros((*tokens.shape, 1))

    def head(self, params: Any, cfg: ChecksumTarget, final: Array) -> Array:
        return logits_of(params, final[..., 0])

    def forward(
        self, params: Any, cfg: Any, tokens: Array, positions: Array, valid: Array, view: View, rule: Any
    ) -> Hidden:
        total = cached_sum(view)[:, None] + jnp.cumsum(tokens * weights(positions), axis=1)
        final = next_token(params, total % VOCAB, positions + 1)[..., None].astype(jnp.float32)
        return Hidden(final=final, features=jnp.zeros((*tokens.shape, 0)), rows=stored(tokens))


drafters.IMPLEMENTATIONS[ChecksumDrafter] = DrafterModule()
targets.IMPLEMENTATIONS[ChecksumTarget] = TargetModule()


def checksum_pair(
    mesh: Mesh, period: int = 3, script: Sequence[int] | None = None, sharpness: float = 0.02, block: int = 16
) -> Pair:
    """``script``: the text by position, whatever stands before; default: the checksum rule."""
    text = np.zeros(LONGEST, np.int32)
    if script is not None:
        text[: len(script)] = script
    rule = {"script": text, "mix": np.int32(script is None), "sharpness": np.float32(sharpness)}
    params = ModelParams(rule | {"embed": np.zeros((VOCAB, 1), np.float32)}, rule | {"period": np.int32(period)})
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    return Pair(placed, Model(ChecksumTarget(), ChecksumDrafter(block), "reference"), mesh)


@dataclass
class Garage:
    """Builds engines; those of the same model and sizes share their compiled steps, since most of a test is XLA's."""

    compiled: dict[Any, dict[DecodeShape | PrefillShape, Compiled]] = field(default_factory=dict)
    pages: dict[int, int] = field(default_factory=dict)  # id of an engine -> pages that it may use

    def engine(
        self,
        pair: Pair,
        max_model_len: int,
        accept: Accept = verify.equality,
        policy: BlockPolicy | None = None,
        drafter: bool = True,
        top_logprobs: int = 0,
        kept: int | None = None,
        **options: Any,
    ) -> Engine:
        """An idle engine; ``options``: of ``EngineConfig``; kept: tokens' worth of pages that are left in its pool, so
        that small pools need no steps of their own."""
        params, model = (pair.params, pair.model) if drafter else pair.alone
        model = replace(model, top_logprobs=top_logprobs)
        config = EngineConfig(**{"max_num_seqs": 4, "prefill_chunk": 64} | options)
        engine = build_engine(params, model, pair.mesh, config, max_model_len, accept, policy)
        shapes = engine.runner.shapes
        key = (model, accept, engine.runner.pages, shapes.max_rows, shapes.max_pages, shapes.page_size)
        steps = engine.runner.steps = self.compiled.setdefault(key, {})
        shapes.ready |= {s for s in steps if isinstance(s, DecodeShape) or (s.rows, s.chunk) in shapes.pieces}
        pool = engine.scheduler.pool
        if kept is not None:
            pool.take(pool.free - -(-kept // shapes.page_size))
        self.pages[id(engine)] = pool.free
        return engine

    def run(
        self, engine: Engine, requests: Sequence[Request], each: Callable[[int], None] = lambda _: None
    ) -> list[Request]:
        """Runs requests to their end; ``each`` is called before every step. All pages must have come back."""
        for request in requests:
            engine.add(request)
        steps = 0
        while engine.busy:
            each(steps)
            engine.step()
            steps += 1
            assert steps < 100_000, "the engine does not come to an end"
        self.balanced(engine)
        return list(requests)

    def balanced(self, engine: Engine) -> None:
        """Every page of an idle engine is free or in the tree."""
        scheduler = engine.scheduler
        cached = scheduler.tree.pages if scheduler.tree else 0
        assert scheduler.pool.free + cached == self.pages[id(engine)]
        assert len(scheduler.slots) == scheduler.shapes.max_rows
        if scheduler.tree:
            scheduler.tree.check()
            assert scheduler.tree.idle == cached


def request_of(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
    stop_ids: Sequence[int] = (),
    room: int = 1 << 30,
    detokenizer: Detokenizer | None = None,
    priority: int = 0,
) -> Request:
    """A request as ``LLM`` makes them."""
    return Request(
        index=index,
        sample=0,
        prompt=tuple(prompt),
        params=params,
        key=row_key(params.seed or 0, 0),
        limit=min(params.max_tokens or room, room),
        stop_ids=frozenset(stop_ids) | frozenset(params.stop_token_ids),
        detokenizer=detokenizer,
        priority=priority,
    )


def generated(pair: Pair, request: Request, block: int, drafter: bool = True) -> Generation:
    """The same request by ``dflash_jax.generate``."""
    return generated_all(pair, [request], block, drafter)[0]


def generated_all(
    pair: Pair, requests: Sequence[Request], block: int, drafter: bool = True, page: int = 512
) -> list[Generation]:
    """Requests by ``dflash_jax.generate`` in batches of eight, each cut at its end; a page a row: one shape for all."""
    params, model = (pair.params, pair.model) if drafter else pair.alone
    rows: list[Generation] = []
    for start in range(0, len(requests), 8):
        batch = list(requests[start : start + 8])
        batch += [batch[-1]] * (8 - len(batch))
        each = [request.params for request in batch]
        sampling = row_sampling(
            8,
            temperature=[p.temperature for p in each],
            top_k=[p.top_k for p in each],
            top_p=[p.top_p for p in each],
            min_p=[p.min_p for p in each],
            seed=[p.seed or 0 for p in each],
        )
        longest = max(request.limit for request in batch)
        made = generate(
            params,
            model,
            [list(request.prompt) for request in batch],
            longest,
            mesh=pair.mesh,
            block_size=block,
            sampling=sampling,
            page=page,
        )
        rows += [cut(g, request) for g, request in zip(made, batch, strict=True)]
    return rows[: len(requests)]


def cut(long: Generation, request: Request) -> Generation:
    """A generation as it would have ended under the request's limit and stop ids."""
    ends = (i + 1 for i, token in enumerate(long.tokens) if token in request.stop_ids)
    end = min(next(ends, request.limit), request.limit)
    rounds, emitted = [], 1
    for count in long.acceptance_lengths:
        if emitted >= end:
            break
        rounds.append(count)
        emitted += count
    return Generation(long.tokens[:end], long.logprobs[:end], rounds)


def same(request: Request, wanted: Generation) -> None:
    """A request ended as ``generate`` says, rounds included."""
    assert request.output == wanted.tokens
    assert request.acceptance_lengths == wanted.acceptance_lengths
