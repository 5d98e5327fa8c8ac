"""ServerMetrics: what the server does, for Prometheus and for its page."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from composer_jax.sampler.policy import Sample
from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.traffic.writer import TrafficWriter

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
WINDOW = 10.0
"""Seconds over which the page's throughput is measured."""


class ServerMetrics:
    """Counters of one server, and gauges of its engine."""

    def __init__(self, sampler: Sampler, traffic: TrafficWriter | None = None) -> None:
        self._sampler, self.registry = sampler, CollectorRegistry()
        counter = lambda name, text: Counter(name, text, registry=self.registry)  # noqa: E731
        self.requests = Counter(
            "composer_http_requests", "Answers by path and status.", ("path", "status"), registry=self.registry
        )
        self._finished = counter("composer_requests_finished", "Requests that the engine answered.")
        self.failed = counter("composer_requests_failed", "Requests that were cancelled or failed.")
        self._prompt = counter("composer_prompt_tokens", "Tokens of prompts.")
        self._cached = counter("composer_cached_prompt_tokens", "Tokens of prompts that were in the cache.")
        self._sampled = counter("composer_sampled_tokens", "Tokens that were sampled.")
        self._seconds = Histogram(
            "composer_request_seconds", "Time of whole requests.", buckets=SECONDS, registry=self.registry
        )
        for name, text, read in (
            ("running", "Requests that run.", lambda: sampler.stats.running),
            ("waiting", "Requests that wait.", lambda: sampler.stats.waiting),
            ("preemptions", "Requests that gave up their pages.", lambda: sampler.stats.preemptions),
            ("cache_pages", "Pages of the cache.", lambda: sampler.stats.pages),
            ("cache_pages_held", "Pages of running requests and open sessions.", lambda: sampler.stats.held_pages),
            ("weight_version", "Version of the weights.", lambda: sampler.version),
        ):
            Gauge(f"composer_{name}", text, registry=self.registry).set_function(read)
        if traffic is not None:
            self.registry.register(_TrafficCollector(traffic))
            waiting = Gauge("composer_traffic_queue", "Turns that wait to be written.", registry=self.registry)
            waiting.set_function(lambda: traffic.queue_length)
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), sampler.decoded_tokens)])

    def note(self, prompt_tokens: int, sample: Sample, seconds: float) -> None:
        """Counts a finished request."""
        self._finished.inc()
        self._prompt.inc(prompt_tokens)
        self._cached.inc(sample.cached)
        self._sampled.inc(len(sample.tokens))
        self._seconds.observe(seconds)

    def summary(self) -> dict[str, Any]:
        """Returns what the page shows."""
        now, tokens, stats = time.monotonic(), self._sampler.decoded_tokens, self._sampler.stats
        self._recent.append((now, tokens))
        while len(self._recent) > 2 and self._recent[1][0] < now - WINDOW:
            self._recent.popleft()
        then, before = self._recent[0]
        return {
            "tokens_per_s": (tokens - before) / max(now - then, 1e-9),
            "running": stats.running,
            "waiting": stats.waiting,
            "pages": stats.pages,
            "held_pages": stats.held_pages,
            "sampled_tokens": tokens,
            "weight_version": self._sampler.version,
        }


class _TrafficCollector(Collector):
    """Reads the counts of a TrafficWriter when Prometheus asks."""

    def __init__(self, traffic: TrafficWriter) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        for name, count in dataclasses.asdict(self._traffic.counts).items():
            text = f"Traffic: {name.replace('_', ' ')}."
            yield CounterMetricFamily(f"composer_traffic_{name}", text, value=count)
