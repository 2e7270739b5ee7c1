"""Drafters that draft token by token: what EAGLE-3 and multi-token-prediction heads share.

A row pairs the token x_p with the hidden state of the position before it and predicts x_{p+1}; it stands at slot p with
position p. So it depends on tokens <= p and features < p, as the target's row p does on tokens <= p, and one page id
addresses both; what the first row of a later step needs of the past is the ``carry``, the fused feature of the last
committed token. Slot 0 has no partner and is never seen.

Drafting feeds a head its own hidden state and token, one row at a time, and keeps none of these rows:
``extend`` writes those of the committed tokens from the target's features.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Rows, View
from dflash_jax.drafters.interface import Draw, TargetIO
from dflash_jax.targets.hidden import Hidden

Params = dict[str, Any]


class Pass(NamedTuple):
    """What rows [B, T] give: the hidden state for the row behind each and what the head reads of it, both [B, T, D];
    the residual stream after every layer, and each layer's K/V [B, T, 2, G, H]."""

    hidden: Array
    final: Array
    stream: list[Array]
    kv: list[Array]


@dataclass(frozen=True)
class Chain:
    """Meets ``interface.Drafter`` for a head that is given as functions.

    reads(cfg, hidden) -> features [B, T, F] of a target's pass.
    fuse(params, cfg, features, kernels) -> [B, T, D], the hidden state that stands for a target's features.
    rows(params, target_io, cfg, tokens, hidden, positions, valid, view, rule) -> Pass of tokens [B, T] with the hidden
    states before them [B, T, D], at positions [B, T] behind ``view``; rule as ``cache.attend`` takes it.
    scores(params, target_io, cfg, final) -> draft logits float32 [B, T, V].
    """

    reads: Callable[[Any, Hidden], Array]
    fuse: Callable[[Params, Any, Array, str], Array]
    rows: Callable[[Params, TargetIO, Any, Array, Array, Array, Array, View, bool | Array], Pass]
    scores: Callable[[Params, TargetIO, Any, Array], Array]

    def cache_shape(self, cfg: Any) -> tuple[int, int, int]:
        """(layers, KV heads, head_dim) of the paged K/V."""
        return cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim

    def carry_width(self, cfg: Any) -> int:
        """One fused feature a row."""
        return int(cfg.hidden_size)

    def with_block(self, cfg: Any, block: int) -> Any:
        """The same drafter drafting blocks of ``block`` tokens, anchor included."""
        return dataclasses.replace(cfg, block_size=block)

    def extend(
        self,
        params: Params,
        target_io: TargetIO,
        cfg: Any,
        features: Array,
        tokens: Array,
        valid: Array,
        view: View,
        carry: Array,
    ) -> tuple[Rows, Array]:
        """The rows of committed tokens: features [B, T, F] and tokens [B, T], each with the fused feature before it.

        Only K/V are kept of them, so of the last layer nothing but its projection is computed.
        """
        fused = self.fuse(params, cfg, features, view.kernels)
        before = jnp.concatenate([carry[:, None].astype(fused.dtype), fused[:, :-1]], axis=1)
        positions = view.positions(tokens.shape[1])
        out = self.rows(params, target_io, cfg, tokens, before, positions, valid, view.replace(since=1), True)
        return Rows(kv=tuple(kv[:, :, None] for kv in out.kv)), fused

    def draft(
        self,
        params: Params,
        target_io: TargetIO,
        cfg: Any,
        anchor: Array,
        lengths: Array,
        view: View,
        carry: Array,
        draw: Draw,
    ) -> Array:
        """anchor int32 [B] at positions lengths [B] -> block int32 [B, cfg.block_size]: a row and a head each draft."""
        view, one = view.replace(since=1), jnp.ones_like(lengths)
        block, hidden = [anchor[:, None]], carry[:, None]
        for _ in range(cfg.block_size - 1):
            at = view.positions(1)
            out = self.rows(params, target_io, cfg, block[-1], hidden, at, one, view, True)
            block.append(draw(self.scores(params, target_io, cfg, out.final), at + 1))
            view, hidden = view.hold(out.kv), out.hidden
        return jnp.concatenate(block, axis=1)
