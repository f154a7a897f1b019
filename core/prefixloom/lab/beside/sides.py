"""Beside: the same trace through peers' real managers, at the same bytes for the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...contract.composition import Composition
from ...contract.manifest import parse_memory
from ...errors import InputError
from ..outcome import ReplayOutcome
from ..setup import Setup, Trace
from .peer import MemoryKind, PeerCache, find_peer, memory_kinds
from .peer_replay import PeerReplay

LONGEST = 1 << 18
"""The tokens of the longest request that peers are started for."""


def check_beside(setup: Setup, names: Sequence[str] = (), settings: Sequence[str] = ()) -> None:
    """Raise InputError if a peer cannot be had, has no such setting, or cannot serve what this setup asks for.

    It is asked before anything is replayed, so that nobody waits for a refusal.
    """
    asked = {
        "requests one after the other (--in-turn)": setup.service is None,
        "published answers (--outputs published)": setup.outputs != "running",
        "a tier below the device (--host)": setup.host is not None,
    }
    if wrong := [each for each, found in asked.items() if found]:
        raise InputError(f"--beside: the drivers of peers do not know {' and '.join(wrong)}")
    if not names:
        return
    composition = setup.compose().composition
    kinds, memory = memory_kinds(composition), bytes_of(setup, composition)
    for name in names:
        peer = find_peer(name)
        for setting in chosen_settings(peer, kinds, settings):
            if setting not in peer.settings:
                raise InputError(
                    f"--settings {setting!r}: {peer.version()} has the settings {', '.join(map(repr, peer.settings))}"
                )
            peer.check_size(kinds, memory, setting)


def chosen_settings(peer: type[PeerCache], kinds: Sequence[MemoryKind], settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that are asked for, or all that make a difference for the model."""
    return tuple(settings) or peer.settings_of(kinds)


def bytes_of(setup: Setup, composition: Composition) -> int:
    """Return the bytes that every side gets: the budget, or what our pools have."""
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
    settings: Sequence[str] = (),
    told: Callable[[int, float], None] | None = None,
) -> Iterator[ReplayOutcome]:
    """Replay the trace with a peer, once with each setting: those named, or all that make a difference for the model.

    An outcome's policy is the peer's version and the setting. ``told`` is what ``Replay`` tells.
    """
    check_beside(setup)
    assert setup.service is not None
    peer = find_peer(name)
    composition = setup.compose().composition
    kinds, memory = memory_kinds(composition), bytes_of(setup, composition)
    service = setup.service
    for setting in chosen_settings(peer, kinds, settings):
        made = peer(kinds, memory, setting, running=service.max_running, chunk=service.chunk, longest=LONGEST)
        called = f"{peer.version()}, {setting}"
        yield PeerReplay(made, composition, name=called, service=service, told=told, trace=trace.name).run(trace)
