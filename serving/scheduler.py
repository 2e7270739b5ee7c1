"""Who runs next. The scheduler hands out row slots and pages and writes plans of integers; it never sees an array.

Requests wait in order of priority, then arrival. Prompts go in by chunks, taking turns with decode steps. Pages are
reserved for what a step can write at most, since the host learns one step late how much was accepted. When pages run
out, cached prefixes that nobody uses go first; then the request that came last is preempted: its pages are taken, and
it is prefilled again later, so that nothing but time is lost. A row and its pages are let go only when no plan in
flight mentions them.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serving.blocks import Acceptance, BlockPolicy
from serving.pages import PagePool
from serving.radix import NO_STATE, Node, RadixCache
from serving.request import Request, SamplingParams
from serving.shapes import DecodeShape, PrefillShape, Shapes
from serving.stats import StepStats

MOST_PREFILLS = 8  # prefill steps between two decode steps
LOOK_AHEAD = 4  # waiting requests that admission looks at, a row slot


@dataclass(frozen=True)
class Admission:
    """A request took a slot: how its row draws."""

    slot: int
    params: SamplingParams
    key: tuple[int, int]


@dataclass(frozen=True)
class Grant:
    """Pages that a slot's table gets from entry ``at`` on; at 0 the table starts anew."""

    slot: int
    at: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A row's part of a prefill step: ``tokens`` behind ``start`` cached ones. anchor: the token that is known to
    follow, where a preempted request comes back; last: whether the prompt ends here. source, save: slots of recurrent
    states to begin from and to keep the state behind the piece in (``NO_STATE``: the row's own, and none)."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    anchor: int | None
    last: bool
    source: int = NO_STATE
    save: int = NO_STATE

    @property
    def emits(self) -> bool:
        """Whether the step's draw is the request's next token."""
        return self.last and self.anchor is None


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of some prompts."""

    shape: PrefillShape
    pieces: tuple[Piece, ...]
    admissions: tuple[Admission, ...]
    grants: tuple[Grant, ...]
    logprobs: bool

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each piece."""
        return tuple(piece.slot for piece in self.pieces)


@dataclass(frozen=True)
class DecodePlan:
    """One draft-verify round of some slots, each with its width of the block."""

    shape: DecodeShape
    slots: tuple[int, ...]
    widths: tuple[int, ...]
    grants: tuple[Grant, ...]
    logprobs: bool


Plan = PrefillPlan | DecodePlan


@dataclass(frozen=True)
class StepResult:
    """One row of a step on the host: emitted ids, their {id: log-probability} (own id first; None: nobody asked),
    whether the logits were finite."""

    tokens: list[int]
    logprobs: list[dict[int, float]] | None
    finite: bool


@dataclass(eq=False)
class Row:
    """A request that holds a slot.

    pages: its page table; nodes: the locked cache path of its first pages (a node may hold another page with the same
    tokens). known: tokens with K/V, as far as the host knows. planned: prompt tokens in plans so far, of ``wanted``.
    inflight: plans not yet applied; reach, sure: most and least tokens that they add. leaving: preempted. marks: where
    its prompt is cut to keep the recurrent state, in tokens; source: the snapshot that it begins from, until it does.
    """

    request: Request
    slot: int
    pages: list[int]
    nodes: list[Node]
    acceptance: Acceptance
    known: int
    planned: int
    wanted: int
    inflight: int = 0
    reach: int = 0
    sure: int = 0
    leaving: bool = False
    marks: set[int] = field(default_factory=set)
    source: int = NO_STATE

    @property
    def prefilling(self) -> bool:
        """Whether a part of its prompt is in no plan yet."""
        return self.planned < self.wanted

    @property
    def gone(self) -> bool:
        """Whether it only waits for plans in flight."""
        return self.leaving or self.request.finished

    @property
    def satisfied(self) -> bool:
        """Whether the plans in flight will bring all tokens that it may have."""
        return len(self.request.output) + self.sure >= self.request.limit


@dataclass
class Scheduler:
    """Queues and policy. ``tree`` None: no prefix cache."""

    pool: PagePool
    tree: RadixCache | None
    shapes: Shapes
    policy: BlockPolicy
    rows: list[Row] = field(default_factory=list)  # by priority, then arrival
    waiting: list[Request] = field(default_factory=list)  # the same order
    stats: StepStats = field(default_factory=StepStats)

    def __post_init__(self) -> None:
        self.stats.pages = self.pool.total
        self.slots = list(range(self.shapes.max_rows - 1, -1, -1))
        self.by_slot: dict[int, Row] = {}
        self.arrivals = 0
        self.burst = 0  # prefill steps since the last decode step
        self.grants: list[Grant] = []
        self.admissions: list[Admission] = []

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.shapes.page_size

    @property
    def available(self) -> int:
        """Pages that are free or can be made so."""
        return self.pool.free + (self.tree.idle if self.tree else 0)

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return self.pool.total * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run fails at once."""
        most = self.pages_for(len(request.prompt) + request.limit)
        if not request.finished and most > self.pool.total:
            request.fail(
                f"{len(request.prompt)} prompt and up to {request.limit} output tokens need {most} pages of "
                f"{self.page_size} tokens; the pool has {self.pool.total}"
            )
        if not request.finished:
            request.arrival, self.arrivals = self.arrivals, self.arrivals + 1
            insort(self.waiting, request, key=order)

    def abort(self, request: Request) -> None:
        """End a request now; what it holds goes back when no plan in flight mentions it."""
        request.abort()
        self.waiting = [r for r in self.waiting if r is not request]
        for row in [r for r in self.rows if r.request is request]:
            self.settle(row)

    def reset(self, error: str) -> list[Request]:
        """Fail what runs and forget all pages, because the device lost them; the requests that failed."""
        failed = [row.request for row in self.rows if not row.request.finished]
        for request in failed:
            request.fail(error)
        self.rows, self.by_slot, self.admissions, self.grants = [], {}, [], []
        self.slots = list(range(self.shapes.max_rows - 1, -1, -1))
        self.pool = PagePool(self.pool.total)
        self.tree = self.tree and RadixCache(self.pool, self.page_size, self.tree.slots)
        return failed

    # --- plans

    def next_plan(self) -> Plan | None:
        """The next step, or None where nothing can run (now): prompts and decode rows take turns by their numbers."""
        decoding = [r for r in self.rows if not (r.prefilling or r.gone or r.satisfied)]
        wanting = sum(r.prefilling and not r.gone for r in self.rows) + min(len(self.waiting), len(self.slots))
        if not decoding or (self.burst < MOST_PREFILLS and self.burst * len(decoding) < wanting):
            plan = self.plan_prefill()
            if plan is not None:
                self.burst += 1
                return plan
        self.burst = 0
        return self.plan_decode(decoding)

    def plan_prefill(self) -> PrefillPlan | None:
        """A chunk of the prompts that came first, new requests included while slots and pages last."""
        rows = [r for r in self.rows if r.prefilling and not r.gone]
        most = max(n for n, _ in self.shapes.pieces)
        rows += self.admit(most - len(rows))
        if not rows:
            return None
        rows = sorted(rows, key=lambda r: order(r.request))[:most]
        widest = max(len(r.pages) for r in rows)
        ahead = max(self.pages_for(len(r.request.prompt) + r.request.limit) for r in rows)
        shape = self.shapes.prefill([r.wanted - r.planned for r in rows], widest, ahead)
        pieces = tuple(self.piece(row, shape.chunk) for row in rows[: shape.rows])
        taking = [self.by_slot[piece.slot] for piece in pieces]
        for row in taking:
            self.cache(row, row.planned)  # later plans run later on the device, so they may read these pages already
        pieces = tuple(replace(piece, save=self.snapshot(row)) for piece, row in zip(pieces, taking, strict=True))
        return PrefillPlan(shape, pieces, *self.handed_out(), logprobs=wants_logprobs(taking))

    def piece(self, row: Row, chunk: int) -> Piece:
        """The next tokens of a row's prompt, at most ``chunk``."""
        start, end = row.planned, min(row.planned + chunk, row.wanted)
        end = min([end, *(mark for mark in row.marks if mark > start)])
        row.planned = end
        source = self.begun(row)
        row.inflight += 1
        piece = Piece(
            slot=row.slot,
            start=start,
            tokens=row.request.tokens(start, end),
            anchor=row.request.output[-1] if row.request.output else None,
            last=end == row.wanted,
            source=source,
        )
        row.sure += piece.emits
        return piece

    def admit(self, most: int) -> list[Row]:
        """Give slots and pages to waiting requests, in order; who shares a prefix with a prompt that is being
        processed waits for it, and then finds it in the cache."""
        admitted: list[Row] = []
        for request in self.waiting[: LOOK_AHEAD * self.shapes.max_rows]:
            if not self.slots or len(admitted) >= most:
                break
            wanted = len(request.prompt) + max(len(request.output) - 1, 0)
            # At least one token is processed, for its draw.
            most_pages = (wanted - 1) // self.page_size
            path = self.tree.match(request.tokens(0, most_pages * self.page_size), most_pages) if self.tree else []
            hit = self.tree.restorable(path) if self.tree else []
            if self.tree and any(self.will_share(row, request, hit, most_pages) for row in self.rows):
                continue
            row = self.place(request, hit, wanted)
            if row is None:
                break
            if self.tree and self.tree.snapshots is not None:
                # Where the next turn of a dialogue will begin, and where others have gone another way.
                row.marks = {pages * self.page_size for pages in (len(path), most_pages) if pages > len(hit)}
            admitted.append(row)
        return admitted

    def snapshot(self, row: Row) -> int:
        """The slot that keeps a row's state where its planned tokens end at a mark."""
        if row.planned not in row.marks or self.tree is None or self.tree.snapshots is None:
            return NO_STATE
        return self.tree.snapshots.take(row.nodes[row.planned // self.page_size - 1])

    def begun(self, row: Row) -> int:
        """The snapshot that a row begins from, which may go once it is in a plan."""
        source, row.source = row.source, NO_STATE
        if source != NO_STATE and self.tree and self.tree.snapshots is not None:
            self.tree.snapshots.unpin(source)
        return source

    def will_share(self, row: Row, request: Request, path: list[Node], most: int) -> bool:
        """Whether a prompt in progress is about to bring (or in this very plan brings) a page that the request needs
        next."""
        if row.gone or not row.prefilling:
            return False
        if self.tree and self.tree.snapshots is not None:
            return self.will_keep(row, request, len(path), most)
        start, end = len(path) * self.page_size, (len(path) + 1) * self.page_size
        return (
            len(path) < most
            and end <= row.wanted
            and row.request.tokens(start, end) == request.tokens(start, end)
            and row.request.tokens(0, start) == request.tokens(0, start)
        )

    def will_keep(self, row: Row, request: Request, pages: int, most: int) -> bool:
        """Whether a prompt in progress will keep its state behind more than ``pages`` pages that the request begins
        with too; it is asked to."""
        size, shared = self.page_size, 0
        for at in range(min(most, row.wanted // size)):
            if row.request.tokens(at * size, (at + 1) * size) != request.tokens(at * size, (at + 1) * size):
                break
            shared = at + 1
        if shared <= pages or row.planned >= shared * size:
            return False
        row.marks.add(shared * size)
        return True

    def place(self, request: Request, path: list[Node], wanted: int) -> Row | None:
        """A slot and the pages of its prompt for a request; None where pages are short."""
        if self.tree:
            self.tree.lock(path)
        most = len(request.prompt) + request.limit
        count = self.pages_for(min(wanted + 1, most)) - len(path)
        # Leave everyone room for a round: who takes it only to be preempted at once could go on like that for ever.
        block = max(self.policy.blocks.values())
        room = sum(max(self.short(r, block), 0) for r in self.rows if not r.gone)
        if self.available < self.pages_for(min(wanted + block, most)) - len(path) + room:
            if self.tree:
                self.tree.unlock(path)
            return None
        self.waiting.remove(request)
        hit = len(path) * self.page_size
        row = Row(
            request=request,
            slot=self.slots.pop(),
            pages=[node.page for node in path] + self.take(count),
            nodes=list(path),
            acceptance=self.policy.start(),
            known=hit,
            planned=hit,
            wanted=wanted,
        )
        if path and self.tree and self.tree.snapshots is not None:
            row.source = self.tree.snapshots.pin(path[-1])
        self.by_slot[row.slot] = row
        insort(self.rows, row, key=lambda r: order(r.request))
        self.stats.prompt_tokens += wanted
        self.stats.hit_tokens += hit
        if not request.output:  # else it was preempted, and what it finds is its own
            request.cached_tokens = hit
        self.admissions.append(Admission(row.slot, request.params, request.key))
        self.grants.append(Grant(row.slot, 0, tuple(row.pages)))
        return row

    def plan_decode(self, decoding: list[Row]) -> DecodePlan | None:
        """A round of all rows that have a prompt behind them and pages before them."""
        if not decoding:
            return None
        block, wanted = self.policy.choose([row.acceptance for row in decoding])
        taking, widths = [], []
        for row, width in zip(decoding, wanted, strict=True):
            if not row.leaving and self.reserve(row, width):
                taking.append(row)
                widths.append(width)
        if not taking:
            return None
        for row, width in zip(taking, widths, strict=True):
            row.inflight += 1
            row.reach += width
            row.sure += 1
        widest = max(len(r.pages) for r in taking)
        most = [self.pages_for(len(r.request.prompt) + r.request.limit) for r in self.rows]
        coming = min(self.shapes.max_rows, len(self.rows) + len(self.waiting))
        shape = self.shapes.decode(len(taking), block, widest, (coming, max(most)))
        _, grants = self.handed_out()
        return DecodePlan(shape, tuple(r.slot for r in taking), tuple(widths), grants, wants_logprobs(taking))

    def reserve(self, row: Row, width: int) -> bool:
        """Pages for one more round of a row; preempts others, then the row itself, where there are none."""
        short = self.short(row, width)
        while short > self.available:
            if any(r.gone for r in self.rows):
                return False  # pages are about to come back
            last = self.rows[-1]
            self.preempt(last)
            if last is row:
                return False
        if short > 0:
            self.grants.append(Grant(row.slot, len(row.pages), tuple(pages := self.take(short))))
            row.pages += pages
        return True

    def short(self, row: Row, width: int) -> int:
        """Pages that a row lacks for all that its plans in flight and a round of ``width`` behind them can write. What
        lies behind the request's limit is never written."""
        most = len(row.request.prompt) + row.request.limit
        cached = max(row.known, row.wanted)  # the prompt's end may still be in flight
        return self.pages_for(min(cached + row.reach + width, most)) - len(row.pages)

    def take(self, count: int) -> list[int]:
        """Pages from the pool, evicting cached ones where it is empty."""
        if self.tree and self.pool.free < count:
            self.tree.evict(count - self.pool.free)
        return self.pool.take(count)

    def preempt(self, row: Row) -> None:
        """Send a row back to the queue, at once or when its plans in flight are done."""
        self.stats.preemptions += 1
        row.leaving = True
        self.settle(row)

    def handed_out(self) -> tuple[tuple[Admission, ...], tuple[Grant, ...]]:
        """What changed hands since the last plan."""
        out = tuple(self.admissions), tuple(self.grants)
        self.admissions, self.grants = [], []
        return out

    # --- results

    def apply(self, plan: Plan, results: Sequence[StepResult]) -> list[Request]:
        """Take a step's results; the requests that they brought something."""
        touched = []
        for i, (slot, result) in enumerate(zip(plan.slots, results, strict=True)):
            row = self.by_slot[slot]
            row.inflight -= 1
            if isinstance(plan, DecodePlan):
                row.reach -= plan.widths[i]
                row.sure -= 1
            else:
                row.sure -= plan.pieces[i].emits
            if not row.request.finished:
                if self.advance(row, plan, i, result):
                    touched.append(row.request)
                self.cache(row, row.known)
            self.settle(row)
        self.stats.pages_used = self.pool.total - self.pool.free
        return touched

    def advance(self, row: Row, plan: Plan, i: int, result: StepResult) -> bool:
        """Move a live row on by its result; whether its request got anything."""
        request = row.request
        if not result.finite:
            request.fail("the target's logits are not finite (NaN or infinity) for this request")
            return True
        if isinstance(plan, PrefillPlan):
            piece = plan.pieces[i]
            row.known = piece.start + len(piece.tokens)
            if not piece.emits:
                return False
        else:
            count = len(result.tokens)
            row.known += count
            self.policy.observe(row.acceptance, plan.widths[i], count)
            request.acceptance_lengths.append(count)
            self.stats.rounds += 1
            self.stats.emitted += count
        before = len(request.output)
        request.accept(result.tokens, result.logprobs)
        self.stats.tokens += len(request.output) - before
        return True

    def cache(self, row: Row, tokens: int) -> None:
        """Put a row's full pages up to ``tokens`` into the tree."""
        if self.tree is None:
            return
        known = min(tokens, len(row.request.prompt) + len(row.request.output))
        for at in range(len(row.nodes), known // self.page_size):
            page = row.request.tokens(at * self.page_size, (at + 1) * self.page_size)
            row.nodes.append(self.tree.insert(row.nodes, page, row.pages[at]))

    def settle(self, row: Row) -> None:
        """Let a row go that has ended or was preempted, once no plan in flight mentions it."""
        if row.inflight or not row.gone:
            return
        self.begun(row)
        own = [page for i, page in enumerate(row.pages) if i >= len(row.nodes) or row.nodes[i].page != page]
        self.pool.give(own)
        if self.tree:
            self.tree.unlock(row.nodes)
        self.rows.remove(row)
        del self.by_slot[row.slot]
        self.slots.append(row.slot)
        if not row.request.finished:
            insort(self.waiting, row.request, key=order)


def order(request: Request) -> tuple[int, int]:
    """Lower priority values first, then who came first."""
    return request.priority, request.arrival


def wants_logprobs(rows: Sequence[Row]) -> bool:
    """Whether a row asks for more than its own tokens' log-probabilities."""
    return any(row.request.params.logprobs for row in rows)
