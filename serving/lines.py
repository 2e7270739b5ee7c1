"""A line of a batch file: what it asks, and the record that answers it.

A *plain* line is an object with one of ``prompt``, ``prompt_token_ids`` and ``messages``, and if wanted ``custom_id``,
``chat_template_kwargs`` (with messages) and fields of ``SamplingParams``. Its record is ``{"index", "custom_id" (if
given), "text", "finish_reason", "stop_reason", "output_tokens", "acceptance_length", "prompt_tokens", "error"}``, with
``token_ids`` and ``logprobs`` where they were asked for; n above 1 gives ``choices``, a list of the fields from text to
logprobs, and the totals beside it. index counts the lines that are not blank, from 0.

A line with a ``body`` is of OpenAI's batch API, ``/v1/chat/completions`` or ``/v1/completions``, and so is its record:
``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``. ``model`` is repeated, not looked
up. The acceptance length stands in ``usage``; ``created`` is 0, so that a run repeats to the byte.

What a line asks for and does not exist is an error of that line: ``error`` is set, and no text is given.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from serving.logprobs import LEAST, chat_logprobs, text_logprobs
from serving.options import is_whole
from serving.request import Completion, FinishReason, SamplingParams
from serving.tokenizer import Prompt, Tokenizer

SAMPLING = tuple(field.name for field in fields(SamplingParams))
MOST_SAMPLES = 128  # a line, so that one line cannot fill the memory

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OURS = (
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
)  # sampling options that vLLM adds to OpenAI's, under our names
SHARED = ("temperature", "top_p", "n", "stop", "seed", *OURS)
UNREAD = ("user", "metadata", "store")  # they ask nothing of the answer
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # options that are not supported, and the values that ask for nothing
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
Record = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """What a line wants continued, and how. chat: it answers with a message."""

    prompt: Prompt
    params: SamplingParams
    template: Mapping[str, Any]
    chat: bool


@dataclass(frozen=True)
class Line:
    """A line that is not blank. index: among those, from 0; number: in the file, from 1; fault: why it is no JSON."""

    index: int
    number: int
    value: Any
    fault: str | None

    @property
    def openai(self) -> bool:
        """Whether it is of OpenAI's form."""
        return isinstance(self.value, dict) and "body" in self.value

    @property
    def custom_id(self) -> str | None:
        """The name that its author gave it."""
        name = self.value.get("custom_id") if isinstance(self.value, dict) else None
        return name if isinstance(name, str) else None

    @property
    def head(self) -> Record:
        """The fields that its record begins with: they tie the two together."""
        if self.openai:
            return {"id": f"batch_req_{self.index}", "custom_id": self.custom_id}
        return {"index": self.index} | ({} if self.custom_id is None else {"custom_id": self.custom_id})

    def ask(self, defaults: SamplingParams) -> Ask:
        """What it asks; what it leaves out is as in ``defaults``. Raises ValueError for whatever does not fit."""
        if self.fault is not None:
            raise ValueError(self.fault)
        if not isinstance(self.value, dict):
            raise ValueError(f"it must be an object, got {shown(self.value)}")
        asked = ask_openai(self.value, defaults) if self.openai else ask_plain(self.value, defaults)
        if asked.params.n > MOST_SAMPLES:
            raise ValueError(f"n must be at most {MOST_SAMPLES}, got {asked.params.n}")
        return asked

    def failed(self, message: str) -> Record:
        """The record of a line that has no answer."""
        if self.openai:
            return self.head | {"response": None, "error": {"code": "request_failed", "message": message}}
        nothing = {"text": None, "finish_reason": FinishReason.ERROR, "stop_reason": None, "output_tokens": 0}
        return self.head | nothing | {"acceptance_length": None, "prompt_tokens": 0, "error": message}

    def answered(
        self, asked: Ask, samples: Sequence[Completion], token_ids: bool, tokenizer: Tokenizer | None
    ) -> Record:
        """The record of its samples. token_ids: plain records name them."""
        if self.openai:
            body = openai_body(self.value["body"].get("model") or "", self.index, asked, samples, tokenizer)
            response = {"status_code": 200, "request_id": f"req_{self.index}", "body": body}
            return self.head | {"response": response, "error": None}
        choices = [plain_choice(sample, token_ids) for sample in samples]
        totals = {"output_tokens": output_tokens(samples), "acceptance_length": acceptance_length(samples)}
        answer = choices[0] if len(choices) == 1 else {"choices": choices} | totals
        return self.head | answer | {"prompt_tokens": samples[0].prompt_tokens, "error": None}


