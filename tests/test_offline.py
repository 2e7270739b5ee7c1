"""Batch runs: records of every form, errors of single lines, bounds, stops, noise, and what a resumed run finds."""

import json
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion
from test_llm import PAIR, PROMPTS, write_tokenizer

from dflash_jax.generate import row_key
from serving import LLM, EngineConfig, SamplingParams, offline
from serving.lines import CHAT, lines_of
from serving.offline import Output, answers
from serving.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WILD = SamplingParams(temperature=3.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder


def opened(target: Path, max_num_seqs: int) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "seed": 5, "block_size": 4, "max_model_len": 128}
    return LLM(target, PAIR / "draft", prefill_chunk=64, max_num_seqs=max_num_seqs, **options)


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return opened(target, 4)


@pytest.fixture(scope="module")
def narrow(target: Path) -> LLM:
    """The same in two rows."""
    return opened(target, 2)


def raw(values: Sequence[Any]) -> list[bytes]:
    """Lines of a file; bytes are as they are."""
    return [v if isinstance(v, bytes) else json.dumps(v).encode() + b"\n" for v in values]


def answered(llm: Any, values: Sequence[Any], defaults: SamplingParams = GREEDY, **options: Any) -> list[Any]:
    return [json.loads(a.record) for a in answers(llm, lines_of(raw(values)), defaults, **options)]


# --- forms


def test_lines_of_every_form_are_answered_in_order_and_bad_ones_alone(llm: LLM) -> None:
    prompt = PROMPTS[0]
    messages = [{"role": "user", "content": prompt}]
    parts = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    body = {"model": "any", "max_tokens": 12, "temperature": 0}
    records = answered(
        llm,
        [
            {"prompt": prompt},
            b"\n",
            {"prompt_token_ids": [ord(c) for c in prompt], "custom_id": "ids"},
            b'{"prompt": "half\n',
            {"messages": messages},
            {"custom_id": "chat", "method": "POST", "url": CHAT, "body": body | {"messages": parts}},
            b"  \r\n",
            {"custom_id": "text", "body": body | {"prompt": prompt, "user": "me", "stream": False, "stop": None}},
            {"custom_id": "bad", "body": body | {"prompt": prompt, "presence_penalty": 0.5}},
            {"prompt": "x" * 200},
            {"prompt": prompt, "max_tokens": 3},
        ],
    )
    (alone,) = llm.generate(prompt, GREEDY)
    assert [r.get("index", r.get("id")) for r in records] == [
        0,
        1,
        2,
        3,
        "batch_req_4",
        "batch_req_5",
        "batch_req_6",
        7,
        8,
    ]
    assert [r.get("custom_id") for r in records] == [None, "ids", None, None, "chat", "text", "bad", None, None]
    for i in (0, 1, 3):
        assert records[i] == records[i] | {
            "text": alone.text,
            "finish_reason": "length",
            "output_tokens": 12,
            "prompt_tokens": alone.prompt_tokens,
            "acceptance_length": round(alone.acceptance_length, 4),
            "error": None,
        }
    assert records[2]["error"].startswith("line 4: it is not JSON: ")
    assert "presence_penalty is not supported, got 0.5" in records[6]["error"]["message"]
    assert "200 tokens" in records[7]["error"]
    assert all(records[i]["text"] is None for i in (2, 7))
    assert (records[8]["text"], records[8]["output_tokens"]) == (alone.text[:3], 3)
    chat = ChatCompletion.model_validate(records[4]["response"]["body"], strict=True)
    text = OpenAICompletion.model_validate(records[5]["response"]["body"], strict=True)
    assert (chat.model, chat.choices[0].message.content, text.choices[0].text) == ("any", alone.text, alone.text)
    assert chat.usage is not None
    assert (chat.usage.completion_tokens, chat.usage.total_tokens) == (12, 12 + alone.prompt_tokens)
    assert records[4]["response"]["body"]["usage"]["acceptance_length"] == round(alone.acceptance_length, 4)


