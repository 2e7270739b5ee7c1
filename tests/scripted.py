"""Models whose tokens are written down in advance, to test the step without caring for weights.

A script is int32 [slots], looked up through the page table: what ``script_of`` writes for a row at a position is what
that row gets there. Importing this module makes the step know both models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from dflash_jax import drafters, targets
from dflash_jax.cache import Delta, Rows, View
from dflash_jax.drafters import TargetIO
from dflash_jax.drafters.interface import Draw
from dflash_jax.targets import Hidden


@dataclass(frozen=True)
class ScriptedDrafter:
    """The config of a drafter that drafts its script, or, a ``twin``, draws as a target with that script would."""

    block_size: int
    max_position_embeddings: int = 1 << 20
    twin: bool = False


@dataclass(frozen=True)
class ScriptedTarget:
    """The config of a target that continues every text with its script, or near it where ``sharpness`` is small."""

    sharpness: float = 10.0
    vocab_size: int = 64
    vocab_rows: int = 64
    max_position_embeddings: int = 1 << 20
    target_layer_ids: tuple[int, ...] = ()


def script_of(texts: Sequence[Sequence[int]], longest: int, page: int) -> NDArray:
    """The script of rows with pages in order, ``longest`` tokens in whole pages each: position i gets texts[row][i]."""
    script = np.zeros((len(texts), -(-longest // page) * page), np.int32)
    for row, text in enumerate(texts):
        script[row, : len(text)] = text[: script.shape[1]]
    return script.reshape(-1)


def lookup(script: Array, view: View, positions: Array) -> Array:
    """What the script says for positions int32 [B, T]."""
    page = view.kv.page
    column = jnp.clip(positions // page, 0, view.table.shape[1] - 1)
    return script[jnp.take_along_axis(view.table, column, axis=1) * page + positions % page]


class DrafterModule:
    """Meets ``drafters.interface.Drafter``; caches nothing."""

    def cache_shape(self, cfg: ScriptedDrafter) -> tuple[int, int, int]:
        return 0, 1, 1

    def carry_width(self, cfg: ScriptedDrafter) -> int:
        return 0

    def reads(self, cfg: ScriptedDrafter, hidden: Hidden) -> Array:
        return hidden.features

    def with_block(self, cfg: ScriptedDrafter, block: int) -> ScriptedDrafter:
        return replace(cfg, block_size=block)

    def extend(
        self, params: Any, io: TargetIO, cfg: Any, features: Array, tokens: Array, valid: Array, view: View, carry: Any
    ) -> tuple[Rows, Any]:
        return Rows(kv=()), carry

    def draft(
        self, params: Any, io: TargetIO, cfg: Any, anchor: Array, lengths: Array, view: View, carry: Any, draw: Draw
    ) -> Array:
        positions = view.positions(cfg.block_size)[:, 1:]
        drafts = lookup(params["script"], view, positions)
        if cfg.twin:
            drafts = draw(io.head(drafts[..., None].astype(jnp.float32)), positions)
        return jnp.concatenate([anchor[:, None], drafts], axis=1)


class TargetModule:
    """A target without layers: its final hidden state is the next id of the script."""

    def cache_shape(self, cfg: ScriptedTarget) -> tuple[int, int, int]:
        return 0, 1, 1

    def state_shape(self, cfg: ScriptedTarget) -> Delta:
        return Delta()

    def embed(self, params: Any, cfg: ScriptedTarget, tokens: Array) -> Array:
        return jnp.zeros((*tokens.shape, 1))

    def head(self, params: Any, cfg: ScriptedTarget, final: Array) -> Array:
        return -cfg.sharpness * jnp.square(jnp.arange(cfg.vocab_size) - final)

    def forward(
        self, params: Any, cfg: Any, tokens: Array, positions: Array, valid: Array, view: View, rule: Any
    ) -> Hidden:
        final = lookup(params["script"], view, positions + 1)[..., None].astype(jnp.float32)
        return Hidden(final=final, features=jnp.zeros((*tokens.shape, 0)), rows=Rows(kv=()))


drafters.IMPLEMENTATIONS[ScriptedDrafter] = DrafterModule()
targets.IMPLEMENTATIONS[ScriptedTarget] = TargetModule()
