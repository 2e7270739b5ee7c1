"""The method. ``decode_step`` is one draft-verify cycle: draft, verify, accept, commit.

``lengths`` is the only truth about what is in both caches: a rejected draft is a number that did not grow. A row's
``anchor`` is its last token, drawn but not yet processed: it opens the next block. A block of one token is plain
decoding.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax import cache, drafters, sampling, targets, verify
from dflash_jax.cache import PagedKV, Recurrent, View
from dflash_jax.config import AnyDrafterConfig, TargetConfig
from dflash_jax.drafters import TargetIO
from dflash_jax.sampling import HostArray, RowSampling
from dflash_jax.verify import Accept


@dataclass(frozen=True)
class Model:
    """The static half of a model pair: configs, kernels' implementation, how many top logprobs a step returns."""

    target: TargetConfig
    drafter: AnyDrafterConfig | None
    kernels: str
    top_logprobs: int = 0

    @property
    def recurrent(self) -> bool:
        """Whether the target keeps a state that only exists where a row stands: pages alone do not restore it."""
        return targets.of(self.target).state_shape(self.target).layers > 0


class ModelParams(struct.PyTreeNode):
    """Packed parameters of target and drafter (None without one)."""

    target: Any
    drafter: Any = None


class StepState(struct.PyTreeNode):
    """What the device keeps between steps; donated to every step.

    R row slots: lengths int32 [R] tokens in both caches, anchor int32 [R]; carry [R, C] is the drafter's after each
    row's last token, carry_pages [pages, C] that after each page's last token (DFlash: both ());
    recurrent the states of the target's recurrent layers, the first R slots being the rows'.
    """

    target: PagedKV
    drafter: PagedKV | None
    lengths: Array
    anchor: Array
    recurrent: Recurrent
    carry: Any = ()
    carry_pages: Any = ()


class StepInputs(struct.PyTreeNode):
    """One decode step as the host plans it: numpy arrays.

    rows int32 [B] row slots (R marks padding), table int32 [B, P] page ids, valid int32 [B] (0: padding), width int32
    [B] how much of the block each row may use, 1 .. T, sampling. logprobs: bool [], whether a row wants the top
    logprobs of this step; they are zeros otherwise.
    """

    rows: HostArray
    table: HostArray
    valid: HostArray
    width: HostArray
    sampling: RowSampling
    logprobs: HostArray = True


class PrefillInputs(struct.PyTreeNode):
    """One chunk of prompt: tokens int32 [B, C] of which valid [B] exist, behind start [B] tokens already cached.

    anchor: int32 [B] or [], the token that is known to follow (a row that was preempted comes back), -1: draw it.
    source: int32 [B], the slots of recurrent states to begin from (None: the rows' own), as a prefix's snapshot. save:
    int32 [B], slots that get the states behind the chunk too (None: none; out of range: none for this row).
    """

    rows: HostArray
    table: HostArray
    tokens: HostArray
    start: HostArray
    valid: HostArray
    sampling: RowSampling
    anchor: HostArray = -1
    logprobs: HostArray = True
    source: HostArray | None = None
    save: HostArray | None = None


class StepOutput(struct.PyTreeNode):
    """tokens int32 [B, T], of which count int32 [B] are emitted; logprob float32 [B, T] under the plain softmax; finite
    bool [B]; top_tokens and top_logprob [B, T, k] where the model asks for k top logprobs (else k = 0)."""

    tokens: Array
    count: Array
    logprob: Array
    finite: Array
    top_tokens: Array
    top_logprob: Array


