"""Explanations: why a prompt hit what it hit, and what would have helped.

A match is followed again, step by step: who lowered the boundary, what each lacked there, and whether a tier below has
it. With a history the explanation also knows what became of what is missing. Every token that did not hit belongs to
one ``Finding``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs

from ..contract.identity import means, plain_name
from ..contract.reach import Interval, merged
from ..operations.match import limit_of, lowerings, walked_boundary
from ..operations.state import Core, Match
from ..tree.lane import Lane
from ..tree.radix import Node, climb
from .history import History, Loss

MissReason = Literal[
    "new",  # nothing that begins so has been cached, as far as is known
    "branch",  # the prompt parts from what is cached in the midst of a page
    "namespace",  # it is cached in another namespace
    "identity",  # it was computed with other weights, adapters or positions
    "too large",  # the prompt has more tokens than a pool can hold
    "evicted",  # it was cached, and went since room was needed
    "expired",  # it was cached, and went first, since the time until which it was wanted had passed
    "flushed",  # it was cached, and the cache was flushed or its namespace dropped
    "failed",  # the step or the copy that wrote it failed
    "never kept",  # the keys are there, and this was never stored
    "refused",  # it could have been stored, and there was no room for it, or a policy did not want it
    "absent",  # not cached; without a history it is not known why
    "below",  # a tier below the device has it
    "plugin",  # a plugin did not accept the boundary
    "page",  # these tokens do not fill a page
    "left",  # they were to be left to compute
    "lookahead",  # their content depends on tokens that come after the prompt
]
"""Why tokens did not hit."""


@attrs.frozen
class Finding:
    """Why the tokens [start, end) of a prompt did not hit.

    ``component``  which component (or plugin) it was; empty where it was none in particular
    ``lacks``      what this component lacks to resume at ``end``: token positions, of a state none
    ``loss``       what became of it, if a history knows
    ``pages``      about how many more pages (states) would have kept it until now; 0 if that is not known
    ``detail``     what else is known, and ``help`` what would have helped, in words
    """

    start: int
    end: int
    reason: MissReason
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
        """The explanation as plain data, for JSON."""
        return {
            "tokens": self.tokens,
            "ready": self.ready,
            "restorable": self.restorable,
            "walked": self.walked,
            "alone": dict(self.alone),
            "findings": [
                {
                    "start": each.start, "end": each.end, "reason": each.reason, "component": each.component,
                    "lacks": [list(span) for span in each.lacks], "text": self._told(each), "help": each.help,
                    "more_pages": each.pages, "loss": None if each.loss is None else {
                        "kind": each.loss.kind, "tier": each.loss.tier, "cause": each.loss.cause, "by": each.loss.by,
                        "seconds_ago": self.at - each.loss.when,
                        "seconds_cached": None if each.loss.stored is None else each.loss.when - each.loss.stored,
                    },
                }
                for each in self.findings
            ],
            "sentences": self.sentences,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _told(self, finding: Finding) -> str:
        loss = finding.loss
        who = f"component {finding.component!r}" if finding.component else "it"
        lacks = f" lacks {_spans(finding.lacks)} to resume at {finding.end}" if finding.lacks else ""
        what = f"{who}{lacks}" if lacks else f"{who} has no state at {finding.end}"
        if not finding.component:
            what = "nothing that begins so is cached"
        known = {
            "new": "nothing that begins so has been cached",
            "branch": "the prompt parts from what is cached in the midst of a page",
            "namespace": "the same tokens are cached in another namespace",
            "identity": "the same tokens are cached under another identity: other weights, adapters or positions",
            "too large": "the prompt is too large to be kept",
            "never kept": f"{what}: it was never stored"
            if self.since is None
            else (f"{what}: it was not stored in the last {_time(self.at - self.since)}, of which all is known"),
            "absent": f"{what}: it was never stored, or it is gone (no history is kept)",
            "below": f"{what} on the device; a tier below has it",
            "plugin": f"plugin {finding.component!r} does not accept the boundary {finding.end}",
            "page": "they do not fill a page",
            "left": "they were to be left to compute",
            "lookahead": "their content depends on tokens that come after the prompt",
        }.get(finding.reason)
        if known is None:
            assert loss is not None
            known = f"{what}: {_became(loss, self.at)}"
        return f"{known} ({finding.detail})" if finding.detail else known


def _spans(spans: Iterable[Interval]) -> str:
    return ", ".join(f"{low} to {high}" for low, high in spans)


def _became(loss: Loss, now: float) -> str:
    """What became of it, in words."""
    ago = f"{_time(now - loss.when)} ago"
    if loss.kind == "refused":
        why = {"room": "no slot could be had", "policy": "a policy did not want it"}.get(loss.cause, loss.cause)
        return f"it was not stored on the {loss.tier} {ago}: {why}" if loss.tier != "store" else (
            f"the store refused it {ago} ({why})"
        )  # fmt: skip
    told = {
        "room": "it was evicted" + (f" to make room for {loss.by!r}" if loss.by else " to make room"),
        "expired": "the time until which it was wanted had passed, and it was evicted before all else",
        "asked": "it was evicted, as the engine asked for it",
        "unneeded": f"it was freed, since {loss.by!r} had lost what it needs beside it",
        "path limit": "it was freed, since its path has as many states as it may have",
        "split": "it was freed, since its path was divided",
        "failed": "what computed or copied it had failed, and it was taken back",
        "dropped": "its namespace was dropped",
        "flushed": "the cache was flushed",
    }.get(loss.cause, f"it was removed ({loss.cause or 'no cause told'})")
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
    return _Explainer(core, match, history, closely).explanation()


class _Explainer:
    """One explanation in the making."""

    def __init__(self, core: Core, match: Match, history: History | None, closely: bool) -> None:
        self.core, self.match, self.history, self.closely = core, match, history, closely
        self.tokens = match.tokens
        self._tiers = ("device",) if core.below is None else ("device", "host", "store")
        self.page = core.shape.page
        self.limit = limit_of(core, match)
        self.walked = walked_boundary(core, match)

    def explanation(self) -> Explanation:
        match, core = self.match, self.core
        findings = [*self._lowered(), *self._unmatched(), *self._rest()]
        return Explanation(
            match.count,
            match.ready,
            match.ready if core.below is None else match.restorable,
            self.walked,
            {lane.name: lane.residency.deepest(match.walked_to, self.walked)[1] for lane in core.shape.lanes},
            tuple(sorted((each for each in findings if each.tokens), key=lambda each: each.start)),
            0.0 if self.history is None else self.history.clock(),
            None if self.history is None else self.history.since,
        )

    # ------------------------------------------------------------ where the keys agree
    def _lowered(self) -> list[Finding]:
        """Why the keys agree further than the hit. Up to what can be restored the device is asked, then all tiers."""
        lanes = {lane.name: lane for lane in self.core.shape.lanes}
        restorable = self.match.ready if self.core.below is None else self.match.restorable
        found: list[Finding] = []
        for name, high, low in lowerings(self.core, self.match):
            lane = lanes.get(name)
            if lane is None or not self._lacks(lane, high):
                if found and found[-1].reason == "plugin" and found[-1].component == name and found[-1].start == high:
                    found[-1] = attrs.evolve(found[-1], start=low)
                else:
                    found.append(Finding(low, high, "plugin", name))
                continue
            cut = min(max(low, restorable), high)
            if high > cut:
                others = (each for each in self.core.shape.in_order if each is not lane)
                culprit = next((each for each in (lane, *others) if self._gone(each, high)), lane)
                found.append(self._of_component(culprit, cut, high))
            if cut > low:
                found.append(self._below(lane, low, cut))
        return found

    def _lacks(self, lane: Lane, boundary: int) -> tuple[Interval, ...]:
        """The pages that the device lacks for ``boundary``; of a state the page of the tree that ends there."""
        return lane.residency.lacking(self._node(boundary), boundary)

    def _gone(self, lane: Lane, boundary: int) -> tuple[Interval, ...]:
        """Return what of ``_lacks`` no tier below has either."""
        below = self.core.below
        residency = lane.residency if below is None else below.residency(lane)
        return residency.lacking(self._node(boundary), boundary)

    def _node(self, boundary: int) -> Node:
        return climb(self.match.walked_to, boundary)

    def _of_component(self, lane: Lane, low: int, high: int) -> Finding:
        """Why this component cannot be resumed at ``high``."""
        gone = self._gone(lane, high)
        if not gone:
            return self._below(lane, low, high)
        return self._finding(lane, low, high, self._told_lacks(lane, high), self._find(lane, gone))

    def _below(self, lane: Lane, low: int, high: int) -> Finding:
        """The tiers below the device have what this component lacks on it."""
        lacks = self._told_lacks(lane, high)
        return Finding(low, high, "below", lane.name, lacks, help="a load from below, by Sequence.restore")

    def _told_lacks(self, lane: Lane, boundary: int) -> tuple[Interval, ...]:
        return self._lacks(lane, boundary) if lane.unit == "page" else ()

    def _finding(
        self, lane: Lane, low: int, high: int, lacks: tuple[Interval, ...], losses: list[Loss | None]
    ) -> Finding:
        if self.history is None:
            return Finding(low, high, "absent", lane.name, lacks, help=self._checkpoint(lane, high))
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses) or not known:
            return Finding(low, high, "never kept", lane.name, lacks, help=self._checkpoint(lane, high))
        loss = max(known, key=lambda each: each.when)
        if loss.kind == "refused":
            return Finding(low, high, "refused", lane.name, lacks, loss, help=_help_refused(loss))
        pages = 0
        if loss.cause in ("room", "expired", "unneeded"):
            first = min(each.number for each in known)
            pages = self.history.lost_since(lane.name, loss.tier, first) if self.closely else 0
        helps = f"about {pages} more {_unit(lane)} of {lane.name!r} on the {loss.tier}" if pages else ""
        if loss.cause == "expired":
            helps = " or ".join(filter(None, ("a later time until which it is wanted", helps)))
        return Finding(low, high, _reason(loss), lane.name, lacks, loss, pages, help=helps)

    def _checkpoint(self, lane: Lane, boundary: int) -> str:
        return f"a step that ends at {boundary}, with its state published" if lane.unit == "boundary" else ""

    def _find(self, lane: Lane, spans: tuple[Interval, ...]) -> list[Loss | None]:
        if self.history is None:
            return []
        return self.history.find(lane.name, self._tiers, self.match.namespace, self.tokens, spans)

    # ------------------------------------------------------------ where they do not
    def _unmatched(self) -> list[Finding]:
        """Why the keys agree no further: what lay there has gone, or never came."""
        start = self.walked
        if start >= self.limit:
            return []
        shape = self.core.shape
        if self.match.count > shape.longest > 0 and shape.path_lanes:
            lane = min(shape.path_lanes, key=lambda each: each.pool.capacity * each.page)
            holds = lane.pool.capacity * lane.page
            told = f"the pool of {lane.name!r} holds {holds} tokens and the prompt has {self.match.count}"
            return [Finding(start, self.limit, "too large", lane.name, detail=told, help="a larger pool")]
        found: list[Finding] = []
        at = start
        while at < self.limit and (lost := self._lost_from(at)) is not None:
            found.append(lost)
            at = lost.end
        if at < self.limit:
            found += self._never_seen(at) if at == start else [Finding(at, self.limit, "new")]
        return found

    def _lost_from(self, at: int) -> Finding | None:
        """What became of the deepest that was cached from ``at`` on, of the first component that a history tells of."""
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

    def _never_seen(self, at: int) -> list[Finding]:
        found = []
        if self.closely:
            elsewhere = self._elsewhere(at)
            if elsewhere is not None:
                found.append(elsewhere)
                at = elsewhere.end
            elif agreed := self._agreed(at):
                told = f"they agree for {agreed} tokens of the page of {self.page} that begins at {at}"
                helps = "smaller pages, or prompts that part at a page's end"
                found.append(Finding(at, at + self.page, "branch", detail=told, help=helps))
                at += self.page
        told = ""
        if self.history is not None and self.history.remembered:
            told = "or longer ago than the last losses that are remembered"
        return [*found, Finding(at, self.limit, "new", detail=told)] if at < self.limit else found

    def _elsewhere(self, at: int) -> Finding | None:
        """Another namespace in which more of these tokens is cached."""
        tree, mine = self.core.index.tree, self.match.namespace
        best: tuple[int, str] | None = None
        for namespace, root in tree.roots.items():
            if namespace != mine:
                _, walked, _ = tree.walk(root, self.match.key)
                if walked > at and (best is None or walked > best[0]):
                    best = walked, namespace
        if best is None:
            return None
        end, other = min(best[0], self.limit), best[1]
        if means(plain_name(mine), other):
            return Finding(at, end, "identity", help="the same weights, adapters and positions")
        name = plain_name(other)
        told = f"in {name!r}" if name else "in the one without a name"
        return Finding(at, end, "namespace", detail=told, help="the same namespace (or salt)")

    def _agreed(self, at: int) -> int:
        """How many tokens of the page at ``at`` agree with something cached."""
        match, tree = self.match, self.core.index.tree
        size, element = tree.page_bytes, self.core.keys.element_bytes
        wanted = match.key[at * element : at * element + size]
        node = match.walked_to
        inside = node.end > at
        keys = [node.key[(at - node.start) * element :]] if inside else [kid.key for kid in node.children]
        best = 0
        for key in keys:
            same = 0
            while same < size and key[same : same + element] == wanted[same : same + element]:
                same += element
            best = max(best, same // element)
        return best

    # ------------------------------------------------------------ what was not asked
    def _rest(self) -> list[Finding]:
        """The tokens past the deepest boundary that could be asked for."""
        count, page = self.match.count, self.page
        whole = count // page * page
        leave = count - self.match.most
        leave = 0 if leave <= self.core.shape.lookahead else leave
        asked = max(0, count - leave) // page * page
        found = [Finding(max(whole, self.match.ready), count, "page", detail=f"a page has {page} tokens")]
        found.append(Finding(asked, whole, "left"))
        found.append(Finding(self.limit, asked, "lookahead"))
        return [each for each in found if each.start < each.end]


def _reason(loss: Loss) -> MissReason:
    if loss.kind == "cleared" or loss.cause == "dropped":
        return "flushed"
    return "failed" if loss.cause == "failed" else "expired" if loss.cause == "expired" else "evicted"


def _help_refused(loss: Loss) -> str:
    return {"room": "a free slot: a larger pool", "policy": "a policy that keeps it"}.get(loss.cause, "")


def _unit(lane: Lane) -> str:
    return "states" if lane.unit == "boundary" else "pages"
