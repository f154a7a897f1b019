"""Messages: what the two processes say as JSON, and the check of what comes: greetings, questions, heads of answers.

Anything may come. Whatever cannot be read raises ``InputError``.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import attrs

from prefixloom import Cache, Identity, InputError, encode
from prefixloom.storage import ALGORITHMS, Algorithm, function, preferred

from ..contract.handover import Handover
from ..contract.requests import Request
from ..serving.engine import Engine
from .transport import LONGEST_FRAME

VERSION = 9
"""Of the messages. Both sides compare it, as a part of ``cache_format``."""
LONGEST_JSON = 1 << 16
"""Bytes of a question's or a head's JSON. Longer ones are not parsed."""
ASKED_FIELDS = ("temperature", "top_p", "seed", "namespace", "tenant", "priority", "ttl", "logprobs")
"""What a question says of its request, beside the tokens."""
HEAD_CHECKSUM = struct.Struct("<I")


def identity_of(engine: Engine) -> Identity:
    """Return the identity of an engine's model. Content of a model without identity must not leave the process."""
    identity = engine.identity
    if identity is None:
        raise InputError(
            f"{type(engine.model).__name__} does not say its identity (prefixloom_engine.Identified), so nobody can "
            f"tell whether two processes compute the same: it cannot be served by two"
        )
    return identity


def cache_format(cache: Cache) -> dict[str, Any]:
    """Describe what a cache keeps and how."""
    parts = {}
    for part in cache.composition.parts:
        buffers = [[b.name, list(b.shape), str(b.dtype), len(b.layers)] for b in part.manifest.buffers]
        kind = f"{type(part.component).__module__}.{type(part.component).__qualname__} {part.manifest.version}"
        parts[part.name] = [kind, part.page_tokens, repr(part.reach), part.manifest.lookahead, buffers]
    return {"version": VERSION, "page": cache.composition.page, "parts": parts}


def format_digest(cache: Cache) -> str:
    """Digest ``cache_format``, for each question."""
    return hashlib.blake2b(json.dumps(cache_format(cache)).encode(), digest_size=16).hexdigest()


def read_json(data: Any) -> dict[str, Any]:
    """Parse a JSON object of bounded length."""
    if len(data) > LONGEST_JSON:
        raise InputError(f"{len(data)} bytes of JSON are more than the {LONGEST_JSON} that are read")
    try:
        told = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise InputError("this is no JSON object")
    return told


# ---------------------------------------------------------------- greetings


def greeting(engine: Engine) -> bytes:
    """Return what both sides must agree on: the facts that content depends on, and the cache's format."""
    return json.dumps({"identity": identity_of(engine).facts, "cache": cache_format(engine.cache)}).encode()


def disagreement(engine: Engine, data: Any) -> str:
    """Say in a sentence how another process's greeting differs; return "" if it does not."""
    try:
        theirs = read_json(data)
        differs = identity_of(engine).difference(theirs["identity"])
        agrees = theirs["cache"] == cache_format(engine.cache)
    except (InputError, TypeError, KeyError, AttributeError):
        return "says something else than this protocol does"
    if not agrees:
        return "keeps other things in its cache than this one: compose both from the same config"
    return f"computes something else: {differs}" if differs else ""


# ---------------------------------------------------------------- questions


@attrs.frozen
class Question:
    """A prompt that a decode process wants, and of which it has ``have`` tokens.

    ``mover``     the name of the mover by which it can fetch content; empty: it has none
    ``checksum``  the algorithm of the checksums of the content
    """

    request: Request
    have: int
    identity: Identity
    mover: str = ""
    checksum: Algorithm = attrs.field(factory=preferred)


def can_be_asked(request: Request) -> bool:
    """Return whether a prompt has tokens alone, not too many for a message, and wants no more than an answer says."""
    plain = not request.inputs and not request.top_logprobs and request.hand_over is None
    return plain and len(encode(request.tokens)) <= LONGEST_FRAME


def encode_question(question: Question, cache: Cache) -> list[bytes]:
    """Return two frames: the question, and the tokens."""
    asked = {
        "identity": question.identity.digest,
        "format": format_digest(cache),
        "have": question.have,
        "mover": question.mover,
        "checksum": question.checksum,
        **{name: getattr(question.request, name) for name in ASKED_FIELDS},
    }
    return [json.dumps(asked).encode(), bytes(encode(question.request.tokens))]


