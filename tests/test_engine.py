"""The engine on real steps: whatever the pool, the pages, the order and the drafter, a request gets its own tokens."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import LONGEST, VOCAB, Garage, checksum_pair, generated_all, request_of, same
from jax import Array
from jax.sharding import Mesh
from tiny_models import Pair

from dflash_jax import Generation, step
from dflash_jax.reference import full_pass
from dflash_jax.step import ModelParams
from dflash_jax.verify import equality
from serving import FinishReason, SamplingParams
from serving.blocks import adaptive
from serving.build import build_engine, warm_up
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import Request
from serving.runner import decode_inputs
from serving.scheduler import DecodePlan, Row
from serving.shapes import DecodeShape, PrefillShape

MANY = 24  # requests against generate(): 200 in the full run
PAGE_SIZES = (1, 8, 16, 64)
BLOCK, SHORT = 16, 64  # of the checksum pair; context of its engines
CONTEXT, CHUNK = 256, 32  # of the trained pair's: alike wherever steps would be compiled anew
STOP = 7
FILTERS = ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02})


@pytest.fixture(scope="module")
def garage() -> Garage:
    return Garage()


@pytest.fixture(scope="module")
def checksum(mesh: Mesh) -> Pair:
    """Two drafts in three are right."""
    return checksum_pair(mesh)


def mixed(count: int, seed: int, longest: int, context: int, vocab: int) -> list[Request]:
    """Requests with all sampling options and lengths; half of the prompts share a beginning with others."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3, vocab) for _ in range(longest)] for _ in range(3)]
    made = []
    for i in range(count):
        length = chance.randrange(1, longest + 1)
        prompt = [chance.randrange(3, vocab) for _ in range(length)]
        if chance.random() < 0.5:
            shared = chance.randrange(length)
            prompt[:shared] = chance.choice(stems)[:shared]
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.0]),
            seed=chance.randrange(1 << 40),
            max_tokens=chance.randrange(1, 60),
            stop_token_ids=chance.choice([(), (), (5, 9)]),
            **chance.choice(FILTERS),
        )
        made.append(request_of(prompt, params, index=i, room=context - length))
    return made


def again(requests: Sequence[Request]) -> list[Request]:
    """The same requests, unanswered."""
    return [
        request_of(r.prompt, r.params, index=r.index, room=r.limit, stop_ids=tuple(r.stop_ids), priority=r.priority)
        for r in requests
    ]


# --- row 4 and the theorem: equal to generate(), whatever happens on the way


@pytest.fixture(scope="module")
def wanted(checksum: Pair) -> tuple[list[Request], list[Generation]]:
    requests = mixed(MANY, 1, 60, SHORT, VOCAB)
    return requests, generated_all(checksum, requests, BLOCK)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kept", [None, SHORT + 30], ids=["ample", "tiny"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ids_and_rounds_equal_generates(
    garage: Garage,
    checksum: Pair,
    wanted: tuple[list[Request], list[Generation]],
    page_size: int,
    overlap: bool,
    kept: int | None,
    prefix_cache: bool,
) -> None:
    """Every token depends on all cached ones, so a page that is lost or mixed up would show."""
    requests, rows = again(wanted[0]), wanted[1]
    if kept and page_size == 64:
        kept = 2 * SHORT
    engine = garage.engine(
        checksum,
        SHORT,
        block_size=BLOCK,
        page_size=page_size,
        overlap=overlap,
        prefix_cache=prefix_cache,
        kept=kept,
    )
    garage.run(engine, requests)
    for request, row in zip(requests, rows, strict=True):
        same(request, row)
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    stats = engine.stats
    if kept and page_size < 64:  # a page of 64 is a whole request
        assert stats.preemptions > 2
    assert stats.tokens == sum(len(r.output) for r in requests)
    assert stats.emitted == sum(sum(r.acceptance_lengths) for r in requests)
    if prefix_cache and page_size < 64:
        assert stats.hit_tokens > 0
    assert prefix_cache or stats.hit_tokens == 0


TEXT = [1, *map(ord, "Q: tell me about sam and the red bike\nA:")]


