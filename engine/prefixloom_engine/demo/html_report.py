"""The demo's report: one HTML page with its pictures as SVG inside, readable without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .comparison import Comparison, Round
from .exactness import Exactness
from .settings import Settings
from .text import findings, installed_version, introduction

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #ffffff; --soft: #6a7386; --line: #d9dee8; --good: #1f7a4d;
  --bad: #b3261e; --hit: #2b6cb0; --cold: #d98324; --miss: #c9d2e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --paper: #14171f; --soft: #99a3b8; --line: #303746;
  --good: #5fd39a; --bad: #ff8a80; --hit: #6ba7e8; --cold: #e9a558; --miss: #3c465a; } }
body { margin: 0 auto; max-width: 880px; padding: 32px 20px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 8px; }
p, li { color: var(--ink); } .soft { color: var(--soft); white-space: pre-line; }
.verdict { border-left: 5px solid var(--good); padding: 10px 16px; margin: 20px 0; font-weight: 600; }
.verdict.bad { border-color: var(--bad); color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; } .tile { border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 16px; min-width: 130px; } .tile b { display: block; font-size: 24px; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: right; padding: 4px 8px;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; } td:first-child, th:first-child
  { text-align: left; } .words td { text-align: left; vertical-align: top; }
.words td:first-child { color: var(--soft); white-space: nowrap; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.s { fill: var(--soft); } .hit { fill: var(--hit); } .cold { fill: var(--cold); } .miss { fill: var(--miss); }
"""


def html_page(settings: Settings, comparison: Comparison, exactness: Exactness) -> str:
    total = comparison.total
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>'
        for name, value in (
            ("to the first token", f"{total.speedup:.1f}x as fast"),
            ("of the tokens hit", f"{total.hit_rate:.0%}"),
            ("not computed again", f"{total.total('hit_tokens'):,.0f}"),
            ("tokens compared", f"{exactness.tokens:,}"),
        )
    )
    words = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in findings(comparison, exactness))
    kind = "verdict" if exactness.passed else "verdict bad"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>prefixloom demo</title><style>{STYLE}</style></head><body>
<h1>prefixloom demo</h1>
<p class="soft">{escape(introduction(settings, comparison))}</p>
<div class="{kind}">{escape(exactness.verdict)}</div>
<div class="tiles">{tiles}</div>
<h2>Seconds to the first token, by turn</h2>
{_time_bars(comparison.rounds)}
<h2>What each prompt found in the cache</h2>
<p class="soft">One row for each turn of a conversation, in the order in which they came, as long as its prompt. Blue is
what hit, grey what was computed.</p>
{_prompt_bars(comparison.rounds)}
<h2>Turn by turn</h2>
{_table(comparison)}
<h2>What was compared</h2>
<table class="words">{words}</table>
<p class="soft">prefixloom {escape(installed_version() or "from source")}; seed {settings.seed}</p>
</body></html>
"""


def _time_bars(rounds: Sequence[Round]) -> str:
    """Draw two bars for each turn: the time with the cache and the time without."""
    width, left, height = 840, 60, 30
    longest = max(round_.total("seconds_without") for round_ in rounds)
    longest = max(longest, *(round_.total("seconds_with") for round_ in rounds))
    scale = (width - left - 120) / longest
    out = []
    for number, round_ in enumerate(rounds):
        y = number * (2 * height + 16)
        out.append(f'<text x="0" y="{y + height + 4}">turn {round_.number}</text>')
        for i, (kind, field) in enumerate((("hit", "seconds_with"), ("cold", "seconds_without"))):
            seconds = round_.total(field)
            length = seconds * scale
            label = f"{seconds:.2f} s " + ("with the cache" if kind == "hit" else "without")
            out.append(
                f'<rect class="{kind}" x="{left}" y="{y + i * height}" width="{length:.1f}" height="{height - 4}"/>'
                f'<text class="s" x="{left + length + 6:.1f}" y="{y + i * height + 18}">{label}</text>'
            )
    total = len(rounds) * (2 * height + 16)
    return _svg(width, total, "Seconds to the first token, with the cache and without", "".join(out))


def _prompt_bars(rounds: Sequence[Round]) -> str:
    """Draw a bar for each prompt: what hit, and what was computed."""
    turns = [(round_.number, turn) for round_ in rounds for turn in round_.turns]
    width, left, step = 840, 150, 14
    scale = (width - left - 110) / max(turn.prompt_tokens for _, turn in turns)
    out = []
    for at, (number, turn) in enumerate(turns):
        y = at * step
        hit, whole = turn.hit_tokens * scale, turn.prompt_tokens * scale
        label = f"{turn.hit_tokens:,} of {turn.prompt_tokens:,}"
        out.append(
            f'<text class="s" x="0" y="{y + 10}">turn {number}, talk {turn.conversation + 1}</text>'
            f'<rect class="miss" x="{left}" y="{y}" width="{whole:.1f}" height="{step - 3}"/>'
            f'<rect class="hit" x="{left}" y="{y}" width="{hit:.1f}" height="{step - 3}"/>'
            f'<text class="s" x="{left + whole + 5:.1f}" y="{y + 10}">{label}</text>'
        )
    return _svg(
        width, len(turns) * step, "Of each prompt, the tokens that hit and those that were computed", "".join(out)
    )


def _table(comparison: Comparison) -> str:
    parts = [part.name for part in comparison.cache.composition.parts]
    head = "".join(f"<th>{escape(f'evicted, {name}')}</th>" for name in parts)
    rows = []
    for round_ in (*comparison.rounds, comparison.total):
        evicted = "".join(f"<td>{round_.evicted.get(name, 0):,}</td>" for name in parts)
        rows.append(
            f"<tr><td>{round_.number or 'all'}</td><td>{round_.total('prompt_tokens'):,.0f}</td>"
            f"<td>{round_.total('hit_tokens'):,.0f}</td><td>{round_.hit_rate:.0%}</td>"
            f"<td>{round_.total('restored_tokens'):,.0f}</td>{evicted}"
            f"<td>{round_.total('seconds_with'):.2f} s</td><td>{round_.total('seconds_without'):.2f} s</td>"
            f"<td>{round_.speedup:.1f}x</td></tr>"
        )
    return (
        f"<table><tr><th>turn</th><th>prompt</th><th>hit</th><th>rate</th>"
        f"<th>from host</th>{head}<th>with cache</th><th>without</th>"
        f"<th>faster</th></tr>{''.join(rows)}</table>"
    )


def _svg(width: int, height: int, title: str, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{inside}</svg>'
    )
