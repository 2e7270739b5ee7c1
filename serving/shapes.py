"""The shapes that steps are compiled for. A step takes the smallest that holds its rows, tokens and pages.

Rows and page-table widths are few sizes each, so that warm-up can compile them all. Without a warm-up the first step
compiles a shape large enough for everything in sight, and later steps reuse it rather than compile a tighter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True, order=True)
class DecodeShape:
    """rows x block tokens, page tables ``pages`` wide."""

    rows: int
    block: int
    pages: int


@dataclass(frozen=True, order=True)
class PrefillShape:
    """rows x chunk tokens, page tables ``pages`` wide."""

    rows: int
    chunk: int
    pages: int


Shape = TypeVar("Shape", DecodeShape, PrefillShape)
NARROWEST = 256  # tokens: page tables below that are not worth a shape of their own
SHORTEST_CHUNK = 32


@dataclass
class Shapes:
    """The table of shapes and which of them are compiled (``ready``).

    max_rows, max_pages: the largest step. chunk: tokens of a prefill step over all rows. page_size: tokens a page.
    narrow: whether narrow page tables pay (an implementation that gathers the whole table).
    """

    max_rows: int
    max_pages: int
    chunk: int
    page_size: int
    narrow: bool
    ready: set[DecodeShape | PrefillShape] = field(default_factory=set)

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts: powers of two, and the largest."""
        return sizes(self.max_rows, 2)

    @property
    def pages(self) -> tuple[int, ...]:
        """Page-table widths."""
        widths = sizes(self.max_pages, 4)[::-1] if self.narrow else (self.max_pages,)
        return tuple(w for i, w in enumerate(widths) if i == 0 or w * self.page_size >= NARROWEST)[::-1]

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens a row) of prefill steps: one row in three lengths, several rows that share the chunk."""
        shortest = min(SHORTEST_CHUNK, self.chunk)
        several = [(n, self.chunk // n) for n in self.rows if n == 1 or self.chunk // n >= shortest]
        return (*((1, c) for c in (self.chunk // 16, self.chunk // 4) if c >= shortest), *several)

    def all(self, blocks_of: dict[int, Sequence[int]]) -> list[DecodeShape | PrefillShape]:
        """Every shape, largest first, with the blocks that each row count decodes with."""
        decode = [DecodeShape(n, block, p) for n in self.rows for block in blocks_of[n] for p in self.pages]
        prefill = [PrefillShape(n, c, p) for n, c in self.pieces for p in self.pages]
        return sorted([*decode, *prefill], key=size, reverse=True)

    def decode(self, rows: int, block: int, pages: int, ahead: tuple[int, int]) -> DecodeShape:
        """The shape of a step of so many rows and pages; ``ahead``: the rows and pages that are coming up."""
        ready = [s for s in self.ready if isinstance(s, DecodeShape) and s.block == block]
        fits = [s for s in ready if s.rows >= rows and s.pages >= pages]
        if fits:
            return min(fits, key=size)
        return DecodeShape(at_least(self.rows, ahead[0]), block, at_least(self.pages, ahead[1]))

    def prefill(self, lengths: Sequence[int], pages: int, ahead: int) -> PrefillShape:
        """The shape that processes most of rows with ``lengths`` tokens left, the smallest among equals."""
        rows, chunk = max(self.pieces, key=lambda piece: (useful(lengths, piece), -piece[0] * piece[1]))
        fits = [
            s
            for s in self.ready
            if isinstance(s, PrefillShape) and s.rows >= rows and s.chunk >= chunk and s.pages >= pages
        ]
        return min(fits, key=size) if fits else PrefillShape(rows, chunk, at_least(self.pages, ahead))


def useful(lengths: Sequence[int], piece: tuple[int, int]) -> int:
    """Tokens that one prefill step of a shape would process."""
    rows, chunk = piece
    return sum(min(n, chunk) for n in lengths[:rows])


def size(shape: DecodeShape | PrefillShape) -> tuple[int, int]:
    """What a step of a shape costs, roughly: its tokens, then its page table."""
    tokens = shape.block if isinstance(shape, DecodeShape) else shape.chunk
    return shape.rows * tokens, shape.rows * shape.pages


def sizes(largest: int, factor: int) -> tuple[int, ...]:
    """Powers of ``factor`` below ``largest``, and ``largest``."""
    below = []
    n = 1
    while n < largest:
        below.append(n)
        n *= factor
    return (*below, largest)


def at_least(ascending: Sequence[int], wanted: int) -> int:
    """The smallest entry that holds ``wanted``. Raises ValueError where none does."""
    for n in ascending:
        if n >= wanted:
            return n
    raise ValueError(f"{wanted} exceeds the largest size {ascending[-1]}")