@pytest.fixture(scope="module")
def wanted_trained(trained: Pair) -> tuple[list[Request], list[Generation]]:
    """Prompts of 1 .. 200 tokens; half of them end in a text that the pair knows."""
    requests = mixed(MANY // 3, 3, 200, CONTEXT, 127)
    for request in requests[::2]:
        request.prompt = (*request.prompt[: -len(TEXT)], *TEXT)[-len(request.prompt) :]
    for request in requests:
        request.limit = min(request.limit, 30)
    return requests, generated_all(trained, requests, 8, page=CONTEXT)


@pytest.mark.parametrize(("kept", "overlap"), [(None, True), (300, True), (300, False)])
def test_a_trained_pair_gives_generates_ids(
    garage: Garage,
    trained: Pair,
    wanted_trained: tuple[list[Request], list[Generation]],
    kept: int | None,
    overlap: bool,
) -> None:
    """The same on real attention; in the small pool somebody is put out now and then, in flight or not."""
    options = {"overlap": overlap, "prefix_cache": overlap, "kept": kept}
    engine = garage.engine(trained, CONTEXT, block_size=8, prefill_chunk=CHUNK, **options)

    def put_out(at: int) -> None:
        if kept and at % 12 == 11 and engine.scheduler.rows and not engine.scheduler.rows[-1].gone:
            engine.scheduler.preempt(engine.scheduler.rows[-1])

    requests = garage.run(engine, again(wanted_trained[0]), put_out)
    for request, row in zip(requests, wanted_trained[1], strict=True):
        same(request, row)
    assert not kept or engine.stats.preemptions > 2
    assert {1, 8} < {n for request in requests for n in request.acceptance_lengths}


def test_overlap_changes_nothing_though_requests_are_aborted_and_preempted(garage: Garage, checksum: Pair) -> None:
    """Row 4: aborts and preemptions between submit and collect; the others' tokens are what they are alone."""
    requests = mixed(60, 3, 40, SHORT, VOCAB)
    rows = generated_all(checksum, requests, BLOCK)
    for overlap in (True, False):
        chance, running = random.Random(5), again(requests)
        engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8, overlap=overlap, kept=128)

        def disturb(at: int, engine: Engine = engine, chance: random.Random = chance) -> None:
            rows = [row for row in engine.scheduler.rows if not row.gone]
            if rows and at % 3 == 0:
                engine.scheduler.preempt(chance.choice(rows))
            if rows and at % 11 == 0:
                engine.abort(chance.choice(rows).request)

        garage.run(engine, running, disturb)
        assert sum(r.finish_reason is FinishReason.ABORT for r in running) > 3
        for request, row in zip(running, rows, strict=True):
            if request.finish_reason is FinishReason.ABORT:
                assert request.output == row.tokens[: len(request.output)]
            else:
                same(request, row)


def test_four_alone_eight_together_and_one_alone_equal_a_fresh_engine(garage: Garage, checksum: Pair) -> None:
    """Row 4."""
    requests = mixed(13, 4, 40, SHORT, VOCAB)
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8)
    used = [garage.run(engine, [request])[0] for request in again(requests[:4])]
    used += garage.run(engine, again(requests[4:12]))
    used += garage.run(engine, again(requests[12:]))
    for request, known in zip(again(requests), used, strict=True):
        fresh = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8)
        garage.run(fresh, [request])
        assert (request.output, request.acceptance_lengths) == (known.output, known.acceptance_lengths)


# --- row 5: any drafter, any temperature


@pytest.mark.parametrize("sharpness", [0.02, 1.0])
def test_any_drafter_gives_the_plain_tokens(garage: Garage, mesh: Mesh, sharpness: float) -> None:
    requests = [
        request_of([3 + i % 7, 4, i % 50], SamplingParams(temperature=t, seed=i, max_tokens=30, **filters), index=i)
        for i, (t, filters) in enumerate((t, filters) for t in (0.0, 0.7, 1.0) for filters in FILTERS)
    ]
    answers = {}
    for name, period in (("never", 1), ("sometimes", 3), ("always", 0)):
        pair = checksum_pair(mesh, period, sharpness=sharpness)
        engine = garage.engine(pair, SHORT, block_size=BLOCK, page_size=8)
        answers[name] = garage.run(engine, again(requests))
        rounds = {n for r in answers[name] for n in r.acceptance_lengths}
        assert rounds <= {"never": {1}, "sometimes": {1, 2, 3}, "always": {BLOCK}}[name]
    pair = checksum_pair(mesh, sharpness=sharpness)
    plain = garage.run(garage.engine(pair, SHORT, drafter=False, page_size=8), again(requests))
    for name in answers:
        assert [r.output for r in answers[name]] == [r.output for r in plain]
    off = garage.run(garage.engine(pair, SHORT, block_size=1, page_size=8), again(requests))
    assert [r.output for r in off] == [r.output for r in plain]
    assert len({tuple(r.output) for r in plain}) > 10


