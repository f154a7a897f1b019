"""Records: the content of a handover in the format of the stores, and the check of what another process sent.

A record is a run of pages of one component, or a state. Its header has a key, which follows from the prompt with its
namespace, the component, the span and the fingerprint (identity and layout), and a checksum of the payload. The
receiver computes the keys that it expects. So it refuses content of other weights, layouts and prompts, and damage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, Identity, InputError, PageChain, encode
from prefixloom.storage import (
    HEADER_BYTES,
    Algorithm,
    Checksum,
    Flaw,
    Key,
    Record,
    RecordHeader,
    decode_header,
    encode_header,
    key,
)

from ..contract.handover import Handover
from ..forward.handover import pages_needed

RUN_BYTES = 16 << 20
"""The payload of a record of pages, unless a single page is larger."""
LAYOUT = "record"
"""Of a payload: page by page, and in it buffer by buffer, those with wider elements first, as a store's records."""


@attrs.frozen
class ContentRun:
    """A record of a handover: ``count`` pages of a component, from token ``start`` to ``end``.

    Of a state both are the position to which it belongs, and ``count`` is 1. ``size``: bytes of the payload
    """

    component: str
    start: int
    end: int
    count: int
    size: int


def buffers_of(cache: Cache, component: str) -> list[tuple[str, Tensor, int]]:
    """Return by name the buffers of a component in the order of a payload, and the bytes of one slot."""
    found = cache.pool(component).buffers.items()
    ordered = sorted(found, key=lambda item: -item[1].element_size())
    return [(name, buffer, buffer[:, 0].numel() * buffer.element_size()) for name, buffer in ordered]


def pages_for(cache: Cache, have: int, boundary: int, end: int) -> dict[str, list[int]]:
    """Return by component the pages of a handover."""
    pages = pages_needed(cache, have, end)
    if not boundary:
        return pages
    before = pages_needed(cache, have, boundary)
    return {name: sorted({*mine, *before[name]}) for name, mine in pages.items()}


def content_size(cache: Cache, have: int, end: int) -> int:
    """Return at most how many bytes a prompt of ``end`` tokens needs if ``have`` of its tokens are there."""
    last = (end - 1) // cache.composition.page * cache.composition.page
    boundary = last if last > have else 0
    return sum(run.size for run in content_runs(cache, pages_for(cache, have, boundary, end), boundary, end))


