"""How many tokens to draft: the block follows the number of rows and what lately was accepted.

A step of more tokens costs more once it is bound by arithmetic, and a draft that is never accepted costs for nothing.
So every row count has one block size, the best at a usual acceptance, and each step asks whether drafting pays now: the
tokens that its rows can expect against what the step costs relative to a plain one. Drafting that does not pay pauses,
and is tried again later. None of this can change a token, only when it comes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

import numpy as np

Costs = Mapping[int, Mapping[int, float]]  # rows -> block -> ms a step

USUAL = 0.75  # chance that a draft is accepted which tables are made for: about 4 tokens a round at block 16
FORGET = 0.9  # weight of a row's past a round later
FORGET_ALL = 0.98  # and of all rows' past an observation, or a step of a pause, later
FEW = 4.0  # drafts: the weight of what is only assumed
TRIES = 2  # rounds of a new try
OTHERS = {"gpu": "nvidia-h200"}  # whose costs stand for kinds of a platform that nobody has measured
SHORT_PAUSE, LONG_PAUSE = 16, 128  # steps before the first and the later tries


@dataclass
class Acceptance:
    """What became of a row's drafts: confirmed of tried ones, discounted, and how long it does not draft."""

    tried: float
    confirmed: float
    rest: int = 0
    pause: int = SHORT_PAUSE

    @property
    def chance(self) -> float:
        """Estimated chance that a draft is accepted where all before it were."""
        return self.confirmed / self.tried

    def observe(self, width: int, count: int, forget: float = FORGET) -> None:
        """A round of ``width`` tokens emitted ``count``: count - 1 drafts confirmed, and one refused before the end."""
        self.fade(forget)
        self.tried += (count - 1) + (count < width)
        self.confirmed += count - 1

    def fade(self, forget: float) -> None:
        """Let what was seen so far weigh less, at the same chance."""
        self.tried *= forget
        self.confirmed *= forget

    def wait(self) -> None:
        """Stop drafting for a pause, a longer one each time."""
        self.rest, self.pause = self.pause, min(2 * self.pause, LONG_PAUSE)


def expected(chance: float, block: int) -> float:
    """Tokens that a round of ``block`` emits on average: 1 + p + p^2 + ... + p^(block - 1)."""
    return float(block) if chance >= 1 else (1 - chance**block) / (1 - chance)


@dataclass
class BlockPolicy:
    """Chooses each step's block and each row's width.

    blocks: row count -> block size, for every size of ``Shapes.rows``. cost: the same row counts -> ms of a step of
    that block over ms of a plain one. fixed: always the whole block, whatever is accepted.
    """

    blocks: Mapping[int, int]
    cost: dict[int, float]
    fixed: bool = False
    overall: Acceptance = field(default_factory=lambda: Acceptance(FEW, FEW * USUAL))

    def start(self) -> Acceptance:
        """The state of a new row: what all rows say, at the weight of a few drafts."""
        return Acceptance(FEW, FEW * self.overall.chance)

    def choose(self, rows: Sequence[Acceptance]) -> tuple[int, list[int]]:
        """The block of a step and the width of each of its rows, 1 .. block."""
        at = min(n for n in self.blocks if n >= len(rows))
        block = self.blocks[at]
        if self.fixed or block == 1:
            return block, [block] * len(rows)
        if self.overall.rest:
            self.overall.rest -= 1
            if self.overall.tried > FEW:  # a pause brings no observations, and time passes all the same
                self.overall.fade(FORGET_ALL)
            if self.overall.rest >= TRIES:
                return 1, [1] * len(rows)
            for row in rows:  # a new try, of all rows together
                row.rest = 0
            return block, [block] * len(rows)
        widths = [self.width(row, block) for row in rows]
        tokens = sum(expected(row.chance, width) for row, width in zip(rows, widths, strict=True))
        if tokens < len(rows) * self.cost[at]:
            self.overall.wait()
            return 1, [1] * len(rows)
        self.overall.pause = SHORT_PAUSE
        return block, widths

    def width(self, row: Acceptance, block: int) -> int:
        """1 for a row whose drafts are hardly ever accepted, until it tries again; else the block."""
        if row.rest:
            row.rest -= 1
            return block if row.rest < TRIES else 1
        if expected(row.chance, block) < 1.1:
            row.wait()
            return 1
        row.pause = SHORT_PAUSE
        return block

    def observe(self, row: Acceptance, width: int, count: int) -> None:
        """Learn from a row's round."""
        if width > 1:
            row.observe(width, count)
            self.overall.observe(width, count, FORGET_ALL)


def block_sizes(largest: int) -> tuple[int, ...]:
    """The blocks to choose from: the largest, its half, quarter, ..., 1."""
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def adaptive(rows: Sequence[int], largest: int, costs: Costs) -> BlockPolicy:
    """The policy for these row counts: of each, the block with the most tokens a ms at the usual acceptance."""
    blocks, cost = {}, {}
    for n in rows:
        ms = {block: interpolated(costs, n, block) for block in block_sizes(largest)}
        blocks[n] = max(ms, key=lambda block: expected(USUAL, block) / ms[block])
        cost[n] = ms[blocks[n]] / ms[1]
    return BlockPolicy(blocks, cost)


def fixed(rows: Sequence[int], block: int) -> BlockPolicy:
    """The policy that always drafts ``block`` tokens."""
    return BlockPolicy(dict.fromkeys(rows, block), dict.fromkeys(rows, 1.0), fixed=True)


def interpolated(costs: Costs, rows: int, block: int) -> float:
    """ms of a step between measured ones: linear in the block, then in the rows; beyond the last, in proportion."""
    counts = sorted(costs)
    columns = [[costs[n][b] for b in sorted(costs[n])] for n in counts]
    at_block = [float(np.interp(block, sorted(costs[n]), column)) for n, column in zip(counts, columns, strict=True)]
    return float(np.interp(rows, counts, at_block)) * max(1.0, rows / counts[-1])


def costs_of(device_kind: str, platform: str) -> Costs:
    """Step costs as ``scripts/benchmark.py tune-block`` measured them on this kind of device, else on another of its
    platform."""
    folder = resources.files("serving") / "tuned"
    for name in (device_kind, OTHERS.get(platform, platform)):
        file = folder / f"{name.lower().replace(' ', '-')}.json"
        if file.is_file():
            ms = json.loads(file.read_text(encoding="utf-8"))["ms"]
            return {int(n): {int(block): float(t) for block, t in row.items()} for n, row in ms.items()}
    raise ValueError(f"no step costs are known for the platform {platform!r}; pass block_size")