def test_several_samples_and_logprobs_in_every_form(llm: LLM) -> None:
    body = {"n": 2, "temperature": 3.0, "seed": 7, "max_tokens": 4}
    plain, chat, text, ids = answered(
        llm,
        [
            {"prompt": PROMPTS[0], **body, "logprobs": 2},
            {
                "custom_id": "a",
                "body": body
                | {"messages": [{"role": "user", "content": PROMPTS[0]}], "logprobs": True, "top_logprobs": 2},
            },
            {"custom_id": "b", "body": body | {"prompt": [ord(c) for c in PROMPTS[0]], "logprobs": 2}},
            {"prompt": PROMPTS[0], **body},
        ],
        SamplingParams(ignore_eos=True),
        token_ids=True,
    )
    outs = llm.generate(PROMPTS[0], SamplingParams(**body, ignore_eos=True))
    assert [c["text"] for c in plain["choices"]] == [c["text"] for c in ids["choices"]] == [c.text for c in outs]
    assert [c["token_ids"] for c in ids["choices"]] == [list(c.token_ids) for c in outs]
    assert ids["output_tokens"] == 8
    assert "logprobs" not in ids["choices"][0]
    first = plain["choices"][0]["logprobs"][0]
    assert next(iter(first)) == str(outs[0].token_ids[0])
    assert len(first) in (2, 3)
    chatted = ChatCompletion.model_validate(chat["response"]["body"])
    texted = OpenAICompletion.model_validate(text["response"]["body"])
    for sample in range(2):
        theirs, others = chatted.choices[sample].logprobs, texted.choices[sample].logprobs
        assert theirs is not None
        assert theirs.content is not None
        assert others is not None
        assert "".join(entry.token for entry in theirs.content) == outs[sample].text == "".join(others.tokens or [])
        assert [entry.logprob for entry in theirs.content] == others.token_logprobs
        assert all(len(entry.top_logprobs) == 2 for entry in theirs.content)
        assert others.text_offset == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\xfa\n",
        b"[" * 100_000 + b"\n",
        b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}\n",
        b'{"prompt": "\\ud800"}\n',
        b'{"prompt": "a", "custom_id": "\\ud800"}\n',
        b'{"messages": [{"role": "user", "content": 5}]}\n',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}\n',
    ],
)
def test_strange_lines_cost_only_themselves(llm: LLM, line: bytes) -> None:
    good, bad = answered(llm, [{"prompt": PROMPTS[0]}, line])
    assert good["error"] is None
    assert bad["error"].startswith("line 2: ")


def test_without_a_tokenizer_ids_are_answered_by_ids() -> None:
    good, stop = answered(FakeLLM(), [{"prompt_token_ids": [81, 58]}, {"prompt_token_ids": [81], "stop": "x"}])
    assert good["token_ids"] == [65]
    assert "stop strings need a tokenizer" in stop["error"]


# --- the window, on an engine that only counts


class FakeEngine:
    """Answers a request at the step that ``steps_of`` names, in ``rows`` rows; remembers the most that it was given."""

    def __init__(self, rows: int, steps_of: Callable[[Request], int]) -> None:
        self.rows, self.steps_of = rows, steps_of
        self.requests: dict[Request, int] = {}
        self.most = 0

    def add(self, request: Request) -> None:
        if not request.finished:
            self.requests[request] = self.steps_of(request)
            self.most = max(self.most, len(self.requests))

    def abort(self, request: Request) -> None:
        request.abort()
        del self.requests[request]

    def step(self) -> None:
        for request in list(self.requests)[: self.rows]:
            self.requests[request] -= 1
            last = self.requests[request] <= 0
            if last:
                del self.requests[request]
            request.limit = len(request.output) + 1 if last else 1_000_000
            request.accept([65 + request.index % 26])
            request.notify(request)


class FakeLLM:
    """What ``answers`` needs of an LLM."""

    tokenizer = None

    def __init__(self, rows: int = 4, steps_of: Callable[[Request], int] = lambda _: 1) -> None:
        self.config = EngineConfig(max_num_seqs=rows, seed=5)
        self.lock = threading.Lock()
        self.engine = FakeEngine(rows, steps_of)

    def encode(self, prompt: Any, _: Any) -> tuple[int, ...]:
        return tuple(prompt)

    def request(self, index: int, sample: int, ids: Any, params: SamplingParams, key: tuple[int, int]) -> Request:
        return Request(index, sample, ids, params, key, 1_000_000, frozenset(), None)


def source(lines: int, read: list[int] | None = None) -> Iterator[bytes]:
    """Lines of a file; ``read``: how many were read, in its last entry."""
    for i in range(lines):
        if read is not None:
            read[-1] = i + 1
        yield b'{"prompt_token_ids": [1, 2, 3], "logprobs": 0}\n'


def test_a_slow_line_holds_back_a_bounded_number_of_others() -> None:
    llm, read = FakeLLM(steps_of=lambda request: 2_000 if request.index == 10 else 1), [0]
    ahead = 0
    for i, answer in enumerate(answers(llm, lines_of(source(1_000, read)), GREEDY)):
        assert json.loads(answer.record)["index"] == i
        ahead = max(ahead, read[-1] - i)
    assert i == 999
    assert ahead <= offline.HELD * 4
    assert llm.engine.most <= offline.OPEN * 4


