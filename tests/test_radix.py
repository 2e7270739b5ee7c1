"""The prefix cache against a plain dictionary: what it finds, what it keeps, in which order it lets go."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.pages import PagePool
from serving.radix import Node, RadixCache


def grown(tree: RadixCache, tokens: list[int], path: list[Node] | None = None) -> list[Node]:
    """Puts whole pages of a text behind a locked path into the tree, as a row would; the locked path."""
    path = list(path or [])
    for at in range(len(path), len(tokens) // tree.page_size):
        (page,) = tree.pool.take(1)
        node = tree.insert(path, tuple(tokens[at * tree.page_size : (at + 1) * tree.page_size]), page)
        if node.page != page:
            tree.pool.give([page])
        path.append(node)
    return path


def cached(total: int, page_size: int, texts: list[list[int]]) -> RadixCache:
    """A tree with texts that nobody holds, the first let go first."""
    tree = RadixCache(PagePool(total), page_size)
    for text in texts:
        tree.unlock(grown(tree, text))
    return tree


def held(tree: RadixCache, text: list[int]) -> int:
    """Pages of a text that are found."""
    return len(tree.match(text, len(text) // tree.page_size))


@settings(deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1 << 30),
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=30),
)
def test_it_finds_the_longest_cached_prefix_and_its_pages(page_size: int, seed: int, texts: list[list[int]]) -> None:
    """Against a dictionary {prefix: page}, with requests that hold paths, go, and pages that are evicted."""
    chance = random.Random(seed)
    pool = PagePool(200)
    tree = RadixCache(pool, page_size)
    pages: dict[tuple[int, ...], int] = {}
    holding: list[tuple[list[int], list[Node]]] = []
    for text in texts:
        most = len(text) // page_size
        path = tree.match(text, most)
        known = 0
        while known < most and tuple(text[: (known + 1) * page_size]) in pages:
            known += 1
        assert [node.page for node in path] == [pages[tuple(text[: (i + 1) * page_size])] for i in range(known)]
        tree.lock(path)
        path = grown(tree, text, path)
        pages |= {tuple(text[: (i + 1) * page_size]): node.page for i, node in enumerate(path)}
        holding.append((text, path))
        tree.check()
        if chance.random() < 0.6:
            tree.unlock(holding.pop(chance.randrange(len(holding)))[1])
            tree.check()
        if chance.random() < 0.5:
            idle, wanted = tree.idle, chance.randrange(4)
            assert tree.evict(wanted) == min(wanted, idle)
            tree.check()
            pages = {
                prefix: page for prefix, page in pages.items() if held(tree, list(prefix)) * page_size == len(prefix)
            }
            for text_held, _ in holding:
                assert held(tree, text_held) == len(text_held) // page_size
        assert pool.free + tree.pages == pool.total
    for _, path in holding:
        tree.unlock(path)
    assert tree.evict(pool.total) == pool.total - pool.free or tree.pages == 0
    assert pool.free == pool.total


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = cached(9, 1, [[1, 2, 3], [1, 5], [6]])
    tree.lock(path := tree.match([1, 2, 3], 3))
    tree.unlock(path)  # used again: now last
    assert tree.evict(1) == 1
    assert (held(tree, [1, 5]), held(tree, [6]), held(tree, [1, 2, 3])) == (1, 1, 3)
    assert tree.evict(1) == 1
    assert held(tree, [6]) == 0
    assert tree.evict(2) == 2
    assert held(tree, [1, 2, 3]) == 1


def test_what_is_held_stays_and_so_do_the_pages_before_it() -> None:
    tree = cached(9, 2, [[1, 1, 2, 2, 3, 3], [1, 1, 4, 4]])
    tree.lock(path := tree.match([1, 1, 2, 2], 2))
    assert tree.evict(9) == 2
    assert held(tree, [1, 1, 2, 2, 3, 3]) == 2
    tree.unlock(path)
    assert tree.evict(9) == 2
    assert (tree.pages, tree.pool.free) == (0, 9)


def test_only_whole_pages_and_no_more_than_asked_for() -> None:
    tree = cached(9, 4, [list(range(12))])
    assert held(tree, list(range(11))) == 2
    assert len(tree.match(list(range(12)), 1)) == 1
    assert tree.match([0, 1, 2, 9], 1) == []
    assert tree.match([], 0) == []


def test_two_that_computed_the_same_page_at_once_keep_one() -> None:
    tree = RadixCache(PagePool(9), 1)
    a, b = tree.pool.take(2)
    first = tree.insert([], (7,), a)
    second = tree.insert([], (7,), b)
    assert first is second
    assert (first.page, first.locks) == (a, 2)
    tree.unlock([first])
    tree.check()
    assert tree.evict(1) == 0
    tree.unlock([first])
    tree.pool.give([b])
    assert tree.evict(1) == 1
    assert tree.pool.free == 9


def test_a_page_that_nobody_uses_makes_way_for_the_same_one_computed_anew() -> None:
    """Else the room that admission counted on would shrink while a prompt runs."""
    tree = cached(9, 1, [[7, 8]])
    (new,) = tree.pool.take(1)
    before = tree.pool.free + tree.idle
    node = tree.insert([], (7,), new)
    assert node.page == new
    assert tree.pool.free + tree.idle == before
    assert held(tree, [7, 8]) == 2
    tree.check()


def test_what_is_noted_for_eviction_stays_small() -> None:
    tree = cached(9, 1, [[1, 2]])
    for _ in range(500):
        tree.lock(path := tree.match([1, 2], 2))
        tree.unlock(path)
    assert len(tree.leaves) <= 2 * tree.pages + 65
    assert tree.evict(2) == 2


def test_check_sees_a_page_that_is_counted_wrong() -> None:
    tree = cached(9, 1, [[1, 2]])
    tree.idle += 1
    with pytest.raises(AssertionError):
        tree.check()
