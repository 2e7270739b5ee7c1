"""What an engine counts."""

from dataclasses import dataclass


@dataclass
class StepStats:
    """What the engine has done so far; all times in seconds.

    steps: decode steps, prefills: prefill steps. rows: rows of all decode steps. rounds, emitted: rounds of live rows
    and the tokens that they emitted, uncut. tokens: output tokens of all requests. prompt_tokens, hit_tokens: of
    admitted requests, and those that the prefix cache had. pages, pages_used: of the pool, and those that requests or
    the cache hold. host_s: Python between waits; wait_s: waiting for the device.
    """

    steps: int = 0
    prefills: int = 0
    rows: int = 0
    rounds: int = 0
    emitted: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    pages: int = 0
    pages_used: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round."""
        return self.emitted / self.rounds if self.rounds else 1.0
