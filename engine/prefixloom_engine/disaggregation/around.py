"""AroundEngine: what an engine that works with other processes leaves to the engine in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixloom import Cache, Figure

from ..contract.model import Model
from ..contract.requests import Answer, Request
from ..serving.engine import Engine
from ..serving.scheduler import Counts


class AroundEngine:
    """Stands around ``engine``, and is driven in its place (``DrivenEngine``). All here is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def cache(self) -> Cache:
        return self.engine.cache

    @property
    def counts(self) -> Counts:
        return self.engine.counts

    @property
    def longest(self) -> int:
        return self.engine.longest

    @property
    def load(self) -> tuple[int, int]:
        return self.engine.load

    @property
    def tokens_ahead(self) -> int:
        return self.engine.tokens_ahead

    @property
    def peers(self) -> Mapping[str, str]:
        return self.engine.peers

    def add(self, request: Request) -> Answer:
        return self.engine.add(request)

    def abort(self, answer: Answer) -> None:
        self.engine.abort(answer)

    def finish(self, answer: Answer) -> None:
        self.engine.finish(answer)

    def namespace(self, name: str) -> str:
        return self.engine.namespace(name)

    def extra_keys(self, tokens: list[int], inputs: Mapping[str, Any]) -> list[tuple[int, int, str]]:
        return self.engine.extra_keys(tokens, inputs)

    def account(self) -> None:
        self.engine.account()

    def figures(self) -> list[Figure]:
        return self.engine.figures()

    def retire(self) -> None:
        self.engine.retire()


def figure_of(name: str, text: str, value: float, *, gauge: bool = False) -> Figure:
    """Make a figure without labels."""
    return Figure(f"prefixloom:prefill_{name}", "gauge" if gauge else "counter", text, (((), float(value)),))
