"""The scheduler against a device that checks every plan: any order of events, and no page is ever read or written
that should not be; what comes out is what each request alone would have said."""

import random

import pytest
from fake_device import Bench, request_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serving.blocks import adaptive
from serving.request import FinishReason, Request

COSTS = {1: {1: 1.0, 8: 1.5}, 4: {1: 1.0, 8: 2.5}}


class Events(RuleBasedStateMachine):
    """Requests come, steps are sent and awaited, requests are aborted, in any order."""

    @initialize(
        rows=st.integers(1, 4),
        page_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.integers(8, 96),
        chunk=st.sampled_from([1, 3, 7, 64]),
        block=st.sampled_from([1, 2, 5, 16, None]),
        prefix_cache=st.booleans(),
        seed=st.integers(0, 1 << 30),
        never_finite=st.sampled_from([0.0, 0.05]),
    )
    def start(
        self,
        rows: int,
        page_size: int,
        tokens: int,
        chunk: int,
        block: int | None,
        prefix_cache: bool,
        seed: int,
        never_finite: float,
    ) -> None:
        chance = random.Random(seed)
        self.requests: list[Request] = []
        policy = adaptive([n for n in (1, 2, 4) if n < rows] + [rows], 8, COSTS) if block is None else block
        self.bench = Bench(
            rows,
            -(-tokens // page_size),
            page_size,
            chunk,
            policy,
            prefix_cache,
            accepted=lambda width: chance.choice([0, width - 1, chance.randrange(width)]),
            finite=lambda: chance.random() >= never_finite,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        behind=st.none() | st.tuples(st.integers(0, 50), st.integers(0, 40)),
        limit=st.integers(1, 24),
        stops=st.sampled_from([(), (), (2,)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(
        self, prompt: list[int], behind: tuple[int, int] | None, limit: int, stops: tuple[int, ...], priority: int
    ) -> None:
        if behind and self.requests:  # goes on where another request is, or ended
            other = self.requests[behind[0] % len(self.requests)]
            prompt = [*other.tokens(0, behind[1]), *prompt]
        prompt = prompt[: 64 - limit]
        request = request_of(prompt, limit, stops, priority)
        self.requests.append(request)
        self.bench.scheduler.add(request)
        fits = -(-(len(prompt) + limit) // self.bench.page_size) <= self.bench.pages
        assert request.finished != fits

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        running = [r for r in self.requests if not r.finished]
        if running:
            request = running[which % len(running)]
            self.bench.scheduler.abort(request)
            assert request.finish_reason is FinishReason.ABORT

    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        rows = [row for row in self.bench.scheduler.rows if not row.gone]
        if rows:
            self.bench.scheduler.preempt(rows[which % len(rows)])

    @precondition(lambda self: len(self.bench.flight) < 3)
    @rule()
    def submit(self) -> None:
        bench = self.bench
        assert bench.submit() or bench.flight or not bench.busy, "nothing runs and nothing is waited for"

    @precondition(lambda self: self.bench.flight)
    @rule()
    def collect(self) -> None:
        self.bench.collect()

    @rule(ahead=st.integers(0, 2), times=st.integers(1, 8))
    def steps(self, ahead: int, times: int) -> None:
        for _ in range(times):
            if self.bench.busy and len(self.bench.flight) < 3:
                self.bench.step(ahead)

    @invariant()
    def all_is_owned_once(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            for request in self.requests:
                self.bench.check_answer(request)


def test_any_order_of_events() -> None:
    """Rows 2 to 4 of faults.md, on the host's side."""
    run_state_machine_as_test(
        Events,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def crowd(seed: int, count: int) -> list[Request]:
    """Requests whose prompts share beginnings, with limits, stops and priorities."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3) for _ in range(24)] for _ in range(4)]
    made = []
    for _ in range(count):
        stem, own = chance.choice(stems)[: chance.randrange(25)], [chance.randrange(3) for _ in range(8)]
        stops = chance.choice([(), (), (), (2,)])
        made.append(request_of([*stem, *own[: 1 + chance.randrange(8)]], 1 + chance.randrange(60), stops))
    return made


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_thousand_requests_that_stop_are_aborted_and_preempted(
    page_size: int, ahead: int, prefix_cache: bool
) -> None:
    """Row 4, a twelfth of them a case: a pool that four rows outgrow, arrivals all the time, aborts anywhere."""
    chance = random.Random(page_size)
    pages = 128 // page_size
    bench = Bench(6, pages, page_size, 16, 8, prefix_cache, accepted=lambda w: chance.randrange(w), longest=96)
    requests = crowd(page_size, 84)
    for request in requests:
        bench.scheduler.add(request)
        for _ in range(chance.randrange(12)):
            bench.step(ahead)
        running = [r for r in requests if not r.finished]
        if running and chance.random() < 0.1:
            bench.scheduler.abort(chance.choice(running))
    bench.drain(ahead)
    for request in requests:
        bench.check_answer(request)
    stats = bench.scheduler.stats
    assert stats.preemptions > 3
    assert (stats.hit_tokens > 100) == prefix_cache
    assert sum(r.finish_reason is FinishReason.ABORT for r in requests) > 1


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_row_that_is_preempted_between_submit_and_collect_keeps_what_comes(ahead: int) -> None:
    """Row 4: its tokens in flight count, it stays until they are there, and goes on behind them."""
    bench = Bench(2, 80, 1, 8, 4, longest=80)
    requests = [request_of([i], 24) for i in range(2)]
    for request in requests:
        bench.scheduler.add(request)
    while not all(len(r.output) > 1 for r in requests):
        bench.step(ahead)
    while not (bench.flight and len(bench.flight[-1].plan.slots) == 2):
        assert bench.submit()
    row = bench.scheduler.rows[-1]
    before, rounds = len(row.request.output), row.inflight
    assert rounds == max(ahead, 1)
    bench.scheduler.preempt(row)
    assert row in bench.scheduler.rows
    while bench.flight:
        bench.collect()
    assert row not in bench.scheduler.rows
    assert bench.scheduler.waiting == [row.request]
    assert len(row.request.output) == before + 4 * rounds
    bench.drain(ahead)
    for request in requests:
        bench.check_answer(request)


def test_a_round_behind_a_prompt_in_flight_finds_its_pages() -> None:
    """The host does not know yet that the prompt is cached; the round's tokens lie behind it all the same."""
    for length in range(1, 9):
        bench = Bench(1, 8, 4, 16, 8, longest=32)
        request = request_of([0] * length, 20)
        bench.scheduler.add(request)
        assert bench.submit()
        assert bench.submit()  # checks that the round's writes find pages
        bench.drain()
        bench.check_answer(request)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_who_has_the_whole_pool_and_a_cached_prompt_gets_on(ahead: int) -> None:
    """The prompt's last page is computed again for its draw, and must not be held twice."""
    for page_size in (1, 2, 4):
        bench = Bench(1, 16 // page_size, page_size, 16, 8, longest=16)
        for _ in range(3):
            request = request_of([0, 1, 2, 0, 1, 2, 0, 1], 8)
            bench.scheduler.add(request)
            for _ in range(30):
                bench.step(ahead)
            bench.check_answer(request)
        bench.drain(ahead)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_nobody_is_let_in_to_be_put_out_at_once(ahead: int) -> None:
    """Pages smaller than a block: who came first needs several a round, and gets them before anybody new."""
    bench = Bench(3, 72, 1, 8, 16, longest=72)
    requests = [request_of([i % 3] * 9, 60) for i in range(6)]
    for request in requests:
        bench.scheduler.add(request)
    bench.drain(ahead, most=2000)
    for request in requests:
        bench.check_answer(request)


def test_who_shares_a_beginning_with_a_prompt_in_progress_waits_and_finds_it() -> None:
    bench = Bench(4, 64, 4, 32, 4, longest=64)
    requests = [request_of([0, 1, 2] * 8 + [i], 4) for i in range(3)]
    for request in requests:
        bench.scheduler.add(request)
    bench.drain()
    for request in requests:
        bench.check_answer(request)
    stats = bench.scheduler.stats
    assert stats.prompt_tokens == 75
    assert stats.hit_tokens == 48  # two of them found six pages each


def test_a_second_turn_finds_prompt_and_answer() -> None:
    bench = Bench(1, 64, 1, 32, 4, longest=64)
    first = request_of([0, 1, 2], 10)
    bench.scheduler.add(first)
    while not first.finished:
        bench.step()
    second = request_of([*first.prompt, *first.output, 1], 4)
    bench.scheduler.add(second)
    bench.drain()
    assert bench.scheduler.stats.hit_tokens >= 12  # the last token of an answer may have no K/V
    bench.check_answer(second)


def test_lower_priority_values_run_first_then_who_came_first() -> None:
    bench = Bench(1, 64, 4, 32, 4, longest=64)
    requests = [request_of([0, i % 3], 3, priority=priority) for i, priority in enumerate([1, 0, 0, -1])]
    ended = []
    for request in requests:
        bench.scheduler.add(request)
    while bench.busy:
        bench.step()
        ended += [r for r in requests if r.finished and r not in ended]
    assert ended == [requests[i] for i in (3, 1, 2, 0)]


def test_a_request_that_the_pool_can_never_hold_fails_at_once() -> None:
    bench = Bench(2, 4, 4, 8, 4, longest=64)
    fits, does_not = request_of([0] * 8, 8), request_of([0] * 8, 9)
    bench.scheduler.add(fits)
    bench.scheduler.add(does_not)
    assert does_not.finish_reason is FinishReason.ERROR
    assert "8 prompt and up to 9 output tokens need 5 pages of 4 tokens; the pool has 4" in str(does_not.error)
    bench.drain()
    bench.check_answer(fits)


def test_rows_that_are_not_finite_fail_alone() -> None:
    answers = iter([True] * 3 + [False] + [True] * 100)
    bench = Bench(3, 64, 4, 32, 4, longest=64, finite=lambda: next(answers))
    requests = [request_of([i, 1], 12) for i in range(3)]
    for request in requests:
        bench.scheduler.add(request)
    bench.drain()
    assert [r.finish_reason for r in requests].count(FinishReason.ERROR) == 1
    for request in requests:
        bench.check_answer(request)


def test_prompts_do_not_hold_decoding_up() -> None:
    """Long prompts come in all the time; whoever decodes still gets its turn between chunks."""
    bench = Bench(4, 400, 4, 8, 1, longest=400)
    bench.scheduler.add(first := request_of([0], 30))
    steps = 0
    while not first.finished:
        if len(bench.scheduler.waiting) < 3:
            bench.scheduler.add(request_of([steps % 3] * 200, 2))
        bench.step()
        steps += 1
    assert steps < 30 * 10
    bench.drain()
