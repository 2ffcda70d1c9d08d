"""Prometheus metrics at /metrics: queue, rows, tokens, tau, fuzzy tokens, latencies.

`rate(eagle_fsd_tokens_total[1m])` is the speed over the last minute; the rate of accepted tokens divided by the rate of
forwards, plus 1, is its tau. Draft tokens are counted by drafter: sum over the label.

Drafts are counted under vLLM's names as well, with its labels, for dashboards that were made for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..batching.engine import Engine
from ..batching.loop import EngineStats
from ..batching.tickets import Ticket
from ..decoding.output import accepted_by_position

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """Metrics of one server in their own registry: the engine's counters, HTTP responses, latencies.

    Args:
        name: name of the model, a label of vLLM's metrics.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.registry = engine, name, CollectorRegistry()
        self.answered = Counter("eagle_fsd_http_answers", "HTTP responses by path and status", ["path", "status"],
                                registry=self.registry)
        self.queued, self.first, self.between, self.total = (
            Histogram(f"eagle_fsd_{name}", what, buckets=SECONDS, registry=self.registry) for name, what in (
                ("queue_seconds", "from submission to the start of decoding"),
                ("first_token_seconds", "from submission to the first token"),
                ("token_seconds", "per token after the first"),
                ("answer_seconds", "from submission to the last token")))
        self.registry.register(self)

    def time(self, ticket: Ticket, tokens: int) -> None:
        """Record the latencies of a finished request with so many new tokens."""
        first, total = ticket.first_token_seconds, ticket.total_seconds
        for histogram, seconds in ((self.queued, ticket.queued_seconds), (self.first, first), (self.total, total)):
            if seconds is not None:
                histogram.observe(seconds)
        if first is not None and tokens > 1:
            self.between.observe((total - first) / (tokens - 1))

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats
        for name, what, value in (
            ("queue", "requests waiting for a row", self.engine.waiting),
            ("rows", "requests being prefilled or decoded", self.engine.rows),
            ("tau", "tokens per verify forward", stats.accepted.total() / max(1, stats.forwards) + 1),
            ("fuzzy_share", "share of tokens that only a rule accepted", stats.fuzzy / max(1, stats.tokens)),
        ):
            yield GaugeMetricFamily(f"eagle_fsd_{name}", what, value=value)
        yield CounterMetricFamily("eagle_fsd_forwards", "verify forwards of the target, counted per row",
                                  value=stats.forwards)
        for item in filter(lambda item: item.metadata, fields(stats)):  # see `counted`
            by, value = item.metadata["by"], getattr(stats, item.name)
            counter = CounterMetricFamily(f"eagle_fsd_{item.name}", item.metadata["what"], labels=[by] if by else [])
            for key, count in value.items() if by else [(None, value)]:
                counter.add_metric([key] if by else [], count)
            yield counter
        yield from self._of_vllm(stats)

    def _of_vllm(self, stats: EngineStats) -> Iterator[Metric]:
        """Counters `vllm:spec_decode_num_*`. On trees a draft is a cycle of a request that verified draft tokens of it;
        its draft tokens are all nodes of its tree but the root, its accepted tokens those of the accepted path without
        the target's own; the position of an accepted token is its depth - 1."""
        labels, values = ["model_name", "engine"], [self.name, "0"]
        for name, what, value in (
            ("drafts", "cycles that verified draft tokens, counted per request", stats.drafts),
            ("draft_tokens", "verified draft tokens: nodes of draft trees", stats.proposed.total()),
            ("accepted_tokens", "draft tokens on accepted paths", stats.accepted.total()),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", what, labels=labels)
            counter.add_metric(values, value)
            yield counter
        by_position = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos",
                                          "accepted draft tokens by depth - 1", labels=[*labels, "position"])
        for position, count in enumerate(accepted_by_position(stats.accepted_lengths)):
            by_position.add_metric([*values, str(position)], count)
        yield by_position


class Counted:
    """ASGI middleware that counts responses by path and status; paths without a route count as "other"."""

    def __init__(self, app: ASGIApp, answered: Counter) -> None:
        self.app, self.answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.answered.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)