def one_more(block: Array, draws: Array, width: Array) -> Array:
    """A wrong rule, off by one."""
    return jnp.minimum(equality(block, draws, width) + 1, jnp.maximum(width - 1, 0))


def test_a_wrong_rule_is_seen(garage: Garage, checksum: Pair, wanted: tuple[list[Request], list[Generation]]) -> None:
    """The negative control of this file."""
    engine = garage.engine(checksum, SHORT, accept=one_more, block_size=BLOCK, page_size=8)
    requests = garage.run(engine, again(wanted[0]))
    for temperature in (0.0, 0.7, 1.0):
        assert any(
            request.output != row.tokens
            for request, row in zip(requests, wanted[1], strict=True)
            if request.params.temperature == temperature
        )


# --- row 6: rows and seeds


def test_each_row_of_a_mixed_batch_equals_its_own_run(garage: Garage, checksum: Pair) -> None:
    requests = mixed(8, 6, 20, SHORT, VOCAB)
    engine = partial(garage.engine, checksum, SHORT, block_size=BLOCK, page_size=8)
    together = garage.run(engine(), again(requests))
    for request, known in zip(again(requests), together, strict=True):
        garage.run(engine(), [request])
        assert (request.output, request.acceptance_lengths) == (known.output, known.acceptance_lengths)


def test_a_seed_gives_its_tokens_in_every_row_and_after_preemption(garage: Garage, checksum: Pair) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40)
    requests = [request_of([1, 2, 3], params if i in (0, 3, 5) else replace(params, seed=100 + i)) for i in range(8)]
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8)

    def put_out(at: int) -> None:
        if at in (3, 6, 9) and engine.scheduler.rows:
            engine.scheduler.preempt(engine.scheduler.rows[0])

    garage.run(engine, requests, put_out)
    assert engine.stats.preemptions >= 3
    assert requests[0].output == requests[3].output == requests[5].output
    assert requests[0].acceptance_lengths == requests[3].acceptance_lengths == requests[5].acceptance_lengths
    assert len({tuple(r.output) for r in requests}) == 6


# --- row 1: stops and budgets inside an accepted block


