"""Explanations: why a prompt hit what it hit, and what would have helped.

A match is followed again, step by step: who lowered the boundary, what each lacked there, and whether a tier below has
it. With a history the explanation also knows what became of what is missing. Every token that did not hit belongs to
one ``Finding``.

``REASONS`` has a sentence for each reason, and ``CAUSES`` what became of what a history knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from ..contract.identity import means, plain_name
from ..contract.reach import Interval, merged
from ..operations.match import limit_of, lowerings, walked_boundary
from ..operations.state import Core, Match
from ..tree.lane import Lane
from ..tree.radix import climb
from .history import History, Loss

REASONS: dict[str, str] = {
    "new": "nothing that begins so has been cached",
    "branch": "the prompt parts from what is cached in the midst of a page",
    "namespace": "the same tokens are cached in another namespace",
    "identity": "the same tokens are cached under another identity: other weights, adapters or positions",
    "too large": "the prompt is too large to be kept",
    "evicted": "{what}: {loss}",
    "expired": "{what}: {loss}",
    "flushed": "{what}: {loss}",
    "failed": "{what}: {loss}",
    "refused": "{what}: {loss}",
    "never kept": "{what}: it was {never}",
    "absent": "{what}: it was never stored, or it is gone (no history is kept)",
    "below": "{what} on the device; a tier below has it",
    "plugin": "plugin {component!r} does not accept the boundary {end}",
    "page": "they do not fill a page",
    "left": "they were to be left to compute",
    "lookahead": "their content depends on tokens that come after the prompt",
}
"""Why tokens did not hit, in words. ``docs/insight.md`` says of each what helps."""

CAUSES: dict[str, tuple[str, str]] = {
    "room": ("evicted", "it was evicted to make room{for_whom}"),
    "expired": ("expired", "the time until which it was wanted had passed, and it was evicted before all else"),
    "asked": ("evicted", "it was evicted, as the engine asked for it"),
    "unneeded": ("evicted", "it was freed, since {by!r} had lost what it needs beside it"),
    "split": ("evicted", "it was freed, since its path was divided"),
    "failed": ("failed", "what computed or copied it had failed, and it was taken back"),
    "dropped": ("flushed", "its namespace was dropped"),
    "flushed": ("flushed", "the cache was flushed"),
}
"""By the cause of a loss: the reason of tokens that miss it, and what became of it."""
OTHERWISE = "evicted", "it was removed"

REFUSALS: dict[str, tuple[str, str]] = {
    "room": ("no slot could be had", "a free slot: a larger pool"),
    "policy": ("a policy did not want it", "a policy that keeps it"),
}
"""By the cause for which something was not stored: that cause in words, and what helps."""


@attrs.frozen
class Finding:
    """Why the tokens [start, end) of a prompt did not hit.

    ``reason``     one of ``REASONS``
    ``component``  which component (or plugin) it was; empty where it was none in particular
    ``lacks``      what this component lacks to resume at ``end``: token positions, of a state none
    ``loss``       what became of it, if a history knows
    ``pages``      about how many more pages (states) would have kept it until now; 0 if that is not known
    ``detail``     what else is known, and ``help`` what would have helped, in words
    """

    start: int
    end: int
    reason: str
    component: str = ""
    lacks: tuple[Interval, ...] = ()
    loss: Loss | None = attrs.field(default=None, repr=False)
    pages: int = 0
    detail: str = ""
    help: str = ""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@attrs.frozen
class Explanation:
    """Why a prompt hit what it hit.

    ``tokens``      of the prompt
    ``ready``       hit on the device; ``restorable`` on the device or below it
    ``walked``      the deepest boundary that the keys agree with, of what was asked
    ``alone``       by component, the deepest boundary that it could be resumed at if it were alone
    ``findings``    ascending: why the tokens from ``ready`` on did not hit
    ``at``          the time of the explanation, on the clock of the history
    ``since``       what was lost before this time is not known, or not all of it; None: all is known
    """

    tokens: int
    ready: int
    restorable: int
    walked: int
    alone: dict[str, int]
    findings: tuple[Finding, ...]
    at: float = attrs.field(default=0.0, repr=False)
    since: float | None = None

    @property
    def sentences(self) -> list[str]:
        """The explanation in words."""
        told = [f"{self.ready} of {self.tokens} tokens hit" + ("." if self.tokens else ": the prompt is empty.")]
        if self.restorable > self.ready:
            told.append(f"The tiers below the device can bring back {self.restorable} tokens.")
        for finding in self.findings:
            told.append(f"Tokens {finding.start} to {finding.end}: {self._told(finding)}.")
            if finding.help:
                told.append(f"What would have helped: {finding.help}.")
        return told

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, for JSON."""
        findings = []
        for each in self.findings:
            loss = each.loss
            told = attrs.asdict(each, filter=lambda field, _: field.name not in ("loss", "pages", "detail"))
            findings.append({**told, "text": self._told(each), "more_pages": each.pages, "loss": loss and {
                "kind": loss.kind, "tier": loss.tier, "cause": loss.cause, "by": loss.by,
                "seconds_ago": self.at - loss.when,
                "seconds_cached": None if loss.stored is None else loss.when - loss.stored,
            }})  # fmt: skip
        told = attrs.asdict(self, filter=lambda field, _: field.name not in ("findings", "at", "since"))
        return {**told, "findings": findings, "sentences": self.sentences}

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _told(self, finding: Finding) -> str:
        """Return the finding in words: the sentence of its reason, and its detail."""
        lacks = f"lacks {_spans(finding.lacks)} to resume at" if finding.lacks else "has no state at"
        told = REASONS[finding.reason].format(
            what=f"component {finding.component!r} {lacks} {finding.end}",
            loss="" if finding.loss is None else _became(finding.loss, self.at),
            never="never stored" if self.since is None else
            f"not stored in the last {_time(self.at - self.since)}, of which all is known",
            component=finding.component, end=finding.end,
        )  # fmt: skip
        return f"{told} ({finding.detail})" if finding.detail else told


