"""Adaptive blocks: drafting stops where it does not pay, is tried again, and goes on where it does."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from fake_device import Bench, request_of
from hypothesis import given
from hypothesis import strategies as st

from serving.blocks import (
    LONG_PAUSE,
    SHORT_PAUSE,
    Acceptance,
    BlockPolicy,
    adaptive,
    block_sizes,
    costs_of,
    expected,
    fixed,
    interpolated,
)

LIKE_A_GPU = {1: {1: 1.0, 16: 1.05}, 8: {1: 1.0, 16: 1.2}}
ROWS = (1, 2, 4, 8)


def simulated(
    policy: BlockPolicy, counts: list[Callable[[int], int]], steps: int
) -> tuple[list[list[int]], list[Acceptance]]:
    """Each step's widths for rows that never end; ``counts``: what a round of a width emits."""
    rows = [policy.start() for _ in counts]
    seen = []
    for _ in range(steps):
        block, widths = policy.choose(rows)
        assert all(1 <= width <= block for width in widths)
        for row, width, count in zip(rows, widths, counts, strict=True):
            policy.observe(row, width, count(width))
        seen.append(widths)
    return seen, rows


def never(width: int) -> int:
    return 1


def always(width: int) -> int:
    return width


def test_a_drafter_that_is_never_right_is_left_alone_and_tried_again() -> None:
    seen, _ = simulated(adaptive(ROWS, 16, LIKE_A_GPU), [never] * 4, 1000)
    drafted = [i for i, widths in enumerate(seen) if max(widths) > 1]
    assert len(drafted) < 60
    assert drafted[-1] > 1000 - LONG_PAUSE - 4
    pauses = [b - a for a, b in pairwise(drafted) if b - a > 1]
    assert pauses == sorted(pauses)  # longer and longer, up to the longest
    assert pauses[0] <= SHORT_PAUSE + 1
    assert max(pauses) <= LONG_PAUSE + 1


def test_a_drafter_that_is_always_right_drafts_in_every_step() -> None:
    seen, _ = simulated(adaptive(ROWS, 16, LIKE_A_GPU), [always] * 4, 300)
    assert all(widths == [16] * 4 for widths in seen)


def test_one_row_without_luck_stops_alone() -> None:
    seen, _ = simulated(adaptive(ROWS, 16, LIKE_A_GPU), [always, never, always], 500)
    assert all(widths[0] == widths[2] == 16 for widths in seen)
    tries = [widths[1] > 1 for widths in seen]
    assert sum(tries) < 60
    assert any(tries[-LONG_PAUSE - 4 :])


def test_drafting_comes_back_when_the_text_gets_easy() -> None:
    state = {"step": 0}

    def later(width: int) -> int:
        state["step"] += 1
        return 1 if state["step"] < 300 else width

    seen, _ = simulated(adaptive(ROWS, 16, LIKE_A_GPU), [later], 1000)
    assert sum(widths[0] > 1 for widths in seen[:300]) < 60
    assert sum(widths[0] > 1 for widths in seen[300 + LONG_PAUSE + 4 :]) > 500


def test_a_new_row_starts_with_what_the_others_saw() -> None:
    policy = adaptive(ROWS, 16, LIKE_A_GPU)
    assert policy.start().chance == pytest.approx(0.75)
    simulated(policy, [always] * 4, 200)
    assert policy.start().chance > 0.95
    policy = adaptive(ROWS, 16, LIKE_A_GPU)
    simulated(policy, [never] * 4, 200)
    assert policy.start().chance < 0.3


@pytest.mark.parametrize("rows", [1, 4])
def test_what_all_rows_say_follows_another_workload(rows: int) -> None:
    """Some hundred observations turn it, and so do few ones and the pauses between them."""
    policy = adaptive(ROWS, 16, LIKE_A_GPU)
    for count, holds in ((16, lambda p: p > 0.95), (1, lambda p: p < 0.1), (16, lambda p: p > 0.95)):
        for _ in range(300):
            policy.observe(policy.start(), 16, count)
        assert holds(policy.start().chance)
    for counts, holds in ((always, lambda p: p > 0.95), (never, lambda p: p < 0.1), (always, lambda p: p > 0.95)):
        simulated(policy, [counts] * rows, 2000)
        assert holds(policy.start().chance)


