"""The loop: plan, submit, and only then wait for the step before. The device always has its next step.

A step's results come back, are taken in, and the next but one is planned and launched while the next runs. Where that
is shorter than all this takes, one more step is kept on its way. With ``overlap`` off each step is awaited before the
next is planned: slower, and the same tokens.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from serving.request import Request
from serving.runner import Pending, Runner
from serving.scheduler import DecodePlan, Scheduler
from serving.stats import StepStats

SHORT_S = 4e-3  # a step below this many seconds is over before the next but one can be on its way
SMOOTHING = 0.1  # weight of a step in the running mean of their times


@dataclass
class Engine:
    """Drives requests through the runner. Not for several threads at once: whoever shares it locks.

    inflight: steps on their way, the oldest first. pace: running mean of the seconds from one step's end to the next's;
    finished: when the last one ended, None where nothing was on its way then.
    """

    scheduler: Scheduler
    runner: Runner
    overlap: bool = True
    inflight: deque[Pending] = field(default_factory=deque)
    pace: float = math.inf
    finished: float | None = None

    @property
    def stats(self) -> StepStats:
        """What has been done so far."""
        return self.scheduler.stats

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.inflight or self.scheduler.waiting or self.scheduler.rows)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run fails here and now."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request; its tokens so far stay."""
        self.scheduler.abort(request)

    def step(self) -> list[Request]:
        """Submit the next step, wait for the one before, and notify the requests that it brought something.

        A step that fails on the device (its memory is full, say) raises what it raised; requests that ran fail with it,
        those that wait can go on.
        """
        start, waited = perf_counter(), self.stats.wait_s
        plan = self.scheduler.next_plan()
        if plan is not None:
            try:
                self.inflight.append(self.runner.submit(plan))
            except BaseException as error:  # an interrupt too: the plan is made, and nothing will come of it
                self.abandon(error)
                raise
        keep = max(len(self.inflight) - 1, 0) if plan is None else self.ahead
        touched: list[Request] = []
        while len(self.inflight) > keep:
            touched += self.finish()
        self.stats.host_s += perf_counter() - start - (self.stats.wait_s - waited)
        for request in touched:
            request.notify(request)
        return touched

    @property
    def ahead(self) -> int:
        """How many steps stay on their way when a new one was submitted."""
        if not self.overlap:
            return 0
        return 2 if self.pace < SHORT_S else 1

    def finish(self) -> list[Request]:
        """Wait for the oldest step in flight and take its results."""
        start = perf_counter()
        try:
            results = self.runner.collect(self.inflight[0])
        except Exception as error:
            self.abandon(error)
            raise
        end = perf_counter()
        self.stats.wait_s += end - start
        plan = self.inflight.popleft().plan  # only now: an interrupted wait can be repeated
        if self.finished is not None:
            last = end - self.finished
            self.pace = last if math.isinf(self.pace) else self.pace + SMOOTHING * (last - self.pace)
        self.finished = end if self.inflight else None
        if isinstance(plan, DecodePlan):
            self.stats.steps += 1
            self.stats.rows += len(plan.slots)
        else:
            self.stats.prefills += 1
        return self.scheduler.apply(plan, results)

    def abandon(self, error: BaseException) -> None:
        """Start anew after a step that failed: what the device held is lost."""
        self.inflight.clear()
        self.finished = None
        self.runner.reset()
        for request in self.scheduler.reset(f"the engine's step failed: {type(error).__name__}: {error}"):
            request.notify(request)
