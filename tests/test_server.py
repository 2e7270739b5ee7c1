"""The server, asked by OpenAI's own client: answers, streams, metrics, refusals."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import load_server
import openai
import pytest
from openai import OpenAI
from running_server import KEY, LIMITS, chat, metric, post, serving, small, write_target
from test_llm import PROMPTS

from serving import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return small(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


# --- answers


def test_completions_are_llms(client: OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    as_ids = [[ord(c) for c in prompt] for prompt in PROMPTS]
    for prompt in (PROMPTS, as_ids):
        done = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=40)
        assert [(c.index, c.text, c.finish_reason) for c in done.choices] == [
            (i, e.text, e.finish_reason) for i, e in enumerate(expected)
        ]
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(map(len, PROMPTS))
        assert done.usage.completion_tokens == sum(e.output_tokens for e in expected)
        assert (done.model, done.object) == ("tiny", "text_completion")
    for one in (PROMPTS[0], as_ids[0]):
        done = client.completions.create(model="tiny", prompt=one, temperature=0)
        assert done.choices[0].text == expected[0].text[:16]  # OpenAI's default of max_tokens
        assert done.choices[0].finish_reason == "length"


def test_chats_go_through_the_template_and_up_to_the_end(client: OpenAI, llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None))[0]
    parts = [{"type": "text", "text": "Q: add 18 and 19"}, {"type": "text", "text": "A:"}]
    for content in (PROMPTS[0], parts):
        messages: Any = [{"role": "user", "content": content, "name": "sam"}]
        done = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
        assert done.choices[0].message.content == whole.text
        assert done.choices[0].message.role == "assistant"
        assert done.choices[0].finish_reason == whole.finish_reason
    again: Any = [done.choices[0].message.model_dump(), *chat(PROMPTS[0])]  # clients send back what they got
    assert client.chat.completions.create(model="tiny", messages=again, max_completion_tokens=3).usage


def test_sampling_options_reach_the_engine(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.9, top_k=30, min_p=0.01, seed=4, max_tokens=30, n=3, stop=["so"])
    expected = llm.generate(PROMPTS[:2], params)
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 4, "max_tokens": 30, "n": 3, "stop": "so"}
    extra = {"top_k": 30, "min_p": 0.01, "stop_token_ids": [], "ignore_eos": False}
    done = client.completions.create(model="tiny", prompt=PROMPTS[:2], extra_body=extra, **options)
    assert [(c.index, c.text) for c in done.choices] == [(i, e.text) for i, e in enumerate(expected)]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(map(len, PROMPTS[:2]))  # once, not per sample
    said = client.chat.completions.create(model="tiny", messages=chat(PROMPTS[0]), extra_body=extra, **options)
    assert [c.message.content for c in said.choices] == [e.text for e in expected[:3]]
    stopped = client.completions.create(
        model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=40, extra_body={"stop_token_ids": [ord("9")]}
    )
    assert stopped.choices[0].text == " 18 plus 1"


def test_values_that_ask_for_nothing_are_taken(url: str) -> None:
    body = {"messages": chat("hi"), "max_tokens": 1, "tools": None, "presence_penalty": 0.0, "user": "me", "n": None}
    body |= {"response_format": {"type": "text"}, "logit_bias": {}, "tool_choice": "none", "frequency_penalty": 0}
    assert post(url, "/v1/chat/completions", body).status_code == 200


def test_logprobs_of_both_kinds(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    entries = llm.generate(PROMPTS[0], params)[0].logprobs
    assert entries is not None
    for stream in (False, True):
        done: Any = client.completions.create(
            model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=6, logprobs=2, stream=stream
        )
        pieces = [c.logprobs for part in (done if stream else [done]) for c in part.choices if c.logprobs]
        assert [t for p in pieces for t in p.tokens] == [chr(next(iter(entry))) for entry in entries]
        assert [o for p in pieces for o in p.text_offset] == list(range(6))
        values = [v for p in pieces for v in p.token_logprobs]
        assert values == pytest.approx([next(iter(entry.values())) for entry in entries], abs=1e-4)
        assert all(len(top) == 2 for p in pieces for top in p.top_logprobs)  # greedy: its own is among them
        for top in (0, 2):
            said: Any = client.chat.completions.create(
                model="tiny",
                messages=chat(PROMPTS[0]),
                temperature=0,
                max_tokens=6,
                logprobs=True,
                top_logprobs=top,
                stream=stream,
            )
            content = [e for part in (said if stream else [said]) for c in part.choices for e in c.logprobs.content]
            assert [e.token for e in content] == [chr(next(iter(entry))) for entry in entries]
            assert [bytes(e.bytes).decode() for e in content] == [e.token for e in content]
            assert all(len(e.top_logprobs) == top for e in content)
            assert all(e.top_logprobs[0].token == e.token for e in content if top)


# --- streams


def test_a_streamed_completion_is_the_whole_one(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[:2], "seed": 9, "n": 2, "max_tokens": 30}
    whole = client.completions.create(**options)
    texts, reasons, usage = ["", "", "", ""], ["", "", "", ""], None
    for part in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            assert not reasons[choice.index]  # nothing comes behind the end
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_a_streamed_chat_by_the_letter(url: str) -> None:
    body = {"messages": chat(PROMPTS[0]), "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = post(url, "/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    *parts, counts = [json.loads(event.removeprefix("data: ")) for event in events]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(parts) - 1)
    assert "".join(delta["content"] for delta in deltas) == " 18 plus 19 is 36. so 18 + 19 = 36."
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all(part["usage"] is None and part["object"] == "chat.completion.chunk" for part in parts)
    assert len({(part["id"], part["created"], part["model"]) for part in (*parts, counts)}) == 1
    assert counts["choices"] == []
    assert counts["usage"]["total_tokens"] == counts["usage"]["prompt_tokens"] + counts["usage"]["completion_tokens"]


def test_many_clients_stream_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more than the engine has rows, each with one of a few requests; most of them more than once."""
    monkeypatch.setattr(load_server, "VARIANTS", 8)
    load = load_server.load(f"{url}/v1", "tiny", clients=40, seconds=2, max_tokens=12, pid=os.getpid(), key=KEY)
    seen = asyncio.run(load)
    assert seen.errors == []
    assert seen.wrong == 0
    assert seen.answers >= 40
    assert seen.memory_mb[-1] < seen.memory_mb[0] + 300  # XLA may compile meanwhile, and both sides are in here


