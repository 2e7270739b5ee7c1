"""Stops and budgets inside accepted blocks: whatever the blocks, a request ends as one-token decoding would end it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import FinishReason, SamplingParams
from serving.blocks import fixed
from serving.engine import Engine
from serving.pages import PagePool
from serving.request import Request, overlap
from serving.scheduler import Plan, PrefillPlan, Scheduler, StepResult
from serving.shapes import Shapes

STOP = 7


class Letters:
    """A detokenizer of one letter an id, which releases text ``late`` ids late."""

    def __init__(self, late: int = 0) -> None:
        self.late, self.held = late, ""

    def push(self, tokens: Sequence[int]) -> str:
        self.held += "".join(chr(97 + token % 26) for token in tokens)
        ready, self.held = self.held[: len(self.held) - self.late], self.held[len(self.held) - self.late :]
        return ready

    def flush(self) -> str:
        ready, self.held = self.held, ""
        return ready


class ScriptedRunner:
    """A runner whose target says ``script`` after any prompt and whose rounds accept as told, in turn."""

    def __init__(self, script: Sequence[int], accepted: Sequence[int]) -> None:
        self.script, self.accepted = list(script), list(accepted)
        self.rounds = self.position = 0

    def submit(self, plan: Plan) -> "Done":
        if isinstance(plan, PrefillPlan):
            return Done(plan, [self.step(1)])
        wanted = self.accepted[self.rounds % len(self.accepted)] + 1
        self.rounds += 1
        return Done(plan, [self.step(min(wanted, plan.widths[0]))])

    def step(self, count: int) -> StepResult:
        start, self.position = self.position, self.position + count
        tokens = self.script[start : start + count]
        return StepResult(tokens, [{token: 0.0} for token in tokens], True)

    def collect(self, pending: "Done") -> list[StepResult]:
        return pending.results


@dataclass
class Done:
    """A step that needs no device."""

    plan: Plan
    results: list[StepResult]


def run(script: Sequence[int], cap: int, block: int, accepted: Sequence[int], **options: object) -> Request:
    late = int(options.pop("late", 0))  # type: ignore[call-overload]
    params = SamplingParams(max_tokens=cap, **options)  # type: ignore[arg-type]
    request = Request(0, 0, (1, 2, 3), params, (0, 0), cap, frozenset({STOP, *params.stop_token_ids}), Letters(late))
    shapes = Shapes(max_rows=1, max_pages=16, chunk=4, page_size=16, narrow=False)
    scheduler = Scheduler(PagePool(16), None, shapes, fixed(shapes.rows, block))
    engine = Engine(scheduler, ScriptedRunner(script, accepted))  # type: ignore[arg-type]
    engine.add(request)
    while engine.busy:
        engine.step()
    assert request.finished
    return request


def ending(request: Request) -> tuple[object, ...]:
    done = request.completion()
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, done.output_tokens


def test_a_stop_inside_a_block_beats_the_cap() -> None:
    done = run([10, 11, STOP, 20, 21, 22], 5, 16, [15]).completion()
    assert (done.token_ids, done.finish_reason, done.stop_reason) == ((10, 11, STOP), FinishReason.STOP, STOP)
    assert done.text == "kl"


def test_every_stop_offset_and_cap_ends_as_one_token_decoding() -> None:
    for offset in range(34):
        script = [10 + i for i in range(offset)] + [STOP] + [50 + i for i in range(40)]
        for cap in range(1, 34):
            plain = run(script, cap, 1, [0])
            for accepted in ([15], [0, 3, 15, 7]):
                fast = run(script, cap, 16, accepted)
                assert ending(fast) == ending(plain)
                # The first token is the prefill's; a round's count is uncut, its tokens may be cut.
                assert 1 + sum(fast.acceptance_lengths) >= len(fast.output)
                assert 1 + sum(fast.acceptance_lengths[:-1]) <= len(fast.output)
                assert fast.finish_reason is (FinishReason.STOP if offset < cap else FinishReason.LENGTH)


@given(
    script=st.lists(st.integers(0, 25), min_size=60, max_size=60),
    cap=st.integers(1, 40),
    accepted=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    late=st.integers(0, 2),
)
def test_stop_strings_do_not_depend_on_blocks(
    script: list[int], cap: int, accepted: list[int], stops: list[str], late: int
) -> None:
    script = [token % 3 for token in script]  # few letters, so that stop strings occur, split over ids and blocks
    options = {"stop": stops, "late": late}
    assert ending(run(script, cap, 8, accepted, **options)) == ending(run(script, cap, 1, [0], **options))


@pytest.mark.parametrize("offset", range(20))
def test_a_stop_string_split_over_two_tokens_is_cut_from_the_text(offset: int) -> None:
    script = [0] * offset + [1, 2] + [0] * 40
    done = run(script, 40, 16, [15], stop=["bc"]).completion()
    assert (done.text, done.stop_reason, done.output_tokens) == ("a" * offset, "bc", offset + 2)


def test_the_earliest_stop_string_wins() -> None:
    assert run([0, 1, 2, 3, 4], 5, 8, [7], stop=["d", "bc"]).completion().text == "a"


def test_a_stream_never_shows_what_a_stop_string_takes_back() -> None:
    params = SamplingParams(max_tokens=9, stop=["bcd"])
    request = Request(0, 0, (1,), params, (0, 0), 9, frozenset(), Letters())
    shown = []
    for token in (0, 1, 2, 0, 1, 2, 3, 9):
        request.accept([token], [{}])
        shown.append(request.chunk().text)
        if request.finished:
            break
    assert shown == ["a", "", "", "bca", "", "", ""]
    assert "".join(shown) == request.completion().text == "abca"


def test_chunks_put_together_are_the_completion() -> None:
    request = Request(0, 0, (1,), SamplingParams(max_tokens=50), (0, 0), 50, frozenset({STOP}), Letters(late=1))
    chunks = []
    for block in ([1, 2], [3, 4, 5], [STOP, 9, 9]):
        request.accept(block, [{}] * len(block))
        chunks.append(request.chunk())
    done = chunks[-1].completion
    assert done is not None
    assert "".join(c.text for c in chunks) == done.text == "bcdef"
    assert sum((c.token_ids for c in chunks), ()) == done.token_ids == (1, 2, 3, 4, 5, STOP)


@given(text=st.text("ab", max_size=6), stop=st.text("ab", min_size=1, max_size=4))
def test_overlap_is_the_longest_proper_start_at_the_end(text: str, stop: str) -> None:
    assert overlap(text, stop) == max(n for n in range(len(stop)) if text.endswith(stop[:n]))


def test_acceptance_statistics() -> None:
    request = run([1] * 40, 12, 8, [7, 0, 2])
    done = request.completion()
    assert done.acceptance_lengths == (8, 1, 3)  # the last round is uncut, though only two of its tokens fit
    assert done.acceptance_length == pytest.approx(4)
    assert done.acceptance_histogram == (2, 2, 1, 1, 1, 1, 1)
    assert done.output_tokens == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n must"),
        ({"n": 2, "temperature": 0.0}, "n must be 1"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids must hold whole numbers"),
        ({"n": 1.5}, "n must be a whole number, got 1.5"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number, got True"),
        ({"seed": "abc"}, "seed must be a whole number"),
        ({"temperature": "0.7"}, "temperature must be a finite number"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": None}, "top_p must be a finite number, got None"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
    ],
)
def test_sampling_params_refuse_what_makes_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["presence_penalty", "logit_bias", "best_of", "min_tokens", "guided_json"])
def test_unsupported_sampling_options_raise_and_name_themselves(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})
