"""The least time that a step can take: the bytes that it must move, or the products that it must form.

A step has two phases, one after the other: the drafter's and the target's. Each must read its weights and the K/V of
every row's context once, and multiply every weight with every token; the slower of the two is its floor. A drafter
reads the target's head again. Rows of the embedding, activations and the products of attention count as nothing, so a
floor errs on the low side. The method is that of the project's table of floors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.params import flatten, leaves_of


@dataclass(frozen=True)
class Phase:
    """What one model of a step must move (bytes) and compute (floating-point operations)."""

    name: str
    bytes: float
    flops: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The floor at a device's bytes and operations per second."""
        return max(self.bytes / bandwidth, self.flops / rate)

    def bound(self, bandwidth: float, rate: float) -> str:
        """Which of the two it is."""
        return "bytes" if self.bytes / bandwidth >= self.flops / rate else "FLOPs"


def floor_of(phases: Sequence[Phase], bandwidth: float, rate: float) -> float:
    """Seconds of phases that follow each other."""
    return sum(phase.seconds(bandwidth, rate) for phase in phases)


def weights_of(cfg: TargetConfig | DrafterConfig, names: Sequence[str] = ()) -> int:
    """Weights that every token meets, the embedding and the head apart; of the top level only ``names`` where given."""
    flat: dict[str, Any] = flatten(leaves_of(cfg))
    tops = {path: path.split(".")[0] for path in flat}
    return sum(
        math.prod(leaf.shape)
        for path, leaf in flat.items()
        if tops[path] not in ("embed", "head") and (not names or tops[path] in names)
    )


def head_of(cfg: TargetConfig) -> int:
    """Weights of the head, the embedding's own where they are tied."""
    return cfg.vocab_rows * cfg.hidden_size


def kv_values(cfg: TargetConfig | DrafterConfig) -> int:
    """Numbers that a cached token has in all layers."""
    return cfg.num_hidden_layers * 2 * cfg.num_key_value_heads * cfg.head_dim


def context_weights(cfg: DrafterConfig) -> int:
    """Weights behind KV injection: features -> context -> K and V of every layer."""
    return weights_of(cfg, ("fc", "hidden_norm")) + cfg.hidden_size * kv_values(cfg)


def decode_phases(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    rows: int,
    block: int,
    context: float,
    kept: float,
    itemsize: int,
) -> list[Phase]:
    """A decode step of rows x block tokens behind ``context`` cached ones, of which ``kept`` a row are written.

    The drafter's K and V weights count once, although injection reads a copy of its own: no arithmetic needs two.
    """
    tokens = rows * block
    phases = []
    if drafter is not None and block > 1:
        weights = weights_of(drafter) + head_of(target)
        moved = weights + rows * (context + kept) * kv_values(drafter)
        phases.append(Phase("draft", moved * itemsize, 2.0 * weights * tokens))
    weights = weights_of(target) + head_of(target)
    moved = weights + rows * (context + kept) * kv_values(target)
    return [*phases, Phase("verify", moved * itemsize, 2.0 * weights * tokens)]


def prefill_phases(
    target: TargetConfig, drafter: DrafterConfig | None, rows: int, chunk: int, context: float, itemsize: int
) -> list[Phase]:
    """A chunk of prompt of every row behind ``context`` cached tokens: the head serves a row's last token only."""
    tokens = rows * chunk
    weights, head = weights_of(target), head_of(target)
    moved = weights + head + rows * (context + chunk) * kv_values(target)
    phases = [Phase("prefill", moved * itemsize, 2.0 * (weights * tokens + head * rows))]
    if drafter is not None:
        weights = context_weights(drafter)
        moved = weights + tokens * kv_values(drafter)
        phases.append(Phase("inject", moved * itemsize, 2.0 * weights * tokens))
    return phases
