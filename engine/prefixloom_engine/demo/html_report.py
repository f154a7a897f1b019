"""The demo's report: one HTML page with the lab's charts inside, readable without a network."""

from __future__ import annotations

from html import escape

from prefixloom.lab.pages.charts import stacked_bars
from prefixloom.lab.pages.report import html_page, html_table

from .comparison import Comparison
from .exactness import Exactness
from .settings import Settings
from .text import findings, installed_version, introduction


def demo_page(settings: Settings, comparison: Comparison, exactness: Exactness) -> str:
    """Return the page of a run: its verdict, the times, what each prompt found in the cache, and what was compared."""
    rounds, total = comparison.rounds, comparison.total
    names = [part.name for part in comparison.cache.composition.parts]
    times = [
        (f"turn {each.number}, {kind}", {kind: each.total(field)})
        for each in rounds
        for kind, field in (("with the cache", "seconds_with"), ("without", "seconds_without"))
    ]
    prompts = [
        (f"turn {each.number}, talk {turn.conversation + 1}",
         {"hit": float(turn.hit_tokens), "computed": float(turn.prompt_tokens - turn.hit_tokens)})
        for each in rounds
        for turn in each.turns
    ]  # fmt: skip
    heads = ["turn", "prompt", "hit", "rate", "from host", *(f"evicted, {name}" for name in names),
             "with cache", "without", "faster"]  # fmt: skip
    figures = [
        [
            str(each.number or "all"), f"{each.total('prompt_tokens'):,.0f}", f"{each.total('hit_tokens'):,.0f}",
            f"{each.hit_rate:.0%}", f"{each.total('restored_tokens'):,.0f}",
            *(f"{each.evicted.get(name, 0):,}" for name in names),
            f"{each.total('seconds_with'):.2f} s", f"{each.total('seconds_without'):.2f} s", f"{each.speedup:.1f}x",
        ]
        for each in (*rounds, total)
    ]  # fmt: skip
    parts = [
        "<h1>prefixloom demo</h1>",
        '<p class="soft">' + "<br>".join(map(escape, introduction(settings, comparison).splitlines())) + "</p>",
        f"<p><b>{escape(exactness.verdict)}</b></p>",
        "<h2>Seconds to the first token, by turn</h2>",
        stacked_bars("Seconds to the first token", times, lambda seconds: f"{seconds:.2f} s"),
        "<h2>What each prompt found in the cache, in tokens</h2>",
        stacked_bars("Tokens of each prompt", prompts, lambda tokens: f"{tokens:,.0f}", neutral={"computed"}),
        "<h2>Turn by turn</h2>",
        html_table(heads, figures),
        "<h2>What was compared</h2>",
        *(f"<p>{escape(title)}: {escape(text)}</p>" for title, text in findings(comparison, exactness)),
        f'<p class="soft">prefixloom {escape(installed_version() or "from source")}; seed {settings.seed}</p>',
    ]
    return html_page("prefixloom demo", parts)
