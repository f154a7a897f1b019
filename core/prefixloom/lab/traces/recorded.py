"""Recorded: the format of a recording, and how it is read as a trace.

A recording has one JSON array a line. Its first element is a verb (``VERBS``). ``recordings`` writes it.
"""

from __future__ import annotations

import binascii
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ...errors import InputError
from .lines import ReadSoFar, numbered_texts, shown
from .requests import BASE, MOST_ID, BlockPrompt, LabRequest

HASH_BYTES = 8
"""Of the hash of a page."""
VERSION = 1
Entry = list[Any]
"""A line: the verb, then what it was called with, then what came of it. ``VERBS`` lists them."""
VERBS: Mapping[str, str] = {
    "open": "number, seconds, namespace, tokens, hashes, most, priority, until, ready, walked, limited by, failed",
    "restore": "number, ready",
    "grow": "number, reserved, failed, arriving",
    "append": "number, named, hashes, the first page",
    "begin": "step, numbers, role, ahead",
    "end": "step, failed",
    "fill": "number",
    "commit": "number, committed",
    "publish": "number, upto, published",
    "rewind": "number, reserved, named",
    "close": "number, seconds",
    "abort": "number, seconds",
    "priority": "number, priority",
    "until": "number, until",
    "evict": "need, unneeded, freed",
    "expire": "now",
    "reclaim": "",
    "poll": "",
    "drop": "namespaces",
    "flush": "",
    "why": "number, findings (start, end, reason, component)",
}


@attrs.frozen
class RecordedComposition:
    """What the cache of a recording was composed of. ``pools``: by component, pages (states) and tokens of a page."""

    page: int
    lookahead: int
    model: str
    policy: str
    pools: Mapping[str, tuple[int, int]]


def is_recording(line: object) -> bool:
    """Return whether a file with this first line is a recording."""
    return isinstance(line, list) and line[:1] == ["recording"]


def entries_of(path: Path, progress: ReadSoFar | None = None) -> Iterator[tuple[int, Entry]]:
    """Yield (line, entry) of a recording, its head first.

    A last line that was cut off is left out: the engine was killed.
    """
    for number, raw, last in numbered_texts(path, ReadSoFar() if progress is None else progress, may_be_cut=True):
        try:
            entry = json.loads(raw)
        except ValueError as error:
            if last and not raw.endswith(b"\n"):
                return
            raise InputError(f"{path}, line {number}: a JSON array is expected ({error})") from error
        if not (is_entry(entry) or (number == 1 and is_recording(entry))):
            raise InputError(f"{path}, line {number}: an entry of a recording is expected, got {shown(entry)}")
        yield number, entry


def is_entry(entry: object) -> bool:
    """Return whether a line has a verb and as many elements as the verb has."""
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str) or entry[0] not in VERBS:
        return False
    plain = re.sub(r"\(.*\)", "", VERBS[entry[0]])
    return len(entry) == 1 + (plain.count(",") + 1 if plain else 0)


def head_of(path: Path, entry: Entry) -> RecordedComposition:
    """Return what the first entry of a recording says."""
    if not is_recording(entry) or len(entry) != 7:
        raise InputError(f"{path}, line 1: the head of a recording is expected, got {shown(entry)}")
    if entry[1] != VERSION:
        raise InputError(f"{path} is a recording of version {entry[1]}, and this prefixloom reads version {VERSION}")
    _, _, page, lookahead, model, policy, pools = entry
    try:
        sizes = {name: (int(slots), int(tokens)) for name, (slots, tokens) in pools.items()}
        if min(page, *(slots for slots, _ in sizes.values())) < 1 or not sizes:
            raise ValueError("a page and each pool have at least 1")
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}, line 1: the head of a recording is expected, got {shown(entry)}") from error
    return RecordedComposition(page, lookahead, model, policy, sizes)


def numbers_of(hashes: str) -> list[int]:
    """Return the hashes of pages as numbers."""
    raw = binascii.a2b_base64(hashes)
    return [int.from_bytes(raw[at : at + HASH_BYTES], "little") % MOST_ID for at in range(0, len(raw), HASH_BYTES)]


class _RecordedRequest:
    """A request of a recording that is not over."""

    __slots__ = ("entry", "ids", "line", "named", "over")

    def __init__(self, line: int, entry: Entry) -> None:
        self.line, self.entry, self.ids = line, entry, numbers_of(entry[5])
        self.named, self.over = int(entry[4]), False


def requests_of(path: Path, progress: ReadSoFar | None = None) -> Iterator[LabRequest]:
    """Yield a recording as a trace: each sequence that was opened is a request, in their order.

    What is read ahead are the requests that ran at the same time.
    """
    entries = entries_of(path, progress)
    first = next(entries, None)
    if first is None:
        raise InputError(f"{path} has no line: a recording begins with its head")
    page = head_of(path, first[1]).page
    running: dict[int, _RecordedRequest] = {}
    waiting: deque[_RecordedRequest] = deque()
    for line, entry in entries:
        verb = entry[0]
        try:
            if verb == "open" and entry[1] >= 0:
                asked = running[entry[1]] = _RecordedRequest(line, entry)
                waiting.append(asked)
            elif verb == "append":
                asked = running[entry[1]]
                asked.named = entry[2]
                asked.ids[entry[4] :] = numbers_of(entry[3])
            elif verb in ("close", "abort"):
                running.pop(entry[1]).over = True
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}, line {line}: this does not follow from the lines above: {shown(entry)}"
            ) from error
        while waiting and waiting[0].over:
            yield _request(waiting.popleft(), page)
    yield from (_request(asked, page) for asked in waiting)


def _request(asked: _RecordedRequest, page: int) -> LabRequest:
    number, at, namespace, count, priority = (asked.entry[place] for place in (1, 2, 3, 4, 7))
    prompt = BlockPrompt(asked.ids[: count // page], page, count, number % BASE)
    ids = asked.ids[: asked.named // page]
    return LabRequest(
        at=at,
        prompt=prompt,
        output=max(0, asked.named - count),
        whole=BlockPrompt(ids, page, asked.named, number % BASE) if asked.named > count else None,
        namespace=namespace,
        priority=priority,
        line=asked.line,
    )