def lines_of(file: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a file that are not blank."""
    index = 0
    for number, raw in enumerate(file, 1):
        if raw.strip():
            try:
                yield Line(index, number, json.loads(raw), None)
            except (ValueError, RecursionError) as error:
                yield Line(index, number, None, f"it is not JSON: {error}")
            index += 1


def encoded(record: Record) -> bytes:
    """A record as a line of UTF-8; half a surrogate pair, which UTF-8 cannot say, is escaped as JSON does."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def shown(value: Any) -> str:
    """A value in an error message, not at full length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- asking


def ask_plain(value: Mapping[str, Any], defaults: SamplingParams) -> Ask:
    """What a plain line asks."""
    given = dict(value)
    check("custom_id", given.pop("custom_id", None), str, optional=True)
    chat, prompt = taken_prompt(given, ("prompt", "prompt_token_ids", "messages"))
    template = taken_template(given, chat)
    refuse_unknown(given.keys() - SAMPLING)
    return Ask(prompt, overridden(defaults, given), template, chat)


def ask_openai(value: Mapping[str, Any], defaults: SamplingParams) -> Ask:
    """What a line of OpenAI's form asks; null is as good as nothing there."""
    refuse_unknown(value.keys() - {"custom_id", "method", "url", "body"})
    if "custom_id" not in value:
        raise ValueError("a line with a body needs a custom_id")
    check("custom_id", value["custom_id"], str)
    check("body", value["body"], dict)
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {shown(value['method'])}")
    given = {name: x for name, x in value["body"].items() if x is not None}
    url = value.get("url", CHAT if "messages" in given else TEXT)
    if url not in (CHAT, TEXT):
        raise ValueError(f"url must be {CHAT} or {TEXT}, got {shown(url)}")
    check("model", given.pop("model", None), str, optional=True)
    for name in UNREAD:
        given.pop(name, None)
    for name, neutral in {"stream": (False,), **NEUTRAL}.items():
        if (wanted := given.pop(name, neutral[0])) not in neutral:
            raise ValueError(f"{name} is not supported, got {shown(wanted)}")
    chat, prompt = taken_prompt(given, ("messages",) if url == CHAT else ("prompt",))
    template = taken_template(given, chat)
    options = {name: given.pop(name) for name in SHARED if name in given}
    options |= taken_limit(given) | taken_logprobs(given, chat)
    refuse_unknown(given.keys())
    return Ask(prompt, overridden(defaults, options), template, chat)


def taken_prompt(given: dict[str, Any], names: Sequence[str]) -> tuple[bool, Prompt]:
    """The one prompt among the fields ``names``, and whether it is a conversation."""
    found = [name for name in names if name in given]
    if len(found) != 1:
        raise ValueError(f"it needs {' or '.join(names)}, got {' and '.join(found) or 'none'}")
    (name,) = found
    prompt = given.pop(name)
    listed = isinstance(prompt, list)
    if name == "messages" and not (listed and prompt and all(isinstance(x, dict) for x in prompt)):
        raise ValueError(f"messages must be a list of objects, at least one, got {shown(prompt)}")
    if name == "prompt_token_ids" and not (listed and all(map(is_whole, prompt))):
        raise ValueError(f"prompt_token_ids must be a list of whole numbers, got {shown(prompt)}")
    ids = "prompt_token_ids" not in names and listed and all(map(is_whole, prompt))  # OpenAI's prompt may be ids
    if name == "prompt" and not (isinstance(prompt, str) or ids):
        raise ValueError(f"prompt must be one text, got {shown(prompt)}")
    return name == "messages", [joined(message) for message in prompt] if name == "messages" else prompt


def joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is one text, where it is OpenAI's list of text parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    found = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    return {**message, "content": "\n".join(texts)} if len(texts) == len(parts) else message


def taken_limit(given: dict[str, Any]) -> Record:
    """max_tokens under either of OpenAI's names."""
    limits = [given.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in given]
    if limits[1:] and limits[0] != limits[1]:
        raise ValueError(f"max_completion_tokens {shown(limits[0])} and max_tokens {shown(limits[1])} disagree")
    return {"max_tokens": limits[0]} if limits else {}


def taken_logprobs(given: dict[str, Any], chat: bool) -> Record:
    """logprobs: a number for completions, a flag and ``top_logprobs`` for chat."""
    if not chat:
        return {"logprobs": given.pop("logprobs")} if "logprobs" in given else {}
    top = given.pop("top_logprobs", None)
    if top is not None and given.get("logprobs") is not True:
        raise ValueError("top_logprobs needs logprobs: true")
    if "logprobs" not in given:
        return {}
    check("logprobs", wanted := given.pop("logprobs"), bool)
    return {"logprobs": (0 if top is None else top) if wanted else None}


def taken_template(given: dict[str, Any], chat: bool) -> Mapping[str, Any]:
    """Arguments of the chat template."""
    if "chat_template_kwargs" not in given:
        return {}
    if not chat:
        raise ValueError("chat_template_kwargs needs messages")
    template = given.pop("chat_template_kwargs")
    check("chat_template_kwargs", template, dict)
    return dict(template)


def overridden(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """``defaults`` with a line's own fields, checked as everywhere."""
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), dict):
            raise ValueError(f"{name} must be a list, got {shown(given[name])}")
    return replace(defaults, **given)


