"""The rules of a planned step: whatever an engine plans while it is watched is held to them."""

from __future__ import annotations

from typing import Any

from prefixloom_engine import Engine
from prefixloom_engine.serving.scheduler import BURST


def watched(engine: Engine) -> Engine:
    """The same engine, whose every plan is checked."""
    scheduler: Any = engine._scheduler
    honest = scheduler.plan

    def plan() -> list[Any]:
        retracted = scheduler.counts.retracted
        rows: list[Any] = honest()
        check(scheduler, rows)
        if scheduler.counts.retracted == retracted:
            check_full(scheduler, rows)
        return rows

    scheduler.plan = plan
    return engine


def check(scheduler: Any, rows: list[Any]) -> None:
    """A step has at most a chunk of tokens, or several of whole prompts if nobody decodes.

    Guesses end with the answer, and pass no boundary that is published.
    """
    page = scheduler.page
    for job in (*scheduler.waiting, *scheduler.running):
        assert not job.answer.done, f"an answer that ended with {job.answer.reason} is still worked at"
    decoding = [row for row in rows if not row.prefill]
    computed = [row.span.count for row in rows if row.prefill and row.incoming is None]
    assert all(count <= scheduler.chunk for count in computed), (
        f"{computed} in a step, whose chunk is {scheduler.chunk}"
    )
    most = scheduler.chunk - len(decoding) if decoding else BURST * scheduler.chunk
    assert sum(computed) <= max(0, most), f"{computed} beside {len(decoding)} decodes"
    for row in decoding:
        left = row.job.request.max_tokens - row.job.answer_launched
        assert 0 <= row.guess_count <= left, f"{row.guess_count} guesses behind a token, and {left} tokens are left"
        if scheduler.publishes_while_decoding:
            first, last = row.span.start // page, (row.span.end - 1) // page
            assert first == last, f"a decode of {row.span} passes a boundary of {page}, and ends on none"


def check_full(scheduler: Any, rows: list[Any]) -> None:
    """A chunk that does not end its prompt ends on a boundary: at a stop, or where the budget has no page more."""
    page = scheduler.page
    computed = [row for row in rows if row.prefill and row.incoming is None]
    left = scheduler.chunk - len(rows) + len(computed) - sum(row.span.end - row.span.start for row in computed)
    for row in computed:
        job, end = row.job, row.span.end
        if end < job.prefill_end and job.media is None:
            last = (job.prefill_end - 1) // page * page
            parts = scheduler.cache.composition.parts
            due = any(part.manifest.checkpoint_every and end % part.manifest.checkpoint_every == 0 for part in parts)
            stops = (
                end in job.prefill_stops or end == row.sequence.branch or (scheduler.stateful and (end == last or due))
            )
            assert end % page == 0, f"a chunk ends at {end}, on no boundary of {page}"
            assert stops or left < page, f"a chunk ends at {end}, and {left} tokens more were in the budget"
