"""The slots that hold recurrent states of prefixes: who gets one, who loses it, and what is never lost."""

import random

import pytest

from serving.pages import PagePool
from serving.radix import NO_STATE, Node, RadixCache, Snapshots


def tree_of(pages: int, slots: int) -> tuple[RadixCache, list[Node]]:
    """A tree with one path, locked."""
    pool = PagePool(pages)
    tree = RadixCache(pool, 2, range(10, 10 + slots))
    path: list[Node] = []
    for i, page in enumerate(pool.take(pages)):
        path.append(tree.insert(path, (i, i), page))
    return tree, path


def test_a_prefix_is_restorable_up_to_its_deepest_snapshot() -> None:
    tree, path = tree_of(5, 2)
    assert tree.restorable(path) == []
    assert tree.snapshots.take(path[1]) == 10
    assert tree.restorable(path) == path[:2]
    assert tree.snapshots.take(path[3]) == 11
    assert tree.restorable(path) == path[:4]
    assert tree.restorable(path[:3]) == path[:2]
    assert tree.snapshots.take(path[3]) == NO_STATE  # it has one


def test_the_least_recently_used_goes_first_and_what_is_pinned_stays() -> None:
    tree, path = tree_of(5, 2)
    kept = tree.snapshots
    first, second = kept.take(path[0]), kept.take(path[1])
    kept.unpin(kept.pin(path[0]))  # used: the other one is older now
    assert kept.take(path[2]) == second
    assert path[1].state == NO_STATE
    kept.pin(path[0])
    kept.pin(path[2])
    assert kept.take(path[3]) == NO_STATE
    kept.unpin(first)
    assert kept.take(path[3]) == first


def test_a_pinned_snapshot_outlives_its_node() -> None:
    tree, path = tree_of(3, 1)
    kept = tree.snapshots
    slot = kept.pin(path[2]) if kept.take(path[2]) != NO_STATE else NO_STATE
    tree.unlock(path)
    assert tree.evict(3) == 3
    assert kept.free == []
    kept.unpin(slot)
    assert (kept.free, kept.kept, kept.pins) == ([slot], {}, {})


def test_without_recurrent_states_every_prefix_is_restorable() -> None:
    tree = RadixCache(PagePool(2), 2)
    node = tree.insert([], (1, 1), tree.pool.take(1)[0])
    assert tree.restorable([node]) == [node]


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_never_lost_or_given_twice(seed: int) -> None:
    chance, kept = random.Random(seed), Snapshots(range(6))
    nodes, pinned = [Node((i,), i, None) for i in range(20)], []
    for _ in range(2000):
        node, what = chance.choice(nodes), chance.randrange(4)
        if what == 0:
            kept.take(node)
        elif what == 1:
            kept.forget(node)
        elif what == 2 and node.state != NO_STATE:
            pinned.append(kept.pin(node))
        elif what == 3 and pinned:
            kept.unpin(pinned.pop(chance.randrange(len(pinned))))
        held = [n.state for n in nodes if n.state != NO_STATE]
        assert sorted(held) == sorted(kept.kept)
        assert len(set(held)) == len(held)
        lingering = set(kept.pins) - set(held)
        assert sorted([*held, *kept.free, *lingering]) == list(range(6))