def test_memory_does_not_grow_with_the_lines() -> None:
    def peak(lines: int) -> int:
        tracemalloc.start()
        assert sum(1 for _ in answers(FakeLLM(), lines_of(source(lines)), GREEDY)) == lines
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)
    assert peak(5_000) < 1.2 * peak(500) + 20_000


def test_stopping_finishes_what_has_begun_and_leaves_the_engine_idle() -> None:
    llm, asked = FakeLLM(steps_of=lambda request: 3 + request.index % 2), count()
    got = [
        json.loads(a.record)["index"]
        for a in answers(llm, lines_of(source(100)), GREEDY, stopping=lambda: next(asked) > 10)
    ]
    assert got == list(range(len(got)))
    assert 10 <= len(got) <= 16
    assert not llm.engine.requests


def test_whoever_stops_reading_aborts_the_rest() -> None:
    llm = FakeLLM(steps_of=lambda _: 2)
    run = answers(llm, lines_of(source(100)), GREEDY)
    next(run)
    run.close()
    assert not llm.engine.requests


# --- noise


def test_noise_is_of_the_seed_and_the_line_whatever_the_order(llm: LLM, narrow: LLM) -> None:
    values: list[Any] = [{"prompt": PROMPTS[i % 3], "max_tokens": 4 + i % 5} for i in range(12)]
    values[4] |= {"custom_id": "named"}
    values[7] |= {"seed": 3}
    values[9] |= {"n": 2}
    whole = answered(llm, values, WILD)
    assert answered(narrow, values, WILD) == whole
    assert answered(llm, [values[4]], WILD)[0]["text"] == whole[4]["text"]
    assert answered(llm, [values[7]], WILD)[0]["text"] == whole[7]["text"]
    (line,) = lines_of(raw([values[4]]))
    assert offline.Window(llm, WILD, False).requests(line)[1][0].key == row_key("5/named", 0)
    texts = [r.get("text") or r["choices"][0]["text"] for r in answered(llm, [{"prompt": PROMPTS[0]}] * 8, WILD)]
    assert len(set(texts)) == 8


# --- the output file


def written(path: Path, records: Sequence[bytes]) -> Path:
    path.write_bytes(b"".join(records))
    return path


@pytest.fixture(scope="module")
def values() -> list[Any]:
    return [
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": [2], "custom_id": "b"},
        {"custom_id": "c", "body": {}},
        b"x\n",
    ]


@pytest.fixture(scope="module")
def records(values: list[Any]) -> list[bytes]:
    return [a.record for a in answers(FakeLLM(), lines_of(raw(values)), GREEDY)]


@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize("torn", [0, 1, 20, -1])
def test_a_torn_last_record_is_done_again(
    tmp_path: Path, values: list[Any], records: list[bytes], done: int, torn: int
) -> None:
    tail = records[done][:torn] if done < 4 else b""
    path = written(tmp_path / "out", [*records[:done], tail])
    with Output(path) as out:
        skipped, left = out.resume(lines_of(raw(values)))
        assert path.read_bytes() == b"".join(records[:done]) + tail
        out.start()
        assert skipped == done
        for line in left:
            out.write(records[line.index])
    assert path.read_bytes() == b"".join(records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: [r[1], r[0]], "record 1 of .*out is .*'custom_id': 'b'.*the input has line 1, {'index': 0}"),
        (lambda r: [r[0], r[2]], "record 2 of .*batch_req_2.*line 2, {'index': 1, 'custom_id': 'b'}"),
        (lambda r: [*r, r[0]], "more than the 4 records"),
        (lambda r: [*r, b"{"], "more than the 4 records"),
        (lambda r: [r[0], b"rubbish\n"], "record 2 of .*rubbish"),
        (lambda r: [r[0], b"5\n"], "record 2"),
        (lambda r: [b"a file of something else"], "ends with .*a file of something else.*begins no answer to line 1"),
    ],
)
def test_an_output_of_another_input_is_refused_as_it_is(
    tmp_path: Path, values: list[Any], records: list[bytes], change: Any, message: str
) -> None:
    path = written(tmp_path / "out", change(records))
    before = path.read_bytes()
    with Output(path) as out, pytest.raises(ValueError, match=message):
        out.resume(lines_of(raw(values)))
    assert path.read_bytes() == before


def test_an_output_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    with Output(tmp_path / "out"), pytest.raises(ValueError, match="another run is writing"):
        Output(tmp_path / "out")
    Output(tmp_path / "out").close()
