"""Paged K/V: the pool of one model, what a step may read of it, and the rows on their way into it; and the states of
recurrent layers, which stand in slots beside it.

Both models' pools share page ids and lengths: a position that is valid in one is valid in the other. A
rejected draft leaves no trace because its rows are never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from dflash_jax.sharding import sharding_of
from pallas_kernels import block_attention, fold_delta, gated_delta, inject_kv
from pallas_kernels import resolve as resolve  # for what stands above this package
from pallas_kernels.gated_delta import CHUNK as CHUNK  # the longest block of which a prefix can be kept
from pallas_kernels.gated_delta import Record as DeltaRecord
from pallas_kernels.inject_kv import Finish


class PagedKV(struct.PyTreeNode):
    """The K/V pool of one model: per layer k and v [slots, G, H], token-major; slots = pages * page."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    page: int = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """Slots of the pool; also the sentinel slot that drops a row."""
        return int(self.k[0].shape[0]) if self.k else 0


@dataclass(frozen=True)
class Delta:
    """The recurrent state of a row of a model: ``layers`` gated delta nets, ``groups`` key heads of ``key`` dimensions
    and ``heads`` value heads of ``value`` each, behind a causal convolution of ``kernel`` rows."""

    layers: int = 0
    groups: int = 1
    heads: int = 1
    key: int = 0
    value: int = 0
    kernel: int = 1

    @property
    def channels(self) -> int:
        """Convolved channels of a key head: its query, its key, the values of its heads."""
        return 2 * self.key + self.heads // self.groups * self.value


class Recurrent(struct.PyTreeNode):
    """The states of all rows in S slots, a layer each: conv [S, kernel - 1, G, channels], the last raw rows before the
    convolution; delta float32 [S, N, K, V]. A row of length 0 is in the zero state, whatever its slot holds."""

    conv: tuple[Array, ...]
    delta: tuple[Array, ...]


class Record(struct.PyTreeNode):
    """What a recurrent layer needs to keep a prefix of a block: raw [B, T, G, channels], and what is folded."""

    raw: Array
    delta: DeltaRecord


class View(struct.PyTreeNode):
    """What one step may read: the pool through a page table int32 [B, P], up to lengths int32 [B]; and the recurrent
    states (None: the model has none) of the slots int32 [B].

    held: K/V [B, S, 2, G, H] of each layer behind the cached ones that will not be cached, as a drafter's own guesses
    (none: ()). since: positions below are never seen.
    """

    kv: PagedKV
    table: Array
    lengths: Array
    kernels: str = struct.field(pytree_node=False)
    recurrent: Recurrent | None = None
    slots: Array | None = None
    held: tuple[Array, ...] = ()
    since: int = struct.field(pytree_node=False, default=0)

    def positions(self, block: int) -> Array:
        """Absolute positions int32 [B, T] of a block that follows the cached tokens and those held."""
        return self.lengths[:, None] + jnp.arange(self.holding, self.holding + block, dtype=jnp.int32)

    @property
    def holding(self) -> int:
        """Rows held."""
        return int(self.held[0].shape[1]) if self.held else 0

    def hold(self, rows: Sequence[Array]) -> "View":
        """The view with K/V [B, t, 2, G, H] of each layer behind what is held."""
        held = self.held or tuple(kv[:, :0] for kv in rows)
        return self.replace(held=tuple(jnp.concatenate(pair, axis=1) for pair in zip(held, rows, strict=True)))


class Rows(struct.PyTreeNode):
    """K/V of a block, not yet in the pool.

    kv: arrays [B, T, l, 2, G, H] whose l add up to the model's layers, in order: one write a group, so that a drafter
    whose projection makes all layers at once injects them in one launch. finish: what the keys of every group still
    need, with cos and sin [B, T, H / 2] (None: keys are normed and rotated).
    """

    kv: tuple[Array, ...]
    finish: Finish | None = None


def empty(layers: int, slots: int, page: int, kv_heads: int, head_dim: int, dtype: jnp.dtype, mesh: Mesh) -> PagedKV:
    """A zeroed pool of ``slots`` tokens on the mesh, heads split over its model axis."""
    shape = (slots, kv_heads, head_dim)
    place = sharding_of(("slots", "kv_heads", "head"), shape, mesh)

    def pool() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype, device=place) for _ in range(layers))

    return PagedKV(k=pool(), v=pool(), page=page)


def no_states(shape: Delta, slots: int, dtype: jnp.dtype, mesh: Mesh | None = None) -> Recurrent:
    """Zero states in ``slots`` slots, heads split over the mesh's model axis."""

    def layers(axes: tuple[str, ...], sizes: tuple[int, ...], dtype: jnp.dtype) -> tuple[Array, ...]:
        place = mesh and sharding_of(axes, sizes, mesh)
        return tuple(jnp.zeros(sizes, dtype, device=place) for _ in range(shape.layers))

    conv = (slots, shape.kernel - 1, shape.groups, shape.channels)
    delta = (slots, shape.heads, shape.key, shape.value)
    return Recurrent(
        conv=layers(("slots", "kernel", "key_heads", "head"), conv, dtype),
        delta=layers(("slots", "value_heads", "head", "head"), delta, jnp.dtype(jnp.float32)),
    )