class Letters:
    """A detokenizer of one letter an id."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(chr(60 + token) for token in tokens)

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def story(mesh: Mesh) -> list[int]:
    """A text by position with a stop token at 40."""
    return [STOP if at == 40 else 10 + at % 40 for at in range(LONGEST)]


@pytest.mark.parametrize("period", [0, 4])
def test_every_stop_offset_and_cap(garage: Garage, mesh: Mesh, story: list[int], period: int) -> None:
    """Row 1: prompts that end 0 .. 33 tokens before the stop, caps 1 .. 33."""
    engine = garage.engine(checksum_pair(mesh, period, story), SHORT + 64, block_size=BLOCK, max_num_seqs=8)
    requests, asked = [], []
    for offset in range(34):
        for cap in range(1, 34):
            params = SamplingParams(temperature=0, max_tokens=cap)
            requests.append(request_of(story[: 40 - offset], params, stop_ids=[STOP]))
            asked.append((offset, cap))
    garage.run(engine, requests)
    for request, (offset, cap) in zip(requests, asked, strict=True):
        start, rounds = 40 - offset, request.acceptance_lengths
        assert request.output == story[start : start + min(cap, offset + 1)]
        assert request.finish_reason is (FinishReason.STOP if offset < cap else FinishReason.LENGTH)
        assert request.stop_reason == (STOP if offset < cap else None)
        at, expected = start + 1, []  # rounds as one-token decoding with these drafts would have them, uncut
        while at - start < len(request.output):
            count = 1
            while count < BLOCK and not (period and (at + count - 1) % period == 0):
                count += 1
            expected.append(count)
            at += count
        assert rounds == expected
        if 1 + sum(rounds) == len(request.output):
            continue
        assert 1 + sum(rounds[:-1]) < len(request.output) < 1 + sum(rounds)


def test_stop_strings_at_each_offset_over_tokens_and_blocks(garage: Garage, mesh: Mesh, story: list[int]) -> None:
    """Row 1: strings of one to three letters that begin 0 .. 33 tokens behind the prompt; ignored stop ids."""
    engine = garage.engine(checksum_pair(mesh, 0, story), SHORT + 64, block_size=BLOCK, max_num_seqs=8)
    said = Letters().push(story)
    requests, asked = [], []
    for offset in range(34):
        for length in (1, 2, 3):
            start = 41
            stop = said[start + offset : start + offset + length]
            params = SamplingParams(temperature=0, max_tokens=38, stop=[stop])
            requests.append(request_of(story[:start], params, detokenizer=Letters()))
            asked.append((offset, length, stop))
    garage.run(engine, requests)
    for request, (offset, length, stop) in zip(requests, asked, strict=True):
        assert (request.text, request.stop_reason) == (said[41 : 41 + offset], stop)
        assert request.output == story[41 : 41 + offset + length]


def test_an_end_of_sequence_token_that_is_ignored_does_not_end(garage: Garage, mesh: Mesh, story: list[int]) -> None:
    engine = garage.engine(checksum_pair(mesh, 0, story), SHORT + 64, block_size=BLOCK, max_num_seqs=8)
    free, held = (
        request_of(story[:30], SamplingParams(temperature=0, max_tokens=30), stop_ids=ids) for ids in ((), (STOP,))
    )
    garage.run(engine, [free, held])
    assert free.output == story[30:60]
    assert held.output == story[30:41]


# --- row 2: what the drafter's pages hold


@jax.jit
def nothing_known(pages: Array) -> Array:
    """A pool full of NaN."""
    return jnp.full_like(pages, jnp.nan)


def poisoned(engine: Engine) -> Engine:
    state = engine.runner.state
    target, drafter = jax.tree.map(nothing_known, (state.target, state.drafter))
    engine.runner.state = state.replace(target=target, drafter=drafter)
    return engine


def row_ready(engine: Engine, request: Request) -> Row:
    """Steps until the request's prompt is cached and nothing is in flight."""
    while True:
        engine.step()
        row = next((r for r in engine.scheduler.rows if r.request is request), None)
        if row and not row.prefilling and not row.inflight:
            return row


