"""A request on the host: what was asked, what has come, when it ends. Pure Python; it never sees an array."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from serving.options import check_kinds, is_whole

MAX_LOGPROBS = 20
GREEDY = 1e-5  # temperatures below it mean argmax, as in vLLM


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt; names and meanings are vLLM's, and what is not listed here is not supported and raises.

    n samples a prompt; temperature 0 is greedy; top_k 0 or -1 is off; max_tokens None means up to the context's end;
    stop strings are cut from the text, stop_token_ids and end-of-sequence ids stay in token_ids; ignore_eos keeps going
    past the latter; seed fixes the noise; logprobs k returns the log-probability of each token and of the k likeliest
    (0: only its own).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_kinds(
            self,
            whole=("n", "top_k", "max_tokens", "seed", "logprobs"),
            real=("temperature", "top_p", "min_p"),
            flags=("ignore_eos",),
            optional=("max_tokens", "seed", "logprobs"),
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple_of("stop", self.stop)
        stop_ids = tuple_of("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        if 0 <= self.temperature < GREEDY:
            object.__setattr__(self, "temperature", 0.0)
        checks = {
            "n must be at least 1": (self.n, self.n >= 1),
            "temperature must be in [0, 1e30]": (self.temperature, 0 <= self.temperature <= 1e30),
            "top_p must be in (0, 1]": (self.top_p, 0 < self.top_p <= 1),
            "top_k must be -1, 0 or at least 1": (self.top_k, self.top_k >= -1),
            "min_p must be in [0, 1]": (self.min_p, 0 <= self.min_p <= 1),
            "max_tokens must be at least 1": (self.max_tokens, self.max_tokens is None or self.max_tokens >= 1),
            "stop must hold non-empty texts": (stop, all(isinstance(s, str) and s for s in stop)),
            "stop_token_ids must hold whole numbers": (stop_ids, all(map(is_whole, stop_ids))),
            f"logprobs must be in 0 .. {MAX_LOGPROBS}": (
                self.logprobs,
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            ),
        }
        for rule, (value, holds) in checks.items():
            if not holds:
                raise ValueError(f"{rule}, got {value!r}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 at temperature 0: {self.n} greedy samples would be equal")


@dataclass(frozen=True)
class Completion:
    """The answer to one sample of one prompt.

    index: of the prompt in the call; sample: 0 .. n - 1. text ends before a stop string or stop token; token_ids keep
    the stop token. stop_reason: the stop string or id that ended it. acceptance_lengths: accepted drafts + 1 of each
    round, uncut; acceptance_length: their mean (1.0 without a round). acceptance_histogram[i]: rounds that accepted at
    least i + 1 drafts, over ``len(acceptance_lengths)`` rounds. logprobs: per token {id: log-probability}, its own
    first. cached_tokens: prompt tokens that the prefix cache had. error: why this item alone failed.
    """

    index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    acceptance_lengths: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None
    error: str | None
    cached_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round."""
        rounds = self.acceptance_lengths
        return sum(rounds) / len(rounds) if rounds else 1.0

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Rounds that accepted the draft at each position 1, 2, ..."""
        return tuple(
            sum(n > i for n in self.acceptance_lengths) for i in range(1, max(self.acceptance_lengths, default=1))
        )


@dataclass(frozen=True)
class Chunk:
    """What a stream yields: new text and ids of one sample, with their log-probabilities where they were asked for;
    ``completion`` is set on its last chunk."""

    index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None = None
    completion: Completion | None = None


class Detokenizer(Protocol):
    """Text of ids that come one by one."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these ids, perhaps none."""

    def flush(self) -> str:
        """The text still held back."""


