"""The pool of pages as integers. A page id addresses the same page of both models' K/V."""

from collections.abc import Iterable


class PagePool:
    """Hands out page ids; whoever took a page gives it back once."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page pool needs at least 1 page, got {total}")
        self.total = total
        self.stack = list(range(total - 1, -1, -1))  # low ids first: a short run touches little memory
        self.taken = bytearray(total)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self.stack)

    def take(self, count: int) -> list[int]:
        """``count`` pages. Raises ValueError where fewer are free."""
        if count > len(self.stack):
            raise ValueError(f"{count} pages wanted, {len(self.stack)} of {self.total} are free")
        pages = [self.stack.pop() for _ in range(count)]
        for page in pages:
            self.taken[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Return pages. Raises ValueError for one that was not taken."""
        for page in pages:
            if not self.taken[page]:
                raise ValueError(f"page {page} is given back but was not taken")
            self.taken[page] = 0
            self.stack.append(page)
