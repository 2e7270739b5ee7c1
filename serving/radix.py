"""The prefix cache: a tree over pages of tokens. A node is one full page, which holds both models' K/V of its tokens.

A request locks the nodes on its path, root first; what nobody locks may be evicted, least recently used leaf first. A
locked node keeps its ancestors, since a path is locked and unlocked as a whole.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.pages import PagePool

Tokens = tuple[int, ...]


NO_STATE = -1


@dataclass(eq=False, slots=True)
class Node:
    """One cached page: its tokens, its page id, how many requests hold it, when it was last let go, and the slot of
    the snapshot of the recurrent state at its end."""

    tokens: Tokens
    page: int
    parent: "Node | None"
    children: dict[Tokens, "Node"] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    state: int = NO_STATE


class RadixCache:
    """Pages by the tokens that lead to them. Owns the pages of its nodes until it evicts them."""

    def __init__(self, pool: PagePool, page_size: int, slots: Sequence[int] | None = None) -> None:
        """``slots``: of snapshots of recurrent states, for a target that has them (None: pages are all there is)."""
        self.pool, self.page_size, self.slots = pool, page_size, slots
        self.snapshots = None if slots is None else Snapshots(slots)
        self.root = Node((), -1, None, locks=1)
        self.clock = 0
        self.pages = 0  # pages owned
        self.idle = 0  # of which nobody locks
        self.leaves: list[tuple[int, int, Node]] = []  # heap of what may be evictable: (used, id, node)

    def restorable(self, path: list[Node]) -> list[Node]:
        """The part of a path that a request can begin behind: all of it, or, where a prefix needs a recurrent state
        too, up to the deepest node with a snapshot."""
        if self.snapshots is None:
            return path
        return path[: max((i + 1 for i, node in enumerate(path) if node.state != NO_STATE), default=0)]

    def match(self, tokens: Sequence[int], most: int) -> list[Node]:
        """The longest cached path of at most ``most`` pages that ``tokens`` begin with."""
        path, node = [], self.root
        for at in range(most):
            child = node.children.get(tuple(tokens[at * self.page_size : (at + 1) * self.page_size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, path: Sequence[Node]) -> None:
        """Keep the nodes of a path, root first."""
        for node in path:
            self.idle -= node.locks == 0
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Let go of a path that was locked."""
        self.clock += 1
        for node in reversed(path):
            node.locks -= 1
            node.used = self.clock
            if node.locks == 0:
                self.idle += 1
                self.offer(node)

    def insert(self, path: Sequence[Node], tokens: Tokens, page: int) -> Node:
        """The node of one more page behind a locked ``path``, locked too.

        The tree takes ``page`` over. Where the tokens have a node already, it takes it instead of the node's page, so
        that nobody's room shrinks; unless that page is in use: then ``node.page != page``, and ``page`` stays the
        caller's.
        """
        parent = path[-1] if path else self.root
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(tokens, page, parent)
            self.pages += 1
            self.idle += 1
        elif node.locks == 0:
            self.pool.give([node.page])
            node.page = page
        self.lock([node])
        return node

    def evict(self, count: int) -> int:
        """Give up to ``count`` pages that nobody locks back to the pool; how many."""
        given = 0
        while given < count and self.leaves:
            entry = heapq.heappop(self.leaves)
            if not evictable(*entry):
                continue
            node = entry[-1]
            assert node.parent is not None
            del node.parent.children[node.tokens]
            parent, node.parent = node.parent, None
            self.pool.give([node.page])
            if self.snapshots is not None:
                self.snapshots.forget(node)
            self.pages -= 1
            self.idle -= 1
            given += 1
            if parent.locks == 0:
                self.offer(parent)
        return given

    def offer(self, node: Node) -> None:
        """Note a node that may now be evictable."""
        if not node.children:
            heapq.heappush(self.leaves, (node.used, id(node), node))
        if len(self.leaves) > 2 * self.pages + 64:
            self.leaves = [entry for entry in self.leaves if evictable(*entry)]
            heapq.heapify(self.leaves)

    def check(self) -> None:
        """Walk the tree and compare it with its counts. Raises AssertionError."""
        pages, idle, stack = set(), 0, list(self.root.children.values())
        while stack:
            node = stack.pop()
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
            assert len(node.tokens) == self.page_size
            assert node.page not in pages
            assert self.pool.taken[node.page]
            assert node.locks >= sum(child.locks for child in node.children.values())
            pages.add(node.page)
            idle += node.locks == 0
            stack += node.children.values()
        assert (self.pages, self.idle) == (len(pages), idle)


class Snapshots:
    """The slots that hold states of prefixes, the least recently used one first to go.

    A slot may be written again as soon as the plan that reads it is made, since later plans run later on the device;
    until then it is pinned.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.free = list(slots)[::-1]
        self.kept: dict[int, Node] = {}  # least recently used first
        self.pins: dict[int, int] = {}

    def pin(self, node: Node) -> int:
        """Keep a node's snapshot until it is read; its slot."""
        self.kept[node.state] = self.kept.pop(node.state)
        self.pins[node.state] = self.pins.get(node.state, 0) + 1
        return node.state

    def unpin(self, slot: int) -> None:
        """It has been read."""
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot not in self.kept:  # its node went meanwhile
                self.free.append(slot)

    def take(self, node: Node) -> int:
        """A slot for a node's state, from another prefix where none is free; ``NO_STATE`` where it has one already, or
        where all are pinned."""
        if node.state != NO_STATE:
            return NO_STATE
        if not self.free:
            oldest = next((slot for slot in self.kept if slot not in self.pins), NO_STATE)
            if oldest == NO_STATE:
                return NO_STATE
            self.forget(self.kept[oldest])
        node.state = self.free.pop()
        self.kept[node.state] = node
        return node.state

    def forget(self, node: Node) -> None:
        """A node goes, or its snapshot does."""
        if node.state != NO_STATE:
            del self.kept[node.state]
            if node.state not in self.pins:
                self.free.append(node.state)
            node.state = NO_STATE


def evictable(used: int, _: int, node: Node) -> bool:
    """Whether a heap entry still holds: entries stay when a node is locked, grows a child, is used again or goes."""
    return node.parent is not None and not node.locks and not node.children and node.used == used
