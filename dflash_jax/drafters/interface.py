"""What a drafter offers to the step, and what it may borrow from the target."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Rows, View
from dflash_jax.targets.hidden import Hidden

# draw(logits float32 [B, t, V], positions int32 [B, t]) -> token ids int32 [B, t]: the verifier's own draw.
Draw = Callable[[Array, Array], Array]


class TargetIO(NamedTuple):
    """What a drafter borrows: ``embed(tokens) -> [..., D]`` and ``head(final) -> float32 [..., V]``."""

    embed: Callable[[Array], Array]
    head: Callable[[Array], Array]


def over_target_ids(logits: Array, d2t: Array, vocab_size: int) -> Array:
    """Logits [..., Vd] of a reduced vocabulary -> [..., V], -inf where it has no id; target id = draft id + d2t."""
    full = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return full.at[..., jnp.arange(d2t.shape[0]) + d2t].set(logits)


class Drafter(Protocol):
    """A drafter module. ``cfg`` is its config, ``carry`` what it keeps a row beside its pages (DFlash: nothing).

    A carry belongs to a position as K/V does: it is a function of the tokens up to there. The step keeps that of each
    row's last token and that of every page's last token, so that a cached prefix brings it along.
    """

    def cache_shape(self, cfg: Any) -> tuple[int, int, int]:
        """(layers, KV heads, head_dim) of its paged K/V."""

    def carry_width(self, cfg: Any) -> int:
        """Values of a row's carry, in the model's dtype; 0: there is none, and carries are ()."""

    def reads(self, cfg: Any, hidden: Hidden) -> Array:
        """The features [B, T, F] that ``extend`` wants of a target's pass."""

    def with_block(self, cfg: Any, block: int) -> Any:
        """The config that drafts blocks of ``block`` tokens."""

    def extend(
        self,
        params: Any,
        target_io: TargetIO,
        cfg: Any,
        features: Array,
        tokens: Array,
        valid: Array,
        view: View,
        carry: Any,
    ) -> tuple[Rows, Any]:
        """Rows to write for features [B, T, F] and tokens [B, T] behind the cached ones, and the carries [B, T, C]
        after each of them, given the ``carry`` [B, C] before the first."""

    def draft(
        self,
        params: Any,
        target_io: TargetIO,
        cfg: Any,
        anchor: Array,
        lengths: Array,
        view: View,
        carry: Any,
        draw: Draw,
    ) -> Array:
        """A block int32 [B, T] that starts with the anchor [B] at positions lengths [B]; carry [B, C] is that of the
        token before the anchor."""
