"""Insight: what the server tells of itself while it runs: metrics, the data of the live page, and why a prompt missed.

Figures are read in the engine's thread, between two steps, at most once in ``FRESH_SECONDS``, however many ask for
them. No prompt, token or tenant is in them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path as File
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from prefixloom import CacheStats, Explanation, Figure, InputError, Path, Window

from .app import Server
from .protocol import ApiError, ExplainAsked
from .worker import PendingAnswer

FRESH_SECONDS = 0.5
"""Figures that are no older are told again as they are."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms of requests."""
REASONS = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}
"""By reason of ours: as vLLM calls it in its metric of finished requests."""
PAGE = File(__file__).with_name("page.html")


@attrs.frozen
class Snapshot:
    """The state of the engine and its cache at one moment."""

    at: float
    stats: CacheStats
    figures: list[Figure]
    running: int
    waiting: int
    preempted: int
    recent: list[dict[str, Any]]
    hot: list[dict[str, Any]]


class Requests:
    """What the server measures of requests, under the names that vLLM has for the same."""

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        labels = {"model_name": name, "engine": "0"}

        def histogram(kind: str, text: str) -> Any:
            made = Histogram(f"vllm:{kind}", text, list(labels), registry=registry, buckets=SECONDS)
            return made.labels(**labels)

        def counter(kind: str, text: str, *more: str) -> Any:
            made = Counter(f"vllm:{kind}", text, [*labels, *more], registry=registry)
            return made if more else made.labels(**labels)

        self._labels = labels
        self.first = histogram("time_to_first_token_seconds", "from the request to its first token")
        self.whole = histogram("e2e_request_latency_seconds", "from the request to the end of its answer")
        self.queued = histogram("request_queue_time_seconds", "from the request to its admission")
        self.each = histogram("request_time_per_output_token_seconds", "mean time of a token after the first")
        self.prompts = counter("prompt_tokens", "tokens of prompts")
        self.cached = counter("prompt_tokens_cached", "tokens of prompts that the cache had, on any tier")
        self.answers = counter("generation_tokens", "tokens of answers")
        self.success = counter("request_success", "requests that have ended", "finished_reason")

    def ended(self, ticket: PendingAnswer) -> None:
        """Count a request that has ended."""
        now = time.monotonic()
        self.whole.observe(now - ticket.begun)
        if ticket.admitted_at:
            self.queued.observe(max(0.0, ticket.admitted_at - ticket.begun))
            self.prompts.inc(len(ticket.request.tokens))
            self.cached.inc(ticket.cached)
        if ticket.first_at:
            self.first.observe(ticket.first_at - ticket.begun)
            if ticket.count > 1:
                self.each.observe((ticket.last_at - ticket.first_at) / (ticket.count - 1))
        self.answers.inc(ticket.count)
        self.success.labels(**self._labels, finished_reason=REASONS.get(ticket.reason, "error")).inc()


