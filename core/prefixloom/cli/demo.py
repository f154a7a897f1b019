"""``prefixloom demo``: synthetic conversations through a composed cache, and whether the cache changed anything.

The model is the toy of ``prefixloom.testing``; the cache is composed from its config, so that the components come from
whatever is installed for its layers. Every turn is computed twice, with the cache and without, and the verdict is what
comes of comparing the two; nothing is taken on trust.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import attrs

from ..compose import compose
from ..errors import InputError
from ..facts import GLOBAL
from . import version

if TYPE_CHECKING:
    from ..cache import Cache
    from ..testing.conversations import Conversations
    from ..testing.toy import ToyModel
    from ..testing.witness import Witness

TOLERANCE = 1e-10
REPLY = 8
"""Tokens of an answer."""
LIMITS = {
    "conversations": (1, 1000),
    "turns": (1, 100),
    "seed": (0, 2**31 - 1),
    "page_size": (1, 256),
    "capacity": (1, 1 << 18),
}
LAYERS = [GLOBAL] * 4
SIZES = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Numbers are read by ``_settings``: argparse would tell the whole usage with every mistake.
    parser.add_argument("--conversations", default="12", metavar="N", help="how many there are (default: 12)")
    parser.add_argument("--turns", default="4", metavar="N", help="turns of each conversation (default: 4)")
    parser.add_argument("--seed", default="0", metavar="N", help="of all random tokens and weights (default: 0)")
    parser.add_argument("--page-size", default="16", metavar="N", help="tokens of a page (default: 16)")
    parser.add_argument(
        "--capacity", metavar="N", help="tokens that the cache holds (default: 60%% of the different tokens)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


@attrs.frozen
class Settings:
    conversations: int
    turns: int
    seed: int
    page_size: int
    capacity: int | None


@attrs.define
class Round:
    """One turn of every conversation. Times are seconds of prefill."""

    number: int
    conversations: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    seconds_with: float = 0.0
    seconds_without: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


@attrs.define
class Verdict:
    """What was compared, and how far it agreed. ``difference`` is the largest of any logit, with and without."""

    rows: int = 0
    difference: float = 0.0
    pages: int = 0
    wrong_pages: int = 0
    held_pages: int = 0

    def see(self, with_cache: Any, without: Any) -> None:
        """Compare the logits of the same tokens, computed in both ways."""
        self.rows += len(with_cache)
        difference = float((with_cache - without).abs().max())
        if not difference <= self.difference:  # so that one that is no number stays
            self.difference = difference

    @property
    def logits(self) -> str:
        if self.difference == 0:
            return "bitwise equal"
        return f"equal within {TOLERANCE:g}" if self.difference <= TOLERANCE else "DIFFERENT"

    @property
    def content(self) -> str:
        if self.wrong_pages:
            return "DIFFERENT"
        return "bitwise equal" if self.pages else "nothing was restored"

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE and not self.wrong_pages and not self.held_pages

    @property
    def word(self) -> str:
        if not self.passed:
            return "NOT EXACT"
        if not self.pages:
            return "nothing was wrong, but nothing was restored either"
        if self.difference == 0:
            return "restored memory and outputs are bitwise the same"
        return f"restored memory is bitwise the same; outputs agree within {TOLERANCE:g} (sums in another order)"


def run(args: argparse.Namespace) -> int:
    """Run the conversations and print what came of it. 1 if the verdict is bad."""
    settings = _settings(args)
    with warnings.catch_warnings():  # torch warns where numpy is missing, and nothing here needs it
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that times compare, whoever else is busy on this machine
    try:
        return _converse(settings, args.json)
    finally:
        torch.set_num_threads(threads)


def _converse(settings: Settings, as_json: bool) -> int:
    from ..testing.conversations import Conversations
    from ..testing.toy import ToyModel, toy_config

    model = ToyModel(toy_config(LAYERS, **SIZES), seed=settings.seed)
    talk = Conversations(settings.conversations, settings.turns, REPLY, model.vocabulary, settings.seed)
    cache = compose(model.config, page_size=settings.page_size, capacity=_capacity(settings, talk))
    demo = Demo(cache, model, talk, quiet=as_json)
    if not as_json:
        print(_introduction(settings, cache, talk))
        print(HEADER, flush=True)
    try:
        for turn in range(settings.turns):
            told = demo.round(turn)
            if not as_json:
                print(_row(told), flush=True)
    finally:
        demo.progress.clear()
    verdict = demo.verdict()
    print(_as_json(settings, cache, demo, verdict) if as_json else _closing(settings, demo, verdict))
    return 0 if verdict.passed else 1


def _settings(args: argparse.Namespace) -> Settings:
    found: dict[str, int | None] = {}
    for name, (low, high) in LIMITS.items():
        text = getattr(args, name)
        option = "--" + name.replace("_", "-")
        if text is not None:
            try:
                value = int(text)
            except ValueError:
                raise InputError(f"{option} takes a whole number, got {text!r}") from None
            if not low <= value <= high:
                raise InputError(f"{option} must be from {low} to {high}, got {value}")
            found[name] = value
    return Settings(**{"capacity": None, **found})  # type: ignore[arg-type]


def _capacity(settings: Settings, talk: Conversations) -> int:
    """Tokens of the pool: less than all that is said, so that something must go, and room for the longest prompt."""
    page = settings.page_size
    least = -(-talk.longest // page) * page
    if settings.capacity is None:
        return min(max(least, talk.total * 6 // 10), LIMITS["capacity"][1])
    if settings.capacity < least:
        raise InputError(
            f"--capacity {settings.capacity} is too small: one conversation of {counted(settings.turns, 'turn')} may "
            f"need {least} tokens. Give at least so many, or fewer --turns"
        )
    return settings.capacity


class Demo:
    """Drives the cache as an engine would, one request at a time, and computes everything once more without it."""

    def __init__(self, cache: Cache, model: ToyModel, talk: Conversations, *, quiet: bool) -> None:
        from ..testing.witness import Witness

        self.cache = cache
        self.model = model
        self.talk = talk
        self.progress = Progress(quiet)
        self.rounds: list[Round] = []
        self._witness: Witness = Witness(cache)
        self._verdict = Verdict()
        self.model.reference(range(64))  # so that the first turn does not pay for torch's start

    def round(self, turn: int) -> Round:
        """One turn of every conversation."""
        told = Round(turn + 1)
        evicted = self._evicted()
        order = self.talk.order()
        for done, number in enumerate(order):
            self.progress.show(f"turn {turn + 1} of {self.talk.turns}, conversation {done + 1} of {len(order)}")
            prompt = self.talk.ask(number, turn)
            self.talk.answered(number, self._request(prompt, told))
        self.progress.clear()
        told.evicted_pages = self._evicted() - evicted
        self.rounds.append(told)
        return told

    def _request(self, prompt: list[int], told: Round) -> list[int]:
        """One request: prefill and a short answer, in both ways. The answer."""
        model, cache = self.model, self.cache
        started = time.perf_counter()
        with cache.open(prompt, leave=1) as sequence:
            opened = time.perf_counter() - started
            self._witness.restored(sequence)
            started = time.perf_counter()
            logits = model.compute(cache, sequence)
            told.seconds_with += opened + time.perf_counter() - started
            reply, logits = model.decode(cache, sequence, logits, REPLY)
            self._witness.live(sequence)
            ready = sequence.ready
        stores = model.plain()
        started = time.perf_counter()
        plain = model.forward(prompt, 0, stores)
        told.seconds_without += time.perf_counter() - started
        self._verdict.see(logits[: len(prompt) - ready], plain[ready:])
        for at, token in enumerate(reply[:-1], len(prompt)):
            self._verdict.see(logits[at - ready : at - ready + 1], model.forward([token], at, stores))
        told.conversations += 1
        told.prompt_tokens += len(prompt)
        told.hit_tokens += ready
        return reply

    def verdict(self) -> Verdict:
        """What all comparisons come to. Nobody runs any more, so that nobody may hold a page."""
        self.cache.poll()
        components = self.cache.stats().components.values()
        return attrs.evolve(
            self._verdict,
            pages=self._witness.compared,
            wrong_pages=self._witness.wrong,
            held_pages=sum(component.running + component.leased for component in components),
        )

    @property
    def total(self) -> Round:
        """All rounds in one."""
        total = Round(0)
        for told in self.rounds:
            for field in ("conversations", "prompt_tokens", "hit_tokens", "evicted_pages"):
                setattr(total, field, getattr(total, field) + getattr(told, field))
            total.seconds_with += told.seconds_with
            total.seconds_without += told.seconds_without
        return total

    def _evicted(self) -> int:
        return sum(component.evicted for component in self.cache.stats().components.values())


# ---------------------------------------------------------------- telling

HEADER = """
         conver-   prompt      hit   hit   evicted     prefill   prefill
