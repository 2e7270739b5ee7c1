"""A device made of integers, to break the scheduler with: it does what plans say, and checks that they may say it.

It keeps what the real one keeps (lengths, page tables, what each slot of each page was written with) and knows what no
device knows: whose row it is and what it will say. So it can assert that every cached position that a plan reads was
written, by an earlier plan, with exactly the prefix that the row stands for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from serving.blocks import BlockPolicy, fixed
from serving.pages import PagePool
from serving.radix import RadixCache
from serving.request import FinishReason, Request, SamplingParams
from serving.scheduler import DecodePlan, Grant, Plan, Row, Scheduler, StepResult
from serving.shapes import Shapes

NO_TOKEN = -9  # what a prefill step that emits nothing draws
Accepted = Callable[[int], int]  # width -> accepted drafts, below it


def token_of(prompt: tuple[int, ...], position: int, letters: int) -> int:
    """What a request says at a position: a function of its prompt and the position alone."""
    return hash((prompt, position)) % 1009 % letters


def text_of(request: Request, start: int, end: int, letters: int) -> list[int]:
    """Prompt and whatever would follow it without an end."""
    split = len(request.prompt)
    said = (token_of(request.prompt, at, letters) for at in range(max(start, split), end))
    return [*request.prompt[start:end], *said]


def told(request: Request, letters: int) -> tuple[list[int], FinishReason]:
    """What decoding one request alone, token by token, gives."""
    split, output = len(request.prompt), []
    while len(output) < request.limit:
        output.append(token_of(request.prompt, split + len(output), letters))
        if output[-1] in request.stop_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def request_of(
    prompt: Iterable[int], limit: int, stop_ids: Iterable[int] = (), priority: int = 0, **options: object
) -> Request:
    """A request without text."""
    params = SamplingParams(max_tokens=limit, **options)  # type: ignore[arg-type]
    return Request(0, 0, tuple(prompt), params, (0, 0), limit, frozenset(stop_ids), None, priority)


@dataclass
class WatchedPool(PagePool):
    """A pool that takes no page back that a plan in flight mentions."""

    def __init__(self, total: int, in_flight: Callable[[], set[int]]) -> None:
        super().__init__(total)
        self.in_flight = in_flight

    def give(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        assert not self.in_flight() & set(pages), "a page comes back that a plan in flight mentions"
        super().give(pages)


@dataclass
class Submitted:
    """A plan on its way, its results and the pages that its rows see."""

    plan: Plan
    results: list[StepResult]
    pages: set[int]


@dataclass
class Bench:
    """A scheduler on a fake device.

    accepted: how many drafts a row's round confirms. finite: whether a row's logits are. letters: of the alphabet.
    ``rounds``: what each request's rounds emitted, uncut, until it ended.
    """

    rows: int
    pages: int
    page_size: int
    chunk: int
    policy: BlockPolicy | int
    prefix_cache: bool = True
    accepted: Accepted = lambda width: width - 1
    finite: Callable[[], bool] = lambda: True
    letters: int = 3
    longest: int = 64
    rounds: dict[Request, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = Shapes(self.rows, -(-self.longest // self.page_size), self.chunk, self.page_size, narrow=True)
        policy = fixed(shapes.rows, self.policy) if isinstance(self.policy, int) else self.policy
        self.flight: deque[Submitted] = deque()
        self.pool = WatchedPool(self.pages, lambda: {page for sent in self.flight for page in sent.pages})
        tree = RadixCache(self.pool, self.page_size) if self.prefix_cache else None
        self.scheduler = Scheduler(self.pool, tree, shapes, policy)
        self.tables: list[list[int]] = [[] for _ in range(self.rows)]
        self.lengths = [0] * self.rows
        self.anchors = [NO_TOKEN] * self.rows
        self.written: dict[tuple[int, int], int] = {}  # (page, slot in it) -> prefix
        self.prefixes: dict[tuple[int, int], int] = {}  # (prefix, token) -> longer prefix

    # --- the device

    def submit(self) -> bool:
        """Plan a step and run it; whether there was one."""
        plan = self.scheduler.next_plan()
        if plan is None:
            return False
        for grant in plan.grants:
            self.hand_over(grant)
        for slot in plan.slots:
            assert len(self.tables[slot]) <= plan.shape.pages
            assert self.tables[slot] == self.scheduler.by_slot[slot].pages
        assert len(set(plan.slots)) == len(plan.slots) <= plan.shape.rows
        results = [self.run(self.scheduler.by_slot[slot], plan, i) for i, slot in enumerate(plan.slots)]
        self.flight.append(Submitted(plan, results, {page for slot in plan.slots for page in self.tables[slot]}))
        self.check()
        return True

    def collect(self) -> list[Request]:
        """Take the oldest step's results."""
        done = self.flight.popleft()
        if isinstance(done.plan, DecodePlan):
            for slot, result in zip(done.plan.slots, done.results, strict=True):
                request = self.scheduler.by_slot[slot].request
                if not request.finished and result.finite:
                    self.rounds.setdefault(request, []).append(len(result.tokens))
        touched = self.scheduler.apply(done.plan, done.results)
        self.check()
        return touched

    def hand_over(self, grant: Grant) -> None:
        table = self.tables[grant.slot]
        if grant.at == 0:
            assert not any(grant.slot in sent.plan.slots for sent in self.flight), "a slot in flight changes hands"
            table.clear()
            self.lengths[grant.slot], self.anchors[grant.slot] = -1, NO_TOKEN
        assert grant.at == len(table)
        table.extend(grant.pages)

    def run(self, row: Row, plan: Plan, i: int) -> StepResult:
        """One row of a step: what it reads must be there, what it writes must be its own."""
        request, slot = row.request, row.slot
        split, finite = len(request.prompt), self.finite()
        if isinstance(plan, DecodePlan):
            assert self.anchors[slot] == self.text(request, self.lengths[slot])
            width = plan.widths[i]
            assert 1 <= width <= plan.shape.block
            start, count = self.lengths[slot], self.accepted(width) + 1
            assert 1 <= count <= width
            emitted = text_of(request, start + 1, start + 1 + count, self.letters)
            anchor = emitted[-1]
        else:
            piece = plan.pieces[i]
            start, count = piece.start, len(piece.tokens)
            assert self.lengths[slot] in (-1, start), "a chunk leaves a gap"
            assert 1 <= count <= plan.shape.chunk
            assert list(piece.tokens) == text_of(request, start, start + count, self.letters)
            following = self.text(request, start + count)
            assert piece.last == (start + count == split + max(len(request.output) - 1, 0))
            if piece.anchor is not None:
                assert piece.anchor == request.output[-1]
            emitted = [following if piece.emits else NO_TOKEN]
            anchor = following if piece.last else NO_TOKEN
        most = split + request.limit
        self.read(request, slot, min(start, most))
        self.write(request, slot, start, start + count)
        self.lengths[slot], self.anchors[slot] = start + count, anchor
        return StepResult(emitted, None, finite)

    def text(self, request: Request, position: int) -> int:
        return text_of(request, position, position + 1, self.letters)[0]

    def prefixes_of(self, tokens: Sequence[int]) -> list[int]:
        """A number for every prefix of a text, the same for the same prefix."""
        numbers, last = [], 0
        for token in tokens:
            last = self.prefixes.setdefault((last, token), len(self.prefixes) + 1)
            numbers.append(last)
        return numbers

    def read(self, request: Request, slot: int, end: int) -> None:
        wanted = self.prefixes_of(text_of(request, 0, end, self.letters))
        table, size = self.tables[slot], self.page_size
        assert end <= len(table) * size, "a plan reads behind its pages"
        found = [self.written.get((table[at // size], at % size)) for at in range(end)]
        assert found == wanted, "a plan reads what was never written, or something else"

    def write(self, request: Request, slot: int, start: int, end: int) -> None:
        numbers, size = self.prefixes_of(text_of(request, 0, end, self.letters)), self.page_size
        most = len(request.prompt) + request.limit
        others = {page for row in self.scheduler.rows if row.slot != slot for page in self.tables[row.slot]}
        for at in range(start, end):
            if at // size >= len(self.tables[slot]):
                assert at >= most, "a token of the request finds no page"
                continue
            page = self.tables[slot][at // size]
            assert page not in others, "a plan writes into another row's page"
            self.written[page, at % size] = numbers[at]

    # --- what must hold after each step

    def check(self) -> None:
        """Every page has one owner, slots are accounted for, and the tree's pages hold what it says."""
        scheduler, size = self.scheduler, self.page_size
        tree = scheduler.tree
        owners: dict[int, str] = dict.fromkeys(self.pool.stack, "free")
        assert len(owners) == self.pool.free
        paths = [] if tree is None else [([], node) for node in tree.root.children.values()]
        while paths:
            before, node = paths.pop()
            assert node.page not in owners
            owners[node.page] = "tree"
            tokens = [*before, *node.tokens]
            found = [self.written.get((node.page, at)) for at in range(size)]
            assert found == self.prefixes_of(tokens)[-size:], "the tree holds a page of other tokens"
            paths += [(tokens, child) for child in node.children.values()]
        for row in scheduler.rows:
            for i, page in enumerate(row.pages):
                if i < len(row.nodes) and row.nodes[i].page == page:
                    assert owners[page] == "tree"
                    assert row.nodes[i].locks > 0
                else:
                    assert page not in owners, f"page {page} has two owners"
                    owners[page] = "row"
        assert sorted(owners) == list(range(self.pages))
        if tree:
            tree.check()
            locked = sum(len(row.nodes) for row in scheduler.rows)
            assert locked == sum(node.locks for node in nodes_of(tree))
        assert sorted([*scheduler.slots, *(row.slot for row in scheduler.rows)]) == list(range(self.rows))
        assert {row.slot: row for row in scheduler.rows} == scheduler.by_slot
        for row in scheduler.rows:
            assert row.inflight == sum(row.slot in sent.plan.slots for sent in self.flight)
            assert row.inflight or not row.gone
        keys = [(r.request.priority, r.request.arrival) for r in scheduler.rows]
        assert keys == sorted(keys)
        keys = [(r.priority, r.arrival) for r in scheduler.waiting]
        assert keys == sorted(keys)
        assert not any(r.finished for r in scheduler.waiting)

    # --- the engine's loop

    @property
    def busy(self) -> bool:
        return bool(self.flight or self.scheduler.waiting or self.scheduler.rows)

    def step(self, ahead: int = 1) -> None:
        """As ``Engine.step``; progress is a duty."""
        sent = self.submit()
        assert sent or self.flight or not self.busy, "nothing runs and nothing is waited for"
        keep = ahead if sent else len(self.flight) - 1
        while self.flight and len(self.flight) > keep:
            self.collect()

    def drain(self, ahead: int = 1, most: int = 10_000) -> None:
        """Run until nobody waits; all pages must have come back."""
        for _ in range(most):
            if not self.busy:
                break
            self.step(ahead)
        assert not self.busy, f"not done after {most} steps"
        tree = self.scheduler.tree
        assert self.pool.free + (tree.pages if tree else 0) == self.pages
        if tree:
            assert tree.idle == tree.pages
            assert tree.evict(self.pages) == self.pages - self.pool.free or not tree.pages
            assert tree.pages == 0
        assert self.pool.free == self.pages
        assert len(self.scheduler.slots) == self.rows

    def check_answer(self, request: Request) -> None:
        """A finished request said what it would have said alone."""
        output, reason = told(request, self.letters)
        assert request.finished
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (request.output, request.finish_reason) == (output, reason)
        else:
            assert request.output == output[: len(request.output)]
        rounds = request.acceptance_lengths
        assert rounds == self.rounds.get(request, [])
        if request.finish_reason is FinishReason.LENGTH:
            assert 1 + sum(rounds[:-1]) < request.limit <= 1 + sum(rounds) or request.limit == 1


def nodes_of(tree: RadixCache) -> Iterable["object"]:
    """All nodes but the root."""
    stack = list(tree.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()
