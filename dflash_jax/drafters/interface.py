"""What a drafter offers to the step, and what it may borrow from the target."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from dflash_jax.cache import Rows, View

# draw(logits float32 [B, t, V], positions int32 [B, t]) -> token ids int32 [B, t]: the verifier's own draw.
Draw = Callable[[Array, Array], Array]


class TargetIO(NamedTuple):
    """What a drafter borrows: ``embed(tokens) -> [..., D]`` and ``head(final) -> float32 [..., V]``."""

    embed: Callable[[Array], Array]
    head: Callable[[Array], Array]


class Drafter(Protocol):
    """A drafter module. ``cfg`` is its config, ``carry`` what it keeps a row beside its pages (DFlash: nothing)."""

    def cache_shape(self, cfg: Any) -> tuple[int, int, int]:
        """(layers, KV heads, head_dim) of its paged K/V."""

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
        """Rows to write for features [B, T, K * Dt] and tokens [B, T] behind the cached ones, and the new carry."""

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
        """A block int32 [B, T] that starts with the anchor [B] at positions lengths [B]."""
