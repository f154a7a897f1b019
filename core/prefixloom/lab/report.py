"""Report: one HTML page of what replays measured, with its charts inside, readable without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .charts import STYLE, LineSeries, line_chart, stacked_areas, stacked_bars
from .outcome import ReplayOutcome, reasons, size_text

BARS = 24
"""The most outcomes whose tokens are shown as bars."""


def html_report(outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound] = ()) -> str:
    """The page. ``outcomes`` are of one trace and one model: of policies, of memories, or of both."""
    first = outcomes[0]
    policies = list(dict.fromkeys(each.policy for each in outcomes))
    sizes = sorted({each.bytes for each in outcomes})
    parts = [
        f"<h1>{escape(first.trace)}</h1>",
        f'<p class="soft">{first.requests:,} requests, {first.prompt:,} tokens of prompts; {escape(first.model)}, pages '
        f"of {first.page} tokens. A cache of infinite memory would compute {first.ideal:,} tokens, and "
        f"{first.ideal_rate:.1%} would hit.</p>",
    ]
    if not all(each.complete for each in outcomes):
        parts.append("<p><b>A replay was interrupted: this is what was measured until then.</b></p>")
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
        ),
    ]
    for each in shown[: 1 if len(policies) > 1 else None]:
        parts += [f"<h2>Memory over time, {escape(each.policy)}, {size_text(each.bytes)}</h2>", _memory(each)]
    notes = list(dict.fromkeys(note for each in outcomes for note in each.notes))
    parts += [f'<p class="soft">{escape(note)}</p>' for note in notes]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{escape(first.trace)}: replay</title><style>{STYLE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _at_one_size(outcomes: Sequence[ReplayOutcome], sizes: Sequence[int]) -> list[ReplayOutcome]:
    """The outcomes of one memory: of the middle one of several."""
    middle = sizes[len(sizes) // 2]
    return [each for each in outcomes if each.bytes == middle]


def _curves(outcomes: Sequence[ReplayOutcome], policies: Sequence[str], bounds: Sequence[Bound]) -> str:
    series = []
    for policy in policies:
        points = sorted((each.bytes, each.hit_rate) for each in outcomes if each.policy == policy)
        series.append(LineSeries(policy, points))
    for name in dict.fromkeys(each.name for each in bounds):
        series.append(LineSeries(name, sorted((each.bytes, each.hit_rate) for each in bounds if each.name == name), True))
    ends = sorted({each.bytes for each in outcomes})
    ideal = outcomes[0].ideal_rate
    series.append(LineSeries("infinite memory", [(ends[0], ideal), (ends[-1], ideal)], True))
    return line_chart(
        "Share of prompt tokens that hit, by memory", series, lambda size: size_text(round(size)),
        lambda share: f"{share:.0%}" if share * 100 % 1 < 1e-9 else f"{share:.2%}", x_title="memory of all pools",
    )  # fmt: skip


def _shares(outcome: ReplayOutcome) -> Iterable[tuple[str, float]]:
    """(name, share of the prompt tokens) of what hit, and of what did not by the reason."""
    if outcome.prompt:
        yield "hit", outcome.hit / outcome.prompt
        if outcome.restored:
            yield "from below the device", outcome.restored / outcome.prompt
        for words, share in reasons(outcome):
            yield words, share


def _table(outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound]) -> str:
    heads = ["memory", "policy", "computed, x ideal", "hit", "gap closed", "evicted", "states", "median left", "p99 left"]
    if not bounds:
        heads.remove("gap closed")
    rows = []
    for each in sorted(outcomes, key=lambda each: (each.bytes, each.policy)):
        cells = [
            size_text(each.bytes), each.policy, f"{each.multiple:.3f}", f"{each.hit_rate:.2%}",
            *([closed(each, outcomes, bounds)] if bounds else []),
            " ".join(f"{name} {use.evicted:,}" for name, use in each.components.items()),
            f"{each.states_made:,}", f"{each.to_compute(0.5):,}", f"{each.to_compute(0.99):,}",
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _memory(outcome: ReplayOutcome) -> str:
    samples = outcome.memory
    layers: dict[str, list[float]] = {}
    for name in outcome.components:
        layers[f"{name}, cached"] = [float(each.cached.get(name, 0)) for each in samples]
        layers[f"{name}, running"] = [float(each.running.get(name, 0)) for each in samples]
    return stacked_areas(
        "Bytes in use over time", [each.at for each in samples], layers, lambda at: f"{at:,.0f} s",
        lambda size: size_text(round(size)),
    )  # fmt: skip
