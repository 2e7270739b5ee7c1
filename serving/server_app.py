"""The HTTP side of the server: routes, keys, limits, event streams. A client that goes away takes its request along."""

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.async_llm import AsyncLLM, EngineError
from serving.request import Chunk, FinishReason, Request
from serving.server_metrics import Metrics
from serving.server_protocol import ApiError, ChatBody, CompletionBody, read
from serving.server_replies import DONE, ChatReplies, Replies, TextReplies, checked, event

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True)
class Limits:
    """What a server takes: waiting samples beyond the engine's rows, bytes a body."""

    queue: int = 256
    request_bytes: int = 4 << 20


def create_app(llm: AsyncLLM, model: str, limits: Limits, api_key: str | None = None) -> Starlette:
    """The server as an ASGI application; at its end it closes ``llm``.

    model: the name that clients know it by. api_key: what requests to /v1 must bring, if anything.
    """
    api = Api(llm, model, limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with llm:
            yield

    routes = [
        Route("/completions", Endpoint(api, CompletionBody, TextReplies), methods=["POST"]),
        Route("/chat/completions", Endpoint(api, ChatBody, ChatReplies), methods=["POST"]),
        Route("/models", api.models),
        Route("/models/{name:path}", api.models),
    ]
    guard = [] if api_key is None else [Middleware(KeyGuard, api_key)]
    return Starlette(
        routes=[
            Mount("/v1", routes=routes, middleware=guard),
            Route("/health", api.health),
            Route("/metrics", api.scrape),
        ],
        exception_handlers={ApiError: refused, HTTPException: refused, EngineError: refused, Exception: refused},
        lifespan=lifespan,
    )


class Api:
    """What the endpoints share."""

    def __init__(self, llm: AsyncLLM, model: str, limits: Limits) -> None:
        self.llm, self.model, self.limits = llm, model, limits
        self.metrics = Metrics(llm.llm.engine)
        self.created = int(time.time())
        self.capacity = llm.llm.config.max_num_seqs + limits.queue
        self.taken = 0  # samples that run or wait

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models, all or one."""
        card = {"id": self.model, "object": "model", "created": self.created, "owned_by": "dflash-jax"}
        card |= {"max_model_len": self.llm.llm.context}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [card]})
        self.check_model(name)
        return JSONResponse(card)

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: 200 while requests can be answered."""
        healthy = self.llm.healthy
        return JSONResponse({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    async def scrape(self, _: HttpRequest) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not here; None is the one that is."""
        if name not in (None, self.model):
            raise ApiError(
                404, f"the model {name!r} does not exist; this is {self.model!r}", "model", "model_not_found"
            )

    @contextmanager
    def room(self, samples: int) -> Iterator[None]:
        """Places in the queue for so many samples. Raises ApiError where there are not as many."""
        if samples > self.capacity:
            raise ApiError(400, f"{samples} samples in one request; at most {self.capacity} can run or wait", "n")
        if self.taken + samples > self.capacity:
            self.metrics.refused.inc()
            message = f"the queue is full: {self.taken} samples run or wait, of at most {self.capacity}"
            raise ApiError(429, message, None, "rate_limit_exceeded", "rate_limit_error", {"Retry-After": "1"})
        self.taken += samples
        try:
            yield
        finally:
            self.taken -= samples

    async def requests(self, body: CompletionBody | ChatBody) -> list[Request]:
        """What the engine is asked for a body. Raises ApiError where it cannot be answered."""
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        params = body.params(self.llm.llm.default_sampling_params())
        self.check_template(body.template)
        try:
            requests = await self.llm.requests(body.prompts, params, body.template)
        except (ValueError, TemplateError) as error:
            raise ApiError(400, str(error), param) from error
        if not requests:
            raise ApiError(400, "the prompt is empty", param)
        most = self.llm.llm.context
        for request in requests:
            if request.error is not None:
                code = "context_length_exceeded" if len(request.prompt) >= most else None
                raise ApiError(400, request.error, param, code)
        return requests

    def check_template(self, variables: Iterable[str]) -> None:
        """Raises ApiError for names that are no variables of a chat template but options of its renderer: a client may
        not bring a template of its own."""
        tokenizer = self.llm.llm.tokenizer
        options = {} if tokenizer is None else inspect.signature(tokenizer.hf.apply_chat_template).parameters
        if taken := sorted(set(options) & set(variables)):
            raise ApiError(400, f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")

    async def run(self, requests: Sequence[Request], arrived: float) -> AsyncGenerator[Chunk, None]:
        """What the engine brings, observed. Raises ApiError where a sample fails."""
        seen: set[tuple[int, int]] = set()
        try:
            async with aclosing(self.llm.run(requests)) as chunks:
                async for chunk in chunks:
                    key, waited = (chunk.index, chunk.sample), time.perf_counter() - arrived
                    if key not in seen:
                        seen.add(key)
                        self.metrics.first_token.observe(waited)
                    if chunk.completion is not None:
                        self.metrics.latency.observe(waited)
                        checked(chunk.completion)
                    yield chunk
        finally:
            for request in requests:
                self.metrics.finished.labels(request.finish_reason or FinishReason.ABORT).inc()


@dataclass(frozen=True)
class Endpoint:
    """POST of a body that is to be answered, as an ASGI application, since it must see the client leave."""

    api: Api
    kind: type[CompletionBody] | type[ChatBody]
    form: type[Replies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        body = read(self.kind, await bytes_of(HttpRequest(scope, receive), self.api.limits.request_bytes))
        self.api.check_model(body.model)
        with self.api.room(body.samples):
            requests = await self.api.requests(body)
            replies = self.form(self.api.model, self.api.llm.llm.tokenizer, body.n, body.likeliest)
            chunks = self.api.run(requests, arrived)
            if body.stream:
                events = self.events(chunks, replies, body.include_usage)
                await while_connected(receive, send_events(events, send))
            else:
                await while_connected(receive, send_whole(chunks, replies, scope, receive, send))

    async def events(
        self, chunks: AsyncGenerator[Chunk, None], replies: Replies, counts: bool
    ) -> AsyncGenerator[bytes, None]:
        """The answer by pieces, at its end the token counts if wanted; a failure is an event too."""
        done = []
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    done += [chunk.completion] if chunk.completion else []
                    part = replies.part(chunk)
                    if part is not None:
                        yield event(part | ({"usage": None} if counts else {}))
            if counts:
                yield event(replies.counts(done))
        except (ApiError, EngineError) as error:
            yield event(told(error).body)
        yield DONE


async def send_events(events: AsyncGenerator[bytes, None], send: Send) -> None:
    """Send events as they come."""
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    async with aclosing(events):
        async for line in events:
            await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_whole(
    chunks: AsyncGenerator[Chunk, None], replies: Replies, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the answer when it is complete."""
    async with aclosing(chunks):
        done = [chunk.completion async for chunk in chunks if chunk.completion]
    done.sort(key=lambda completion: (completion.index, completion.sample))
    await JSONResponse(replies.whole(done))(scope, receive, send)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do ``work`` as long as the client is there."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def bytes_of(request: HttpRequest, most: int) -> bytes:
    """The body. Raises ApiError as soon as it is seen to be too large."""
    length, body = request.headers.get("content-length", ""), bytearray()
    too_large = ApiError(413, f"the body has more than {most} bytes", code="request_too_large")
    if length.isdecimal() and int(length) > most:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


class KeyGuard:
    """Lets requests through that bring the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = HttpRequest(scope).headers.get("authorization", "").encode("latin-1")
        if not secrets.compare_digest(given, self.expected):
            message = "no API key was given" if not given else "the API key is wrong"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await self.app(scope, receive, send)


def told(error: Exception) -> ApiError:
    """What a client hears of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers or {})
    if isinstance(error, EngineError):
        return ApiError(503, str(error), kind="server_error")
    return ApiError(500, "an error inside the server", kind="server_error")


async def refused(_: HttpRequest, error: Exception) -> Response:
    """An error as a response."""
    known = told(error)
    return JSONResponse(known.body, known.status, known.headers)
