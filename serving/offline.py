"""Batch inference: lines in, records out in the same order, however many there are.

``answers`` keeps the engine full from a stream of lines and yields what is answered in the order of the lines; what it
holds at a time is bounded, so memory stays flat. ``Output`` is the file of records: whole lines are appended, and a run
that was killed goes on behind the last whole one. The noise of a line without a seed comes from the engine's seed and
the line's name, so that it gets the same answer in whichever run it is reached.
"""

import fcntl
import itertools
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from dflash_jax.generate import row_key
from serving.lines import Ask, Line, encoded, output_tokens, shown
from serving.llm import LLM
from serving.request import Request, SamplingParams

# Both a row slot of the engine:
OPEN = 4  # requests that it is given, so that it never runs dry
HELD = 32  # lines between the last one read and the first one without an answer: a slow answer holds up those behind it

FSYNC_S = 5.0  # between two waits for the disk: what a power failure can cost; a killed process costs no written line


@dataclass(frozen=True)
class Answer:
    """A record as it is written, and what it counts for."""

    record: bytes
    error: str | None
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(eq=False)
class Job:
    """A line on its way. unfinished: of its requests; begun: whether a token has come. An answered one keeps nothing of
    the line, whose prompt may be long."""

    requests: list[Request] = field(default_factory=list)
    unfinished: int = 0
    begun: bool = False
    answer: Answer | None = None


@dataclass
class Window:
    """The lines between the first one without an answer and the last one read, in order."""

    llm: LLM
    defaults: SamplingParams
    token_ids: bool
    jobs: deque[Job] = field(default_factory=deque)
    open: int = 0  # requests that the engine has and has not finished

    def __post_init__(self) -> None:
        config = self.llm.config
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.most_open, self.most_held = OPEN * config.max_num_seqs, HELD * config.max_num_seqs

    @property
    def room(self) -> bool:
        """Whether another line may be read."""
        return self.open < self.most_open and len(self.jobs) < self.most_held

    def admit(self, line: Line) -> None:
        """Give a line to the engine, or answer it with what is wrong with it."""
        job = Job()
        self.jobs.append(job)
        try:
            asked, requests = self.requests(line)
        except Exception as error:  # a chat template may raise anything; whatever it is, it is this line's
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            job.answer = failure(line, f"{kind}{error}")
            return
        job.requests, job.unfinished = requests, len(requests)
        self.open += len(requests)

        def notify(request: Request) -> None:
            job.begun |= bool(request.output)
            if request.finished:
                self.open -= 1
                job.unfinished -= 1
                if not job.unfinished:
                    job.answer, job.requests = self.answer(line, asked, job.requests), []

        with self.llm.lock:
            for request in requests:
                request.notify = notify
                self.llm.engine.add(request)
                if request.finished:
                    notify(request)

    def requests(self, line: Line) -> tuple[Ask, list[Request]]:
        """What a line asks, and a request a sample."""
        asked = line.ask(self.defaults)
        params, name = asked.params, line.index if line.custom_id is None else line.custom_id
        if params.stop and self.llm.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this target has none; stop_token_ids work without")
        ids = self.llm.encode(asked.prompt, asked.template)
        seed = f"{self.seed}/{name}" if params.seed is None else params.seed
        return asked, [
            self.llm.request(line.index, sample, ids, params, row_key(seed, sample)) for sample in range(params.n)
        ]

    def answer(self, line: Line, asked: Ask, requests: Sequence[Request]) -> Answer:
        """The answer of a line whose requests have finished."""
        samples = [request.completion() for request in requests]
        errors = [sample.error for sample in samples if sample.error is not None]
        if errors:
            return failure(line, errors[0])
        tokenizer = self.llm.tokenizer
        record = line.answered(asked, samples, self.token_ids or tokenizer is None, tokenizer)
        return Answer(encoded(record), None, samples[0].prompt_tokens, output_tokens(samples))

    def ready(self) -> Iterator[Answer]:
        """Take out the answers that nothing before them holds up."""
        while self.jobs and (answer := self.jobs[0].answer):
            self.jobs.popleft()
            yield answer

    def drop(self, begun: bool) -> None:
        """Abort lines, from the last one back to one that has begun; those as well if ``begun``."""
        with self.llm.lock:
            while self.jobs and (begun or not self.jobs[-1].begun):
                for request in self.jobs.pop().requests:
                    if not request.finished:
                        self.llm.engine.abort(request)