def cached_rows(engine: Engine, row: Row, length: int) -> list[np.ndarray]:
    """The drafter's K and V of a row's first tokens, layer by layer."""
    size = engine.scheduler.page_size
    slots = [row.pages[at // size] * size + at % size for at in range(length)]
    drafter = engine.runner.state.drafter
    assert drafter is not None
    return [np.asarray(pool)[slots] for pool in (*drafter.k, *drafter.v)]


drafted = jax.jit(step.draft, static_argnames=("model", "block"))


def next_block(engine: Engine, row: Row, block: int) -> list[int]:
    """What the drafter proposes for a row's next round."""
    runner = engine.runner
    shape = DecodeShape(runner.shapes.max_rows, block, runner.shapes.max_pages)
    plan = DecodePlan(shape, (row.slot,), (block,), (), False)
    inputs = decode_inputs(jnp.asarray(runner.packed(plan)))
    state = runner.state
    lengths, anchor = (x.at[inputs.rows].get(mode="fill", fill_value=0) for x in (state.lengths, state.anchor))
    return np.asarray(drafted(runner.params, runner.model, block, state, inputs, anchor, lengths))[0].tolist()


def test_the_drafter_knows_a_prompt_however_it_came(garage: Garage, trained: Pair) -> None:
    """Row 2: whole, in chunks, as a prefix hit and after preemption, in a pool full of NaN: the same first block."""
    chance = random.Random(9)
    prompt = [chance.randrange(3, 127) for _ in range(200)]
    params = SamplingParams(temperature=0, max_tokens=20)
    make = partial(garage.engine, trained, CONTEXT, block_size=8, prefill_chunk=CHUNK, overlap=False)

    def started(engine: Engine) -> tuple[list[int], list[np.ndarray]]:
        engine.add(request := request_of(prompt, params))
        row = row_ready(engine, request)
        found = next_block(engine, row, 8), cached_rows(engine, row, 200)
        engine.abort(request)
        return found

    block, rows = started(poisoned(make(prefill_chunk=256)))
    assert all(np.isfinite(x).all() for x in rows)
    others = [started(poisoned(make(prefill_chunk=chunk))) for chunk in (1, 7, CHUNK)]
    warm = poisoned(make())
    garage.run(warm, [request_of(prompt[:180], SamplingParams(temperature=0, max_tokens=1))])
    others.append(started(warm))
    assert warm.stats.hit_tokens == 176
    resumed = poisoned(make())
    resumed.add(request := request_of(prompt, params))
    resumed.scheduler.preempt(row_ready(resumed, request))
    row = row_ready(resumed, request)
    assert resumed.stats.preemptions == 1
    others.append((next_block(resumed, row, 8), cached_rows(resumed, row, 200)))
    for other_block, other_rows in others:
        assert other_block == block
        for a, b in zip(other_rows, rows, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_drafters_pages_hold_accepted_tokens_only(garage: Garage, trained: Pair) -> None:
    """Row 2: after rounds that kept a part of their drafts, as after a prompt of the same tokens."""
    prompt = TEXT
    make = partial(garage.engine, trained, CONTEXT, block_size=8, prefill_chunk=CHUNK, overlap=False)
    engine = poisoned(make())
    engine.add(request := request_of(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=60)))
    row = row_ready(engine, request)
    while len(request.acceptance_lengths) < 8:
        engine.step()
    assert {n for n in request.acceptance_lengths if 1 < n < 8}
    tokens = [*prompt, *request.output]
    assert row.known == len(tokens) - 1
    found = cached_rows(engine, row, row.known)
    rebuilt = poisoned(make())
    rebuilt.add(other := request_of(tokens[:-1], SamplingParams(temperature=0, max_tokens=20)))
    for a, b in zip(found, cached_rows(rebuilt, row_ready(rebuilt, other), row.known), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# --- row 3: pages at a block's tail


def test_a_shared_page_is_never_written_again(garage: Garage, trained: Pair) -> None:
    """Row 3: A runs, B arrives with a page-aligned hit; what both share keeps its bits."""
    prompt = [3 + i % 120 for i in range(64)]
    engine = garage.engine(trained, CONTEXT, block_size=8, prefill_chunk=CHUNK)
    first = request_of(prompt, SamplingParams(temperature=0, max_tokens=60))
    engine.add(first)
    while len(first.output) < 6:
        engine.step()
    (row,) = engine.scheduler.rows
    shared = row.pages[:4]

    def bits() -> list[bytes]:
        state = engine.runner.state
        assert state.drafter is not None
        pools = (*state.target.k, *state.target.v, *state.drafter.k, *state.drafter.v)
        return [np.asarray(pool).reshape(-1, 16, *pool.shape[1:])[shared].tobytes() for pool in pools]

    before = bits()
    second = request_of([*prompt, 5], SamplingParams(temperature=0, max_tokens=60))
    engine.add(second)
    while not second.output:
        engine.step()
    assert engine.stats.hit_tokens == 64
    garage.run(engine, [])
    assert bits() == before
    expected = generated_all(trained, [first, second], 8, page=CONTEXT)
    for request, wanted in zip((first, second), expected, strict=True):
        same(request, wanted)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_rows_to_the_last_position(garage: Garage, checksum: Pair, page_size: int) -> None:
    """Row 3: the context ends inside their blocks; neither the neighbour nor the pool notices."""
    params = SamplingParams(temperature=0, max_tokens=None)
    requests = [request_of([5] * 3, params, room=SHORT - 3), request_of([6] * 10, params, room=SHORT - 10)]
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=page_size)
    garage.run(engine, requests)
    for request, row in zip(requests, generated_all(checksum, requests, BLOCK), strict=True):
        same(request, row)
        assert len(request.prompt) + len(request.output) == SHORT


# --- rows 10 and 15: log-probabilities, NaN


def test_logprobs_equal_a_teacher_forced_pass(garage: Garage, tiny: Pair) -> None:
    """Beside rows that want none, greedy and hot; across a preemption."""
    requests = [
        request_of([4 + i] * (5 + i), SamplingParams(temperature=t, seed=i, max_tokens=12, logprobs=k))
        for i, (t, k) in enumerate([(0.0, 3), (1.0, None), (0.8, 0), (1.0, 5)])
    ]
    engine = garage.engine(tiny, 64, block_size=4, page_size=8, top_logprobs=5)

    def put_out(at: int) -> None:
        if at == 6 and engine.scheduler.rows:
            engine.scheduler.preempt(engine.scheduler.rows[-1])

    garage.run(engine, requests, put_out)
    assert engine.stats.preemptions == 1
    for request in requests:
        k = request.params.logprobs
        if k is None:
            assert request.completion().logprobs is None
            continue
        tokens = np.zeros((1, 64), np.int32)
        text = [*request.prompt, *request.output]
        tokens[0, : len(text)] = text
        _, logits = full_pass(tiny.params.target, tiny.model.target, tokens)
        rows = np.asarray(jax.nn.log_softmax(logits[0]))[len(request.prompt) - 1 :]
        assert len(request.logprobs) == len(request.output)
        for token, entry, row in zip(request.output, request.logprobs, rows, strict=False):
            assert next(iter(entry)) == token
            assert set(entry) == {token, *np.argsort(-row)[:k].tolist()}
            assert all(abs(value - row[t]) < 1e-4 for t, value in entry.items())


def test_a_row_of_nan_fails_alone_and_its_pages_serve_the_next(garage: Garage, tiny: Pair) -> None:
    """Row 15: one token's embedding is NaN; the pages that held it are used again."""
    params = dict(tiny.params.target)
    params["embed"] = params["embed"].at[88].set(jnp.nan)
    broken = Pair(ModelParams(params, tiny.params.drafter), tiny.model, tiny.mesh)
    prompts = [[4, 5, 6], [5, 88, 7], [7, 8]]
    wanted = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[88])
    engine = garage.engine(broken, 64, block_size=4, page_size=8, top_logprobs=5, kept=64)
    requests = garage.run(engine, [request_of(prompt, wanted) for prompt in prompts])
    assert [r.finish_reason is FinishReason.ERROR for r in requests] == [False, True, False]
    assert "not finite" in str(requests[1].error)
    clean = garage.engine(tiny, 64, block_size=4, page_size=8, top_logprobs=5)
    expected = garage.run(clean, [request_of(prompt, wanted) for prompt in prompts])
    assert (requests[0].output, requests[2].output) == (expected[0].output, expected[2].output)
    later = [request_of([9 + i] * 20, wanted) for i in range(6)]
    assert [r.output for r in garage.run(engine, later)] == [r.output for r in garage.run(clean, again(later))]


# --- row 11: limits


def test_prompts_up_to_the_context_end_get_what_is_left(garage: Garage, checksum: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=None)
    requests = [request_of([i % 60] * (SHORT - room), params, room=room) for i, room in enumerate(range(1, 18))]
    garage.run(garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8), requests)
    for request, row in zip(requests, generated_all(checksum, requests, BLOCK), strict=True):
        same(request, row)
        assert (len(request.output), request.finish_reason) == (request.limit, FinishReason.LENGTH)