def new_state(
    model: Model, rows: int, pages: int, page: int, dtype: jnp.dtype, mesh: Mesh, snapshots: int = 0
) -> StepState:
    """Empty caches of ``pages`` pages of ``page`` tokens for both models, ``rows`` idle rows, and room for
    ``snapshots`` of recurrent states in the slots behind the rows'."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def pool(implementation: Any, cfg: Any) -> PagedKV:
        layers, kv_heads, head_dim = implementation.cache_shape(cfg)
        return cache.empty(layers, pages * page, page, kv_heads, head_dim, dtype, mesh)

    width = 0 if model.drafter is None else drafters.of(model.drafter).carry_width(model.drafter)

    def carries(count: int) -> Any:
        return jnp.zeros((count, width), dtype, device=replicated) if width else ()

    return StepState(
        target=pool(targets.of(model.target), model.target),
        drafter=None if model.drafter is None else pool(drafters.of(model.drafter), model.drafter),
        lengths=jnp.zeros((rows,), jnp.int32, device=replicated),
        anchor=jnp.zeros((rows,), jnp.int32, device=replicated),
        carry=carries(rows),
        carry_pages=carries(pages),
        recurrent=cache.no_states(targets.of(model.target).state_shape(model.target), rows + snapshots, dtype, mesh),
    )


def block_of(drafter: AnyDrafterConfig | None, block_size: int | None) -> int:
    """The block size to decode with: ``block_size``, or the drafter's trained size, or 1 without a drafter.

    Raises ValueError for a block without a drafter; warns once above the trained size.
    """
    trained = drafter.block_size if drafter is not None else 1
    if block_size is None:
        return trained
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if drafter is None and block_size > 1:
        raise ValueError(f"block_size {block_size} needs a drafter; without one only 1 exists")
    if block_size > trained:
        warnings.warn(f"block_size {block_size} is above the {trained} that the drafter was trained with", stacklevel=3)
    return block_size


@partial(jax.jit, static_argnames=("model", "block", "accept"), donate_argnames="state")
def decode_step(
    params: ModelParams,
    model: Model,
    block: int,
    state: StepState,
    inputs: StepInputs,
    accept: Accept = verify.equality,
) -> tuple[StepState, StepOutput]:
    """Draft ``block`` tokens (the anchor included), verify them in one causal pass, keep the longest confirmed prefix
    plus the target's next token. Emits count = accepted + 1 tokens a row."""
    if model.recurrent and block > cache.CHUNK:
        raise ValueError(f"a block of {block} tokens: a target with recurrent layers verifies at most {cache.CHUNK}")
    lengths = state.lengths.at[inputs.rows].get(mode="fill", fill_value=0)
    anchor = state.anchor.at[inputs.rows].get(mode="fill", fill_value=0)
    width = jnp.where(inputs.valid > 0, usable(model, block, lengths, inputs.width), 0)
    view = view_of(model, state, inputs, lengths)
    positions = view.positions(block)
    target = targets.of(model.target)

    tokens = draft(params, model, block, state, inputs, anchor, lengths)
    hidden = target.forward(params.target, model.target, tokens, positions, width, view, True)
    logits = target.head(params.target, model.target, hidden.final)
    draws = sampling.draw(logits, inputs.sampling, positions + 1)

    accepted = accept(tokens, draws, width)
    count = jnp.where(width > 0, accepted + 1, 0)
    emitted = jnp.arange(block) < count[:, None]
    state = commit(params, model, state, inputs, hidden, tokens, positions, emitted, lengths)
    last = jnp.take_along_axis(draws, accepted[:, None], axis=1)[:, 0]
    state = advance(state, inputs.rows, lengths + count, last)
    return state, output(model, logits, draws, count, emitted, inputs.logprobs)


