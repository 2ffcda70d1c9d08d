"""What Prometheus reads at /metrics: queue, rows, tokens, speed, tau, fuzzy tokens, latencies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..serve.engine import Engine
    from ..serve.tickets import Ticket

WINDOW = 60.0  # seconds that the rates are of
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PATHS = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/health", "/metrics")
COUNTERS = {
    "requests": "requests that were taken",
    "prompt_tokens": "tokens of prompts",
    "reused_tokens": "those of them that an earlier request had left",
    "tokens": "new tokens",
    "fuzzy": "those of them that only a rule accepted",
    "accepted": "accepted draft tokens",
    "forwards": "verify forwards of the target, each row counted",
    "undrafted": "those of them without a draft tree",
}


class EngineCollector(Collector):
    """An engine's counters, and its rates over about the last minute: since the oldest reading in it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.clock = engine, clock
        self.readings: deque[tuple[float, dict[str, int]]] = deque()
        self.read()

    def read(self) -> dict[str, float]:
        """The rates up to now, which are those since the next reading after it leaves the window."""
        now, stats = self.clock(), self.engine.stats
        self.readings.append((now, {name: getattr(stats, name) for name in COUNTERS}))
        while len(self.readings) > 2 and self.readings[1][0] <= now - WINDOW:
            self.readings.popleft()
        (before, old), (_, new) = self.readings[0], self.readings[-1]
        grown = {name: new[name] - old[name] for name in COUNTERS}
        return {
            "tokens_per_second": grown["tokens"] / (now - before) if now > before else 0.0,
            "tau": grown["accepted"] / grown["forwards"] + 1 if grown["forwards"] else 1.0,
            "fuzzy_share": grown["fuzzy"] / grown["tokens"] if grown["tokens"] else 0.0,
        }

    def collect(self) -> Iterator[Metric]:
        engine, rates = self.engine, self.read()
        gauges = {
            "queue": ("requests that wait for a row", engine.waiting),
            "rows": ("requests being read or decoded", engine.rows),
            "tokens_per_second": ("new tokens per second, over the last minute", rates["tokens_per_second"]),
            "tau": ("tokens per forward of the target, over the last minute", rates["tau"]),
            "fuzzy_share": ("share of tokens that only a rule accepted, over the last minute", rates["fuzzy_share"]),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"eagle_fsd_{name}", what, value=value)
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"eagle_fsd_{name}", what, value=getattr(engine.stats, name))
        ended = CounterMetricFamily("eagle_fsd_finished", "requests by why they ended", labels=["reason"])
        for reason, count in dict(engine.stats.finished).items():
            ended.add_metric([reason], count)
        yield ended


class Metrics:
    """What one server counts, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.rates = EngineCollector(engine)
        self.registry.register(self.rates)
        self.answered = Counter("eagle_fsd_http_answers", "answers by path and status", ["path", "status"],
                                registry=self.registry)
        self.queued = self.histogram("queue_seconds", "from a request to its row")
        self.first = self.histogram("first_token_seconds", "from a request to its first token")
        self.between = self.histogram("token_seconds", "per token, after the first")
        self.total = self.histogram("answer_seconds", "from a request to its last token")

    def histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"eagle_fsd_{name}", what, buckets=SECONDS, registry=self.registry)

    def count(self, path: str, status: int) -> None:
        """An answer of HTTP; a path that there is not counts as "other": clients choose it."""
        self.answered.labels(path if path in PATHS else "other", str(status)).inc()

    def time(self, ticket: Ticket, tokens: int) -> None:
        """A request that has ended with so many tokens."""
        self.rates.read()
        first, total = ticket.first_token_seconds, ticket.total_seconds
        for histogram, seconds in ((self.queued, ticket.queued_seconds), (self.first, first), (self.total, total)):
            if seconds is not None:
                histogram.observe(seconds)
        if first is not None and total is not None and tokens > 1:
            self.between.observe((total - first) / (tokens - 1))

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
