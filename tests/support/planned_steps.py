"""The rules of a planned step: whatever an engine plans while it is watched is held to them."""

from __future__ import annotations

from typing import Any

from prefixloom_engine import Engine


def watched(engine: Engine) -> Engine:
    """The same engine, whose every plan is checked."""
    scheduler: Any = engine._scheduler
    honest = scheduler.plan

    def plan() -> list[Any]:
        rows: list[Any] = honest()
        check(scheduler, rows)
        return rows

    scheduler.plan = plan
    return engine


def check(scheduler: Any, rows: list[Any]) -> None:
    """A step has at most a chunk of tokens; guesses end with the answer, and pass no boundary that is published."""
    page = scheduler.page
    for job in (*scheduler.waiting, *scheduler.running):
        assert not job.answer.done, f"an answer that ended with {job.answer.reason} is still worked at"
    decoding = [row for row in rows if not row.prefill]
    computed = [row.span.end - row.span.start for row in rows if row.prefill and row.incoming is None]
    assert sum(computed) <= max(0, scheduler.chunk - len(decoding)), f"{computed} beside {len(decoding)} decodes"
    for row in decoding:
        left = row.job.request.max_tokens - row.job.answer_launched
        assert 0 <= row.guess_count <= left, f"{row.guess_count} guesses behind a token, and {left} tokens are left"
        if scheduler.publishes_while_decoding:
            first, last = row.span.start // page, (row.span.end - 1) // page
            assert first == last, f"a decode of {row.span} passes a boundary of {page}, and ends on none"
