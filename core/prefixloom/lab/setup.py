"""Setup: which cache a replay composes, and how it is driven. Plain data, so that another process can make the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

import attrs

from ..cache.cache import Cache
from ..compose.entry import compose
from ..compose.profiles import resolve_profile
from ..compose.registry import default_registry
from ..compose.sizing import Traffic
from ..contract.manifest import TierManifest
from ..contract.values import ComponentSpec, ComponentType
from ..errors import CompositionError
from .outcome import ReplayOutcome
from .replay import CHUNK, CLOSELY, Outputs, Replay
from .service import Service
from .traces.reading import RequestFile
from .traces.synthetic import SyntheticTrace

Trace = RequestFile | SyntheticTrace
Outcome = TypeVar("Outcome")


@attrs.frozen
class Setup:
    """A cache on the device "meta", and how a trace is replayed through it.

    ``model``, ``page_size``, ``capacity``, ``memory``, ``traffic``, ``policy``, ``admission``  as in ``compose``
    ``host``      memory of a host tier below, as a number of bytes or a text such as "40GiB"; None: there is none
    ``options``   by component: options that it is made with beside those that follow from the model
    ``service``   how requests overlap in time; None: one after the other, in steps of ``chunk`` tokens
    ``outputs``, ``closely``  what becomes of answers, and how many requests are looked at closely, as in ``Replay``
    ``debug``     check everything after every operation
    ``name``      how the outcome is called among others; empty: by its policy
    """

    model: Any
    page_size: int | None = None
    capacity: int | Mapping[str, int] | None = None
    memory: int | str | None = None
    traffic: Traffic | None = None
    policy: str = "lru"
    admission: str = "all"
    host: int | str | None = None
    options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    service: Service | None = attrs.field(factory=Service)
    chunk: int = CHUNK
    outputs: Outputs = "running"
    closely: int = CLOSELY
    name: str = ""
    debug: bool | None = None

    def compose(self) -> Cache:
        """Make the cache. A CompositionError says what does not fit together."""
        running = None if self.service is None or self.traffic is not None else self.service.max_running
        return compose(
            self._profile(), page_size=self.page_size, capacity=self.capacity, memory=self.memory,
            traffic=self.traffic, policy=self.policy, admission=self.admission, device="meta", debug=self.debug,
            plugins=self._tiers(), max_running=running,
        )  # fmt: skip

    def replay(self, trace: Trace, told: Callable[[int, float], None] | None = None) -> ReplayOutcome:
        """Compose the cache and serve the trace."""
        outcome = self.driver(trace.name, told).run(trace)
        return attrs.evolve(outcome, policy=self.name) if self.name else outcome

    def driver(
        self, trace: str, told: Callable[[int, float], None] | None = None, explain: Collection[int] = ()
    ) -> Replay:
        """Compose the cache, and make what drives it with a trace of this name."""
        return Replay(
            self.compose(), service=self.service, chunk=self.chunk, outputs=self.outputs, closely=self.closely,
            explain=explain, told=told, trace=trace,
        )  # fmt: skip

    def _profile(self) -> object:
        if not self.options:
            return self.model
        profile = resolve_profile(self.model, default_registry())
        known = {spec.name or spec.kind for spec in profile.components}
        if unknown := sorted(set(self.options) - known):
            raise CompositionError(f"options for {', '.join(unknown)}: this model has {', '.join(sorted(known))}")
        return attrs.evolve(profile, components=tuple(self._with_options(spec) for spec in profile.components))

    def _with_options(self, spec: ComponentSpec) -> ComponentSpec:
        more = self.options.get(spec.name or spec.kind, {})
        return attrs.evolve(spec, options={**spec.options, **more})

    def _tiers(self) -> list[object]:
        if self.host is None:
            return []
        return [_tier_below(self.host)]


def _tier_below(memory: int | str) -> object:
    """Return a tier of so much memory, of the installed plugin that has one."""
    registry = default_registry()
    for offer in registry.offers():
        if offer.offer == "component" and offer.status == "ok" and not offer.layer_kinds:
            made = _made(registry.component(offer.name), memory)
            if isinstance(getattr(made, "manifest", None), TierManifest):
                return made
    raise CompositionError(
        "no installed plugin has a tier below the device: install one, or leave out the host's memory"
    )


def _made(kind: ComponentType, memory: int | str) -> object:
    """Return a component of this kind with so much memory; None if it takes none."""
    try:
        return kind.make(memory=memory)
    except TypeError:
        return None


def replay_all(
    setups: Sequence[Setup], trace: Trace, *, jobs: int = 1, told: Callable[[int, ReplayOutcome], None] | None = None
) -> list[ReplayOutcome]:
    """Return the outcomes of all setups on one trace, in their order, in ``jobs`` processes.

    ``told`` is called with the number of each setup and its outcome when it is done.
    """
    return outcomes_of(Setup.replay, [(setup, trace) for setup in setups], jobs=jobs, told=told)


def outcomes_of(
    work: Callable[..., Outcome], asked: Sequence[tuple[Any, ...]], *, jobs: int,
    told: Callable[[int, Outcome], None] | None,
) -> list[Outcome]:  # fmt: skip
    """Return what ``work`` returns for the arguments of each, in their order, in ``jobs`` processes.

    ``told`` is called with the number of each and its outcome when it is done. What it raises ends all.
    """
    outcomes: dict[int, Outcome] = {}

    def done(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        if told is not None:
            told(number, outcome)

    if jobs <= 1 or len(asked) <= 1:
        for number, arguments in enumerate(asked):
            done(number, work(*arguments))
    else:
        with ProcessPoolExecutor(min(jobs, len(asked)), mp_context=get_context("spawn")) as pool:
            running = {pool.submit(work, *arguments): number for number, arguments in enumerate(asked)}
            try:
                for each in as_completed(running):
                    done(running[each], each.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [outcomes[number] for number in range(len(asked))]