def slots_of(kv: PagedKV, table: Array, positions: Array, keep: Array) -> Array:
    """Slots int32 [B, T] of positions [B, T]; rows that are not kept (bool [B, T]) get the sentinel."""
    column = jnp.clip(positions // kv.page, 0, table.shape[1] - 1)
    slots = jnp.take_along_axis(table, column, axis=1) * kv.page + positions % kv.page
    inside = keep & (positions < table.shape[1] * kv.page)
    return jnp.where(inside, slots, kv.slots).astype(jnp.int32)


def attend(
    view: View,
    layer: int,
    q: Array,
    kv: Array,
    positions: Array,
    valid: Array,
    causal: bool | Array,
    window: int | None,
    sinks: Array | None = None,
) -> Array:
    """Attention of block queries [B, T, N, H] over the layer's pages, its rows held and the block's own kv
    [B, T, 2, G, H].

    sinks: [N] scores that take part in the softmax and have no value.
    """
    if view.held:
        kv = jnp.concatenate([view.held[layer], kv], axis=1)
        held = view.lengths[:, None] + jnp.arange(view.holding, dtype=jnp.int32)
        positions, valid = jnp.concatenate([held, positions], axis=1), valid + view.holding
    return block_attention(
        q,
        kv,
        view.kv.k[layer],
        view.kv.v[layer],
        view.table,
        view.lengths,
        valid,
        positions,
        page=view.kv.page,
        causal=causal,
        window=window,
        since=view.since,
        sinks=sinks,
        implementation=view.kernels,
    )


def commit(cache: PagedKV, rows: Rows, slots: Array, kernels: str = "reference") -> PagedKV:
    """Writes rows [B, T] to explicit slots int32 [B, T]; the sentinel ``cache.slots`` drops a row."""
    flat = slots.reshape(-1)
    finish = rows.finish
    if finish is not None:
        finish = finish._replace(cos=finish.cos.reshape(flat.size, -1), sin=finish.sin.reshape(flat.size, -1))
    groups = [kv.reshape(flat.size, *kv.shape[2:]) for kv in rows.kv]
    written = inject_kv(list(zip(cache.k, cache.v, strict=True)), groups, flat, finish, implementation=kernels)
    return cache.replace(k=tuple(k for k, _ in written), v=tuple(v for _, v in written))


def states_of(view: View) -> tuple[Recurrent, Array, Array]:
    """The states that a view reads, their slots int32 [B], and which rows have one yet (bool [B])."""
    if view.recurrent is None or view.slots is None:
        raise ValueError("the model has recurrent layers, and the view holds no states")
    return view.recurrent, view.slots, view.lengths > 0


def recent(view: View, layer: int) -> Array:
    """The raw rows [B, kernel - 1, G, channels] before a block."""
    recurrent, slots, started = states_of(view)
    return latest(recurrent.conv[layer], slots, started)


def latest(conv: Array, slots: Array, started: Array) -> Array:
    """The rows of slots; zero where nothing has started."""
    return jnp.where(started[:, None, None, None], conv.at[slots].get(mode="clip"), 0)


def delta_rule(
    view: View, layer: int, q: Array, k: Array, v: Array, beta: Array, decay: Array
) -> tuple[Array, DeltaRecord]:
    """The gated delta rule of a block behind the layer's states, which stay as they are: see ``gated_delta``."""
    recurrent, slots, started = states_of(view)
    states = recurrent.delta[layer]
    return gated_delta(q, k, v, beta, decay, states, slots, started, implementation=view.kernels)


def fold(view: View, records: tuple[Record, ...], slots: Array, count: Array) -> Recurrent:
    """The states that the view has read, with the first ``count`` int32 [B] rows of its block folded in, in ``slots``
    int32 [B]. A row without any stays as it is."""
    if not records:
        return Recurrent((), ())
    recurrent, source, started = states_of(view)
    conv, delta = [], []
    for held, states, record in zip(recurrent.conv, recurrent.delta, records, strict=True):
        rows = jnp.concatenate([latest(held, source, started), record.raw.astype(held.dtype)], axis=1)
        kept = count[:, None] + jnp.arange(held.shape[1])
        rows = jnp.take_along_axis(rows, kept[..., None, None], axis=1)
        where = jnp.where(count > 0, slots, held.shape[0])
        conv.append(held.at[where].set(rows, mode="drop"))
        delta.append(fold_delta(states, source, started, slots, record.delta, count, implementation=view.kernels))
    return Recurrent(tuple(conv), tuple(delta))


def copied(recurrent: Recurrent, source: Array, into: Array) -> Recurrent:
    """The states with those of slots ``source`` int32 [B] in slots ``into`` int32 [B] too; out of range: not.

    Most steps copy nothing: then no state is read.
    """

    def copy(recurrent: Recurrent) -> Recurrent:
        return jax.tree.map(lambda held: held.at[into].set(held.at[source].get(mode="clip"), mode="drop"), recurrent)

    if not recurrent.delta:
        return recurrent
    return jax.lax.cond((into < recurrent.delta[0].shape[0]).any(), copy, lambda same: same, recurrent)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree, over all devices once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