@partial(jax.jit, static_argnames="model", donate_argnames="state")
def prefill_step(
    params: ModelParams, model: Model, state: StepState, inputs: PrefillInputs
) -> tuple[StepState, StepOutput]:
    """Process one chunk of each row's prompt for both models and draw the token after it.

    The draw becomes the row's anchor; it is the first output token after the last chunk and meaningless before it.
    """
    view = view_of(model, state, inputs, inputs.start)
    positions = view.positions(inputs.tokens.shape[1])
    target = targets.of(model.target)

    hidden = target.forward(params.target, model.target, inputs.tokens, positions, inputs.valid, view, True)
    kept = jnp.arange(inputs.tokens.shape[1]) < inputs.valid[:, None]
    state = commit(params, model, state, inputs, hidden, inputs.tokens, positions, kept, inputs.start)
    if inputs.save is not None:
        state = state.replace(recurrent=cache.copied(state.recurrent, inputs.rows, inputs.save))

    last = jnp.maximum(inputs.valid - 1, 0)[:, None]
    logits = target.head(params.target, model.target, jnp.take_along_axis(hidden.final, last[..., None], axis=1))
    draws = sampling.draw(logits, inputs.sampling, jnp.take_along_axis(positions, last, axis=1) + 1)
    anchor = jnp.where(jnp.asarray(inputs.anchor) >= 0, inputs.anchor, draws[:, 0])
    state = advance(state, inputs.rows, inputs.start + inputs.valid, anchor)
    count = jnp.minimum(inputs.valid, 1)
    return state, output(model, logits, draws, count, count[:, None] > 0, inputs.logprobs)


def view_of(model: Model, state: StepState, inputs: StepInputs | PrefillInputs, lengths: Array) -> View:
    """What the target may read in a step."""
    source = inputs.source if isinstance(inputs, PrefillInputs) else None
    slots = inputs.rows if source is None else source
    return View(state.target, inputs.table, lengths, model.kernels, recurrent=state.recurrent, slots=slots)


def borrow(params: ModelParams, model: Model) -> TargetIO:
    """The target's embedding and head, for a drafter."""
    target = targets.of(model.target)
    return TargetIO(
        embed=partial(target.embed, params.target, model.target), head=partial(target.head, params.target, model.target)
    )


def usable(model: Model, block: int, lengths: Array, width: Array) -> Array:
    """How much of a block each row may use, int32 [B]: what the host allows, 1 where the drafter's positions end."""
    if model.drafter is not None:
        width = jnp.where(lengths + block <= model.drafter.max_position_embeddings, width, 1)
    return jnp.clip(width, 1, block)


def draft(
    params: ModelParams, model: Model, block: int, state: StepState, inputs: StepInputs, anchor: Array, lengths: Array
) -> Array:
    """The block int32 [B, T] to verify: the anchor alone for a block of one."""
    if block == 1:
        return anchor[:, None]
    if model.drafter is None or state.drafter is None:
        raise ValueError(f"a block of {block} tokens needs a drafter")
    drafter = drafters.of(model.drafter)
    cfg = drafter.with_block(model.drafter, block)
    view = View(state.drafter, inputs.table, lengths, model.kernels)

    def draw(logits: Array, positions: Array) -> Array:
        # The verifier's own draw, noise and filters included: a drafter with the target's logits would always be right.
        return sampling.draw(logits, inputs.sampling, positions)

    carry = carry_of(state, inputs, lengths)
    return drafter.draft(params.drafter, borrow(params, model), cfg, anchor, lengths, view, carry, draw)


