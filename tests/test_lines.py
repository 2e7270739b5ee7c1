"""What a line of a batch file may ask, and what is said where it may not."""

import json
from typing import Any

import pytest

from serving import SamplingParams
from serving.lines import CHAT, TEXT, encoded, lines_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "must be an object"),
        ("text", "must be an object"),
        ({}, "needs prompt or prompt_token_ids or messages, got none"),
        ({"prompt": "a", "messages": []}, "got prompt and messages"),
        ({"prompt": ["a", "b"]}, "prompt must be one text"),
        ({"prompt": [1, 2]}, "prompt must be one text"),
        ({"prompt_token_ids": [1, True]}, "whole numbers"),
        ({"prompt_token_ids": "12"}, "whole numbers"),
        ({"messages": []}, "at least one"),
        ({"messages": ["hi"]}, "list of objects"),
        ({"prompt": "a", "custom_id": 5}, "custom_id must be a text, got 5"),
        ({"prompt": "a", "max_token": 5}, "not supported: max_token"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be a whole number, got '5'"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "a", "temperature": None}, "temperature must be a finite number"),
        ({"prompt": "a", "temperature": True}, "temperature must be a finite number"),
        ({"prompt": "a", "stop": {"a": 1}}, "stop must be a list"),
        ({"prompt": "a", "n": 2}, "n must be 1 at temperature 0"),
        ({"prompt": "a", "n": 129, "temperature": 1}, "n must be at most 128, got 129"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs needs messages"),
        ({"messages": [{}], "chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"body": {"prompt": "a"}}, "a line with a body needs a custom_id"),
        ({"custom_id": None, "body": {"prompt": "a"}}, "custom_id must be a text, got None"),
        ({"custom_id": "a", "body": []}, "body must be an object"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "prompt": "a"}, "not supported: prompt"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "method": "GET"}, "method must be POST"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "url": "/v1/embeddings"}, "url must be"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "url": CHAT}, "needs messages, got none"),
        ({"custom_id": "a", "body": {"messages": [{}]}, "url": TEXT}, "needs prompt, got none"),
        ({"custom_id": "a", "body": {"prompt": "a", "messages": [{}]}}, "not supported: prompt"),
        ({"custom_id": "a", "body": {"prompt": ["a"]}}, "prompt must be one text"),
        ({"custom_id": "a", "body": {"prompt": "a", "model": 5}}, "model must be a text"),
        ({"custom_id": "a", "body": {"prompt": "a", "stream": True}}, "stream is not supported"),
        ({"custom_id": "a", "body": {"prompt": "a", "tools": [{}]}}, "tools is not supported"),
        ({"custom_id": "a", "body": {"prompt": "a", "suffix": "b"}}, "suffix is not supported"),
        ({"custom_id": "a", "body": {"prompt": "a", "foo": 1, "bar": 2}}, "not supported: bar, foo"),
        (
            {"custom_id": "a", "body": {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}},
            "max_completion_tokens 4 and max_tokens 3 disagree",
        ),
        ({"custom_id": "a", "body": {"messages": [{}], "logprobs": 3}}, "logprobs must be true or false, got 3"),
        ({"custom_id": "a", "body": {"messages": [{}], "top_logprobs": 3}}, "top_logprobs needs logprobs"),
    ],
)
def test_what_a_line_may_not_ask_is_named(value: Any, message: str) -> None:
    (line,) = lines_of([json.dumps(value).encode()])
    with pytest.raises(ValueError, match=message):
        line.ask(GREEDY)
    assert json.loads(encoded(line.failed("why"))) == line.head | json.loads(encoded(line.failed("why")))
