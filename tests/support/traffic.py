"""Random requests of a toy model, a few at a time, through a small cache; every logit, page and state is checked.

Restored against live is compared bitwise, by the witness; cached against uncached within ``TOLERANCE``, since which
rows go together depends on what hit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache as once
from importlib.metadata import EntryPoint
from typing import Any

import attrs
import torch
from torch import Tensor

import prefixloom
from prefixloom import CapacityError, Profile, ProtocolError
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.compose.profiles import resolve_profile
from prefixloom.compose.registry import Registry
from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import ToyModel, composition

TOLERANCE = 1e-10
REGISTRY = Registry(
    [EntryPoint(kind, f"prefixloom_{kind}.plugin", "prefixloom") for kind in ("full", "swa", "mamba")]
)  # prefixloom's own, wherever it is run from
VOCABULARY = 97
LONGEST = 88
NO_ROWS = torch.empty(0, VOCABULARY, dtype=torch.float64)


def profile_of(config: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> Profile:
    """Return the profile of a model config, with further options of its components by name."""
    profile = resolve_profile(config, REGISTRY)
    assert set(changes) <= {spec.name for spec in profile.components}, changes
    specs = [attrs.evolve(spec, options={**spec.options, **changes.get(spec.name, {})}) for spec in profile.components]
    return attrs.evolve(profile, components=tuple(specs), warnings=())


def composed(
    config: Mapping[str, Any],
    page: int,
    *,
    tokens: int = 512,
    slots: int = 24,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    more: Mapping[str, int] | None = None,
    **options: Any,
) -> Cache:
    """Return the cache of a model config: so many tokens of each component of pages, so many states."""
    profile = profile_of(config, changes or {})
    rough = prefixloom.compose(profile, page_size=page, capacity=4096, registry=REGISTRY, device="meta")
    capacity = {part.name: tokens if part.page_tokens else slots for part in rough.composition.parts} | dict(more or {})
    return prefixloom.compose(
        profile, page_size=page, registry=REGISTRY, **{"capacity": capacity, "debug": True, **options}
    )


@once
def model_of(name: str) -> ToyModel:
    return ToyModel(composition(name))


def prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


class Traffic:
    """``counts`` tells what was met: a property that meets no split, hit or rewind proves nothing."""

    def __init__(self, cache: Cache, model: ToyModel, seed: object, *, rewind: int = 0) -> None:
        self.rng = random.Random(str(seed))
        self.cache = cache
        self.model = model
        self.rewind_depth = rewind
        self.witness = Witness(cache)
        self.live: list[Sequence] = []
        self.rows: dict[Sequence, list[Tensor]] = {}
        self.known: dict[str, list[list[int]]] = {"": [[]], "lora-7": [[]]}
        self.counts = dict.fromkeys(("hit", "split", "rewound", "refused", "computed", "evicted", "compared"), 0)

    def run(self, steps: int) -> None:
        actions = (self.compute, self.compute, self.compute, self.decode, self.publish, self.rewind)
        for _ in range(steps):
            if len(self.live) < 3:
                self.open()
            if self.live:
                self.rng.choice(actions)(self.rng.choice(self.live))
            if self.live and self.rng.random() < 0.3:
                self.end(self.rng.choice(self.live))
            if self.rng.random() < 0.1:
                self.evict_one()
            if self.live and self.rng.random() < 0.04:
                self.fail(self.rng.choice(self.live))
            if self.rng.random() < 0.02:
                self.known["lora-7"] = [[]]
                self.cache.drop_namespace("lora-7")
        while self.live:
            self.end(self.live[0])

    # ------------------------------------------------------------ requests
    def open(self) -> None:
        namespace = self.rng.choice(("", "", "lora-7"))
        known = self.known[namespace]
        base = self.rng.choice(known[-4:])
        kept = self.rng.choice((len(base), len(base), self.rng.randrange(len(base) + 1)))
        if self.rng.random() < 0.3:
            kept = kept // self.cache.composition.page * self.cache.composition.page
        tokens = base[:kept][: LONGEST - 24] + prompt(self.rng, self.rng.randrange(1, 24))
        if self.live and self.rng.random() < 0.25:
            twin = self.rng.choice(self.live)
            namespace, tokens = twin.namespace, twin.tokens.tolist()
        nodes = self.cache.stats().nodes
        try:
            sequence = self.cache.open(tokens, namespace=namespace, leave=1)
        except CapacityError:
            self.counts["refused"] += 1
            return
        self.live.append(sequence)
        self.rows[sequence] = []
        self.counts["hit"] += sequence.ready > 0
        self.counts["split"] += self.cache.stats().nodes > nodes
        self.opened(sequence)
        self.same(sequence)
        if self.rng.random() < 0.5:
            with self.cache.step([sequence]) as step:  # no tokens, but the copies of its states
                step.run_ops()
            self.same(sequence)

    def opened(self, sequence: Sequence) -> None:
        """Note a sequence that was just opened."""

    def same(self, sequence: Sequence) -> None:
        assert self.witness.restored(sequence) == 0, "what was restored is nothing that a live sequence had"

    def compute(self, sequence: Sequence, upto: int | None = None) -> bool:
        """A chunk of what is named; a state can be published where a step ends. A request without room is given up."""
        if upto is None:
            upto = min(sequence.named, sequence.committed + self.rng.randrange(1, 40))
        page = self.cache.composition.page
        chunk = self.rng.choice((3, page, 2 * page, 48 // page * page))
        try:
            while sequence.committed < upto:
                end = min(upto, sequence.committed // chunk * chunk + chunk)
                self.rows[sequence].append(self.model.compute(self.cache, sequence, upto=end))
                self.witness.live(sequence)
                if sequence.committed % page == 0 and self.rng.random() < 0.2:
                    self.publish(sequence)
        except CapacityError:
            self.counts["refused"] += 1
            self.check(sequence)
            self.live.remove(sequence)
            sequence.abort()
            return False
        return True

    def fail(self, sequence: Sequence) -> None:
        """Run a step whose layers write half of what they should, and raise; what was committed before is published."""
        if sequence.named == sequence.reserved:  # layers without a token write nothing
            self.name(sequence, prompt(self.rng, 2))
        try:
            sequence.grow(min(4, sequence.named - sequence.reserved))
            with self.cache.step([sequence]) as step:
                step.run_ops()
                for part in self.cache.composition.parts:
                    if not part.page_tokens:
                        for buffer in self.cache.pool(part.name).buffers.values():
                            buffer[:, sequence.pages(part.name)[0]] = 0.25
                raise ArithmeticError
        except (CapacityError, ArithmeticError):
            self.check(sequence)
            self.live.remove(sequence)
            sequence.close()

    def name(self, sequence: Sequence, tokens: list[int]) -> None:
        self.model.append(self.cache, sequence, tokens)

    def decode(self, sequence: Sequence) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            if not self.compute(sequence, sequence.named) or sequence.named >= LONGEST:
                return
            rows = torch.cat([NO_ROWS, *self.rows[sequence]])
            self.name(sequence, [int(rows[-1].argmax()) if len(rows) else self.rng.randrange(VOCABULARY)])

    def publish(self, sequence: Sequence) -> None:
        nodes = self.cache.stats().nodes
        sequence.publish()
        self.counts["split"] += self.cache.stats().nodes > nodes + 1  # a leaf, and the upper half
        self.same(sequence)

    def rewind(self, sequence: Sequence) -> None:
        """Rewind after a step of a few tokens, as a speculation would."""
        if self.rewind_depth and sequence.named < LONGEST and self.compute(sequence, sequence.named):
            self.name(sequence, prompt(self.rng, self.rng.randrange(1, self.rewind_depth + 2)))
            try:
                self.rows[sequence].append(self.model.compute(self.cache, sequence))
                self.witness.live(sequence)
            except CapacityError:
                self.counts["refused"] += 1
        room = min(self.rng.randrange(1, 40), sequence.reserved - sequence.published)
        for count in (room, min(room, self.rewind_depth)):
            try:
                sequence.rewind(count)
            except ProtocolError:
                continue
            self.counts["rewound"] += count > 0
            break
        else:
            return
        rows = torch.cat([NO_ROWS, *self.rows[sequence]])
        self.rows[sequence] = [rows[: sequence.committed - sequence.ready]]
        self.name(sequence, prompt(self.rng, self.rng.randrange(0, 6)))

    def evict_one(self) -> None:
        """Evict from one component alone, at times all that it can."""
        part = self.rng.choice(self.cache.composition.parts)
        count = self.rng.choice((1, 1, 2, 2, 5, 5, part.capacity))
        self.counts["evicted"] += self.cache.evict({part.name: count})[part.name]

    def end(self, sequence: Sequence) -> None:
        self.check(sequence)
        self.known[sequence.namespace].append(sequence.tokens.tolist())
        self.live.remove(sequence)
        if self.rng.random() < 0.8:
            self.publish(sequence)
            sequence.close()
        else:
            sequence.abort()

    def check(self, sequence: Sequence) -> None:
        """Compare all that was computed for a sequence with the same without a cache."""
        got = torch.cat([NO_ROWS, *self.rows.pop(sequence)])
        if len(got):
            expected = self.model.reference(sequence.tokens.tolist()[: sequence.ready + len(got)])
            assert distance(got, expected[sequence.ready :]) < TOLERANCE
            self.counts["computed"] += len(got)
