"""Messages: what the two processes send as bytes, and the check of a handover that arrived."""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prefixloom import Cache, Identity, InputError
from prefixloom.storage import Checksum

from ..contract.handover import Handover
from ..contract.requests import Request
from ..forward.handover import pages_needed
from ..serving.engine import Engine

VERSION = 5
"""Of the messages. Both sides compare it when they connect, as a part of ``cache_format``."""


def identity_of(engine: Engine) -> Identity:
    """The identity of an engine's model. Content that has none must not leave the process."""
    identity = engine.identity
    if identity is None:
        raise InputError(
            f"{type(engine.model).__name__} does not say its identity (prefixloom_engine.Identified), so nobody can "
            f"tell whether two processes compute the same: it cannot be served by two"
        )
    return identity


def greeting(engine: Engine) -> dict[str, Any]:
    """What both sides must agree on when they connect: what the model's content depends on, and how caches keep it."""
    return {"identity": identity_of(engine).facts, "cache": cache_format(engine.cache)}


def disagreement(engine: Engine, data: bytes) -> str:
    """What is different in another process's greeting, in a sentence; empty if nothing is."""
    try:
        theirs = json.loads(data)
        differs = identity_of(engine).difference(theirs["identity"])
        agrees = theirs["cache"] == cache_format(engine.cache)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "says something else than this protocol does"
    if not agrees:
        return "keeps other things in its cache than this one: compose both from the same config"
    return f"computes something else: {differs}" if differs else ""


def cache_format(cache: Cache) -> dict[str, Any]:
    """Describe what a cache keeps and how."""
    parts = {}
    for part in cache.composition.parts:
        buffers = [[b.name, list(b.shape), str(b.dtype), len(b.layers)] for b in part.manifest.buffers]
        kind = f"{type(part.component).__module__}.{type(part.component).__qualname__} {part.manifest.version}"
        parts[part.name] = [kind, part.page_tokens, repr(part.reach), part.manifest.lookahead, buffers]
    return {"version": VERSION, "page": cache.composition.page, "parts": parts}


def encode_question(request: Request, have: int, identity: Identity) -> bytes:
    """Ask for the prompt of a request of which ``have`` tokens are cached here, computed under ``identity``."""
    question = {
        "identity": identity.digest,
        "tokens": request.tokens, "temperature": request.temperature, "top_p": request.top_p, "seed": request.seed,
        "namespace": request.namespace, "priority": request.priority, "ttl": request.ttl, "logprobs": request.logprobs,
        "have": have,
    }  # fmt: skip
    return json.dumps(question).encode()


def check_handover(cache: Cache, handover: Handover, total: int, vocabulary: int) -> None:
    """Raise InputError unless this can be the handover of a prompt of ``total`` tokens into ``cache``."""
    numbers = handover.have, handover.boundary, handover.end, handover.token
    if any(type(number) is not int for number in numbers) or type(handover.logprob) not in (int, float):
        raise InputError(f"{numbers} and {handover.logprob!r} are no boundaries, token and log-probability")
    have, boundary, end, token = numbers
    last = (end - 1) // cache.composition.page * cache.composition.page
    if not 0 <= have < end == total or not 0 <= token < vocabulary or boundary not in (0, last):
        raise InputError(
            f"[{have}, {end}) with a boundary at {boundary} and token {token} does not belong to a prompt of {total} "
            f"tokens"
        )
    pages = pages_needed(cache, have, end)
    if boundary:
        before = pages_needed(cache, have, boundary)
        pages = {name: sorted({*mine, *before[name]}) for name, mine in pages.items()}
    if {name: list(mine) for name, mine in handover.pages.items()} != pages:
        raise InputError(f"the pages {dict(handover.pages)} are not those that are needed: {pages}")
    content, states = {}, {}
    for part in cache.composition.parts:
        for name, buffer in cache.pool(part.name).buffers.items():
            layers, _, *shape = buffer.shape
            if part.page_tokens:
                content[part.name, name] = (layers, len(pages[part.name]), *shape), buffer.dtype
            else:
                content[part.name, name] = states[part.name, name] = (layers, *shape), buffer.dtype
    for came, wanted in ((handover.content, content), (handover.states, states if boundary else {})):
        if {name: (tuple(each.shape), each.dtype) for name, each in came.items()} != wanted:
            raise InputError("its content has other names, shapes or types than the pools here")


# ---------------------------------------------------------------- a handover as bytes


def encode_handover(handover: Handover) -> bytes:
    """Return the length of a header, the header in JSON, and the bytes of all tensors in the header's order."""
    fields = {
        "have": handover.have, "boundary": handover.boundary, "end": handover.end, "token": handover.token,
        "logprob": handover.logprob, "pages": {name: list(pages) for name, pages in handover.pages.items()},
        "content": _index(handover.content), "states": _index(handover.states),
    }  # fmt: skip
    tensors = (*handover.content.values(), *handover.states.values())
    content = b"".join(map(_bytes, tensors))
    header = json.dumps({**fields, "checksum": Checksum.of(content, "crc32").value}).encode()
    return b"".join((struct.pack("<I", len(header)), header, content))


def _index(tensors: Mapping[tuple[str, str], Tensor]) -> list[list[Any]]:
    return [[*name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in tensors.items()]


def decode_handover(data: bytes) -> Handover:
    """The reverse of ``encode_handover``. It raises whatever malformed bytes cause."""
    (length,) = struct.unpack_from("<I", data)
    fields = json.loads(data[4 : 4 + length])
    at, whole = 4 + length, bytearray(data)
    if not Checksum("crc32", fields.pop("checksum")).fits(memoryview(data)[at:]):
        raise InputError("what was handed over was damaged on its way: its checksum is another one")
    for kind in ("content", "states"):
        fields[kind], at = _tensors(whole, at, fields[kind])
    if at != len(data):
        raise InputError(f"what was handed over has {len(data)} bytes, and its header announces {at}")
    return Handover(**fields)


def _tensors(whole: bytearray, at: int, index: list[list[Any]]) -> tuple[dict[tuple[str, str], Tensor], int]:
    """Return views of the bytes from ``at`` on, and where they end."""
    found = {}
    for component, buffer, shape, dtype in index:
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        each = torch.frombuffer(whole, dtype=torch.uint8, count=count * kind.itemsize, offset=at) if count else None
        found[component, buffer] = torch.empty(shape, dtype=kind) if each is None else each.view(kind).view(shape)
        at += count * kind.itemsize
    return found, at


def _bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor. ``Tensor.numpy`` would give it as well, but numpy may not be installed."""
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())
