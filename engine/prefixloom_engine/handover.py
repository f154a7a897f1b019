"""Handing over: what one engine computed of a prompt, for another to go on from.

What is handed over is what the reaches need at the prompt's end, wherever that lies: of a path all, of a window the
tail, of a recurrence one state; less what the other has already. It is read and written on the forward streams.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, InputError

VERSION = 1


@attrs.frozen(eq=False)
class Handed:
    """``have``: tokens that the receiver said to have; ``border``: where the content ends; ``token``: the one behind.

    ``pages``: of each component with pages the numbers (by position) that are there; ``content``: by component and
    buffer, (layers, pages, *entries of a page), for states (layers, *shape).
    """

    have: int
    border: int
    token: int
    logprob: float
    pages: Mapping[str, Sequence[int]]
    content: Mapping[tuple[str, str], Tensor]

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(each.numel() * each.element_size() for each in self.content.values())


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


def collect(
    cache: Cache, tables: Mapping[str, Tensor], pages: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], Tensor]:
    """On the stream: copies of what a sequence has; ``tables`` are its rows."""
    content = {}
    for part in cache.composition.parts:
        row = tables[part.name]
        at = row[list(pages[part.name])].long() if part.page_tokens else row[:1].long()
        for name, buffer in cache.pool(part.name).buffers.items():
            mine = buffer[:, at]
            content[part.name, name] = (mine if part.page_tokens else mine[:, 0]).clone()
    return content


def fill(cache: Cache, tables: Mapping[str, Tensor], handed: Handed, ready: int) -> None:
    """On the stream: write what was handed over into a sequence's slots, from ``ready`` on."""
    for part in cache.composition.parts:
        row, size = tables[part.name], part.page_tokens
        if not size:
            for name, buffer in cache.pool(part.name).buffers.items():
                buffer[:, row[0].long()] = handed.content[part.name, name].to(buffer.device)
            continue
        wanted = [i for i, page in enumerate(handed.pages[part.name]) if page >= ready // size]
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
    index = [[*name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in handed.content.items()]
    told = {
        "have": handed.have, "border": handed.border, "token": handed.token, "logprob": handed.logprob,
        "pages": {name: list(pages) for name, pages in handed.pages.items()}, "content": index,
    }  # fmt: skip
    header = json.dumps(told).encode()
    return struct.pack("<I", len(header)) + header + b"".join(_bytes(each) for each in handed.content.values())


def unpacked(data: bytes) -> Handed:
    (length,) = struct.unpack_from("<I", data)
    told = json.loads(data[4 : 4 + length])
    content, at = {}, 4 + length
    whole = bytearray(data)
    for component, buffer, shape, dtype in told.pop("content"):
        kind = getattr(torch, dtype)
        count = 1
        for edge in shape:
            count *= edge
        each = torch.frombuffer(whole, dtype=torch.uint8, count=count * kind.itemsize, offset=at) if count else None
        content[component, buffer] = torch.empty(shape, dtype=kind) if each is None else each.view(kind).view(shape)
        at += count * kind.itemsize
    if at != len(data):
        raise InputError(f"what was handed over has {len(data)} bytes, and its header tells of {at}")
    return Handed(content=content, **told)


def _bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor; numpy, which would have a word for it, may not be installed."""
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())