def test_metrics_count_what_was_served(url: str, client: OpenAI) -> None:
    names = ["dflash_generated_tokens_total", "dflash_request_latency_seconds_count"]
    names.append("dflash_time_to_first_token_seconds_count")
    before = [metric(url, name) for name in names]
    done = client.completions.create(model="tiny", prompt=PROMPTS, temperature=0, max_tokens=30)
    assert done.usage is not None
    gained = [metric(url, name) - b for name, b in zip(names, before, strict=True)]
    assert gained == [done.usage.completion_tokens, 3, 3]
    assert metric(url, "dflash_acceptance_length") > 1
    assert 0 < metric(url, "dflash_prefix_hit_rate") < 1
    assert metric(url, "dflash_pages") >= metric(url, "dflash_pages_used") > 0
    assert metric(url, "dflash_requests_running") == metric(url, "dflash_requests_waiting") == 0


# --- refusals

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": chat("hi"), "tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"messages": chat("hi"), "response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"messages": chat("hi"), "logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"messages": chat("hi"), "presence_penalty": 0.5}, "presence_penalty"),
    ("chat/completions", {"messages": chat("hi"), "beam_width": 4}, "beam_width"),
    ("chat/completions", {"messages": chat("hi"), "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": chat("hi"), "stream_options": {"include_usage": True}}, "stream_options"),
    (
        "chat/completions",
        {"messages": chat("hi"), "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
    ),
    ("chat/completions", {"messages": chat("hi"), "chat_template_kwargs": {"shout": True}}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("chat/completions", {}, "messages"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1.5]}, "prompt"),
    ("completions", {"prompt": [5, 900]}, "prompt"),
    ("completions", {"prompt": chat("hi")}, "prompt"),
    ("completions", {"prompt": "x", "echo": True}, "echo"),
    ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "x", "temperature": "0"}, "temperature"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "x", "n": 0}, "n"),
    ("completions", {"prompt": "x", "n": 2, "temperature": 0}, "n"),
    ("completions", {"prompt": "x", "n": 10**9}, "n"),
    ("completions", {"prompt": "x", "stop": ["y"] * 17}, "stop"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{path}-{param}" for path, _, param in BAD])
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_named(url: str, path: str, body: dict[str, Any], param: str, stream: bool) -> None:
    if stream and param == "stream_options":
        return
    answer = post(url, f"/v1/{path}", body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [*chat("hi"), {"role": "assistant"}]}, "messages.1.content: Field required"),
        ({"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.0.x is not supported"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string or"),
        ({"messages": chat("hi"), "a b": 1}, "a b is not supported"),
        ({"messages": chat("hi"), "n": "2"}, "n: Input should be a valid integer"),
    ],
)
def test_refusals_say_where(url: str, body: dict[str, Any], message: str) -> None:
    assert post(url, "/v1/chat/completions", body).json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 9000, b"[1]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"null"])