def test_a_request_that_the_pool_cannot_hold_fails_and_the_rest_is_answered(garage: Garage, checksum: Pair) -> None:
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8)
    engine.scheduler.pool.total = 4
    params = SamplingParams(temperature=0, max_tokens=20)
    good, bad, other = (request_of([7] * n, params) for n in (3, 40, 5))
    for request in (good, bad, other):
        engine.add(request)
    assert bad.finish_reason is FinishReason.ERROR
    assert "the pool has 4" in str(bad.error)
    while engine.busy:
        engine.step()
    assert len(good.output) == len(other.output) == 20


def test_a_request_that_is_aborted_while_it_waits_never_runs(garage: Garage, checksum: Pair) -> None:
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8)
    request = request_of([3], SamplingParams(max_tokens=5))
    engine.add(request)
    engine.abort(request)
    assert not engine.busy
    assert engine.step() == []
    assert (request.finish_reason, request.output) == (FinishReason.ABORT, [])


@pytest.mark.parametrize("where", ["packed", "launch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_fails_takes_what_ran_with_it_and_nothing_else(
    garage: Garage, checksum: Pair, monkeypatch: pytest.MonkeyPatch, where: str, overlap: bool
) -> None:
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8, max_num_seqs=2, overlap=overlap)
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [[3, i, 5] for i in range(4)]
    wanted = [r.output for r in garage.run(engine, [request_of(p, params) for p in prompts])]
    requests, heard = [request_of(p, params, index=i) for i, p in enumerate(prompts)], []
    for request in requests:
        request.notify = lambda r: heard.append(r.index)
        engine.add(request)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, where, lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            garage.run(engine, [])
    failed = [r for r in requests if r.finished]
    assert len(failed) == 2
    assert {r.index for r in failed} <= set(heard)
    assert all("RuntimeError: no memory" in str(r.error) for r in failed)
    while engine.busy:
        engine.step()
    garage.balanced(engine)
    assert [r.output for r in requests if r.error is None] == wanted[2:]


