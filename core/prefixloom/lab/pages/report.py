"""Report: one HTML page of what replays measured, with its charts inside, readable without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ...compose.sizing import size_text
from ..outcome import ReplayOutcome, reasons, table_of
from ..plan import CapacityPlan, cost_table
from ..trace_bounds import Bound, share_closed
from .charts import STYLE, LineSeries, line_chart, stacked_areas, stacked_bars

BARS = 24
"""The most outcomes whose tokens are shown as bars."""


def html_report(outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound] = ()) -> str:
    """Return the page. ``outcomes`` are of one trace and one model: of policies, of memories, or of both."""
    first = outcomes[0]
    policies = list(dict.fromkeys(each.policy for each in outcomes))
    sizes = sorted({each.bytes for each in outcomes})
    parts = [
        f"<h1>{escape(first.trace)}</h1>",
        f'<p class="soft">{first.requests:,} requests, {first.prompt:,} tokens of prompts; {escape(first.model)}, '
        f"pages of {first.page} tokens. A cache of infinite memory would compute {first.ideal:,} tokens, and "
        f"{first.ideal_rate:.1%} would hit.</p>",
    ]
    if not all(each.complete for each in outcomes):
        parts.append("<p><b>A replay was interrupted: this is what was measured until then.</b></p>")
    if len({each.refused for each in outcomes}) > 1:
        parts.append("<p>Some pools are too small for the longest requests: those rows are of fewer requests.</p>")
    if len(sizes) > 1:
        parts += ["<h2>Tokens that hit, by memory</h2>", _curves(outcomes, policies, bounds)]
    parts += ["<h2>All figures</h2>", _table(outcomes, bounds)]
    shown = _at_one_size(outcomes, sizes)
    parts += [
        f"<h2>What became of the tokens of the prompts, at {size_text(shown[0].bytes)}</h2>",
        stacked_bars(
            "Shares of the prompt tokens",
            [(each.policy, dict(_shares(each))) for each in shown[:BARS]],
            lambda share: f"{share:.1%}",
            neutral={"new"},
        ),
    ]
    for each in shown[: 1 if len(policies) > 1 else None]:
        parts += [f"<h2>Memory over time, {escape(each.policy)}, {size_text(each.bytes)}</h2>", _memory(each)]
    notes = list(dict.fromkeys(note for each in outcomes for note in each.notes))
    parts += [f'<p class="soft">{escape(note)}</p>' for note in notes]
    return html_page(f"{first.trace}: replay", parts)


def plan_report(plan: CapacityPlan) -> str:
    """Return the page of a plan: the curve, what requests cost, and what pages and checkpoints cost in hits."""
    fit, knee = plan.fit, plan.knee
    parts = [
        f"<h1>{escape(plan.model)}, {size_text(plan.memory)}</h1>",
        '<p class="soft">' + "<br>".join(map(escape, plan.sizing)) + "</p>",
        f"<p>Of requests of {plan.traffic.length:,} tokens, <b>{fit.running:,}</b> run at once "
        f"({escape(fit.running_limit)} is full first), and <b>{fit.cached:,}</b> stay cached while none runs "
        f"({escape(fit.cached_limit)} is full first).</p>",
    ]
    if plan.short_first:
        parts.append(
            f"<p>In the replay, {escape(plan.short_first)} is short first: alone it would serve the least.</p>"
        )
    if len(plan.curve) > 1:
        points = sorted((each.bytes, each.hit_rate) for each in plan.curve)
        series = [LineSeries("hit", points), _infinite(plan.curve)]
        if knee is not None:
            series.append(LineSeries("knee", [(knee.bytes, 0.0), (knee.bytes, knee.hit_rate)], True))
        parts += ["<h2>Tokens that hit, by memory</h2>", _rates(series), _table(plan.curve, ())]
    parts += ["<h2>What one request takes, in pages and states</h2>", _below_heads(cost_table(plan))]
    for title, outcomes in (("Page sizes", plan.pages), ("Checkpoints", plan.grids)):
        if outcomes:
            parts += [f"<h2>{title}, at the budget</h2>", _table(outcomes, ())]
    parts += [f'<p class="soft">{escape(note)}</p>' for note in plan.notes]
    return html_page(f"{plan.model}: plan", parts)


def html_page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _at_one_size(outcomes: Sequence[ReplayOutcome], sizes: Sequence[int]) -> list[ReplayOutcome]:
    """Return the outcomes of one memory: of the middle one of several."""
    middle = sizes[len(sizes) // 2]
    return [each for each in outcomes if each.bytes == middle]


def _curves(outcomes: Sequence[ReplayOutcome], policies: Sequence[str], bounds: Sequence[Bound]) -> str:
    series = []
    for policy in policies:
        points = sorted((each.bytes, each.hit_rate) for each in outcomes if each.policy == policy)
        series.append(LineSeries(policy, points))
    if bounds:
        series.append(LineSeries("no policy hits more", sorted((each.bytes, each.hit_rate) for each in bounds), True))
    return _rates([*series, _infinite(outcomes)])


def _infinite(outcomes: Sequence[ReplayOutcome]) -> LineSeries:
    """Return what a cache of infinite memory would hit, of the requests that each memory can hold."""
    return LineSeries("infinite memory", sorted({each.bytes: each.ideal_rate for each in outcomes}.items()), True)


def _rates(series: Sequence[LineSeries]) -> str:
    return line_chart(
        "Share of prompt tokens that hit, by memory", series, lambda size: size_text(round(size)),
        lambda share: f"{share:.0%}" if share * 100 % 1 < 1e-9 else f"{share:.2%}", x_title="memory of all pools",
    )  # fmt: skip


def _shares(outcome: ReplayOutcome) -> Iterable[tuple[str, float]]:
    """Return (name, share of the prompt tokens) of what hit, and of what did not by the reason."""
    if outcome.prompt:
        yield "hit", outcome.hit / outcome.prompt
        if outcome.restored:
            yield "from below the device", outcome.restored / outcome.prompt
        yield from reasons(outcome)


def _table(outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound]) -> str:
    names = ["memory", "policy", "x ideal", "hit", "gap closed", "states used", "p50", "p99", "refused"]
    if not bounds:
        names.remove("gap closed")
    ordered = sorted(outcomes, key=lambda each: (each.bytes, each.policy))
    return _below_heads(table_of(ordered, names, gap_closed=lambda each: share_closed(each, outcomes, bounds)))


def _below_heads(rows: Sequence[Sequence[str]]) -> str:
    return html_table(rows[0], rows[1:])


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _memory(outcome: ReplayOutcome) -> str:
    samples = outcome.memory
    layers: dict[str, list[float]] = {}
    for name in outcome.components:
        layers[f"{name}, cached"] = [float(each.cached.get(name, 0)) for each in samples]
        layers[f"{name}, running"] = [float(each.running.get(name, 0)) for each in samples]
    most = max((sum(values) for values in zip(*layers.values(), strict=True)), default=0.0)
    unit = max((1024.0**power for power in range(5) if 1024.0**power <= most), default=1.0)
    return stacked_areas(
        "Bytes in use over time", [each.at for each in samples], layers, lambda at: f"{at:,.0f} s",
        lambda size: size_text(round(size)), unit,
    )  # fmt: skip
