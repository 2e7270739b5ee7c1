"""What Prometheus scrapes: the engine's counts as they stand, and how long clients waited."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.first_token = Histogram(
            "dflash_time_to_first_token_seconds",
            "From a request's arrival to its first text",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.latency = Histogram(
            "dflash_request_latency_seconds",
            "From a request's arrival to its last text",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.finished = Counter(
            "dflash_requests", "Samples that ended, by finish reason", ["finish_reason"], registry=self.registry
        )
        self.refused = Counter("dflash_refused", "Requests turned away by a full queue", registry=self.registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Reads the engine when asked; nothing is counted twice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, as they stand."""
        stats, scheduler = self.engine.stats, self.engine.scheduler
        for name, text, value in (
            ("requests_running", "Requests that hold a row", len(scheduler.rows)),
            ("requests_waiting", "Requests that wait for one", len(scheduler.waiting)),
            ("pages", "K/V pages of the pool", stats.pages),
            ("pages_used", "K/V pages that requests or the prefix cache hold", stats.pages_used),
            ("acceptance_length", "Mean tokens a draft-verify round so far", stats.acceptance_length),
            ("prefix_hit_rate", "Share of prompt tokens that the prefix cache had so far", stats.hit_rate),
        ):
            yield GaugeMetricFamily(f"dflash_{name}", text, value=value)
        for name, text, value in (
            ("generated_tokens", "Output tokens", stats.tokens),
            ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
            ("prefix_hit_tokens", "Prompt tokens that the prefix cache had", stats.hit_tokens),
            ("rounds", "Draft-verify rounds of rows", stats.rounds),
            ("emitted_tokens", "Tokens that rounds emitted", stats.emitted),
            ("decode_steps", "Decode steps", stats.steps),
            ("prefill_steps", "Prefill steps", stats.prefills),
            ("preemptions", "Requests sent back to the queue for want of pages", stats.preemptions),
            ("host_seconds", "Seconds of Python between waits for the device", stats.host_s),
            ("device_wait_seconds", "Seconds of waiting for the device", stats.wait_s),
        ):
            yield CounterMetricFamily(f"dflash_{name}", text, value=value)