def test_malformed_json_is_400(url: str, raw: bytes) -> None:
    answer = post(url, "/v1/completions", raw)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_an_overlong_prompt_is_400(client: OpenAI) -> None:
    for prompt in ("x" * 512, [5] * 600):
        with pytest.raises(openai.BadRequestError, match="512") as caught:
            client.completions.create(model="tiny", prompt=prompt)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=chat("x" * 512), stream=True)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_page_pool_cannot_hold_is_400(
    client: OpenAI, url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(llm.engine.scheduler.pool, "total", 4)
    for path, body, param in (
        ("completions", {"prompt": "x" * 64}, "prompt"),
        ("completions", {"prompt": ["x", "x" * 64], "max_tokens": 1}, "prompt"),
        ("chat/completions", {"messages": chat("x" * 64)}, "messages"),
    ):
        answer = post(url, f"/v1/{path}", body | {"stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "the prompt has 64 tokens; the K/V pool of 64 tokens (4 pages of 16) leaves no room for output",
            "type": "invalid_request_error",
            "param": param,
            "code": "context_length_exceeded",
        }
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 64
    with monkeypatch.context() as endless:  # what it can hold is answered up to its end
        endless.setattr(llm, "eos_token_ids", ())
        for length in (8, 63):
            said = client.chat.completions.create(model="tiny", messages=chat("x" * length), temperature=0)
            assert said.usage is not None
            assert (said.usage.completion_tokens, said.choices[0].finish_reason) == (64 - length, "length")


def test_other_models_routes_and_methods(url: str, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    unknown = post(url, "/v1/embeddings", {})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "invalid_request_error")
    got = httpx2.get(f"{url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"})
    assert (got.status_code, got.json()["error"]["message"]) == (405, "Method Not Allowed")


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", "\u00fc"])
def test_a_wrong_key_is_401(url: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    for method, path in (("POST", "completions"), ("POST", "chat/completions"), ("GET", "models")):
        answer = httpx2.request(method, f"{url}/v1/{path}", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in answer.text
    assert httpx2.get(f"{url}/health").status_code == 200


def test_a_large_body_is_413_whether_its_size_is_told_or_not(url: str) -> None:
    body = json.dumps({"prompt": "x" * LIMITS.request_bytes}).encode()
    assert post(url, "/v1/completions", body).status_code == 413
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    told = httpx2.post(f"{url}/v1/completions", content=pieces, headers={"Authorization": f"Bearer {KEY}"})
    assert told.status_code == 413
    assert told.json()["error"]["code"] == "request_too_large"