def test_a_draft_more_or_less_does_not_turn_what_all_rows_say() -> None:
    policy, chance = adaptive(ROWS, 16, LIKE_A_GPU), random.Random(2)
    seen = []
    for _ in range(2000):
        count = next((n for n in range(1, 16) if chance.random() > 0.7), 16)
        policy.observe(policy.start(), 16, count)
        seen.append(policy.start().chance)
    assert 0.55 < min(seen[200:]) < 0.7 < max(seen[200:]) < 0.85


def test_a_fixed_block_is_always_whole() -> None:
    for block in (1, 5, 16):
        seen, _ = simulated(fixed(ROWS, block), [never] * 3, 50)
        assert all(widths == [block] * 3 for widths in seen)


def test_dear_steps_get_small_blocks_and_cheap_ones_large_ones() -> None:
    free = adaptive(ROWS, 16, {1: {1: 1.0, 16: 1.0}})
    assert set(free.blocks.values()) == {16}
    dear = adaptive(ROWS, 16, {1: {1: 1.0, 16: 16.0}})
    assert set(dear.blocks.values()) == {1}
    loaded = adaptive(ROWS, 16, {1: {1: 1.0, 16: 1.0}, 8: {1: 1.0, 16: 16.0}})
    assert loaded.blocks[1] == 16 > loaded.blocks[8]
    assert list(loaded.blocks) == list(ROWS)
    assert adaptive((1,), 1, LIKE_A_GPU).blocks == {1: 1}


@given(p=st.floats(0, 1), block=st.integers(1, 40))
def test_expected_tokens_are_the_geometric_sum(p: float, block: int) -> None:
    assert expected(p, block) == pytest.approx(math.fsum(p**i for i in range(block)))


def test_the_estimate_approaches_the_chance_of_each_draft() -> None:
    chance, row = random.Random(0), Acceptance(4.0, 3.0)
    seen = []
    for _ in range(4000):
        count = 1
        while count < 16 and chance.random() < 0.6:
            count += 1
        row.observe(16, count)
        seen.append(row.chance)
    assert sum(seen) / len(seen) == pytest.approx(0.6, abs=0.03)


def test_costs_between_measured_ones_and_beyond() -> None:
    costs = {1: {1: 2.0, 16: 17.0}, 3: {1: 4.0, 16: 19.0}}
    assert interpolated(costs, 1, 4) == pytest.approx(5.0)
    assert interpolated(costs, 2, 1) == pytest.approx(3.0)
    assert interpolated(costs, 2, 4) == pytest.approx(6.0)
    assert interpolated(costs, 9, 1) == pytest.approx(12.0)
    assert block_sizes(16) == (16, 8, 4, 2, 1)
    assert block_sizes(6) == (6, 3, 1)


def test_costs_are_known_by_device_kind_then_by_platform() -> None:
    assert costs_of("a chip that nobody has", "cpu") == costs_of("cpu", "cpu")
    assert all(ms > 0 for row in costs_of("cpu", "cpu").values() for ms in row.values())
    with pytest.raises(ValueError, match="'tpu'; pass block_size"):
        costs_of("TPU v9", "tpu")


@pytest.mark.parametrize("rightness", ["never", "half", "always"])
def test_what_is_said_does_not_depend_on_the_blocks(rightness: str) -> None:
    """Mixed batches through the scheduler: the same output with every policy."""
    chance = random.Random(1)
    accepted = {"never": lambda w: 0, "half": lambda w: chance.randrange(w), "always": lambda w: w - 1}[rightness]
    policy = adaptive((1, 2, 4), 16, LIKE_A_GPU)
    bench = Bench(4, 60, 4, 64, policy, accepted=accepted, longest=256)
    requests = [request_of([i % 3, i % 2], 40 + 20 * (i % 3), priority=i % 2) for i in range(20)]
    for request in requests:
        bench.scheduler.add(request)
    bench.drain()
    for request in requests:
        bench.check_answer(request)
    stats = bench.scheduler.stats
    assert stats.emitted >= stats.rounds
    if rightness == "always":
        assert stats.emitted / stats.rounds > 12
    if rightness == "never":
        assert stats.emitted == stats.rounds
