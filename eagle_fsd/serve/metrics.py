"""What Prometheus reads at /metrics: queue, rows, tokens, tau, fuzzy tokens, latencies.

Counters only grow: `rate(eagle_fsd_tokens_total[1m])` is the speed of the last minute, and the rate of accepted over
that of forwards, plus 1, its tau. Draft tokens are counted by who drafted them: sum them up.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..batching.engine import Engine
from ..batching.tickets import Ticket

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTERS = {  # of `EngineStats`
    "requests": "requests that were taken",
    "prompt_tokens": "tokens of prompts",
    "reused_tokens": "those of them that an earlier request had left",
    "tokens": "new tokens",
    "fuzzy": "those of them that only a rule accepted",
    "forwards": "verify forwards of the target, each row counted",
    "undrafted": "those of them without a draft tree",
}
BY_DRAFTER = {"proposed": "draft tokens that were verified", "accepted": "those of them that were accepted"}


class Metrics(Collector):
    """What one server counts, in a registry of its own: the engine's counters, answers of HTTP, latencies."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.answered = Counter("eagle_fsd_http_answers", "answers by path and status", ["path", "status"],
                                registry=self.registry)
        self.queued, self.first, self.between, self.total = (
            Histogram(f"eagle_fsd_{name}", what, buckets=SECONDS, registry=self.registry) for name, what in (
                ("queue_seconds", "from a request to its row"),
                ("first_token_seconds", "from a request to its first token"),
                ("token_seconds", "per token, after the first"),
                ("answer_seconds", "from a request to its last token")))
        self.registry.register(self)

    def time(self, ticket: Ticket, tokens: int) -> None:
        """A request that has ended with so many tokens."""
        first, total = ticket.first_token_seconds, ticket.total_seconds
        for histogram, seconds in ((self.queued, ticket.queued_seconds), (self.first, first), (self.total, total)):
            if seconds is not None:
                histogram.observe(seconds)
        if first is not None and tokens > 1:
            self.between.observe((total - first) / (tokens - 1))

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats
        for name, what, value in (
            ("queue", "requests that wait for a row", self.engine.waiting),
            ("rows", "requests being read or decoded", self.engine.rows),
            ("tau", "tokens per forward of the target", stats.accepted.total() / max(1, stats.forwards) + 1),
            ("fuzzy_share", "share of tokens that only a rule accepted", stats.fuzzy / max(1, stats.tokens)),
        ):
            yield GaugeMetricFamily(f"eagle_fsd_{name}", what, value=value)
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"eagle_fsd_{name}", what, value=getattr(stats, name))
        for name, what in BY_DRAFTER.items():
            drafted = CounterMetricFamily(f"eagle_fsd_{name}", f"{what}, by who drafted them", labels=["drafter"])
            for drafter, count in getattr(stats, name).items():
                drafted.add_metric([drafter], count)
            yield drafted
        ended = CounterMetricFamily("eagle_fsd_finished", "requests by why they ended", labels=["reason"])
        for reason, count in dict(stats.finished).items():
            ended.add_metric([reason], count)
        yield ended


class Counted:
    """ASGI middleware that counts answers by path and status, paths that there are not as "other"."""

    def __init__(self, app: ASGIApp, answered: Counter) -> None:
        self.app, self.answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.answered.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)