turn     sations   tokens   tokens  rate     pages  with cache   without"""


class Progress:
    """One line that tells how far it is, on a terminal; nothing anywhere else."""

    def __init__(self, quiet: bool) -> None:
        self._on = not quiet and sys.stderr.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        if self._on:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compared(seconds_with: float, seconds_without: float) -> str:
    """How the time with the cache compares to that without."""
    return f"{seconds_without / seconds_with:.1f} times as fast" if seconds_without >= seconds_with else "slower"


def _introduction(settings: Settings, cache: Cache, talk: Conversations) -> str:
    parts = "; ".join(
        f"{part.name} ({part.origin}), {counted(part.capacity, 'page')} of {counted(part.page_tokens, 'token')}"
        for part in cache.composition.parts
    )
    return (
        f"Conversations: {settings.conversations}, of {counted(settings.turns, 'turn')}, with one system prompt.\n"
        f"Tokens: about {talk.total:,} different ones; each turn sends its history again.\n"
        f"Model: {counted(len(LAYERS), 'layer')} ({', '.join(dict.fromkeys(LAYERS))}) in float64, random weights, "
        f"one thread.\n"
        f"Cache: {parts}."
    )


def _row(told: Round, name: str = "") -> str:
    return (
        f"{name or told.number:<5}{told.conversations:>11}{told.prompt_tokens:>9,}{told.hit_tokens:>9,}"
        f"{told.hit_rate:>6.0%}{told.evicted_pages:>10,}{told.seconds_with:>10.2f} s{told.seconds_without:>8.2f} s"
    )


def _closing(settings: Settings, demo: Demo, verdict: Verdict) -> str:
    total = demo.total
    held = "no page is held by anybody"
    if verdict.held_pages:
        held = f"{counted(verdict.held_pages, 'page')} {'is' if verdict.held_pages == 1 else 'are'} still held"
    return (
        f"{_row(total, 'all')}\n\n"
        f"with the cache = without it:  {verdict.logits} (largest difference {verdict.difference:.1e} over the logits "
        f"of {counted(verdict.rows, 'token')})\n"
        f"restored = live:              {verdict.content} ({counted(verdict.pages, 'page')}, {verdict.wrong_pages} "
        f"wrong)\n"
        f"after the last turn:          {held}\n"
        f"prefill:                      {total.seconds_with:.2f} s with the cache, {total.seconds_without:.2f} s "
        f"without: {compared(total.seconds_with, total.seconds_without)}\n"
        f"verdict:                      {verdict.word}{_remedy(settings, verdict)}"
    )


def _remedy(settings: Settings, verdict: Verdict) -> str:
    """What to try where nothing was restored."""
    from ..testing.conversations import SYSTEM

    if verdict.pages or not verdict.passed:
        return ""
    return ": try a smaller --page-size, or more --turns" if settings.page_size > SYSTEM else ": try more --turns"


def _as_json(settings: Settings, cache: Cache, demo: Demo, verdict: Verdict) -> str:
    total = demo.total
    asked = attrs.asdict(settings) | {
        "capacity": {part.name: part.capacity * part.page_tokens for part in cache.composition.parts}
    }
    rounds = [attrs.asdict(told) | {"hit_rate": told.hit_rate} for told in demo.rounds]
    difference = verdict.difference if math.isfinite(verdict.difference) else None
    judged = attrs.asdict(verdict) | {
        "difference": difference, "logits": verdict.logits, "content": verdict.content, "passed": verdict.passed,
    }  # fmt: skip
    speedup = total.seconds_without / total.seconds_with
    told = {"prefixloom": version(), "settings": asked, "rounds": rounds, "speedup": speedup, "verdict": judged}
    return json.dumps(told, indent=2)