@dataclass(eq=False)
class Request:
    """One sample of one prompt while it waits and runs.

    limit: most output tokens, from max_tokens and the context's end. stop_ids: ids that end it. detokenizer None: no
    tokenizer, so no text. priority: lower runs first; arrival: among equals, set by the scheduler. notify: called after
    a step that brought it something. It ends by itself in ``accept`` (stop, length), or by ``fail`` or ``abort``.
    """

    index: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams
    key: tuple[int, int]
    limit: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None
    priority: int = 0
    arrival: int = 0
    cached_tokens: int = 0
    notify: Callable[["Request"], None] = lambda _: None
    output: list[int] = field(default_factory=list)
    text: str = ""
    decoded: int = 0  # output ids that the text covers
    logprobs: list[dict[int, float]] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    streamed_text: int = 0
    streamed_ids: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more will be accepted."""
        return self.finish_reason is not None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Ids ``start`` .. ``end`` of prompt and output together."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return (*self.prompt[start:split], *self.output[max(start - split, 0) : end - split])

    def accept(self, tokens: Sequence[int], logprobs: Sequence[dict[int, float]] | None = None) -> None:
        """Take tokens in order until one ends the request; the rest is dropped, as if decoding had gone one by one."""
        for i, token in enumerate(tokens):
            if self.finished:
                return
            self.output.append(token)
            if self.params.logprobs is not None and logprobs is not None:
                self.logprobs.append(trimmed(logprobs[i], self.params.logprobs))
            if token in self.stop_ids:
                self.finish(FinishReason.STOP, token)
                return
            if self.params.stop:  # else the text can wait until somebody looks
                self.decode()
            if not self.finished and len(self.output) >= self.limit:
                self.finish(FinishReason.LENGTH, None)

    def decode(self) -> None:
        """Bring the text up to the output; a stop token gives none."""
        end = len(self.output) - (bool(self.output) and self.output[-1] in self.stop_ids)
        if self.detokenizer and self.decoded < end:
            piece = self.detokenizer.push(self.output[self.decoded : end])
            self.decoded = end
            self.extend_text(piece)

    def extend_text(self, piece: str) -> None:
        """Append text and end at the first stop string that it completes."""
        searched = len(self.text) - max((len(s) for s in self.params.stop), default=1) + 1
        self.text += piece
        hits = [(at, s) for s in self.params.stop if (at := self.text.find(s, max(searched, 0))) >= 0]
        if hits and not self.finished:
            at, string = min(hits)
            self.text = self.text[:at]
            self.finish_reason, self.stop_reason = FinishReason.STOP, string

    def finish(self, reason: FinishReason, stop_reason: int | None) -> None:
        """End the request; text still held back by the detokenizer may yet complete a stop string."""
        self.decode()
        if self.detokenizer:
            self.extend_text(self.detokenizer.flush())
        if not self.finished:
            self.finish_reason, self.stop_reason = reason, stop_reason

    def fail(self, error: str) -> None:
        """End the request with an error; what was computed stays."""
        self.finish_reason, self.error = FinishReason.ERROR, error

    def abort(self) -> None:
        """End the request because nobody wants it any more; what was computed stays."""
        if not self.finished:
            self.finish(FinishReason.ABORT, None)

    def chunk(self) -> Chunk:
        """What is new since the last chunk; text that may be the start of a stop string waits."""
        self.decode()
        held = 0 if self.finished else max((overlap(self.text, s) for s in self.params.stop), default=0)
        end = len(self.text) - held
        chunk = Chunk(
            index=self.index,
            sample=self.sample,
            text=self.text[self.streamed_text : end],
            token_ids=tuple(self.output[self.streamed_ids :]),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs[self.streamed_ids :]),
            completion=self.completion() if self.finished else None,
        )
        self.streamed_text, self.streamed_ids = max(end, self.streamed_text), len(self.output)
        return chunk

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None, "the request is still running"
        self.decode()
        return Completion(
            index=self.index,
            sample=self.sample,
            text=self.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            acceptance_lengths=tuple(self.acceptance_lengths),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            error=self.error,
            cached_tokens=self.cached_tokens,
        )


def tuple_of(name: str, values: Any) -> tuple[Any, ...]:
    """A list-like option as a tuple; None is empty. Raises ValueError for a text or a single value."""
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, got {values!r}")
    return tuple(values)


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper start of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def trimmed(entry: dict[int, float], k: int) -> dict[int, float]:
    """The token's own log-probability and the k likeliest ones."""
    own = next(iter(entry))
    best = sorted(entry, key=entry.__getitem__, reverse=True)[:k]
    return {token: entry[token] for token in dict.fromkeys([own, *best])}
