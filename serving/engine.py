"""The loop: plan, submit, and only then wait for the step before. The device always has its next step.

With ``overlap`` off each step is awaited before the next is planned: slower, and the same tokens.
"""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from serving.request import Request
from serving.runner import Pending, Runner
from serving.scheduler import DecodePlan, Scheduler
from serving.stats import StepStats


@dataclass
class Engine:
    """Drives requests through the runner. Not for several threads at once: whoever shares it locks."""

    scheduler: Scheduler
    runner: Runner
    overlap: bool = True
    inflight: deque[Pending] = field(default_factory=deque)

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
        keep = 1 if self.overlap and plan is not None else 0
        touched: list[Request] = []
        while len(self.inflight) > keep:
            touched += self.finish()
        self.stats.host_s += perf_counter() - start - (self.stats.wait_s - waited)
        for request in touched:
            request.notify(request)
        return touched

    def finish(self) -> list[Request]:
        """Wait for the oldest step in flight and take its results."""
        start = perf_counter()
        try:
            results = self.runner.collect(self.inflight[0])
        except Exception as error:
            self.abandon(error)
            raise
        self.stats.wait_s += perf_counter() - start
        plan = self.inflight.popleft().plan  # only now: an interrupted wait can be repeated
        if isinstance(plan, DecodePlan):
            self.stats.steps += 1
            self.stats.rows += len(plan.slots)
        else:
            self.stats.prefills += 1
        return self.scheduler.apply(plan, results)

    def abandon(self, error: BaseException) -> None:
        """Start anew after a step that failed: what the device held is lost."""
        self.inflight.clear()
        self.runner.reset()
        for request in self.scheduler.reset(f"the engine's step failed: {type(error).__name__}: {error}"):
            request.notify(request)
