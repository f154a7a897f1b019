"""Side by side: one table of replays of the same trace, and the counts that explain how they differ.

What a side computes is what its requests missed, and what it computed again after a request gave up its room. What was
missed has one reason for each token. So the difference of two sides is the sum of the differences by reason, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...compose.sizing import size_text
from ..outcome import GONE, NEW, ROUNDED, ReplayOutcome, columns

AGAIN = "again"
"""Tokens that were computed again after a request gave up its room to others."""
WORDS = {
    NEW: "nobody asked for before",
    GONE: "had been evicted",
    ROUNDED: "lie behind the last place where a hit may end",
    AGAIN: "were computed again by requests that had given up their room",
}


def computed_by_reason(outcome: ReplayOutcome) -> dict[str, int]:
    """Return the tokens that a side computed, by the reason why. They add up to ``outcome.computed``."""
    found = dict(outcome.missed)
    found[AGAIN] = outcome.computed - sum(found.values())
    return found


def differences(ours: ReplayOutcome, other: ReplayOutcome) -> dict[str, int]:
    """Return by reason how many more tokens ``other`` computed than ``ours``. They add up to the whole difference."""
    mine, theirs = computed_by_reason(ours), computed_by_reason(other)
    return {reason: theirs.get(reason, 0) - mine.get(reason, 0) for reason in mine | theirs}


def explanation(ours: ReplayOutcome, other: ReplayOutcome) -> str:
    """Return one sentence that explains by counts why another side computed more or less than ours."""
    if other.refused != ours.refused or other.requests != ours.requests:
        return (
            f"{other.policy}: {other.requests:,} requests were served and {other.refused:,} refused, ours served "
            f"{ours.requests:,}: the sums are not of the same requests"
        )
    whole = other.computed - ours.computed
    counted = sorted(differences(ours, other).items(), key=lambda each: -abs(each[1]))
    parts = [f"{tokens:+,} {_words(reason)}" for reason, tokens in counted if tokens]
    if not parts:
        return f"{other.policy}: no difference"
    return f"{other.policy}: {whole:+,} tokens = {'; '.join(parts)}"


def _words(reason: str) -> str:
    return WORDS.get(reason, f"had no usable {reason} where full attention still was")


def best(outcomes: Sequence[ReplayOutcome]) -> ReplayOutcome:
    """Return the side that computed least, of those that served most requests."""
    return min(outcomes, key=lambda each: (each.refused, each.computed))


def table(ours: Sequence[ReplayOutcome], peers: Mapping[str, Sequence[ReplayOutcome]]) -> list[str]:
    """Return all sides as lines for a terminal: the ideal, ours, and each peer's settings, its best one with a star."""
    reasons = list(dict.fromkeys(
        reason for each in (*ours, *(one for many in peers.values() for one in many))
        for reason, tokens in each.missed.items() if tokens and reason not in (NEW, GONE, ROUNDED)
    ))  # fmt: skip
    first = ours[0]
    rows: list[tuple[str, ...]] = [(
        "side", "x ideal", "hit", *(f"no {each}" for each in reasons), "rounded", "evicted", "again", "retracted",
        "refused", "bytes",
    )]  # fmt: skip
    blank = ("",) * (len(rows[0]) - 3)
    rows.append(("ideal (infinite memory)", "1.000", f"{first.ideal_rate:.2%}", *blank))
    for each in ours:
        rows.append(_row(f"prefixloom, {each.policy}", each, reasons))
    for outcomes in peers.values():
        chosen = best(outcomes) if len(outcomes) > 1 else None
        rows += [_row(each.policy + (" *" if each is chosen else ""), each, reasons) for each in outcomes]
    told = columns(rows)
    told += ["", f"More computed than prefixloom, {first.policy}, in tokens, by the reason why:"]
    told += [f"  {explanation(first, each)}" for outcomes in peers.values() for each in outcomes]
    told += ["", "Sizes:"]
    for outcomes in peers.values():
        told += [f"  {each.policy}: {'; '.join(each.notes)}" for each in outcomes]
    return told


def _row(name: str, each: ReplayOutcome, reasons: Sequence[str]) -> tuple[str, ...]:
    def share(tokens: int) -> str:
        return f"{tokens / each.prompt:.2%}" if each.prompt else ""

    return (
        name, f"{each.multiple:.3f}", f"{each.hit_rate:.2%}", *(share(each.missed.get(one, 0)) for one in reasons),
        share(each.missed.get(ROUNDED, 0)), share(each.missed.get(GONE, 0)), share(computed_by_reason(each)[AGAIN]),
        f"{each.retracted:,}", f"{each.refused:,}", size_text(each.bytes),
    )  # fmt: skip
