"""Traces: files of requests, read line by line.

A line is a JSON object. ``read_trace`` sees from the first line which of these formats a file has:

- **blocks**: Mooncake's format, and the agent traces': ``timestamp`` (milliseconds), ``input_length``,
  ``output_length``, ``hash_ids``. The size of a block is not in the file: it follows from the lines.
- **tokens**: ``tokens``, a list of whole numbers, and ``output``, their number or the answer's tokens.
- **hashes**: ``hashes``, a list of texts or whole numbers, and ``length`` in tokens.
- **recording**: what ``recordings`` wrote (``recorded``).

A file is never read whole. Names that end in ``.gz`` are decompressed. What a line has wrong is an ``InputError`` with
the number of the line and what was expected there. Nothing here knows a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from ...errors import InputError
from ...keys.tokens import encode
from .lines import Line, ReadSoFar, Where, numbered_lines, numbered_texts, shown
from .recorded import requests_of
from .requests import BASE, MOST_ID, BlockPrompt, LabRequest, TokenPrompt

SAMPLE = 512
"""So many lines decide the size of a block."""
POWERS = 17
"""Blocks of 1 to 65536 tokens are recognised."""
USUAL = 512
"""The size that a block has in most traces, if the lines leave it open."""
LONGEST = 1 << 28
"""The most tokens of one request."""
HASHED_BITS = 61


@attrs.frozen
class RequestFile:
    """A trace on disk. It can be iterated again and again, and is read anew each time.

    ``format``  "blocks", "tokens", "hashes" or "recording"
    ``block``   tokens of a block; 0 where there are tokens
    ``limit``   so many requests are read; None: all
    ``ticks``   how much one second of the file's times is
    """

    path: Path
    format: str
    block: int = 0
    limit: int | None = None
    ticks: float = 1.0
    progress: ReadSoFar = attrs.field(factory=ReadSoFar, eq=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    def __iter__(self) -> Iterator[LabRequest]:
        return islice(self._requests(), self.limit)

    def _requests(self) -> Iterator[LabRequest]:
        if self.format == "recording":
            yield from requests_of(self.path, self.progress)
            return
        parse = PARSERS[self.format]
        last, first = 0.0, None
        for count, (number, line) in enumerate(numbered_lines(self.path, self.progress)):
            where = Where(self.path, number, line)
            request = parse(self, where, count)
            first = request.at if first is None else first
            if request.at < last:
                raise where.error(
                    f"the time {where.line.get('timestamp', where.line.get('at'))!r} is before that of the line above: "
                    f"sort the lines by time"
                )
            last = request.at
            yield attrs.evolve(request, at=request.at - first)


def read_trace(path: Path | str, *, block: int | None = None, limit: int | None = None) -> RequestFile:
    """Open a trace, and find its format and the size of its blocks. ``block`` says the size where the lines do not."""
    path = Path(path)
    for name, value in (("block", block), ("limit", limit)):
        if value is not None and (value.__class__ is not int or value < 1):
            raise InputError(f"{name} is a whole number from 1 up, got {value!r}")
    head = next(numbered_texts(path, ReadSoFar()), None)
    if head is not None and head[1].lstrip().startswith(b'["recording"'):
        return RequestFile(path, "recording", 0, limit)
    sample: list[tuple[int, Line]] = []
    try:
        sample += islice(numbered_lines(path, ReadSoFar()), SAMPLE)
    except InputError:
        if not sample:
            raise  # else it is told when the line is reached
    if not sample:
        raise InputError(f"{path} has no line: a trace has one JSON object a line")
    first = Where(path, *sample[0])
    if "hash_ids" in first.line:
        size = block or _block_size([Where(path, *each) for each in sample])
        return RequestFile(path, "blocks", size, limit, 1.0 if "chat_id" in first.line else 1000.0)
    if "tokens" in first.line:
        return RequestFile(path, "tokens", 0, limit)
    if "hashes" in first.line:
        stated = first.line.get("block")
        size = block or (first.whole("block", 1 << 20) if stated is not None else 0)
        if not size:
            raise first.error("hashes of texts need a size: 'block', the tokens of each text, or --block")
        return RequestFile(path, "hashes", size, limit)
    raise first.error(
        "this is no request that is known: 'hash_ids', 'tokens' or 'hashes' is expected, got the keys "
        + (", ".join(map(repr, first.line)) or "none")
    )


# ---------------------------------------------------------------- formats


def _blocks(trace: RequestFile, where: Where, count: int) -> LabRequest:
    ids, size = where.many("hash_ids"), trace.block
    length = where.whole("input_length", LONGEST)
    if len(ids) - length // size not in (0, 1) or len(ids) > -(-length // size):
        raise where.error(
            f"{length} tokens in blocks of {size} are {length // size} or {-(-length // size)} ids, got {len(ids)}: "
            f"say another size with --block, if it is not that of the lines before"
        )
    return _request(where, _block_prompt(where, ids, size, length, count), where.seconds("timestamp", trace.ticks))


def _tokens(trace: RequestFile, where: Where, count: int) -> LabRequest:
    prompt = _encoded(where, "tokens", where.many("tokens"))
    answer = where.line.get("output", where.line.get("output_length", 0))
    at = where.seconds("at", 1.0, 0.0) if "timestamp" not in where.line else where.seconds("timestamp", 1000.0)
    if not isinstance(answer, list):
        return _request(where, TokenPrompt(prompt), at)
    whole = TokenPrompt(prompt.extended(_encoded(where, "output", answer)))
    return attrs.evolve(_request(where, TokenPrompt(prompt), at, len(answer)), whole=whole)


def _hashes(trace: RequestFile, where: Where, count: int) -> LabRequest:
    named, size = where.many("hashes"), trace.block
    if (stated := where.whole("block", 1 << 20, size)) != size:
        raise where.error(f"'block' is {stated} here: one size is expected in all lines, and it was {size} before")
    length = where.whole("length", LONGEST, len(named) * size)
    if len(named) > -(-length // size):
        raise where.error(f"{length} tokens are fewer than {len(named)} texts of {size} tokens have")
    ids = [each if each.__class__ is int else _number_of(where, each) for each in named]
    at = where.seconds("at", 1.0, 0.0) if "timestamp" not in where.line else where.seconds("timestamp", 1000.0)
    return _request(where, _block_prompt(where, ids, size, length, count), at)


PARSERS: dict[str, Callable[[RequestFile, Where, int], LabRequest]] = {
    "blocks": _blocks,
    "tokens": _tokens,
    "hashes": _hashes,
}


def _request(where: Where, prompt: BlockPrompt | TokenPrompt, at: float, output: int | None = None) -> LabRequest:
    line = where.line
    if output is None:
        output = where.whole("output_length" if "output_length" in line else "output", LONGEST, 0)
    if not prompt.count:
        raise where.error("the prompt is empty: at least one token is expected")
    priority = line.get("priority", 0)
    if priority.__class__ is not int:
        raise where.error(f"'priority' is expected to be a whole number, got {shown(priority)}")
    return LabRequest(
        at=at,
        prompt=prompt,
        output=output,
        namespace=where.text("namespace"),
        priority=priority,
        ttl=where.seconds("ttl", 1.0) if line.get("ttl") is not None else None,
        session=where.text("session", "session_id", "conv", "chat_id"),
        line=where.number,
    )


def _block_prompt(where: Where, ids: list[Any], size: int, length: int, count: int) -> BlockPrompt:
    try:
        return BlockPrompt(ids, size, length, count % BASE)
    except InputError as error:
        raise where.error(str(error)) from None


def _encoded(where: Where, key: str, tokens: list[Any]) -> Any:
    try:
        return encode(tokens)
    except InputError as error:
        raise where.error(f"{key!r}: {error}") from None


def _number_of(where: Where, text: object) -> int:
    """Return a number for a text's hash, of which no two are the same but by chance (one in 2^61)."""
    if not isinstance(text, str):
        raise where.error(f"'hashes' are expected to be texts or whole numbers, got {shown(text)}")
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - HASHED_BITS)) % MOST_ID


def _block_size(lines: list[Where]) -> int:
    """Return the size of a block, a power of two, with which each line has as many ids as its length says.

    The last block of a line may be a part, with an id or without.
    """
    fits, whole = [], []
    counts = [(len(line.many("hash_ids")), line.whole("input_length", LONGEST)) for line in lines]
    for power in range(POWERS):
        size = 1 << power
        if all(ids - length // size in (0, 1) and ids <= -(-length // size) for ids, length in counts):
            fits.append(size)
            if all(ids == -(-length // size) for ids, length in counts):
                whole.append(size)
    found = whole or fits
    if not found:
        raise lines[0].error(
            "no size of blocks fits the first lines: 'input_length' is expected to be that of 'hash_ids' blocks of one "
            "size, the last of them whole or not. Say the size with --block, and the line that does not fit is named"
        )
    return USUAL if USUAL in found else found[0]
