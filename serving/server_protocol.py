"""What clients may ask: OpenAI's bodies with vLLM's extra fields. What is not supported is refused by its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from serving.lines import NEUTRAL, UNREAD
from serving.llm import Prompts, listed_prompts
from serving.request import SamplingParams

COMPLETION_TOKENS = 16  # OpenAI's default; chats may go on to the end of the context
SHARED = {"n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
MOST_STOPS = 16  # each is searched for after every step


@dataclass
class ApiError(Exception):
    """What a client is told instead of an answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """Refuses unknown fields and values of another kind; null is as good as nothing there."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, value: Any) -> Any:
        """Clients send their unset fields as null."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool = False


class Body(Strict):
    """What both kinds of requests share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """``defaults`` with what the body sets."""
        given = self.model_dump(include=SHARED, exclude_none=True)
        try:
            return replace(defaults, max_tokens=max_tokens, logprobs=logprobs, **given)
        except ValueError as error:
            name = str(error).split()[0]  # as SamplingParams begins its messages
            raise ApiError(400, str(error), name if name in type(self).model_fields else None) from error


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    @property
    def prompts(self) -> Prompts:
        """What is to be continued."""
        return self.prompt

    @property
    def samples(self) -> int:
        """How many answers that makes."""
        return self.n * len(listed_prompts(self.prompt))

    @property
    def template(self) -> Mapping[str, Any]:
        """Nothing goes through the chat template."""
        return {}

    @property
    def likeliest(self) -> int | None:
        """How many log-probabilities a token; None: none at all."""
        return self.logprobs

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """How to continue it."""
        return self.sampling(defaults, COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)


class TextPart(Strict):
    """A piece of a message; pictures and sounds are not supported."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its parts joined, as vLLM joins them."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompts(self) -> Prompts:
        """The conversation, as chat templates take it."""
        named = [{} if message.name is None else {"name": message.name} for message in self.messages]
        return [{"role": m.role, "content": m.text} | name for m, name in zip(self.messages, named, strict=True)]

    @property
    def samples(self) -> int:
        """How many answers that makes."""
        return self.n

    @property
    def template(self) -> Mapping[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs or {}

    @property
    def likeliest(self) -> int | None:
        """How many log-probabilities a token; None: none at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """How to answer it."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(defaults, most, self.likeliest)


Kind = TypeVar("Kind", bound=Body)


def read(kind: type[Kind], raw: bytes) -> Kind:
    """A body from its bytes. Raises ApiError for whatever does not fit."""
    try:
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name in UNREAD:
        given.pop(name, None)
    for name, neutral in NEUTRAL.items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported", name)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise refusal(error) from error
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return body


def refusal(error: ValidationError) -> ApiError:
    """The first field that does not fit, and all ways in which it does not."""
    first, *others = error.errors(include_url=False, include_input=False, include_context=False)
    name, place = str(first["loc"][0]), place_of(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(map(str, first['loc']))} is not supported", name)
    inside = [other["msg"] for other in others if f"{place_of(other['loc'])}.".startswith(f"{place}.")]
    return ApiError(400, f"{place}: {' or '.join(dict.fromkeys([first['msg'], *inside]))}", name)


def place_of(path: tuple[int | str, ...]) -> str:
    """Where in the body something does not fit; the kinds that pydantic has tried there are not of interest."""
    kinds = ("str", "int")
    return ".".join(str(part) for part in path if isinstance(part, int) or (part.isidentifier() and part not in kinds))