class Insight:
    """The routes. The engine accounts for each request from when this is made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.engine = server.worker.engine
        self.registry = CollectorRegistry()
        self.requests = Requests(self.registry, server.name)
        self.registry.register(self)
        server.worker.observe(self.requests.ended)
        self._snapshot: Snapshot | None = None
        self._reading = asyncio.Lock()
        self._explaining = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/insight", self.data, methods=["GET"]),
            Route("/cache/explain", self.explain, methods=["GET", "POST"]),
        ]

    # ------------------------------------------------------------ figures
    async def snapshot(self) -> Snapshot:
        """Return the figures of now, or of a moment ago."""
        async with self._reading:
            if self._snapshot is None or time.monotonic() - self._snapshot.at > FRESH_SECONDS:
                self._snapshot = await self.server.worker.call(self._read)
            return self._snapshot

    def _read(self) -> Snapshot:
        """Read the figures. In the engine's thread."""
        cache, history = self.engine.cache, self.engine.cache.history()
        figures, now = self.engine.figures(), time.monotonic()
        running, waiting = self.engine.load
        recent = [
            {"seconds_ago": now - each.when, "component": each.component, "tier": each.tier,
             "cause": each.figure,
             "count": each.count}
            for each in history.recent
        ]  # fmt: skip
        hottest = sorted(history.hot.items(), key=lambda item: (-item[1].hits, -item[1].last))[:12]
        hot = [
            {"prefix": f"{number & 0xFFFFFFFF:08x}", "tokens": each.tokens, "hits": each.hits,
             "seconds_ago": now - each.last}
            for number, each in hottest
        ]  # fmt: skip
        preempted = self.engine.counts.retracted
        return Snapshot(now, cache.stats(), figures, running, waiting, preempted, recent, hot)

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the last snapshot, for Prometheus's registry."""
        told = self._snapshot
        if told is None:
            return
        for figure in told.figures:
            yield family_of(figure)
        labels, values = ["model_name", "engine"], [self.server.name, "0"]
        gauges = {
            "vllm:num_requests_running": ("requests that run", told.running),
            "vllm:num_requests_waiting": ("requests that wait", told.waiting),
            **shares(self.engine.cache.composition.parts, told.stats),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "vllm:prefix_cache_queries": ("tokens that the cache was asked for", told.stats.asked_tokens),
            "vllm:prefix_cache_hits": ("of these, tokens that hit on the device", told.stats.hit_tokens),
            "vllm:num_preemptions": ("requests that were set back to wait again", told.preempted),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, value)
            yield counter

    # ------------------------------------------------------------ routes
    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus. It needs no key, since there is no prompt and no tenant in the answer."""
        await self.snapshot()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def data(self, request: Request) -> Response:
        """Answer what the page shows, as JSON."""
        told = await self.snapshot()
        return JSONResponse(
            {
                "model": self.server.name,
                "running": told.running,
                "waiting": told.waiting,
                "preempted": told.preempted,
                "stats": attrs.asdict(told.stats),
                "figures": {
                    figure.name: [{"labels": dict(labels), "value": value} for labels, value in figure.samples]
                    for figure in told.figures
                    if figure.kind != "histogram"
                },
                "recent": told.recent,
                "hot": told.hot,
            }
        )

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def explain(self, request: Request) -> Response:
        """Explain why a prompt would hit what it hits now. Whoever is no administrator learns nothing of others."""
        tenant = self.server.tenant(request)
        with self.server.memory.share(tenant.name) as share:
            data = by_query(request) if request.method == "GET" else b""
            read = await self.server.read(request, ExplainAsked, share, data)
            asked, (prompt,) = read.asked, read.prompts
            tokens = prompt.tokens
            if not tokens:
                raise ApiError(400, "give a prompt, or messages", param="prompt")
            whole = tenant.admin
            name = tenant.namespace_of(asked.cache_salt)
            if asked.namespace is not None:
                if not whole:
                    raise ApiError(403, "another namespace wants the key of an administrator", param="namespace")
                name = asked.namespace
            engine = self.engine

            def look() -> Explanation:
                try:
                    extra = engine.extra_keys(tokens, prompt.inputs)
                except InputError as error:
                    raise ApiError(400, str(error)) from error
                namespace = engine.namespace(name)
                return engine.cache.explain(tokens, namespace=namespace, leave=1, extra=extra, closely=whole)

            async with self._explaining:  # one at a time: the engine waits meanwhile
                told = await self.server.worker.call(look)
        return JSONResponse((told if whole else without_others(told)).as_dict())


def without_others(told: Explanation) -> Explanation:
    """Return the explanation without a word of other requests: their labels are left out."""
    findings = [
        each
        if each.loss is None
        else attrs.evolve(each, loss=attrs.evolve(each.loss, by="", cause=each.loss.cause.partition(":")[0]))
        for each in told.findings
    ]
    return attrs.evolve(told, findings=tuple(findings))


def by_query(request: Request) -> bytes:
    """Return the query of a GET as a body."""
    names = ("model", "prompt", "cache_salt", "namespace")
    return json.dumps({name: request.query_params[name] for name in names if name in request.query_params}).encode()


def family_of(figure: Figure) -> Metric:
    """Return a figure as Prometheus takes it."""
    names = [name for name, _ in figure.samples[0][0]] if figure.samples else []
    if figure.kind == "histogram":
        family: Any = HistogramMetricFamily(figure.name, figure.help, labels=names)
        for labels, value in figure.samples:
            assert not isinstance(value, float)
            total, buckets = 0, []
            for bound, count in zip((*map(str, figure.bounds), "+Inf"), value.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric([each for _, each in labels], buckets, value.sum)
        return family
    kind: Any = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family = kind(figure.name, figure.help, labels=names)
    for labels, value in figure.samples:
        family.add_metric([each for _, each in labels], value)
    return family


def shares(parts: Iterable[Any], stats: CacheStats) -> dict[str, tuple[str, float]]:
    """Return which part of the fullest pool of each kind cannot be had now, by the names that engines have for it."""
    used: dict[str, float] = {}
    for part in parts:
        each = stats.components[part.name]
        names = ["sglang:mamba_usage"] if not part.page_tokens else ["vllm:kv_cache_usage_perc"]
        if isinstance(part.reach, Path):
            names.append("sglang:full_token_usage")
        elif isinstance(part.reach, Window):
            names.append("sglang:swa_token_usage")
        for name in names if each.capacity else ():
            share = (each.capacity - each.free - each.evictable) / each.capacity
            used[name] = max(used.get(name, 0.0), share)
    return {
        name: ("part of the fullest pool of this kind that cannot be had now", share) for name, share in used.items()
    }
