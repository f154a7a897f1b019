"""What the demo prints: plain lines that fit a terminal and a pipe, or one JSON object."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs

from .comparison import Comparison, Round
from .exactness import Exactness
from .settings import Settings


def columns() -> int:
    """Return how wide lines may be: as wide as the terminal, but from 60 to 120."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def wrapped(title: str, text: str) -> str:
    """Fold ``text`` into lines that fit, indented after its title."""
    return textwrap.fill(title + text, columns(), subsequent_indent=" " * len(title), break_on_hyphens=False)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def speedup_in_words(speedup: float) -> str:
    return f"{speedup:.1f} times as fast" if speedup >= 1 else "slower"


def introduction(settings: Settings, comparison: Comparison) -> str:
    cache = comparison.cache
    pools = ", ".join(
        f"{part.name} {counted(part.capacity * part.page_tokens, 'token')}"
        if part.page_tokens
        else f"{part.name} {counted(part.capacity, 'state')}"
        for part in cache.composition.parts
    )
    talk = (
        f"{counted(settings.conversations, 'conversation')} of {counted(settings.turns, 'turn')} below one system "
        f"prompt, about {comparison.conversations.total:,} different tokens; each turn sends its history again, some "
        f"branch off others"
    )
    page = cache.composition.page
    return "\n".join(
        (
            wrapped("Model:  ", f"{comparison.about}; {settings.dtype}, one thread"),
            wrapped("Talk:   ", talk),
            wrapped("Cache:  ", f"{pools}; a hit ends on a multiple of {page} tokens{_host_capacity(comparison)}"),
        )
    )


def _host_capacity(comparison: Comparison) -> str:
    """Describe what the tier in the host's memory holds; "" if there is no tier."""
    tier = comparison.cache.stats().tier
    if tier is None:
        return ""
    parts = {part.name: part.page_tokens for part in comparison.cache.composition.parts}
    pools = ", ".join(
        f"{name} {counted(count * parts[name], 'token') if parts[name] else counted(count, 'state')}"
        for name, count in tier.capacity.items()
    )
    return f"; what has to go rests in the host's memory: {pools}"


def table_head(comparison: Comparison) -> str:
    names = "/".join(part.name for part in comparison.cache.composition.parts)
    return (
        f"\n{'':>4}{'prompt':>8}{'hit':>8}{'hit':>6}{'from':>7}  {'evicted':<16}{'first token':>17}\n"
        f"{'turn':>4}{'tokens':>8}{'tokens':>8}{'rate':>6}{'host':>7}  {names:<16}{'with cache':>10}{'without':>10}"
        f"{'faster':>7}"
    )


def table_row(comparison: Comparison, round_: Round) -> str:
    parts = [part.name for part in comparison.cache.composition.parts]
    evicted = "/".join(f"{round_.evicted.get(name, 0):,}" for name in parts)
    seconds, without = round_.total("seconds_with"), round_.total("seconds_without")
    return (
        f"{round_.number or 'all':>4}{round_.total('prompt_tokens'):>8,.0f}{round_.total('hit_tokens'):>8,.0f}"
        f"{round_.hit_rate:>6.0%}{round_.total('restored_tokens'):>7,.0f}  {evicted:<16}{seconds:>8.2f} s"
        f"{without:>8.2f} s{round_.speedup:>6.1f}x"
    )


def findings(comparison: Comparison, exactness: Exactness) -> list[tuple[str, str]]:
    """Return the (title, text) of everything that was compared or measured."""
    total = comparison.total
    saved, asked = total.total("hit_tokens"), total.total("prompt_tokens")
    same = f"all {exactness.tokens:,} are those without the cache"
    if exactness.other_tokens:
        same = f"{exactness.other_tokens:,} of {exactness.tokens:,} DIFFER from those without the cache"
    verb = "differ" if exactness.difference <= exactness.tolerance else "DIFFER"
    difference = (
        f"their log-probabilities {verb} by {exactness.difference:.1e} at most (allowed: {exactness.tolerance:g})"
    )
    back = f"{counted(exactness.pages, 'page')} and {counted(exactness.states, 'state')}, {exactness.wrong} wrong"
    if not exactness.restored:
        back = "nothing was restored"
    moved = ", ".join(f"{name} {_shift(by)}" for name, by in exactness.moved.items()) or "there was nothing to lose"
    held = "no page is held by anybody"
    if exactness.held:
        held = f"{counted(exactness.held, 'page')} {'is' if exactness.held == 1 else 'are'} still held"
    lines = [
        ("answers", f"{same}; {difference}"),
        ("restored", f"bit for bit what was left: {back}" if exactness.restored and not exactness.wrong else back),
        ("control", f"with a component's memory lost they move: {moved}"),
        ("at the end", held),
        (
            "first token",
            f"{total.total('seconds_with'):.2f} s with the cache, {total.total('seconds_without'):.2f} s without: "
            f"{speedup_in_words(total.speedup)}; {saved / asked:.0%} of {asked:,.0f} tokens were not computed again",
        ),
    ]
    tier = comparison.cache.stats().tier
    if tier is not None:
        brought, hit = total.total("restored_tokens"), total.total("hit_tokens")
        lines.insert(
            2,
            (
                "from the host",
                f"{brought:,.0f} tokens in {counted(tier.restores, 'load')} that the device had lost: "
                f"{brought / hit if hit else 0:.0%} of what hit",
            ),
        )
    if comparison.engine.counts.drafted:
        counts = comparison.engine.counts
        lines.append(
            ("guesses", f"{counts.accepted:,} of {counts.drafted:,} tokens that were guessed ahead were right")
        )
    return lines


def _shift(by: float) -> str:
    return f"by {by:.1e}" if math.isfinite(by) else "to another token"


def closing(comparison: Comparison, exactness: Exactness) -> str:
    """Return the last row of the table, all findings, and the verdict."""
    lines = [wrapped(f"{title + ':':<16}", text) for title, text in findings(comparison, exactness)]
    advice = "" if exactness.restored or not exactness.passed else ": try more --turns"
    last = wrapped(f"{'verdict:':<16}", f"{exactness.verdict}{advice}")
    return "\n".join((table_row(comparison, comparison.total), "", *lines, last))


def installed_version() -> str | None:
    try:
        return version("prefixloom")
    except PackageNotFoundError:
        return None


def as_json(settings: Settings, comparison: Comparison, exactness: Exactness) -> str:
    total = comparison.total
    parts = comparison.cache.composition.parts
    options = {name: str(value) if isinstance(value, Path) else value for name, value in attrs.asdict(settings).items()}
    options["capacity"] = {part.name: part.capacity * (part.page_tokens or 1) for part in parts}
    judged = attrs.asdict(exactness) | {"passed": exactness.passed, "word": exactness.verdict}
    judged["difference"] = _finite_or_none(exactness.difference)
    judged["moved"] = {name: _finite_or_none(by) for name, by in exactness.moved.items()}
    output = {
        "prefixloom": installed_version(),
        "settings": options,
        "rounds": [attrs.asdict(round_) | {"hit_rate": round_.hit_rate} for round_ in comparison.rounds],
        "speedup": total.speedup,
        "hit_rate": total.hit_rate,
        "verdict": judged,
    }
    return json.dumps(output, indent=2)


def _finite_or_none(value: float) -> float | None:
    """Return a value as JSON can have it: infinity and NaN become None."""
    return value if math.isfinite(value) else None