@pytest.mark.parametrize(("seconds", "overlap", "ahead"), [(1e-3, True, 2), (6e-3, True, 1), (1e-3, False, 0)])
def test_short_steps_have_one_more_on_its_way(
    garage: Garage, checksum: Pair, monkeypatch: pytest.MonkeyPatch, seconds: float, overlap: bool, ahead: int
) -> None:
    """The host needs some ms from a step's end to the launch of the next but one."""
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8, max_num_seqs=2, overlap=overlap)
    clock = count()
    monkeypatch.setattr("serving.engine.perf_counter", lambda: next(clock) * seconds / 4)  # read four times a step
    engine.add(request := request_of([3], SamplingParams(temperature=0, max_tokens=50)))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.inflight))
    assert most == ahead
    assert len(request.output) == 50


# --- row 18: nothing compiles once it is warm


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    """How often XLA compiled since the test began."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(seen)
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_warm_up(
    mesh: Mesh, compilations: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 18: any mixture of lengths and options, those seen for the first time included."""
    engine = Garage().engine(checksum_pair(mesh, block=4), SHORT, page_size=8, max_num_seqs=2, top_logprobs=5)
    warm_up(engine, progress=False)
    assert "steps compiled" in capsys.readouterr().err
    before = compilations()
    assert before > 3
    extras = ({"logprobs": 3}, {"logprobs": 0}, {"stop": ["ab"]}, {"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.5})
    requests = [request_of([5], SamplingParams(temperature=0, max_tokens=5))]
    requests += [
        request_of([5, 6], SamplingParams(temperature=0.9, max_tokens=5, **extra), detokenizer=Letters())
        for extra in extras
    ]
    requests += mixed(20, 8, 60, SHORT, VOCAB)
    for request in requests:
        engine.add(request)
        engine.step()
    while engine.busy:
        engine.step()
    assert compilations() == before


# --- adaptive blocks


@pytest.mark.parametrize(("name", "period"), [("never", 1), ("sometimes", 3), ("always", 0)])
def test_adaptive_blocks_change_no_id(garage: Garage, mesh: Mesh, name: str, period: int) -> None:
    requests = mixed(16, 10, 8, SHORT, VOCAB)
    pair = checksum_pair(mesh, period)
    policy = adaptive((1, 2, 4), BLOCK, {1: {1: 1.0, 16: 1.05}, 4: {1: 1.0, 16: 1.2}})
    engine = garage.engine(pair, SHORT, policy=policy, page_size=8)
    garage.run(engine, requests)
    for request, row in zip(requests, generated_all(pair, again(requests), BLOCK), strict=True):
        assert request.output == row.tokens
    stats = engine.stats
    if name == "always":
        assert stats.acceptance_length == BLOCK
    if name == "never":
        assert stats.acceptance_length == 1


# --- memory


def test_no_step_copies_the_pool(tiny: Pair) -> None:
    """A cache that is read and written in one step must be written in place, however large it is."""
    config = EngineConfig(max_num_seqs=1, page_size=16, num_pages=5000, block_size=8)
    runner = build_engine(tiny.params, tiny.model, tiny.mesh, config, 64).runner
    for shape in (PrefillShape(1, 32, 4), DecodeShape(1, 1, 4), DecodeShape(1, 8, 4)):
        assert runner.step(shape).memory_analysis().temp_size_in_bytes < runner.cache_bytes / 20


def test_the_memory_of_the_largest_step_is_planned(garage: Garage, checksum: Pair) -> None:
    engine = garage.engine(checksum, SHORT, block_size=BLOCK, page_size=8, max_num_seqs=2)
    held = sum(x.nbytes for x in jax.tree.leaves((engine.runner.params, engine.runner.state)))
    engine.runner.step(DecodeShape(2, 1, engine.scheduler.shapes.max_pages))
    small = engine.runner.planned_bytes
    engine.runner.step(DecodeShape(2, BLOCK, engine.scheduler.shapes.max_pages))
    assert held < small <= engine.runner.planned_bytes