def carry_of(state: StepState, inputs: StepInputs | PrefillInputs, lengths: Array) -> Any:
    """The drafter's carry [B, C] behind lengths [B] tokens: at a page's end the page's, so that a row that starts on
    cached pages finds it there; inside a page the row's own; zeros before the first token."""
    page = state.target.page
    column = jnp.clip(lengths // page - 1, 0, inputs.table.shape[1] - 1)
    last = jnp.take_along_axis(jnp.asarray(inputs.table), column[:, None], axis=1)[:, 0]

    def chosen(own: Array, pages: Array) -> Array:
        own = own.at[inputs.rows].get(mode="fill", fill_value=0)
        paged = pages.at[last].get(mode="fill", fill_value=0)
        return jnp.where((lengths > 0)[:, None], jnp.where((lengths % page == 0)[:, None], paged, own), 0)

    return jax.tree.map(chosen, state.carry, state.carry_pages)


def keep_carry(
    state: StepState, inputs: StepInputs | PrefillInputs, carries: Any, positions: Array, keep: Array
) -> StepState:
    """The state with the carries [B, T, C] after each row's last kept token (bool [B, T]) and after each page's."""
    page, last = state.target.page, keep.sum(axis=1) - 1
    rows = jnp.where(last >= 0, inputs.rows, state.lengths.shape[0])
    column = jnp.clip(positions // page, 0, inputs.table.shape[1] - 1)
    ends = keep & (positions % page == page - 1) & (positions // page < inputs.table.shape[1])

    def own(kept: Array, carries: Array) -> Array:
        final = jnp.take_along_axis(carries, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
        return kept.at[rows].set(final.astype(kept.dtype), mode="drop")

    def paged(kept: Array, carries: Array) -> Array:
        ids = jnp.where(ends, jnp.take_along_axis(jnp.asarray(inputs.table), column, axis=1), kept.shape[0])
        return kept.at[ids].set(carries.astype(kept.dtype), mode="drop")

    return state.replace(
        carry=jax.tree.map(own, state.carry, carries), carry_pages=jax.tree.map(paged, state.carry_pages, carries)
    )


def commit(
    params: ModelParams,
    model: Model,
    state: StepState,
    inputs: StepInputs | PrefillInputs,
    hidden: targets.Hidden,
    tokens: Array,
    positions: Array,
    keep: Array,
    lengths: Array,
) -> StepState:
    """Write the kept rows (bool [B, T], leading ones) of both models to the same slots; fold them into the states."""
    slots = cache.slots_of(state.target, inputs.table, positions, keep)
    # Never true, but XLA cannot know: the writes wait for the last layer. Without it, where the slots do not depend on
    # what was read (plain decoding, prefill), XLA may write first, and for that it copies the whole pool every step.
    slots = jnp.where(hidden.final[:, :1, 0] > jnp.inf, state.target.slots, slots)
    states = cache.fold(view_of(model, state, inputs, lengths), hidden.records, inputs.rows, keep.sum(axis=1))
    written = state.replace(target=cache.commit(state.target, hidden.rows, slots, model.kernels), recurrent=states)
    if model.drafter is None or state.drafter is None:
        return written
    drafter = drafters.of(model.drafter)
    view = View(state.drafter, inputs.table, lengths, model.kernels)
    rows, carries = drafter.extend(
        params.drafter,
        borrow(params, model),
        model.drafter,
        drafter.reads(model.drafter, hidden),
        tokens,
        keep.sum(axis=1),
        view,
        carry_of(state, inputs, lengths),
    )
    written = written.replace(drafter=cache.commit(state.drafter, rows, slots, model.kernels))
    return keep_carry(written, inputs, carries, positions, keep)


def advance(state: StepState, rows: Array, lengths: Array, anchor: Array) -> StepState:
    """New lengths and anchors [B] of the step's rows; padding rows drop out."""
    return state.replace(
        lengths=state.lengths.at[rows].set(lengths, mode="drop"), anchor=state.anchor.at[rows].set(anchor, mode="drop")
    )


def output(
    model: Model, logits: Array, draws: Array, count: Array, emitted: Array, logprobs: Array | bool
) -> StepOutput:
    """What the host gets of a step; ``finite`` judges the emitted positions (bool [B, T]) only."""
    logprob, finite = sampling.log_probabilities(logits, draws)
    shape = (*draws.shape, model.top_logprobs)

    def likeliest(logits: Array) -> tuple[Array, Array]:
        top, ids = jax.lax.top_k(logits, model.top_logprobs)
        return top - jax.nn.logsumexp(logits, axis=-1, keepdims=True), ids

    def none(_: Array) -> tuple[Array, Array]:
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)

    top, ids = jax.lax.cond(logprobs, likeliest, none, logits) if model.top_logprobs else none(logits)
    return StepOutput(
        tokens=draws,
        count=count,
        logprob=logprob,
        finite=(finite | ~emitted).all(axis=1),
        top_tokens=ids,
        top_logprob=top,
    )
