"""AsyncLLM: the same LLM for an event loop. One thread steps the engine; callers await what it brings.

The loop never waits for the engine: callers post what they want to an inbox that the thread reads between steps, and
what comes lies in the caller's mailbox, one chunk a sample, however slowly it is fetched.
"""

import asyncio
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from serving.llm import LLM, Prompts
from serving.request import Chunk, Completion, Request, SamplingParams


class EngineError(RuntimeError):
    """The engine takes no requests: it was closed, or a step failed (then that is the cause)."""


class AsyncLLM:
    """An LLM that many tasks share, of one event loop or several.

    Args:
        target: an LLM, which may go on being used directly, or what ``LLM`` opens.
        drafter, options: as ``LLM`` takes them, where it is to be made here.

    Leaving a stream early, or cancelling who awaits, aborts the requests. Close with ``aclose`` or ``async with``.
    """

    def __init__(self, target: LLM | str | Path, drafter: str | Path | None = None, **options: Any) -> None:
        if isinstance(target, LLM) and (drafter is not None or options):
            raise TypeError("drafter and options belong to the LLM, which is made already")
        self.llm = target if isinstance(target, LLM) else LLM(target, drafter, **options)
        self.wake = threading.Condition()  # held for moments only; guards what follows
        self.inbox: list[Callable[[], None]] = []  # what the engine thread is to do before its next step
        self.mailboxes: set[Mailbox] = set()
        self.closing = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def healthy(self) -> bool:
        """Whether requests can be answered."""
        return not self.closing and self.error is None

    def close(self) -> None:
        """Abort what runs and let the engine thread end; the LLM stays usable."""
        with self.wake:
            self.closing = True
            self.wake.notify()

    async def aclose(self) -> None:
        """The same, and wait until it has ended."""
        self.close()
        await asyncio.to_thread(self.thread.join)

    # --- what callers use

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """As ``LLM.generate``; requests of a lower priority value run first."""
        requests = await self.requests(prompts, params, chat_template_kwargs, priority)
        async with aclosing(self.run(requests)) as chunks:
            done = [chunk.completion async for chunk in chunks if chunk.completion]
        return sorted(done, key=lambda completion: (completion.index, completion.sample))

    async def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """As ``LLM.stream``; requests of a lower priority value run first."""
        requests = await self.requests(prompts, params, chat_template_kwargs, priority)
        async with aclosing(self.run(requests)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """As ``LLM.requests``, in a thread, since a long prompt takes the tokenizer a while."""
        requests = await asyncio.to_thread(self.llm.requests, prompts, params, chat_template_kwargs)
        for request in requests:
            request.priority = priority
        return requests

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[Chunk, None]:
        """Runs requests together with everybody's; yields what is new, each sample's last chunk with its Completion.

        Raises EngineError where the engine has stopped or stops meanwhile.
        """
        mailbox = Mailbox(asyncio.get_running_loop(), requests)
        with self.wake:
            self.refuse_if_stopped()
            self.mailboxes.add(mailbox)
        self.post(partial(self.begin, mailbox))
        try:
            unfinished = len(requests)
            while unfinished:
                chunks = await mailbox.take()
                if not chunks:
                    self.refuse_if_stopped()
                for chunk in chunks:
                    unfinished -= chunk.completion is not None
                    yield chunk
        finally:
            self.post(partial(self.end, mailbox))

    def refuse_if_stopped(self) -> None:
        """Raises EngineError where nobody steps the engine any more."""
        if self.error is not None:
            raise EngineError(f"the engine failed: {self.error!r}") from self.error
        if self.closing:
            raise EngineError("the engine is closed")

    def post(self, command: Callable[[], None]) -> None:
        """Have the engine thread do something before its next step."""
        with self.wake:
            self.inbox.append(command)
            self.wake.notify()

    # --- the engine thread

    def work(self) -> None:
        """Do what callers posted, and step while there is something to do; at the end nobody is left waiting."""
        try:
            while not self.closing:
                with self.wake:
                    self.wake.wait_for(lambda: self.inbox or self.closing or self.llm.engine.busy)
                with self.llm.lock:
                    with self.wake:  # once more: what came while another caller of LLM held the lock
                        posted, self.inbox = self.inbox, []
                    for command in posted:
                        command()
                    if self.llm.engine.busy:
                        self.llm.engine.step()
            with self.llm.lock:
                for mailbox in list(self.mailboxes):
                    self.end(mailbox)
        except BaseException as error:  # whatever it is, callers must hear of it
            traceback.print_exception(error)
            self.error = error
        with self.wake:
            for mailbox in self.mailboxes:
                mailbox.stop()

    def begin(self, mailbox: "Mailbox") -> None:
        """Queue a caller's requests."""
        for request in mailbox.requests:
            request.notify = mailbox.put
            self.llm.engine.add(request)
            if request.finished:
                mailbox.put(request)

    def end(self, mailbox: "Mailbox") -> None:
        """Abort what a caller left unfinished."""
        for request in mailbox.requests:
            if not request.finished:
                self.llm.engine.abort(request)
                mailbox.put(request)
        with self.wake:
            self.mailboxes.discard(mailbox)


class Mailbox:
    """What has come for one caller and was not fetched yet: at most one chunk a sample, which grows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Sequence[Request]) -> None:
        self.loop = loop
        self.requests = requests
        self.lock = threading.Lock()
        self.chunks: dict[Request, Chunk] = {}
        self.ready = asyncio.Event()
        self.stopped = False

    def put(self, request: Request) -> None:
        """Add what is new of a request; called by whoever steps the engine."""
        chunk = request.chunk()
        with self.lock:
            before = self.chunks.get(request)
            asleep = not self.chunks
            self.chunks[request] = chunk if before is None else joined(before, chunk)
        if asleep:
            self.alert()

    def stop(self) -> None:
        """Nothing more will come."""
        self.stopped = True
        self.alert()

    def alert(self) -> None:
        """Wake the caller."""
        with suppress(RuntimeError):  # its loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.ready.set)

    async def take(self) -> list[Chunk]:
        """Wait for news and fetch all of them; nothing where nothing more will come."""
        while True:
            stopped = self.stopped  # before the chunks: those that came before the end are fetched first
            with self.lock:
                taken, self.chunks = self.chunks, {}
            if taken or stopped:
                return list(taken.values())
            self.ready.clear()  # what comes from here on sets it again, in this very loop, so behind this line
            await self.ready.wait()


def joined(first: Chunk, then: Chunk) -> Chunk:
    """Two chunks of a sample as one."""
    both = None if then.logprobs is None else (*(first.logprobs or ()), *then.logprobs)
    return replace(then, text=first.text + then.text, token_ids=first.token_ids + then.token_ids, logprobs=both)