def _spans(spans: Iterable[Interval]) -> str:
    return ", ".join(f"{low} to {high}" for low, high in spans)


def _became(loss: Loss, now: float) -> str:
    """Return in words what became of something, and when."""
    ago = f"{_time(now - loss.when)} ago"
    if loss.kind == "refused":
        why = REFUSALS[loss.cause][0] if loss.cause in REFUSALS else loss.cause
        if loss.tier == "store":
            return f"the store refused it {ago} ({why})"
        return f"it was not stored on the {loss.tier} {ago}: {why}"
    for_whom = f" for {loss.by!r}" if loss.by else ""
    told = CAUSES.get(loss.cause, OTHERWISE)[1].format(by=loss.by, for_whom=for_whom)
    where = f" from the {loss.tier}" if loss.tier else ""
    age = "" if loss.stored is None else f", after {_time(loss.when - loss.stored)}"
    return f"{told}{where} {ago}{age}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------- finding


def explain(core: Core, match: Match, history: History | None, closely: bool) -> Explanation:
    """Explain a current match. ``closely``: look into other namespaces, and at single tokens where keys part."""
    if history is not None:
        history.poll()
    found = _Explainer(core, match, history, closely)
    return Explanation(
        match.count, match.ready, found.restorable, found.walked,
        {lane.name: lane.residency.deepest(match.walked_to, found.walked)[1] for lane in core.shape.lanes},
        tuple(sorted(found.findings(), key=lambda each: each.start)),
        0.0 if history is None else history.clock(), None if history is None else history.since,
    )  # fmt: skip


