"""The loop that drives the runner: batches of requests, prefill, then rounds until every row has ended.

Batching is static: a batch runs until its last row is done. Streams and batch calls share it.
"""

from collections.abc import Iterator, Sequence

from serving.request import Request
from serving.runner import Batch, DecodePlan, PrefillPlan, Runner, StepResult


class Engine:
    """Runs requests to their end."""

    def __init__(self, runner: Runner, block_size: int, max_num_seqs: int) -> None:
        self.runner, self.block_size, self.max_num_seqs = runner, block_size, max_num_seqs

    def run(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Runs requests in order; yields a request each time it has something new, the last time finished."""
        yield from (r for r in requests if r.finished)
        waiting = [r for r in requests if not r.finished]
        for start in range(0, len(waiting), self.max_num_seqs):
            yield from self.run_batch(waiting[start : start + self.max_num_seqs])

    def run_batch(self, batch: list[Request]) -> Iterator[Request]:
        """Prefill in chunks, then decode until all rows have ended."""
        device = self.runner.begin(batch, self.block_size)
        yield from self.prefill(batch, device)
        while live := [r for r in batch if not r.finished]:
            width = tuple(0 if r.finished else self.block_size for r in batch)
            results = device.collect(device.submit(DecodePlan(self.block_size, width)))
            for request, result in zip(batch, results, strict=False):
                if not request.finished:
                    request.acceptance_lengths.append(len(result.tokens))
                    apply(request, result)
            yield from live

    def prefill(self, batch: list[Request], device: Batch) -> Iterator[Request]:
        """Chunks of all prompts side by side; a row's first token comes with the end of its prompt."""
        chunk = self.runner.prefill_chunk
        for start in range(0, max(len(r.prompt) for r in batch), chunk):
            pieces = tuple(r.prompt[start : start + chunk] for r in batch)
            pending = device.submit(PrefillPlan(start, pieces))
            ended = [row for row, r in enumerate(batch) if start < len(r.prompt) <= start + chunk]
            if ended:
                results = device.collect(pending)
                for row in ended:
                    apply(batch[row], results[row])
                    yield batch[row]


def apply(request: Request, result: StepResult) -> None:
    """Give a row's step to its request; a step with NaN or infinite logits ends that request alone."""
    if not result.finite:
        request.fail("the target's logits are not finite (NaN or infinity) for this request")
        return
    k = request.params.logprobs
    request.accept(result.tokens, [trimmed(entry, k or 0) for entry in result.logprobs])


def trimmed(entry: dict[int, float], k: int) -> dict[int, float]:
    """The token's own log-probability and the k likeliest ones."""
    own = next(iter(entry))
    best = sorted(entry, key=entry.__getitem__, reverse=True)[:k]
    return {token: entry[token] for token in dict.fromkeys([own, *best])}
