"""Fleet report: one HTML page of what simulations measured, with its charts inside, readable without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from prefixloom.compose.sizing import size_text
from prefixloom.lab.pages.charts import LineSeries, line_chart, stacked_bars
from prefixloom.lab.pages.report import html_page, html_table

from .fleet_outcome import HEADS, FleetOutcome, row_of

Figure = Callable[[FleetOutcome], float]
WORDS = {"new": "new", "gone": "evicted with their keys", "rounded": "behind the last place where a hit may end"}


def fleet_report(outcomes: Sequence[FleetOutcome]) -> str:
    """Return the page. ``outcomes`` are of one model: of policies, of numbers of replicas, or of both."""
    first = outcomes[0]
    parts = [
        f"<h1>{escape(first.trace)}</h1>",
        f'<p class="soft">{escape(first.model)}; {size_text(first.bytes)} of pools and {first.prefill:,.0f} tokens of '
        f"prompts a second for each replica. The ideal is what one cache of infinite memory computes.</p>",
    ]
    if len({each.places for each in outcomes}) > 1:
        parts += [
            "<h2>Tokens computed, as a multiple of the ideal, by replicas</h2>",
            _curves("Tokens computed", outcomes, lambda each: each.multiple, lambda value: f"{value:.2f}"),
            "<h2>Seconds to the first token of nine requests in ten, by replicas</h2>",
            _curves("Seconds", outcomes, lambda each: each.first_token(0.9), lambda value: f"{value:.3g} s"),
        ]
    parts += ["<h2>All figures</h2>", html_table(HEADS, [row_of(each) for each in outcomes])]
    most = max(each.places for each in outcomes)
    parts += [
        f"<h2>What became of the tokens of the prompts, with {most:,} replicas</h2>",
        stacked_bars(
            "Shares of the prompt tokens",
            [(each.routing, _shares(each)) for each in outcomes if each.places == most],
            lambda share: f"{share:.1%}",
            neutral={"new"},
        ),
    ]
    if not all(each.complete for each in outcomes):
        parts.append("<p><b>A simulation was interrupted: this is what was measured until then.</b></p>")
    return html_page(f"{first.trace}: fleet", parts)


def _curves(title: str, outcomes: Sequence[FleetOutcome], figure: Figure, text: Callable[[float], str]) -> str:
    series = []
    for routing in dict.fromkeys(each.routing for each in outcomes):
        points = sorted((float(each.places), figure(each)) for each in outcomes if each.routing == routing)
        series.append(LineSeries(routing, points))
    return line_chart(title, series, lambda count: f"{count:,.0f}", text, x_title="replicas")


def _shares(outcome: FleetOutcome) -> dict[str, float]:
    """Return by name the share of the prompt tokens of what hit, and of what did not by the reason."""
    if not outcome.prompt:
        return {}
    found = {"hit": outcome.hit / outcome.prompt}
    if outcome.restored:
        found["from below"] = outcome.restored / outcome.prompt
    for reason, tokens in sorted(outcome.missed.items(), key=lambda each: -each[1]):
        found[WORDS.get(reason, f"no usable {reason}")] = tokens / outcome.prompt
    return found