def check(name: str, value: Any, kind: type, optional: bool = False) -> None:
    """Raises ValueError unless a field is of its kind."""
    if not (isinstance(value, kind) or (optional and value is None)):
        words = {str: "a text", dict: "an object", bool: "true or false"}
        raise ValueError(f"{name} must be {words[kind]}, got {shown(value)}")


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises ValueError where fields are left over."""
    if listed := ", ".join(sorted(names)):
        raise ValueError(f"not supported: {listed}")


# --- answering


def output_tokens(samples: Sequence[Completion]) -> int:
    """Generated tokens of all samples."""
    return sum(sample.output_tokens for sample in samples)


def acceptance_length(samples: Sequence[Completion]) -> float:
    """Mean tokens a round of all samples."""
    rounds = [n for sample in samples for n in sample.acceptance_lengths]
    return round(sum(rounds) / len(rounds), 4) if rounds else 1.0


def plain_choice(sample: Completion, token_ids: bool) -> Record:
    """One sample of a plain record."""
    choice: Record = {
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "output_tokens": sample.output_tokens,
        "acceptance_length": acceptance_length([sample]),
    }
    if token_ids:
        choice["token_ids"] = sample.token_ids
    if sample.logprobs is not None:
        choice["logprobs"] = [{str(i): max(x, LEAST) for i, x in entry.items()} for entry in sample.logprobs]
    return choice


def openai_body(
    model: str, index: int, asked: Ask, samples: Sequence[Completion], tokenizer: Tokenizer | None
) -> Record:
    """The body of OpenAI's response."""
    choices = []
    for sample in samples:
        message = {"message": {"role": "assistant", "content": sample.text}}
        logprobs, top = None, asked.params.logprobs or 0
        if sample.logprobs is not None and asked.chat:
            logprobs = chat_logprobs(sample.logprobs, top, tokenizer)
        elif sample.logprobs is not None:
            logprobs = text_logprobs(sample.logprobs, top, tokenizer, 0)
        choices.append(
            {"index": sample.sample}
            | (message if asked.chat else {"text": sample.text})
            | {"logprobs": logprobs, "finish_reason": sample.finish_reason}
        )
    before, after = samples[0].prompt_tokens, output_tokens(samples)
    usage = {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
    return {
        "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{index}",
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": usage | {"acceptance_length": acceptance_length(samples)},
    }
