"""Spans of OpenTelemetry: one for each request, in the trace that it came with, and nothing of what was said."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from prefixloom_engine.server.telemetry import Telemetry
from tests.support.servers import serving

CHAT = {
    "messages": [{"role": "user", "content": "a secret that nobody may read " * 4}],
    "max_tokens": 5,
    "temperature": 0,
}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Kept:
    """The spans of a server, with the processors that it is given."""

    def __init__(self, *more: SpanProcessor) -> None:
        self.exporter = InMemorySpanExporter()
        self.processors = [*more, SimpleSpanProcessor(self.exporter)]

    def around(self, server: Any, app: Any) -> Any:
        return Telemetry(server.worker, server.name, self.processors).around(app)

    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is SpanKind.SERVER]

    def inside(self, span: ReadableSpan) -> list[ReadableSpan]:
        mine = [
            each
            for each in self.exporter.get_finished_spans()
            if each.parent and each.parent.span_id == span.context.span_id
        ]
        return sorted(mine, key=lambda each: each.start_time or 0)


def test_a_request_is_a_span_with_its_tokens_and_what_it_waited_for() -> None:
    kept = Kept()
    with serving(around=kept.around) as running, running.client() as client:
        usage = [client.post("/v1/chat/completions", json=CHAT).json()["usage"] for _ in range(2)]
    first, second = kept.roots()
    assert first.name == "chat built-in"
    for span, told in zip((first, second), usage, strict=True):
        values = dict(span.attributes or {})
        assert values["gen_ai.usage.input_tokens"] == told["prompt_tokens"]
        assert values["gen_ai.usage.output_tokens"] == told["completion_tokens"]
        assert values["gen_ai.usage.cache_read.input_tokens"] == told["prompt_tokens_details"]["cached_tokens"]
        assert values["gen_ai.response.finish_reasons"] == ("length",)
        parts = kept.inside(span)
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        times = [span.start_time, *(part.end_time for part in parts)]
        assert [part.start_time for part in parts] == times[:-1] and times[-1] == span.end_time
        assert times == sorted(times)  # type: ignore[type-var]
        assert "secret" not in span.to_json()
    assert dict(second.attributes or {})["gen_ai.usage.cache_read.input_tokens"] != 0


def test_a_request_goes_on_with_the_trace_that_it_came_with() -> None:
    kept = Kept()
    with serving(around=kept.around) as running, running.client() as client:
        body = {"prompt": "abc", "max_tokens": 2}
        client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        client.post("/v1/completions", json=body, headers={"traceparent": "00-nonsense"})
        client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # not sampled
        client.get("/health")
    known, unknown = kept.roots()
    assert known.name == "text_completion built-in"
    assert f"{known.context.trace_id:032x}" == TRACE and f"{known.parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
    assert unknown.parent is None and unknown.context.trace_id != known.context.trace_id
    assert {each.context.trace_id for each in kept.inside(known)} == {known.context.trace_id}


def test_a_client_that_leaves_and_choices_are_told() -> None:
    kept = Kept()
    with serving(around=kept.around) as running, running.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "n": 2, "temperature": 1})
        body = {"prompt": "abcd", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    one, other, left = kept.roots()
    assert one.context.span_id != other.context.span_id
    assert dict(left.attributes or {})["gen_ai.response.finish_reasons"] == ("aborted",)


def test_a_processor_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("no collector")

    kept = Kept(Broken())
    with serving(around=kept.around) as running, running.client() as client:
        told = [client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}) for _ in range(3)]
    assert [each.status_code for each in told] == [200] * 3
    assert "no span" in caplog.text
