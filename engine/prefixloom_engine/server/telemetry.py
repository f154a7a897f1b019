"""Telemetry: a span of OpenTelemetry for each request, told when it has ended. No text and no token is in it.

A request that comes with ``traceparent`` goes on with its trace. Spans are made in the event loop from times that are
known anyway, and sent by the SDK's own thread, which drops what does not fit its queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from prefixloom import CompositionError

from .endpoints import FORMS
from .worker import EngineWorker, PendingAnswer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("prefixloom.server")
OPERATIONS = {form.path: form.operation for form in FORMS}
"""By path: the operation. Of other paths there are no spans."""
CARRIED = (b"traceparent", b"tracestate")

asking: ContextVar[tuple[str, Any] | None] = ContextVar("asking", default=None)
"""Of the HTTP request that this task answers: its operation, and the context of OpenTelemetry that it came with."""


class Telemetry:
    """Makes the spans of one server. ``name``: of its model."""

    def __init__(self, worker: EngineWorker, name: str, processors: Iterable[SpanProcessor]) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise CompositionError(
                f"telemetry needs the package {error.name!r}: install the extra, pip install 'prefixloom[otel]'"
            ) from error
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "prefixloom"}
        self._provider = TracerProvider(resource=Resource.create(named))  # with OTEL_RESOURCE_ATTRIBUTES
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("prefixloom")
        self._propagator = TraceContextTextMapPropagator()
        self._name = name
        self._failed = False
        worker.observe(self.ended, account=False)

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an app that remembers with which trace each request came, and at its end sends what waits."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            async def closing(message: Message) -> None:
                if message["type"].startswith("lifespan.shutdown"):  # every request has ended
                    await asyncio.to_thread(self.close)
                await send(message)

            operation = OPERATIONS.get(scope.get("path", "")) if scope["type"] == "http" else None
            if operation is not None:
                carried = {
                    name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"] if name in CARRIED
                }
                asking.set((operation, self._propagator.extract(carried)))
            await app(scope, receive, closing if scope["type"] == "lifespan" else send)

        return traced

    def ended(self, ticket: PendingAnswer) -> None:
        """Tell the span of a request that has ended. What a processor raises is logged once, and harms nobody."""
        told = ticket.context.get(asking)
        if told is None:
            return
        try:
            self._tell(ticket, *told)
        except Exception:
            if not self._failed:
                log.exception("no span could be told of a request; further failures are not logged")
            self._failed = True

    def _tell(self, ticket: PendingAnswer, operation: str, context: Any) -> None:
        """Tell the span of a request, and in it what the request did."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        shift = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + shift

        end = time.monotonic()
        request = ticket.request
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "prefixloom",
            "gen_ai.request.model": self._name,
            "gen_ai.response.model": self._name,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": float(request.temperature),
            "gen_ai.request.top_p": float(request.top_p),
            "gen_ai.usage.input_tokens": len(request.tokens),
            "gen_ai.usage.output_tokens": ticket.count,
            "gen_ai.usage.cache_read.input_tokens": ticket.cached,
            "gen_ai.response.finish_reasons": (ticket.reason,),
        }
        span = self._tracer.start_span(
            f"{operation} {self._name}", context, SpanKind.SERVER, attributes, start_time=at(ticket.begun)
        )
        parent = set_span_in_context(span, context)
        moments = [ticket.begun, ticket.admitted_at, ticket.first_at, end]
        for name, begun, over in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if not begun:
                break
            self._tracer.start_span(name, parent, start_time=at(begun)).end(at(over or end))
        if ticket.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(at(end))


def batches_to(endpoint: str) -> SpanProcessor:
    """Return a processor that sends spans to a collector, in batches and on a thread of its own.

    ``endpoint``: such as http://127.0.0.1:4318, or empty for what the variables OTEL_EXPORTER_OTLP_... say.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise CompositionError(
            f"telemetry needs the package {error.name!r}: install the extra, pip install 'prefixloom[otel]'"
        ) from error
    url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
