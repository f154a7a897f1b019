"""Compares what an engine answered with and without a cache: tokens, log-probabilities, cached tokens, drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tests.engines.worlds import strayed

Answers = Sequence[Mapping[str, Any]]

FLOOR = 5e-5
"""Log-probabilities in float32 may differ by this much where sums run in another order, as a hit makes them do, and as
other batches do on a busy machine. 1.1e-5 was seen; what a spoiled page does is 0.1 and more.
"""

MORE = 3
"""A run with a cache may have so many times the near ties that two runs without one have, and so many beside. The same
holds for places where another expert was chosen. Their number depends on where chunks begin.
"""

SAMPLE = 1.05
"""The largest difference of three pairs of runs is a sample: another pair may be so many times further apart. Where
another expert was chosen, 0.63047 was seen beside 0.63031, with the engine's own cache too. What a spoiled page does to
the same model is 1.1.
"""

BOTH = 2
"""Of two tokens, one may gain as much as two runs with the cache off are apart, and the other lose as much."""

ROUNDING = 0.0625
"""The largest gain and loss that count as rounding: two steps of bfloat16 at the size of these models' logits. Where
another expert was chosen, two runs are ten times further apart, and that says nothing of other places.
"""


BEHIND = 0.05
"""With SGLang's extra buffer of states, one run of ours may have this part less cached than SGLang's own cache.

A request there often ends without a new entry. SGLang then counts its prefix as used when it was last matched or
published, and ours when the request has ended. So other prompts go first when memory is short, and either cache hits
more in one traffic or another. ``python -m tests.engines.order_sglang`` sums up many.
"""


@attrs.frozen
class Comparison:
    """How one run's answers stand to those of the run with the cache off."""

    requests: int
    tokens: int
    different: tuple[str, ...]
    """Requests whose prompt is the same, and whose tokens are not, where the engine was sure of its token."""
    ties: int
    """Requests that differ first at a near tie: a token whose runner-up could have changed places with it."""
    widest: float
    """How far the runner-up was at the most, among these."""
    moved: int
    """Requests whose prompt is another one, since an earlier answer of their conversation differs."""
    apart: float
    """The largest difference of log-probabilities, over equal tokens."""
    far: int
    """Tokens whose log-probabilities differ by more than rounding: another expert was chosen there."""


def compare(off: Answers, other: Answers, near: float) -> Comparison:
    """Compare request by request. A runner-up that is at most ``near`` could have changed places with its token."""
    assert [each["name"] for each in off] == [each["name"] for each in other]
    different, ties, widest, moved, apart, far, tokens = [], 0, 0.0, 0, 0.0, 0, 0
    for one, two in zip(off, other, strict=True):
        if one["prompt"] != two["prompt"]:
            moved += 1
            continue
        for at, (left, right) in enumerate(zip(one["tokens"], two["tokens"], strict=True)):
            if left != right:
                if one["margins"][at] <= near:
                    ties += 1
                    widest = max(widest, one["margins"][at])
                else:
                    different.append(one["name"])
                break
            difference = abs(one["logprobs"][at] - two["logprobs"][at])
            apart = max(apart, math.inf if math.isnan(difference) else difference)
            far += difference > ROUNDING
            tokens += 1
    return Comparison(len(off), tokens, tuple(different), ties, widest, moved, apart, far)


def drafted(off: Answers, other: Answers) -> tuple[int, int]:
    """Of requests with equal answers: how often a draft model proposed something in both runs, and how often otherwise.

    A request that was taken back and began again has no proposal at some places.
    """
    places = different = 0
    for one, two in zip(off, other, strict=True):
        if one["prompt"] == two["prompt"] and one["tokens"] == two["tokens"]:
            both = one["drafts"].keys() & two["drafts"].keys()
            places += len(both)
            different += sum(one["drafts"][place] != two["drafts"][place] for place in both)
    return places, different


def cached(answers: Answers) -> int:
    return sum(each["cached"] or 0 for each in answers)


