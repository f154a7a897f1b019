"""The adapter of our own cache: what holds of others must hold of ours, in debug mode."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import prefixloom
from prefixloom import Buffer, CapacityError, Component, InputError, Manifest, Path, Point, Window
from prefixloom.testing.foreign.contract import (
    AdaptedComponent,
    ForeignCache,
    NoRoom,
    PassPart,
    PassResult,
    RequestTables,
    StateAccess,
    UnitOwners,
)
from prefixloom.testing.inside import backdoor

NAMES = {"F": "kv", "S": "window", "M": "state"}


class OurRequest:
    """A sequence, and how many tokens its prompt has."""

    def __init__(self, sequence: Any, prompt: int) -> None:
        self.sequence = sequence
        self.prompt = prompt


class OurCache(ForeignCache):
    """prefixloom, one step ahead of the device. Prompts are published chunk by chunk, decoded states at their ends."""

    sets = ("F", "S", "FS", "FM", "SM", "FSM", "M")
    page_sizes = (1, 4)
    ahead = 1

    def __init__(self, device: Any, components: str, page: int, tokens: int, states: int, window: int) -> None:
        self.device, self.page = device, page
        reaches = {"F": Path(), "S": Window(window), "M": Point()}
        number = [Buffer("number", (), "int64")]
        manifests = {"F": Manifest(number), "S": Manifest(number), "M": Manifest(number, checkpoint_every=2 * page)}
        self.cache = prefixloom.compose(
            None,
            plugins=[Component(NAMES[letter], manifests[letter], reaches[letter]) for letter in components],
            page_size=page,
            capacity={NAMES[letter]: states if letter == "M" else tokens for letter in components},
            debug=True,
        )
        self.components = [
            AdaptedComponent(NAMES[each], reaches[each], NAMES[each], 1 if each == "M" else page) for each in components
        ]
        self.pools = {each.name: range(self.cache.pool(each.name).capacity) for each in self.components}
        self._memory = {
            name: (ctypes.c_int64 * buffer.numel()).from_address(buffer.data_ptr())
            for name, buffer in ((each.name, self.cache.pool(each.name).buffers["number"]) for each in self.components)
        }
        self._running: list[OurRequest] = []
        self._making: list[OurRequest] = []

    @classmethod
    def version(cls) -> str:
        return f"prefixloom {importlib.metadata.version('prefixloom')}"

    def begin(self) -> None:
        self.cache.poll()
        self._making = []

    def extend(self, request: OurRequest, count: int) -> None:
        """Reserve tokens up to where a state is worth a checkpoint."""
        sequence = request.sequence
        try:
            sequence.grow(sequence.next_stop(count) - sequence.reserved)
        except (CapacityError, InputError):
            raise NoRoom from None
        self._making.append(request)

    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        try:
            sequence = self.cache.open(list(tokens), namespace=namespace, leave=1)
        except CapacityError:
            raise NoRoom from None
        request = OurRequest(sequence, len(tokens))
        hit = sequence.ready
        try:
            self.extend(request, min(count, len(tokens) - hit))
        except NoRoom:
            sequence.abort()
            raise
        self._running.append(request)
        return request, hit

    def launch(self, forward: Callable[[Sequence[tuple[Any, PassPart]]], None]) -> None:
        making = self._making
        before = [each.sequence.committed for each in making]
        with self.cache.step([each.sequence for each in making]) as step:
            step.run_ops(self.device)
            parts = []
            for request, start in zip(making, before, strict=True):
                sequence = request.sequence
                slots, states = {}, {}
                for component in self.components:
                    pages = sequence.pages(component.name)
                    if component.is_state:
                        states[component.name] = StateAccess(pages[0], ((pages[0], sequence.reserved),))
                    else:
                        slots[component.name] = self._slots(pages, sequence.reserved)
                parts.append((request, PassPart(start, sequence.reserved, slots, states)))
            forward(parts)
        for request in making:
            request.sequence.publish()

    def _slots(self, pages: Sequence[int], count: int) -> list[int]:
        size = self.page
        return [pages[i // size] * size + i % size if pages[i // size] >= 0 else -1 for i in range(count)]

    def commit(self, results: Sequence[PassResult]) -> None:
        self.cache.poll()
        for result in results:
            sequence = result.request.sequence
            if result.sampled is not None:
                sequence.append([result.sampled])
            if result.last:
                self._running.remove(result.request)
                sequence.close()

    def abort(self, request: OurRequest) -> None:
        self._running.remove(request)
        request.sequence.abort()

    retract = abort

    def evict(self, count: int) -> None:
        self.cache.poll()
        self.cache.evict({each.name: -(-count // each.entries) for each in self.components})
        self.cache.poll()

    def tables(self, request: OurRequest) -> RequestTables:
        sequence = request.sequence
        pages = {each.name: sequence.pages(each.name) for each in self.components}
        states = {each.name: pages[each.name][0] for each in self.components if each.is_state}
        for component, _, source in backdoor.fills(sequence):  # a slot that the next step fills first
            states[component] = source
        slots = {name: self._slots(pages[name], sequence.reserved) for name in pages.keys() - states.keys()}
        return RequestTables(slots, states)

    def owners(self) -> dict[str, UnitOwners]:
        found = {}
        for lane in backdoor.lanes(self.cache):
            cells = [backdoor.cell(node, lane) for node in backdoor.nodes(self.cache, dropped=True)]
            cached = [slot for cell in cells if cell is not None for slot in lane.slots_of(cell)]
            running = {each: lane.own_slots(backdoor.holding(each.sequence, lane.name)) for each in self._running}
            found[lane.name] = UnitOwners(list(self.cache.pool(lane.name).free_ids()), cached, running)
        return found

    def read(self, component: str, slot: int) -> int:
        return self._memory[component][slot]

    def write(self, component: str, slot: int, number: int) -> None:
        self._memory[component][slot] = number
