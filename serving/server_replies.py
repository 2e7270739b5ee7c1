"""What clients get: OpenAI's answers, whole and by pieces."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from serving.logprobs import Entry, chat_logprobs, text_logprobs
from serving.request import Chunk, Completion, FinishReason
from serving.server_protocol import ApiError
from serving.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass
class Replies:
    """The answer to one body.

    n: samples a prompt. top: log-probabilities a token, None where nobody asked. told: characters of each
    choice that earlier pieces brought.
    """

    model: str
    tokenizer: Tokenizer | None
    n: int
    top: int | None
    told: dict[int, int] = field(default_factory=dict)
    id: str = field(init=False)
    created: int = field(init=False)

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    part_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(16)}", int(time.time())

    def index(self, sample: Chunk | Completion) -> int:
        """Of a choice: the samples of a prompt stand side by side."""
        return sample.index * self.n + sample.sample

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The answer in one piece."""
        choices = [self.choice(self.index(c), self.answer(c.text), c.finish_reason, c.logprobs, 0) for c in completions]
        return self.head(self.whole_object) | {"choices": choices, "usage": usage(completions)}

    def part(self, chunk: Chunk) -> Json | None:
        """A piece of one choice, None where there is nothing to tell."""
        index = self.index(chunk)
        first, characters = index not in self.told, self.told.get(index, 0)
        entries = None if self.top is None else chunk.logprobs
        reason = chunk.completion.finish_reason if chunk.completion else None
        if not (chunk.text or entries or reason):
            return None
        self.told[index] = characters + len(chunk.text)
        choice = self.choice(index, self.piece(chunk.text, first), reason, entries or None, characters)
        return self.head(self.part_object) | {"choices": [choice]}

    def counts(self, completions: Sequence[Completion]) -> Json:
        """The piece that brings the counts alone."""
        return self.head(self.part_object) | {"choices": [], "usage": usage(completions)}

    def head(self, kind: str) -> Json:
        """What every piece repeats."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice(
        self, index: int, answer: Json, reason: FinishReason | None, entries: Sequence[Entry] | None, offset: int
    ) -> Json:
        """One choice or a piece of it."""
        logprobs = None if entries is None else self.logprobs(entries, offset)
        return {"index": index} | answer | {"logprobs": logprobs, "finish_reason": reason}

    def answer(self, text: str) -> Json:
        """A choice's text where the form has it."""
        raise NotImplementedError

    def piece(self, text: str, first: bool) -> Json:
        """A piece of it."""
        raise NotImplementedError

    def logprobs(self, entries: Sequence[Entry], offset: int) -> Json:
        """Log-probabilities in the form's way."""
        raise NotImplementedError


class TextReplies(Replies):
    """Of /v1/completions."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def answer(self, text: str) -> Json:
        return {"text": text}

    def piece(self, text: str, first: bool) -> Json:
        return {"text": text}

    def logprobs(self, entries: Sequence[Entry], offset: int) -> Json:
        return text_logprobs(entries, self.top or 0, self.tokenizer, offset)


class ChatReplies(Replies):
    """Of /v1/chat/completions."""

    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def answer(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, first: bool) -> Json:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}

    def logprobs(self, entries: Sequence[Entry], offset: int) -> Json:
        return chat_logprobs(entries, self.top or 0, self.tokenizer)


def usage(completions: Iterable[Completion]) -> Json:
    """Token counts; a prompt with several samples counts once."""
    done = list(completions)
    prompt = sum({c.index: c.prompt_tokens for c in done}.values())
    output = sum(c.output_tokens for c in done)
    cached = sum({c.index: min(d.cached_tokens for d in done if d.index == c.index) for c in done}.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def checked(completion: Completion) -> Completion:
    """The completion, if it is an answer. Raises ApiError where it failed or was aborted."""
    if completion.finish_reason is FinishReason.ERROR:
        raise ApiError(500, str(completion.error), kind="server_error")
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the server is shutting down", kind="server_error")
    return completion