class _Explainer:
    """One explanation in the making."""

    def __init__(self, core: Core, match: Match, history: History | None, closely: bool) -> None:
        self.core, self.match, self.history, self.closely = core, match, history, closely
        self._tiers = ("device",) if core.below is None else ("device", "host", "store")
        self.page = core.shape.page
        self.limit = limit_of(core, match)
        self.walked = walked_boundary(core, match)
        self.restorable = match.ready if core.below is None else match.restorable

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that have tokens: where the keys agree, where they do not, and past what was asked."""
        for each in (*self._lowered(), *self._unmatched(), *self._rest()):
            if each.tokens > 0:
                yield each

    # ------------------------------------------------------------ where the keys agree
    def _lowered(self) -> list[Finding]:
        """Return why the keys agree further than the hit. Up to what can be restored the device is asked, then all
        tiers: the component that lowered the boundary first, then the others.
        """
        lanes = {lane.name: lane for lane in self.core.shape.lanes}
        found: list[Finding] = []
        for name, high, low in lowerings(self.core, self.match):
            lane = lanes.get(name)
            if lane is None or not self._lacks(lane, high):
                if found and (found[-1].reason, found[-1].component, found[-1].start) == ("plugin", name, high):
                    high = found.pop().end
                found.append(Finding(low, high, "plugin", name))
                continue
            cut = min(max(low, self.restorable), high)
            if high > cut:
                others = (each for each in self.core.shape.in_order if each is not lane)
                gone = ((each, self._lacks(each, high, below=True)) for each in (lane, *others))
                found.append(self._of_component(*next((each for each in gone if each[1]), (lane, ())), cut, high))
            if cut > low:
                found.append(self._of_component(lane, (), low, cut))
        return found

    def _lacks(self, lane: Lane, boundary: int, below: bool = False) -> tuple[Interval, ...]:
        """Return what the device lacks of a component at ``boundary``, or what the tiers ``below`` it lack as well.

        Of a state it is the page of the tree that ends there.
        """
        tiers = self.core.below
        residency = tiers.residency(lane) if below and tiers is not None else lane.residency
        return residency.lacking(climb(self.match.walked_to, boundary), boundary)

    def _of_component(self, lane: Lane, gone: tuple[Interval, ...], low: int, high: int) -> Finding:
        """Return why a component cannot be resumed at ``high``. If nothing is ``gone``, the tiers below have it."""
        lacks = self._lacks(lane, high) if lane.unit == "page" else ()
        if gone:
            return self._finding(lane, low, high, lacks, self._find(lane, gone))
        return Finding(low, high, "below", lane.name, lacks, help="a load from below, by Sequence.restore")

    def _finding(
        self, lane: Lane, low: int, high: int, lacks: tuple[Interval, ...], losses: list[Loss | None]
    ) -> Finding:
        """Return what became of pages that a component lacks: what was lost last of them, if a history knows of all."""
        known = [loss for loss in losses if loss is not None]
        if self.history is None or not known or len(known) < len(losses):
            reason = "absent" if self.history is None else "never kept"
            step = f"a step that ends at {high}, with its state published" if lane.unit == "boundary" else ""
            return Finding(low, high, reason, lane.name, lacks, help=step)
        loss = max(known, key=lambda each: each.when)
        if loss.kind == "refused":
            return Finding(low, high, "refused", lane.name, lacks, loss, help=REFUSALS.get(loss.cause, ("", ""))[1])
        pages = 0
        helps = ["a later time until which it is wanted"] if loss.cause == "expired" else []
        if self.closely and loss.cause in ("room", "expired", "unneeded"):
            pages = self.history.lost_since(lane.name, loss.tier, min(each.number for each in known))
        if pages:
            unit = "states" if lane.unit == "boundary" else "pages"
            helps.append(f"about {pages} more {unit} of {lane.name!r} on the {loss.tier}")
        return Finding(
            low, high, CAUSES.get(loss.cause, OTHERWISE)[0], lane.name, lacks, loss, pages, help=" or ".join(helps)
        )

    def _find(self, lane: Lane, spans: tuple[Interval, ...]) -> list[Loss | None]:
        if self.history is None:
            return []
        return self.history.find(lane.name, self._tiers, self.match.namespace, self.match.tokens, spans)

    # ------------------------------------------------------------ where they do not
    def _unmatched(self) -> Iterator[Finding]:
        """Yield why the keys agree no further: what was cached there is gone, or never was."""
        at, shape = self.walked, self.core.shape
        if self.match.count > shape.longest > 0 and shape.path_lanes:
            lane = min(shape.path_lanes, key=lambda each: each.pool.capacity * each.page)
            holds = lane.pool.capacity * lane.page
            told = f"the pool of {lane.name!r} holds {holds} tokens and the prompt has {self.match.count}"
            yield Finding(at, self.limit, "too large", lane.name, detail=told, help="a larger pool")
            return
        while at < self.limit and (lost := self._lost_from(at)) is not None:
            yield lost
            at = lost.end
        told = ""
        if at < self.limit and at == self.walked:
            seen = self._seen(at) if self.closely else None
            if seen is not None:
                yield seen
                at = seen.end
            if self.history is not None and self.history.remembered:
                told = "or longer ago than the last losses that are remembered"
        yield Finding(at, self.limit, "new", detail=told)

    def _lost_from(self, at: int) -> Finding | None:
        """Return what became of the deepest that was cached from ``at`` on, of the first component with a loss."""
        for lane in self.core.shape.in_order:
            page = lane.part.page_tokens or self.page
            losses = self._find(lane, ((at, self.limit),))
            gone = [(at + place * page, loss) for place, loss in enumerate(losses) if loss is not None]
            if not gone:
                continue
            end = at + -(-(gone[-1][0] + page - at) // self.page) * self.page
            if lane.unit == "boundary":
                return self._finding(lane, at, end, (), [gone[-1][1]])
            lacks = merged((start, start + page) for start, _ in gone)
            return self._finding(lane, at, end, lacks, [loss for _, loss in gone])
        return None

    def _seen(self, at: int) -> Finding | None:
        """Return where else more of these tokens is cached, or how much of the page at ``at``."""
        elsewhere = self._elsewhere(at)
        agreed = 0 if elsewhere is not None else self._agreed(at)
        if not agreed:
            return elsewhere
        told = f"they agree for {agreed} tokens of the page of {self.page} that begins at {at}"
        return Finding(
            at, at + self.page, "branch", detail=told, help="smaller pages, or prompts that part at a page's end"
        )

    def _elsewhere(self, at: int) -> Finding | None:
        """Return the namespace in which most of these tokens are cached, if it is more than in that of the prompt."""
        tree, mine = self.core.index.tree, self.match.namespace
        walks = ((tree.walk(root, self.match.key)[1], name) for name, root in tree.roots.items() if name != mine)
        end, other = max(walks, key=lambda found: found[0], default=(0, ""))
        if end <= at:
            return None
        end = min(end, self.limit)
        if means(plain_name(mine), other):
            return Finding(at, end, "identity", help="the same weights, adapters and positions")
        name = plain_name(other)
        told = f"in {name!r}" if name else "in the one without a name"
        return Finding(at, end, "namespace", detail=told, help="the same namespace (or salt)")

    def _agreed(self, at: int) -> int:
        """Return how many tokens of the page at ``at`` agree with something cached."""
        size, element = self.core.index.tree.page_bytes, self.core.keys.element_bytes
        wanted = self.match.key[at * element : at * element + size]
        node = self.match.walked_to
        inside = node.end > at
        keys = [node.key[(at - node.start) * element :]] if inside else [kid.key for kid in node.children]
        best = 0
        for key in keys:
            while key[: best + element] == wanted[: best + element] and best < size:
                best += element
        return best // element

    # ------------------------------------------------------------ what was not asked
    def _rest(self) -> Iterator[Finding]:
        """Yield the tokens past the deepest boundary that could be asked for."""
        count, page = self.match.count, self.page
        whole = count // page * page
        leave = count - self.match.most
        leave = 0 if leave <= self.core.shape.lookahead else leave
        asked = max(0, count - leave) // page * page
        yield Finding(max(whole, self.match.ready), count, "page", detail=f"a page has {page} tokens")
        yield Finding(asked, whole, "left")
        yield Finding(self.limit, asked, "lookahead")
