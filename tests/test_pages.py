"""The pool of pages: whoever takes a page is its only owner until it gives it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.pages import PagePool


@given(total=st.integers(1, 12), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_every_page_is_free_or_taken_by_one(total: int, moves: list[tuple[bool, int]]) -> None:
    pool = PagePool(total)
    held: list[int] = []
    for takes, count in moves:
        if takes and count > pool.free:
            with pytest.raises(ValueError, match=f"{count} pages wanted, {pool.free} of {total} are free"):
                pool.take(count)
        elif takes:
            pages = pool.take(count)
            assert len(pages) == count
            assert not set(pages) & set(held)
            held += pages
        else:
            pool.give(held[:count])
            del held[:count]
        assert sorted([*held, *pool.stack]) == list(range(total))
        assert [page for page in range(total) if pool.taken[page]] == sorted(held)
        assert pool.free == total - len(held)


def test_a_page_comes_back_once() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.give([page])
    with pytest.raises(ValueError, match=f"page {page} is given back but was not taken"):
        pool.give([page])
    with pytest.raises(ValueError, match="was not taken"):
        pool.give([2])


def test_a_short_run_touches_the_first_pages() -> None:
    pool = PagePool(9)
    for _ in range(5):
        pages = pool.take(2)
        assert sorted(pages) == [0, 1]
        pool.give(reversed(pages))


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        PagePool(0)