def failure(line: Line, error: str) -> Answer:
    """The answer to a line that has none; its number comes first."""
    message = f"line {line.number}: {error}"
    return Answer(encoded(line.failed(message)), message)


def answers(
    llm: LLM,
    lines: Iterable[Line],
    defaults: SamplingParams,
    *,
    token_ids: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Answers lines in their order, reading no further ahead than the engine can use.

    Args:
        defaults: what a line leaves open.
        token_ids: plain records name their tokens (without a tokenizer they always do).
        stopping: asked at every step; once true, no line is begun any more, and the last answers are of those begun.
    """
    window, source = Window(llm, defaults, token_ids), iter(lines)
    more, stopped = True, False
    try:
        while more or window.jobs:
            if not stopped and stopping():
                stopped, more = True, False
                window.drop(begun=False)
            while more and window.room:
                line = next(source, None)
                more = line is not None
                if line is not None:
                    window.admit(line)
            yield from window.ready()
            if window.jobs:
                with llm.lock:
                    llm.engine.step()
    finally:
        window.drop(begun=True)


class Output:
    """The file of records, for one run at a time.

    ``resume`` finds where to go on, ``start`` throws away what is behind that, and nothing changes before.
    Raises ValueError where another run is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a+b")
        self.synced = monotonic()
        self.size = 0  # of the records to keep
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise ValueError(f"another run is writing {path}") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        """Whether nothing is in the file."""
        return os.fstat(self.file.fileno()).st_size == 0

    def resume(self, lines: Iterator[Line]) -> tuple[int, Iterator[Line]]:
        """Counts the records of a run before and gives the lines behind them. A last record that a kill has torn does
        not count.

        Raises ValueError where a record does not belong to its line.
        """
        count = 0
        self.file.seek(0)
        for raw in self.file:
            line = next(lines, None)
            if line is None:
                raise ValueError(f"{self.path} has more than the {count} records that the input asks for")
            if not raw.endswith(b"\n"):
                begins, torn = encoded(line.head)[:-2], raw.strip(b"\0")  # zeros: what a power failure leaves
                if not (torn.startswith(begins) or begins.startswith(torn)):
                    raise ValueError(f"{self.path} ends with {shown(torn)}, which begins no answer to {named(line)}")
                return count, itertools.chain([line], lines)
            if (found := head_of(raw)) != line.head:
                raise ValueError(
                    f"record {count + 1} of {self.path} is {shown(found)}, and the input has {named(line)} there: they "
                    "do not belong together"
                )
            self.size += len(raw)
            count += 1
        return count, lines

    def start(self) -> None:
        """Cut the file behind the records to keep."""
        self.file.truncate(self.size)

    def write(self, record: bytes) -> None:
        """Append a whole line; it outlives the process from here on, and a power failure after some seconds."""
        self.file.write(record)
        self.file.flush()
        if monotonic() - self.synced > FSYNC_S:
            os.fsync(self.file.fileno())
            self.synced = monotonic()

    def close(self) -> None:
        """Everything on the disk, and the file free for another run."""
        os.fsync(self.file.fileno())
        self.file.close()


def head_of(raw: bytes) -> Any:
    """The fields of a written record that tie it to a line; what is no record as it is."""
    try:
        record = json.loads(raw)
    except ValueError:
        return raw
    return {n: record[n] for n in ("index", "id", "custom_id") if n in record} if isinstance(record, dict) else raw


def named(line: Line) -> str:
    """A line in an error message."""
    return f"line {line.number}, {shown(line.head)},"
