"""Handover: which content of a prompt another engine needs, and copies of it from the pools and into them.

The receiver needs what the components' reaches cover at the end of the prompt, wherever that lies: of a path every
page, of a window the last pages, of a recurrence one state. It also needs what they cover at the last page boundary
before the end, so that it can publish there and the next turn of the conversation hits. It does not need what it has
already. All copies run on the forward streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from prefixloom import Cache

from ..contract.handover import Handover


def pages_needed(cache: Cache, have: int, end: int) -> dict[str, list[int]]:
    """Return by component the numbers of the pages beyond ``have`` tokens that are read when resuming at ``end``."""
    found = {}
    for part in cache.composition.parts:
        size = part.page_tokens
        if size:
            spans = part.reach.needs(end)
            pages = {page for first, last in spans if last > first for page in range(first // size, -(-last // size))}
            found[part.name] = sorted(page for page in pages if page >= have // size)
    return found


def plan_handover(cache: Cache, have: int, start: int, end: int) -> tuple[int, dict[str, list[int]]]:
    """Choose the boundary at which the receiver shall be able to resume beside ``end``, and the pages for both.

    ``start`` is where the pass that reaches ``end`` begins; it overwrites states of earlier positions. The boundary is
    0 in three cases: the receiver has it already; it needs nothing beyond what ``end`` needs; or the component's reach
    is not convex, so that ``end`` needs pages which the boundary does not, and the receiver would have given back their
    slots when it publishes at the boundary.
    """
    pages = pages_needed(cache, have, end)
    boundary = (end - 1) // cache.composition.page * cache.composition.page
    stateful = any(not part.page_tokens for part in cache.composition.parts)
    if boundary <= have or (stateful and start != boundary):
        return 0, pages
    before = pages_needed(cache, have, boundary)
    for part in cache.composition.parts:
        size = part.page_tokens
        if size and not {page for page in pages[part.name] if page < boundary // size} <= {*before[part.name]}:
            return 0, pages
    both = {name: sorted({*mine, *before[name]}) for name, mine in pages.items()}
    return (boundary if stateful or both != pages else 0), both


def copy_states(cache: Cache, tables: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Copy on the stream the running states of the sequence whose table rows are ``tables``."""
    return {
        (part.name, name): buffer[:, tables[part.name][:1].long()][:, 0].clone()
        for part in cache.composition.parts
        if not part.page_tokens
        for name, buffer in cache.pool(part.name).buffers.items()
    }


def copy_content(
    cache: Cache, tables: Mapping[str, Tensor], pages: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], Tensor]:
    """Copy on the stream the running states and these pages of the sequence whose table rows are ``tables``."""
    content = copy_states(cache, tables)
    for part in cache.composition.parts:
        if part.page_tokens:
            at = tables[part.name][list(pages[part.name])].long()
            for name, buffer in cache.pool(part.name).buffers.items():
                content[part.name, name] = buffer[:, at].clone()
    return content


def write_content(cache: Cache, tables: Mapping[str, Tensor], handover: Handover, start: int, end: int) -> None:
    """Write on the stream the pages of [start, end) and the states at ``end`` into the slots of a sequence."""
    states = handover.content if end == handover.end else handover.states
    for part in cache.composition.parts:
        row, size = tables[part.name], part.page_tokens
        if not size:
            for name, buffer in cache.pool(part.name).buffers.items():
                buffer[:, row[0].long()] = states[part.name, name].to(buffer.device)
            continue
        within = range(start // size, -(-end // size))
        wanted = [i for i, page in enumerate(handover.pages[part.name]) if page in within]
        at = row[[handover.pages[part.name][i] for i in wanted]].long()
        for name, buffer in cache.pool(part.name).buffers.items():
            buffer[:, at] = handover.content[part.name, name][:, wanted].to(buffer.device)
