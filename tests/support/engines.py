"""What tests of the engine share: small caches over ``ThreeWay``, answers without a cache, and what must be left."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache as remembered
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import BrokenError, Cache, compose
from prefixloom_engine import Batch, Engine, Model, Request, Span, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from prefixloom_engine.disaggregation.transport import Transport
from prefixloom_engine.threeway import SIZES
from tests.support.planned_steps import watched

CAPACITY = {"full": 1200, "swa": 900, "mamba": 28}
AMPLE = {"full": 4096, "swa": 4096, "mamba": 64}


@remembered
def model(dtype: str = "float64", *, mixing: float = 1.0, device: str = "cpu") -> ThreeWay:
    return ThreeWay(attrs.evolve(SIZES["tiny"], mixing=mixing), dtype=dtype, device=device)


def cache_for(it: ThreeWay, capacity: Mapping[str, int] = AMPLE, **options: Any) -> Cache:
    return compose(it.config, capacity=capacity, **{"max_rewind": 4, "debug": True, "device": it.device, **options})


def untracked(it: ThreeWay) -> Cache:
    """A cache whose states keep no checkpoints while a request decodes, so that the engine publishes them."""
    config = it.config
    specs = [
        attrs.evolve(spec, options={**spec.options, "checkpoint_every": 0}) if spec.kind == "mamba" else spec
        for spec in config.components
    ]
    return compose(attrs.evolve(config, components=specs), capacity=AMPLE, max_rewind=4, debug=True)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SIZES["tiny"].vocabulary) for _ in range(length)]


SYSTEM = prompt(0, 150)


def mixed(count: int, seed: int = 1, **more: Any) -> list[Request]:
    """Requests of which every second has the same beginning."""
    rng = random.Random(seed)
    return [
        Request(
            (SYSTEM if i % 2 else []) + prompt(seed * 1000 + i, rng.randrange(1, 200)), rng.randrange(1, 40), **more
        )
        for i in range(count)
    ]


def plain(it: ThreeWay, requests: Sequence[Request]) -> list[list[int]]:
    """The answers without a cache: each from a cold one of its own, nothing guessed, nothing ahead."""
    bare = {"speculate": 0, "label": "", "priority": 0, "namespace": "", "tenant": ""}
    return [list(_plain(it, attrs.evolve(each, **bare))) for each in requests]


@remembered
def _plain(it: ThreeWay, request: Request) -> tuple[int, ...]:
    cache = cache_for(it, {"full": 2048, "swa": 2048, "mamba": 10}, debug=False)
    with Engine(it, cache, overlap=False, chunk=2048) as engine:
        (answer,) = engine.generate([request])
    return tuple(answer.tokens)


def served(it: ThreeWay, requests: Sequence[Request], cache: Cache, **options: Any) -> tuple[list[list[int]], Engine]:
    with watched(Engine(it, cache, **{"chunk": 256, **options})) as engine:
        answers = engine.generate(requests)
    nothing_left(cache)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.tokens for answer in answers], engine


class Known:
    """Guesses from the right answers, some of them made wrong."""

    def __init__(self, requests: Sequence[Request], answers: Sequence[list[int]], wrong: float) -> None:
        self.texts = [[*r.tokens, *answer] for r, answer in zip(requests, answers, strict=True)]
        self.wrong, self.rng = wrong, random.Random(1)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        for text in self.texts:
            if text[: len(tokens)] == list(tokens):
                ahead = text[len(tokens) : len(tokens) + most]
                return [(t + 1) % 512 if self.rng.random() < self.wrong else t for t in ahead]
        return []


def computed_once(requests: Sequence[Request], page: int) -> int:
    """How many tokens of these prompts are computed if no page that prompts share is computed twice.

    No prompt may end on a boundary: of such a one at least the last token is computed, with its page.
    """
    pages: set[tuple[str, tuple[int, ...]]] = set()
    for each in requests:
        assert len(each.tokens) % page
        pages |= {(each.namespace, tuple(each.tokens[:end])) for end in range(page, len(each.tokens), page)}
    return page * len(pages) + sum(len(each.tokens) % page for each in requests)


def nothing_left(cache: Cache) -> None:
    """Nobody runs, so that nobody holds a page; and nothing was found that had been dropped. A broken cache may have
    anything left."""
    try:
        cache.poll()
    except BrokenError:
        return
    stats = cache.stats()
    held = {name: part.running + part.leased for name, part in stats.components.items()}
    assert (stats.sequences, stats.in_flight, stats.recovered) == (0, 0, 0), str(stats)
    assert not any(held.values()), str(stats)


def forward(it: ThreeWay, cache: Cache, sequence: Any, ends: Sequence[int], singles: bool = False) -> Tensor:
    """Compute a sequence up to each of ``ends``; the logits of all tokens that were not cached."""
    runner, out, tokens = it.bind(cache), [], sequence.tokens.tolist()
    for end in ends:
        start = sequence.committed
        if end <= start:
            continue
        sequence.grow(end - sequence.reserved)
        with cache.step([sequence]) as step:
            step.run_ops()
            parts = cache.composition.parts
            tables = {part.name: step.table(part.name) for part in parts}
            rewinds = {part.name: step.rewind_table(part.name) for part in parts if not part.page_tokens and singles}
            ids = torch.tensor([tokens[start:end]], device=it.device)
            out.append(runner.forward(Batch(ids, [Span(start, end)], tables, rewinds, end - start))[0])
    return torch.cat(out)


# ---------------------------------------------------------------- two processes


@contextmanager
def serving(
    make: Callable[[], Cache], it: Model | None = None, over: str | Transport = "tcp://127.0.0.1:0", **options: Any
) -> Iterator[PrefillServer]:
    """A server in a thread of its own, which made the cache that it drives; nothing is left of it in the end."""
    made: list[PrefillServer] = []
    failed: list[BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            made.append(PrefillServer(Engine(it or model(), make(), chunk=128), over, **options))
            ready.set()
            made[0].run()
            nothing_left(made[0].engine.cache)
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield made[0]
    finally:
        made[0].stop()
        thread.join(timeout=60)
    assert not failed, failed


def decoding(cache: Cache, server: PrefillServer, it: Model | None = None, **options: Any) -> DecodeEngine:
    return connected(Engine(it or model(), cache, chunk=128, **options), server.address)


def connected(engine: Engine, over: str | Transport, **options: Any) -> DecodeEngine:
    """A decode engine that the prefill process has greeted."""
    decode = DecodeEngine(engine, over, **options)
    try:
        assert decode.connect(30), "no prefill process has greeted"
    except BaseException:
        decode.close()
        raise
    return decode
