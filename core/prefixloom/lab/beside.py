"""Beside: the same trace through peers' real managers, at the same bytes for the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..contract.composition import Composition
from ..contract.manifest import parse_memory
from ..errors import InputError
from .outcome import ReplayOutcome
from .peer import PeerCache, find_peer, memory_kinds
from .peer_replay import PeerReplay
from .setup import Setup, Trace

LONGEST = 1 << 18
"""The tokens of the longest request that peers are started for."""


def check_beside(setup: Setup) -> None:
    """InputError: the peers' drivers do not know what this setup asks for."""
    asked = {
        "requests one after the other (--in-turn)": setup.service is None,
        "published answers (--outputs published)": setup.outputs != "running",
        "a tier below the device (--host)": setup.host is not None,
    }
    if wrong := [each for each, found in asked.items() if found]:
        raise InputError(f"--beside: the drivers of peers do not know {' and '.join(wrong)}")


def bytes_of(setup: Setup, composition: Composition) -> int:
    """The bytes that every side gets: the budget, or what our pools have."""
    if setup.memory is not None:
        return parse_memory(setup.memory)
    return sum(
        part.capacity * max(1, part.page_tokens) * sum(each.entry_bytes for each in part.manifest.buffers)
        for part in composition.parts
    )


def replay_beside(
    setup: Setup,
    trace: Trace,
    name: str,
    *,
    settings: tuple[str, ...] = (),
    told: Callable[[str, int, float], None] | None = None,
) -> Iterator[ReplayOutcome]:
    """Replay the trace with a peer, once with each setting: those named, or all that matter for the model.

    An outcome's policy is the peer's version and the setting. ``told`` gets that, and what ``Replay`` tells.
    """
    check_beside(setup)
    assert setup.service is not None
    peer = find_peer(name)
    composition = setup.compose().composition
    kinds, memory = memory_kinds(composition), bytes_of(setup, composition)
    for setting in settings or peer.settings_of(kinds):
        service = setup.service
        made = peer(
            kinds, memory, setting, running=service.max_running, chunk=service.chunk, longest=LONGEST
        )  # fmt: skip
        called = label(peer, setting)

        def tell(count: int, now: float, called: str = called) -> None:
            if told is not None:
                told(called, count, now)

        replay = PeerReplay(made, composition, name=called, service=service, told=tell, trace=trace.name)
        yield replay.run(trace)


def label(peer: type[PeerCache], setting: str) -> str:
    """How a side is called in tables."""
    return f"{peer.version()}, {setting}"