def question_digest(frames: Sequence[Any]) -> str:
    """Digest a question's frames; the answer repeats the digest."""
    made = hashlib.blake2b(digest_size=16)
    for each in frames:
        made.update(hashlib.blake2b(each, digest_size=16).digest())
    return made.hexdigest()


def decode_question(engine: Engine, frames: Sequence[memoryview]) -> Question:
    """Read a question that came to this engine. It must be about the same content as this engine's."""
    if len(frames) != 2:
        raise InputError("a question has two parts")
    asked = read_json(frames[0])
    identity = identity_of(engine)
    if asked.pop("identity", None) != identity.digest:
        raise InputError("the model's weights or adapters here are others than those that are asked for")
    if asked.pop("format", None) != format_digest(engine.cache):
        raise InputError("the cache here keeps other things than the one that asks, or in another version")
    have, mover, checksum = asked.pop("have", None), asked.pop("mover", ""), asked.pop("checksum", None)
    if checksum not in ALGORITHMS.values() or function(checksum) is None:
        checksum = "crc32"  # which everybody can compute
    if asked.keys() - {*ASKED_FIELDS} or type(have) is not int or type(mover) is not str:
        raise InputError("this question is none of this protocol")
    tokens = encode(bytes(frames[1])).tolist()
    request = Request(tokens, **asked, max_tokens=1, stops=(), speculate=0, hand_over=have)
    return Question(request, have, identity, mover, checksum)


# ---------------------------------------------------------------- heads of answers


@attrs.frozen
class AnswerHead:
    """What an answer says beside its content. The names are those of ``Handover``.

    ``question``  the digest of the question
    ``ticket``    by which a mover fetches the content; empty: it comes in parts
    """

    have: int
    boundary: int
    end: int
    token: int
    logprob: float
    hit: int
    question: str
    ticket: str = ""


OF_HANDOVER = ("have", "boundary", "end", "token", "logprob", "hit")
"""The fields of a head that are those of a ``Handover``."""


def encode_head(handover: Handover, question: str, ticket: bytes) -> bytes:
    """Return a checksum, and the head as JSON."""
    told = {**{name: getattr(handover, name) for name in OF_HANDOVER}, "question": question, "ticket": ticket.hex()}
    head = json.dumps(told).encode()
    return HEAD_CHECKSUM.pack(zlib.crc32(head)) + head


def decode_head(data: memoryview, question: Question, digest: str, cache: Cache, vocabulary: int) -> AnswerHead:
    """Read the head of an answer to ``question``, which has this digest, and check that it can be one."""
    if len(data) < HEAD_CHECKSUM.size or HEAD_CHECKSUM.unpack_from(data)[0] != zlib.crc32(data[HEAD_CHECKSUM.size :]):
        raise InputError("the head of an answer was damaged on its way")
    try:
        head = AnswerHead(**read_json(data[HEAD_CHECKSUM.size :]))
    except TypeError as error:
        raise InputError(f"the head of an answer has other fields: {error}") from error
    numbers = head.have, head.boundary, head.end, head.token, head.hit
    if any(type(number) is not int for number in numbers) or type(head.logprob) not in (int, float):
        raise InputError(f"{numbers} and {head.logprob!r} are no boundaries, token, hit and log-probability")
    if type(head.ticket) is not str:
        raise InputError("an answer's ticket is a text")
    if head.question != digest:
        raise InputError("this is the answer to another question")
    total, page = len(question.request.tokens), cache.composition.page
    last = (total - 1) // page * page
    boundaries = (0, last) if last > head.have else (0,)
    if not head.have == question.have < head.end == total or head.boundary not in boundaries:
        raise InputError(
            f"[{head.have}, {head.end}) with a boundary at {head.boundary} is no answer to a prompt of {total} tokens "
            f"of which {question.have} are here"
        )
    if not 0 <= head.hit < total:
        raise InputError(f"{head.hit} tokens cannot hit of a prompt of {total}")
    if not 0 <= head.token < vocabulary:
        raise InputError(f"the model has no token {head.token}")
    return head
