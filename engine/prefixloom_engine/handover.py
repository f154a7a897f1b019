"""Handing over: what one engine computed of a prompt, for another to go on from.

What is handed over is what the reaches need at the prompt's end, wherever that lies: of a path all, of a window the
tail, of a recurrence one state; and what they need at the last boundary before it, so that the other can publish there
and the next turn hits. All less what the other has already. It is read and written on the forward streams.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, InputError

VERSION = 2


@attrs.frozen(eq=False)
class Handed:
    """``have``: tokens that the receiver said to have; ``border``: where the content ends; ``token``: the one behind.

    ``boundary``: the last one before the border, at which it can be resumed as well; 0: the receiver has that, or has
    no use for it. ``pages``: of each component with pages the numbers (by position) that are there; ``content``: by
    component and buffer, (layers, pages, *entries of a page), for states (layers, *shape); ``states``: the states at
    the boundary.
    """

    have: int
    boundary: int
    border: int
    token: int
    logprob: float
    pages: Mapping[str, Sequence[int]]
    content: Mapping[tuple[str, str], Tensor]
    states: Mapping[tuple[str, str], Tensor]

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(each.numel() * each.element_size() for kind in (self.content, self.states) for each in kind.values())


def needed(cache: Cache, have: int, border: int) -> dict[str, list[int]]:
    """Page numbers, by position, that resuming at ``border`` reads of each component beyond ``have``."""
    found = {}
    for part in cache.composition.parts:
        size = part.page_tokens
        if size:
            spans = part.reach.needs(border)
            pages = {page for start, end in spans if end > start for page in range(start // size, -(-end // size))}
            found[part.name] = sorted(page for page in pages if page >= have // size)
    return found


def outgoing(cache: Cache, have: int, start: int, border: int) -> tuple[int, dict[str, list[int]]]:
    """The boundary at which the receiver can resume as well as at ``border``, and the pages for both.

    ``start``: where the pass to the border begins; states of before are gone. 0: the receiver has that boundary, or it
    needs nothing beside what the border needs, or (of a reach that is not convex) the border needs pages that the
    boundary does not, for which the receiver would have no slots by then.
    """
    pages = needed(cache, have, border)
    boundary = (border - 1) // cache.composition.page * cache.composition.page
    stated = any(not part.page_tokens for part in cache.composition.parts)
    if boundary <= have or (stated and start != boundary):
        return 0, pages
    before = needed(cache, have, boundary)
    for part in cache.composition.parts:
        size = part.page_tokens
        if size and not {page for page in pages[part.name] if page < boundary // size} <= {*before[part.name]}:
            return 0, pages
    both = {name: sorted({*mine, *before[name]}) for name, mine in pages.items()}
    return (boundary if stated or both != pages else 0), both


def check(cache: Cache, handed: Handed, total: int, vocabulary: int) -> None:
    """InputError: nobody who keeps what ``cache`` keeps hands this over of a prompt of ``total`` tokens."""
    numbers = handed.have, handed.boundary, handed.border, handed.token
    if any(type(number) is not int for number in numbers) or type(handed.logprob) not in (int, float):
        raise InputError(f"{numbers} and {handed.logprob!r} are no boundaries, token and probability")
    have, boundary, border, token = numbers
    last = (border - 1) // cache.composition.page * cache.composition.page
    if not 0 <= have < border == total or not 0 <= token < vocabulary or boundary not in (0, last):
        raise InputError(f"[{have}, {border}) with a boundary at {boundary} and token {token} is of no such prompt")
    pages = needed(cache, have, border)
    if boundary:
        before = needed(cache, have, boundary)
        pages = {name: sorted({*mine, *before[name]}) for name, mine in pages.items()}
    if {name: list(mine) for name, mine in handed.pages.items()} != pages:
        raise InputError(f"the pages {dict(handed.pages)} are not those that are needed")
    content, states = {}, {}
    for part in cache.composition.parts:
        for name, buffer in cache.pool(part.name).buffers.items():
            layers, _, *shape = buffer.shape
            if part.page_tokens:
                content[part.name, name] = (layers, len(pages[part.name]), *shape), buffer.dtype
            else:
                content[part.name, name] = states[part.name, name] = (layers, *shape), buffer.dtype
    for came, wanted in ((handed.content, content), (handed.states, states if boundary else {})):
        if {name: (tuple(each.shape), each.dtype) for name, each in came.items()} != wanted:
            raise InputError("its content has other names, shapes or types than the pools here")


def collect_states(cache: Cache, tables: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """On the stream: copies of the running states of a sequence; ``tables`` are its rows."""
    return {
        (part.name, name): buffer[:, tables[part.name][:1].long()][:, 0].clone()
        for part in cache.composition.parts
        if not part.page_tokens
        for name, buffer in cache.pool(part.name).buffers.items()
    }


def collect(
    cache: Cache, tables: Mapping[str, Tensor], pages: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], Tensor]:
    """On the stream: copies of what a sequence has; ``tables`` are its rows."""
    content = collect_states(cache, tables)
    for part in cache.composition.parts:
        if part.page_tokens:
            at = tables[part.name][list(pages[part.name])].long()
            for name, buffer in cache.pool(part.name).buffers.items():
                content[part.name, name] = buffer[:, at].clone()
    return content


def fill(cache: Cache, tables: Mapping[str, Tensor], handed: Handed, start: int, end: int) -> None:
    """On the stream: write what was handed over of [start, end) into a sequence's slots, and the states at ``end``."""
    states = handed.content if end == handed.border else handed.states
    for part in cache.composition.parts:
        row, size = tables[part.name], part.page_tokens
        if not size:
            for name, buffer in cache.pool(part.name).buffers.items():
                buffer[:, row[0].long()] = states[part.name, name].to(buffer.device)
            continue
        there = range(start // size, -(-end // size))
        wanted = [i for i, page in enumerate(handed.pages[part.name]) if page in there]
        at = row[[handed.pages[part.name][i] for i in wanted]].long()
        for name, buffer in cache.pool(part.name).buffers.items():
            buffer[:, at] = handed.content[part.name, name][:, wanted].to(buffer.device)


def shapes(cache: Cache) -> dict[str, Any]:
    """What both sides must agree on: told once, when they meet."""
    parts = {}
    for part in cache.composition.parts:
        buffers = [[b.name, list(b.shape), str(b.dtype), len(b.layers)] for b in part.manifest.buffers]
        parts[part.name] = [part.page_tokens, repr(part.reach), part.manifest.lookahead, buffers]
    return {"version": VERSION, "page": cache.composition.page, "parts": parts}


# ---------------------------------------------------------------- bytes


def packed(handed: Handed) -> bytes:
    """A header in JSON, and the content behind it."""
    told = {
        "have": handed.have, "boundary": handed.boundary, "border": handed.border, "token": handed.token,
        "logprob": handed.logprob, "pages": {name: list(pages) for name, pages in handed.pages.items()},
        "content": _index(handed.content), "states": _index(handed.states),
    }  # fmt: skip
    header = json.dumps(told).encode()
    tensors = (*handed.content.values(), *handed.states.values())
    return b"".join((struct.pack("<I", len(header)), header, *map(_bytes, tensors)))


def _index(tensors: Mapping[tuple[str, str], Tensor]) -> list[list[Any]]:
    return [[*name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in tensors.items()]


def unpacked(data: bytes) -> Handed:
    (length,) = struct.unpack_from("<I", data)
    told = json.loads(data[4 : 4 + length])
    at, whole = 4 + length, bytearray(data)
    for kind in ("content", "states"):
        told[kind], at = _tensors(whole, at, told[kind])
    if at != len(data):
        raise InputError(f"what was handed over has {len(data)} bytes, and its header tells of {at}")
    return Handed(**told)


def _tensors(whole: bytearray, at: int, index: list[list[Any]]) -> tuple[dict[tuple[str, str], Tensor], int]:
    """Views of the bytes from ``at`` on, and where they end."""
    found = {}
    for component, buffer, shape, dtype in index:
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        each = torch.frombuffer(whole, dtype=torch.uint8, count=count * kind.itemsize, offset=at) if count else None
        found[component, buffer] = torch.empty(shape, dtype=kind) if each is None else each.view(kind).view(shape)
        at += count * kind.itemsize
    return found, at


def _bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor; numpy, which would have a word for it, may not be installed."""
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())
