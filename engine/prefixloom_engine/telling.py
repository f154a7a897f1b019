"""What the demo prints: plain lines that fit a terminal and a pipe, one JSON object, or a line of progress."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .demo import Demo, Round, Settings
    from .verdict import Verdict


def columns() -> int:
    """How wide lines may be: as the terminal is, within reason."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def wrapped(title: str, text: str) -> str:
    """``text`` in lines that fit, behind its title."""
    return textwrap.fill(title + text, columns(), subsequent_indent=" " * len(title), break_on_hyphens=False)


class Progress:
    """One line that tells how far it is, on a terminal; nothing anywhere else."""

    def __init__(self, quiet: bool) -> None:
        self._on = not quiet and sys.stderr.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        if self._on:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be taken back
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compared(faster: float) -> str:
    """How the time with the cache compares to that without."""
    return f"{faster:.1f} times as fast" if faster >= 1 else "slower"


def introduction(settings: Settings, demo: Demo) -> str:
    cache = demo.cache
    pools = ", ".join(
        f"{part.name} {counted(part.capacity * part.page_tokens, 'token')}"
        if part.page_tokens
        else f"{part.name} {counted(part.capacity, 'state')}"
        for part in cache.composition.parts
    )
    talk = (
        f"{counted(settings.conversations, 'conversation')} of {counted(settings.turns, 'turn')} below one system "
        f"prompt, about {demo.talk.total:,} different tokens; each turn sends its history again, some branch off others"
    )
    return "\n".join(
        (
            wrapped("Model:  ", f"{demo.about}; {settings.dtype}, one thread"),
            wrapped("Talk:   ", talk),
            wrapped("Cache:  ", f"{pools}; a hit ends on a multiple of {cache.composition.page} tokens{below(demo)}"),
        )
    )


def below(demo: Demo) -> str:
    """What takes what the device has no room for."""
    tier = demo.cache.stats().tier
    if tier is None:
        return ""
    parts = {part.name: part.page_tokens for part in demo.cache.composition.parts}
    pools = ", ".join(
        f"{name} {counted(count * parts[name], 'token') if parts[name] else counted(count, 'state')}"
        for name, count in tier.capacity.items()
    )
    return f"; what has to go rests in the host's memory: {pools}"


def header(demo: Demo) -> str:
    names = "/".join(part.name for part in demo.cache.composition.parts)
    return (
        f"\n{'':>4}{'prompt':>8}{'hit':>8}{'hit':>6}{'from':>7}  {'evicted':<16}{'first token':>17}\n"
        f"{'turn':>4}{'tokens':>8}{'tokens':>8}{'rate':>6}{'host':>7}  {names:<16}{'with cache':>10}{'without':>10}"
        f"{'faster':>7}"
    )


def row(demo: Demo, told: Round) -> str:
    parts = [part.name for part in demo.cache.composition.parts]
    evicted = "/".join(f"{told.evicted.get(name, 0):,}" for name in parts)
    seconds, without = told.total("seconds_with"), told.total("seconds_without")
    return (
        f"{told.number or 'all':>4}{told.total('prompt_tokens'):>8,.0f}{told.total('hit_tokens'):>8,.0f}"
        f"{told.hit_rate:>6.0%}{told.total('restored_tokens'):>7,.0f}  {evicted:<16}{seconds:>8.2f} s{without:>8.2f} s"
        f"{told.faster:>6.1f}x"
    )


def findings(demo: Demo, verdict: Verdict) -> list[tuple[str, str]]:
    """What was compared and what came of it, line by line."""
    total = demo.total
    saved, asked = total.total("hit_tokens"), total.total("prompt_tokens")
    same = f"all {verdict.tokens:,} are those without the cache"
    if verdict.other_tokens:
        same = f"{verdict.other_tokens:,} of {verdict.tokens:,} DIFFER from those without the cache"
    word = "differ" if verdict.difference <= verdict.tolerance else "DIFFER"
    difference = f"their log-probabilities {word} by {verdict.difference:.1e} at most (allowed: {verdict.tolerance:g})"
    back = f"{counted(verdict.pages, 'page')} and {counted(verdict.states, 'state')}, {verdict.wrong} wrong"
    if not verdict.restored:
        back = "nothing was restored"
    moved = ", ".join(f"{name} {shift(by)}" for name, by in verdict.moved.items()) or "there was nothing to lose"
    held = "no page is held by anybody"
    if verdict.held:
        held = f"{counted(verdict.held, 'page')} {'is' if verdict.held == 1 else 'are'} still held"
    lines = [
        ("answers", f"{same}; {difference}"),
        ("restored", f"bit for bit what was left: {back}" if verdict.restored and not verdict.wrong else back),
        ("control", f"with a component's memory lost they move: {moved}"),
        ("at the end", held),
        (
            "first token",
            f"{total.total('seconds_with'):.2f} s with the cache, {total.total('seconds_without'):.2f} s without: "
            f"{compared(total.faster)}; {saved / asked:.0%} of {asked:,.0f} tokens were not computed again",
        ),
    ]
    tier = demo.cache.stats().tier
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
    if demo.engine.counts.drafted:
        counts = demo.engine.counts
        lines.append(
            ("guesses", f"{counts.accepted:,} of {counts.drafted:,} tokens that were guessed ahead were right")
        )
    return lines


def shift(by: float) -> str:
    return f"by {by:.1e}" if math.isfinite(by) else "to another token"


def finite(value: float) -> float | None:
    """JSON has no word for others."""
    return value if math.isfinite(value) else None


def remedy(verdict: Verdict) -> str:
    """What to try where nothing was restored."""
    return "" if verdict.restored or not verdict.passed else ": try more --turns"


def closing(demo: Demo, verdict: Verdict) -> str:
    lines = [wrapped(f"{title + ':':<16}", text) for title, text in findings(demo, verdict)]
    last = wrapped(f"{'verdict:':<16}", f"{verdict.word}{remedy(verdict)}")
    return "\n".join((row(demo, demo.total), "", *lines, last))


def installed() -> str | None:
    try:
        return version("prefixloom")
    except PackageNotFoundError:
        return None


def as_json(settings: Settings, demo: Demo, verdict: Verdict) -> str:
    total = demo.total
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in attrs.asdict(settings).items()}
    asked["capacity"] = {part.name: part.capacity * (part.page_tokens or 1) for part in demo.cache.composition.parts}
    judged = attrs.asdict(verdict) | {"passed": verdict.passed, "word": verdict.word}
    judged["difference"] = finite(verdict.difference)
    judged["moved"] = {name: finite(by) for name, by in verdict.moved.items()}
    told = {
        "prefixloom": installed(),
        "settings": asked,
        "rounds": [attrs.asdict(told) | {"hit_rate": told.hit_rate} for told in demo.rounds],
        "speedup": total.faster,
        "hit_rate": total.hit_rate,
        "verdict": judged,
    }
    return json.dumps(told, indent=2)