def content_runs(cache: Cache, pages: Mapping[str, Sequence[int]], boundary: int, end: int) -> list[ContentRun]:
    """Return the records of a handover in order: by component, and of a state first the one at the end."""
    found = []
    for part in cache.composition.parts:
        slot = sum(size for _, _, size in buffers_of(cache, part.name))
        if not slot:
            continue
        if not part.page_tokens:
            found += [ContentRun(part.name, at, at, 1, slot) for at in (end, boundary) if at]
            continue
        most, run = max(RUN_BYTES // slot, 1), list[int]()
        for page in pages[part.name]:
            if run and (page != run[-1] + 1 or len(run) == most):
                found.append(_of_pages(part.name, run, part.page_tokens, end, slot))
                run = []
            run.append(page)
        if run:
            found.append(_of_pages(part.name, run, part.page_tokens, end, slot))
    return found


def _of_pages(component: str, run: Sequence[int], page_tokens: int, end: int, slot: int) -> ContentRun:
    upto = min((run[-1] + 1) * page_tokens, end)
    return ContentRun(component, run[0] * page_tokens, upto, len(run), len(run) * slot)


@attrs.frozen
class ContentKeys:
    """The keys of the records of one prompt, computed by a model of one identity."""

    cache: Cache
    identity: Identity
    namespace: str
    tokens: Sequence[int]

    def of(self, runs: Sequence[ContentRun]) -> list[Key]:
        told = encode(list(self.tokens))
        chain = PageChain(told.count)  # all tokens are one page
        (link,) = chain.pages(told, chain.root(self.identity.namespace(self.namespace)))
        names = {run.component for run in runs}
        fingerprints = {name: self.cache.fingerprint(name, self.identity) for name in names}
        return [key(link, run.component, run.start, run.end, fingerprints[run.component]) for run in runs]


# ---------------------------------------------------------------- sending


def pack_content(handover: Handover, keys: ContentKeys, content: memoryview, algorithm: Algorithm) -> bytes:
    """Write the payloads of all records one behind the other, and return the headers.

    ``content``    memory of ``handover.size`` bytes
    ``algorithm``  of the payloads' checksums
    """
    cache = keys.cache
    runs = content_runs(cache, handover.pages, handover.boundary, handover.end)
    at = 0
    for part in cache.composition.parts:
        buffers = buffers_of(cache, part.name)
        slot = sum(size for _, _, size in buffers)
        kinds = [handover.content] if part.page_tokens or not handover.boundary else [handover.content, handover.states]
        for kind in kinds:
            count = len(handover.pages[part.name]) if part.page_tokens else 1
            if not slot or not count:
                continue
            rows = torch.frombuffer(content, dtype=torch.uint8, count=count * slot, offset=at).view(count, slot)
            first = 0
            for name, _, size in buffers:
                given = kind[part.name, name]
                by_slot = given.movedim(1, 0) if part.page_tokens else given[None]
                rows[:, first : first + size] = by_slot.reshape(count, -1).contiguous().view(torch.uint8).cpu()
                first += size
            at += count * slot
    headers, at = [], 0
    for run, each in zip(runs, keys.of(runs), strict=True):
        payload = content[at : at + run.size]
        checksum = Checksum.of(payload, algorithm)
        record = Record(each, run.component, run.start, run.end, LAYOUT, payload, checksum)
        headers.append(encode_header(record))
        at += run.size
    return b"".join(headers)


# ---------------------------------------------------------------- receiving


@attrs.frozen
class ExpectedContent:
    """The records of an answer whose headers came and are those that this side expects."""

    cache: Cache
    boundary: int
    pages: Mapping[str, Sequence[int]]
    runs: Sequence[ContentRun]
    keys: Sequence[Key]
    headers: Sequence[RecordHeader]

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        return sum(run.size for run in self.runs)

    def check(self, content: memoryview) -> None:
        """Raise InputError unless every payload is what the other side wrote."""
        if len(content) != self.size:
            raise InputError(f"the content has {len(content)} of {self.size} bytes")
        at = 0
        for run, each, header in zip(self.runs, self.keys, self.headers, strict=True):
            record = header.record(each, content[at : at + run.size])
            if isinstance(record, Flaw):
                raise InputError(f"{run.component} [{run.start}, {run.end}): {record.detail}")
            at += run.size

    def unpack(self, content: memoryview) -> tuple[dict[tuple[str, str], Tensor], dict[tuple[str, str], Tensor]]:
        """Return copies of checked content as the ``content`` and the ``states`` of a ``Handover``."""
        at, found, states = 0, dict[tuple[str, str], Tensor](), dict[tuple[str, str], Tensor]()
        for part in self.cache.composition.parts:
            buffers = buffers_of(self.cache, part.name)
            slot = sum(size for _, _, size in buffers)
            kinds = [found] if part.page_tokens or not self.boundary else [found, states]
            for kind in kinds:
                count = len(self.pages[part.name]) if part.page_tokens else 1
                rows = _tensor_of(content[at : at + count * slot]).view(count, slot)
                first = 0
                for name, buffer, size in buffers:
                    layers, _, *shape = buffer.shape
                    mine = rows[:, first : first + size].clone(memory_format=torch.contiguous_format)
                    tensor = mine.view(-1).view(buffer.dtype).view(count, layers, *shape)
                    kind[part.name, name] = tensor.movedim(0, 1) if part.page_tokens else tensor[0]
                    first += size
                at += count * slot
        return found, states


def _tensor_of(view: memoryview) -> Tensor:
    """Return the bytes of a view as a tensor, which must not be written."""
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def expect_content(data: memoryview, have: int, boundary: int, end: int, keys: ContentKeys) -> ExpectedContent:
    """Read the headers of an answer's records. InputError: this side needs other records."""
    pages = pages_for(keys.cache, have, boundary, end)
    runs = content_runs(keys.cache, pages, boundary, end)
    if len(data) != len(runs) * HEADER_BYTES:
        raise InputError(f"{len(data)} bytes of headers came for {len(runs)} records")
    expected, headers = keys.of(runs), []
    for i, (run, wanted) in enumerate(zip(runs, expected, strict=True)):
        header = decode_header(data[i * HEADER_BYTES : (i + 1) * HEADER_BYTES])
        if isinstance(header, Flaw):
            raise InputError(f"the header of record {i}: {header.detail}")
        told = header.component, header.start, header.end, header.layout, header.size
        if told != (run.component, run.start, run.end, LAYOUT, run.size):
            raise InputError(f"record {i} is {told}, and {run} is needed")
        if header.fingerprint + header.content != wanted.address:
            raise InputError(f"record {i} is of another prompt, of other weights or of another layout")
        headers.append(header)
    return ExpectedContent(keys.cache, boundary, pages, runs, expected, headers)
