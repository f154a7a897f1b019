"""Composing for the lab: a cache that keeps books only, and a replay over it in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..cache.cache import Cache
from ..compose.entry import Capacity, compose
from ..compose.registry import Registry, default_registry
from ..compose.sizing import Traffic
from ..contract.admission import AdmissionPolicy
from ..contract.manifest import TierManifest
from ..contract.policy import EvictionPolicy
from ..errors import CompositionError
from .outcome import ReplayOutcome
from .replay import CHUNK, CLOSELY, Outputs, Replay
from .requests import LabRequest
from .service import Service


def cache_for(
    model: object,
    *,
    memory: int | str | None = None,
    capacity: Capacity | None = None,
    page_size: int | None = None,
    policy: str | EvictionPolicy = "lru",
    admission: str | AdmissionPolicy = "all",
    host: int | str | None = None,
    traffic: Traffic | None = None,
    max_running: int | None = None,
    debug: bool | None = None,
    plugins: Iterable[object] = (),
) -> Cache:
    """A cache for a model whose pools have no bytes. The arguments are those of ``compose``.

    ``host``  the memory of a tier below the device, which an installed plugin gives
    """
    tier = [] if host is None else [lower_tier(host)]
    return compose(
        model, page_size=page_size, capacity=capacity, memory=memory, traffic=traffic, max_running=max_running,
        device="meta", policy=policy, admission=admission, debug=debug, plugins=[*plugins, *tier],
    )  # fmt: skip


def lower_tier(memory: int | str, registry: Registry | None = None) -> Any:
    """A tier below the device of so much memory, made by the installed plugin that offers one."""
    registry = default_registry() if registry is None else registry
    offers = [each for each in registry.offers() if each.offer == "component" and each.status == "ok"]
    for offer in offers:
        kind = registry.component(offer.name)
        if kind.layer_kinds:
            continue
        try:
            made = kind.make(name="host", memory=memory)
        except TypeError:  # it is no tier: it takes no memory
            continue
        if isinstance(getattr(made, "manifest", None), TierManifest):
            return made
    raise CompositionError(
        f"no installed plugin offers a tier below the device. Installed: {', '.join(each.name for each in offers)}"
    )


def replay(
    trace: Iterable[LabRequest],
    model: object,
    *,
    service: Service | None = None,
    chunk: int = CHUNK,
    outputs: Outputs = "running",
    closely: int = CLOSELY,
    told: Callable[[int, float], None] | None = None,
    **composition: Any,
) -> ReplayOutcome:
    """Compose a cache for ``model`` (``cache_for`` has the options), and serve a trace with it (``Replay`` has these).

    A pool of states has at least room for what the service runs at once.
    """
    if service is not None:
        composition.setdefault("max_running", service.max_running)
    cache = cache_for(model, **composition)
    name = getattr(trace, "name", "trace")
    driver = Replay(cache, service=service, chunk=chunk, outputs=outputs, closely=closely, told=told, trace=str(name))
    return driver.run(trace)


def parse_capacity(text: str) -> int | Mapping[str, int]:
    """A capacity as a command line has it: "1000000", or "NAME=1000000,NAME=200"."""
    try:
        if "=" not in text:
            return int(text.replace("_", ""))
        pairs = [each.partition("=") for each in text.split(",")]
        return {name.strip(): int(value.replace("_", "")) for name, _, value in pairs}
    except ValueError:
        raise CompositionError(
            f"a capacity is a number of tokens, or NAME=NUMBER for each component, with commas; got {text!r}"
        ) from None