def judge(
    results: Mapping[str, Mapping[str, Any]], behind: float = 0.0, restarted: bool = False
) -> tuple[list[str], list[str]]:
    """Return what is to be said of the runs, by mode, and what is wrong.

    The modes: those that begin with ``off``, in chunks of other sizes, which together say how far runs without a cache
    are apart; ``own``; ``prefixloom``; those that begin with ``spoiled``, whose answers must differ; and those that
    begin with ``blind``, where requests must get tokens of others, or other drafts. ``behind`` is the part of the own
    cache's tokens that ours may have less. ``restarted``: a store has what another engine was sent before.
    """
    said, wrong = [], []
    off = results["off"]["answers"]
    noise = near = 0.0
    ties = far = 0
    for one, two in itertools.combinations([mode for mode in results if mode.startswith("off")], 2):
        again = compare(results[one]["answers"], results[two]["answers"], math.inf)
        noise, near = max(noise, again.apart), max(near, again.widest)
        ties, far = max(ties, again.ties), max(far, again.far)
        said.append(
            f"{one}, {two}: log-probabilities at most {again.apart:.2e} apart, {again.ties} requests differ "
            f"at ties of at most {again.widest:.2g}"
        )
    allowed = max(SAMPLE * noise, FLOOR)
    near = min(max(near, BOTH * max(noise, FLOOR)), ROUNDING)
    apart, drafts = any(each["world"] for each in off), "drafts" in off[0]
    for mode, result in results.items():
        for check, passed in result["checks"].items():
            if not passed:
                wrong.append(f"{mode}: the engine's check '{check}' fails")
        if mode.startswith("off"):
            continue
        found = compare(off, result["answers"], near)
        hits = cached(result["answers"])
        said.append(
            f"{mode}: {found.requests} requests, {found.tokens} tokens equal, {len(found.different)} requests differ, "
            f"{found.ties} at ties of at most {found.widest:.2g}, {found.moved} after one of these, log-probabilities "
            f"at most {found.apart:.2e} apart, {found.far} times more than {ROUNDING}, {hits} prompt tokens cached, "
            f"{result['seconds']:.1f} s"
        )
        astray = 0 if restarted else len(strayed(result["answers"]))
        if apart:
            said.append(f"  {astray} requests have more cached tokens than their world had sent")
        places, other = drafted(off, result["answers"]) if drafts else (0, 0)
        if drafts:
            said.append(f"  {other} of {places} drafts differ")
        if mode.startswith("blind"):
            if not astray and not other:
                wrong.append(f"{mode}: no request got what belongs to others, so the other runs say nothing")
            continue
        if astray:
            wrong.append(f"{mode}: {astray} requests have more cached tokens than their world had sent")
        if mode.startswith("spoiled"):
            if not found.different and found.apart <= allowed:
                wrong.append(f"{mode}: no answer changed, so equal answers of the other runs say nothing")
            continue
        if found.different:
            wrong.append(f"{mode}: {len(found.different)} answers differ, the first is {found.different[0]}")
        for what, count, most in (("near ties", found.ties, ties), ("places that are far apart", found.far, far)):
            if count > MORE * (most + 1):
                wrong.append(f"{mode}: {count} {what}, and runs without a cache have at most {most}")
        if found.apart > allowed:
            wrong.append(f"{mode}: log-probabilities are {found.apart:.3e} apart, two runs without {noise:.3e}")
        if drafts and (other or not places):
            wrong.append(f"{mode}: {other} of {places} drafts differ")
        if not hits:
            wrong.append(f"{mode}: nothing was cached, so nothing was tried")
    if "own" in results and "prefixloom" in results:
        own, ours = cached(results["own"]["answers"]), cached(results["prefixloom"]["answers"])
        if ours < own * (1 - behind):
            wrong.append(f"prefixloom has {ours} tokens cached, and the engine's own cache {own}")
    return said, wrong
