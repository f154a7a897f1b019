"""Rerun: makes the calls of a recording again, on a cache of the same composition, and compares what comes of them.

A page of the recording becomes tokens whose last two are its hash, so the cache shares what the recorded one shared.
With all of a recording, every decision is the same. With some of its requests left out, each of the others asks for the
lengths that it asked for then; ``shrink`` looks for the fewest requests with which debug mode still fails.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ...cache.cache import Cache
from ...cache.sequence import Sequence
from ...errors import CapacityError, CompositionError, InputError, ProtocolError
from ...keys.tokens import Tokens, encode
from ...operations.step import Step
from ...script import fewest
from ...tree.radix import FOREVER
from ..traces.recorded import Entry, RecordedComposition, entries_of, head_of, numbers_of
from ..traces.requests import BASE, OWN

SHOWN = 20
"""So many differences are told in words."""
COMPARED = frozenset({"open", "restore", "grow", "append", "publish", "rewind", "close", "abort"})
"""Verbs of sequences that the driver has a method for, because something is compared or kept in mind."""
PLAIN: Mapping[str, Callable[[Sequence, Entry], object]] = {
    "fill": lambda sequence, entry: sequence.fill(),
    "commit": lambda sequence, entry: sequence.commit(max(sequence.committed, min(entry[2], sequence.reserved))),
    "priority": lambda sequence, entry: setattr(sequence, "priority", entry[2]),
    "until": lambda sequence, entry: setattr(sequence, "until", FOREVER if entry[2] is None else entry[2]),
    "why": lambda sequence, entry: None,
}
"""The other verbs of sequences."""
OF_CACHES: Mapping[str, Callable[[Cache, Entry], object]] = {
    "expire": lambda cache, entry: cache.expire(entry[1]),
    "reclaim": lambda cache, entry: cache.reclaim(),
    "poll": lambda cache, entry: cache.poll(),
    "drop": lambda cache, entry: [cache.drop_namespace(namespace) for namespace in entry[1]],
    "flush": lambda cache, entry: cache.flush(),
}
"""The verbs of caches of which nothing is compared."""


@attrs.define
class RecordedCalls:
    """A recording in memory: what it was composed of, and its entries with the lines they stand in."""

    head: RecordedComposition
    first: Entry
    entries: list[tuple[int, Entry]]

    @classmethod
    def read(cls, path: Path | str) -> RecordedCalls:
        path = Path(path)
        entries = list(entries_of(path))
        if not entries:
            raise InputError(f"{path} has no line: a recording begins with its head")
        return cls(head_of(path, entries[0][1]), entries[0][1], entries[1:])

    def write(self, path: Path | str) -> None:
        """Write it as ``record`` does."""
        path = Path(path)
        text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in (self.first, *self._plain()))
        try:
            path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error

    def _plain(self) -> Iterator[Entry]:
        return (entry for _, entry in self.entries)

    @property
    def requests(self) -> list[int]:
        """The numbers of the sequences that were opened."""
        return [entry[1] for _, entry in self.entries if entry[0] == "open" and entry[1] >= 0]

    def check(self, cache: Cache) -> None:
        """Refuse a cache that is composed otherwise: its decisions would not be those of the recording."""
        composition, head = cache.composition, self.head
        pools = {name: (each.capacity, each.page_tokens) for name, each in cache.stats().components.items()}
        for what, recorded, has in (
            ("page", head.page, composition.page),
            ("lookahead", head.lookahead, composition.lookahead),
            ("policy", head.policy, composition.policy.name),
            ("pools", dict(head.pools), pools),
        ):
            if recorded != has:
                raise CompositionError(f"the recorded cache has the {what} {recorded}, and this one has {has}")


@attrs.frozen
class Rerun:
    """What came of making the calls again.

    ``calls``        that were made
    ``differences``  how many of them came out otherwise, and ``told`` the first of these in words
    """

    calls: int
    differences: int
    told: tuple[str, ...]


def rerun(recording: RecordedCalls, cache: Cache, keep: Callable[[Entry], Entry | None] | None = None) -> Rerun:
    """Make the calls of a recording on ``cache``. ``keep`` may leave entries out, or some sequences of a step."""
    if keep is None:
        recording.check(cache)
    driver = _Driver(recording, cache)
    try:
        for line, entry in recording.entries:
            kept = entry if keep is None else keep(entry)
            if kept is not None:
                driver.make(line, kept)
    finally:
        driver.end()
    return Rerun(driver.calls, driver.differences, tuple(driver.told))


class _Driver:
    """Makes calls, one entry after the other."""

    def __init__(self, recording: RecordedCalls, cache: Cache) -> None:
        self._cache = cache
        self._page, self._lookahead = cache.composition.page, cache.composition.lookahead
        self._coming: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By sequence, the (page, hash) of all pages, in the order in which they are complete."""
        for _, entry in recording.entries:
            if entry[0] in ("open", "append"):
                first, hashes = (0, entry[5]) if entry[0] == "open" else (entry[4], entry[3])
                self._coming[entry[1]] += enumerate(numbers_of(hashes), first)
        self._complete: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._steps: dict[int, Step] = {}
        self.calls = self.differences = 0
        self.told: list[str] = []

    def end(self) -> None:
        """Give back what is still open."""
        for sequence in self._sequences.values():
            if sequence.open:
                try:
                    sequence.abort()
                except Exception:  # a cache that has failed may fail again
                    continue

    def make(self, line: int, entry: Entry) -> None:
        verb = entry[0]
        self.calls += 1
        if verb in OF_CACHES:
            OF_CACHES[verb](self._cache, entry)
        elif verb == "open" or not _is_of_a_sequence(verb):
            getattr(self, f"_{verb}")(line, entry)
        elif (sequence := self._sequences.get(entry[1])) is not None and sequence.open:
            if verb in PLAIN:
                PLAIN[verb](sequence, entry)
            else:
                getattr(self, f"_{verb}")(line, entry, sequence)

    def _expect(self, line: int, what: str, recorded: object, found: object) -> None:
        if recorded != found:
            self.differences += 1
            if len(self.told) < SHOWN:
                self.told.append(f"line {line}: {what} was {recorded!r}, and is {found!r}")

    # ------------------------------------------------------------ sequences
    def _open(self, line: int, entry: Entry) -> None:
        _, number, _, namespace, count, hashes, most, priority, until, *found = entry
        if number < 0:
            self._coming[number] = list(enumerate(numbers_of(hashes)))
        self._complete[number] = 0
        tokens = self._tokens(number, 0, count)
        until = FOREVER if until is None else until
        plan = self._cache.match(tokens, namespace=namespace, leave=max(0, count - most))
        try:
            sequence = self._cache.open(plan, priority=priority, until=until)
        except CapacityError:
            self._expect(line, "(ready, walked, limited by, failed)", found, [*_found(plan), 1])
            return
        self._expect(line, "(ready, walked, limited by, failed)", found, [*_found(plan), 0])
        if number < 0:  # it could not be opened then
            sequence.abort()
            return
        self._complete[number] = len(numbers_of(hashes))
        self._sequences[number] = sequence

    def _restore(self, line: int, entry: Entry, sequence: Sequence) -> None:
        if sequence.reserved == sequence.ready:
            sequence.restore()
            self._expect(line, "restored", entry[2], sequence.ready)

    def _grow(self, line: int, entry: Entry, sequence: Sequence) -> None:
        _, _, reserved, failed, arriving = entry
        if reserved < sequence.reserved:
            return
        try:
            sequence.grow(reserved - sequence.reserved, arriving=bool(arriving))
        except CapacityError:
            self._expect(line, "grow failed", failed, 1)
            return
        self._expect(line, "grow failed", failed, 0)

    def _append(self, line: int, entry: Entry, sequence: Sequence) -> None:
        _, number, named, hashes, _ = entry
        if named > sequence.named:
            sequence.append(self._tokens(number, sequence.named, named))
        self._complete[number] += len(numbers_of(hashes))

    def _publish(self, line: int, entry: Entry, sequence: Sequence) -> None:
        _, _, asked, published = entry
        upto = min(asked, sequence.publishable)
        if upto > sequence.published:
            sequence.publish(upto)
        self._expect(line, "published", published, sequence.published)

    def _rewind(self, line: int, entry: Entry, sequence: Sequence) -> None:
        if entry[2] < sequence.reserved:
            try:
                sequence.rewind(sequence.reserved - entry[2])
            except ProtocolError:  # other requests were left out, and more of this one is published
                self._expect(line, "reserved", entry[2], sequence.reserved)

    def _close(self, line: int, entry: Entry, sequence: Sequence) -> None:
        del self._sequences[entry[1]]
        self._coming.pop(entry[1], None)
        getattr(sequence, entry[0])()

    _abort = _close

    # ------------------------------------------------------------ steps
    def _begin(self, line: int, entry: Entry) -> None:
        _, number, numbers, role, ahead = entry
        running = [self._sequences[each] for each in numbers if each in self._sequences]
        if running:
            step = self._cache.step(running, role, ahead=ahead)
            step.__enter__()
            self._steps[number] = step
            step.run_ops()

    def _end(self, line: int, entry: Entry) -> None:
        step = self._steps.pop(entry[1], None)
        if step is not None:
            error = RuntimeError("the recorded step failed") if entry[2] else None
            step.__exit__(None if error is None else RuntimeError, error, None)

    # ------------------------------------------------------------ the cache
    def _evict(self, line: int, entry: Entry) -> None:
        _, need, unneeded, freed = entry
        self._expect(line, "evicted", freed, self._cache.evict(need, unneeded=bool(unneeded)))

    # ------------------------------------------------------------ tokens
    def _tokens(self, number: int, start: int, end: int) -> Tokens:
        """Return tokens for the positions [start, end) of a sequence. The last two of a page are its hash."""
        page = self._page
        first, last = start // page, -(-end // page)
        known: dict[int, int] = {}
        for place, value in self._coming[number][self._complete[number] :]:
            if place not in known and first <= place < last:
                known[place] = value
            elif place >= last:
                break
        words = array("q", bytes(8 * page * (last - first)))
        values = [known.get(place, (max(number, 0) % BASE) + OWN * BASE) for place in range(first, last)]
        words[page - 1 :: page] = array("q", [value % BASE for value in values])
        if page > 1:
            words[page - 2 :: page] = array("q", [value // BASE for value in values])
        return encode(words[start - first * page : end - first * page])


def _is_of_a_sequence(verb: str) -> bool:
    return verb in COMPARED or verb in PLAIN


def _found(plan: Any) -> list[object]:
    return [plan.ready, plan.walked, plan.limited_by]


# ---------------------------------------------------------------- shrinking


@attrs.frozen
class Shrunk:
    """The fewest requests that still fail: their recording, the error, and how many attempts it took."""

    recording: RecordedCalls
    error: BaseException
    attempts: int


def shrink(recording: RecordedCalls, compose: Callable[[], Cache], most: int = 1000) -> Shrunk | None:
    """Leave requests and other calls out of a recording while it fails in the same way. None: it does not fail.

    ``compose`` makes a cache, with debug mode on. Requests are left out first, then the calls that belong to none.
    ``most``: attempts.
    """
    error = _failure(recording, compose)
    if error is None:
        return None
    attempts = 1
    kind = type(error)

    def fails(candidate: RecordedCalls) -> bool:
        nonlocal attempts, error
        attempts += 1
        found = _failure(candidate, compose)
        if type(found) is kind:
            error = found
            return True
        return False

    numbers = recording.requests
    kept = fewest(numbers, lambda few: attempts < most and fails(_only(recording, few)))
    smaller = _only(recording, kept)
    others = [at for at, (_, entry) in enumerate(smaller.entries) if _is_loose(entry)]
    left = fewest(others, lambda few: attempts < most and fails(_without(smaller, set(others) - set(few))))
    smaller = _without(smaller, set(others) - set(left))
    assert error is not None
    return Shrunk(smaller, error, attempts)


def _failure(recording: RecordedCalls, compose: Callable[[], Cache]) -> BaseException | None:
    cache = compose()
    recording.check(cache)  # what is wrong with the composition is told
    try:
        rerun(recording, cache, keep=lambda entry: entry)
    except Exception as error:
        return error
    return None


def _is_loose(entry: Entry) -> bool:
    """Return whether a call belongs to no request."""
    verb = entry[0]
    return not (_is_of_a_sequence(verb) or verb in ("begin", "end")) or entry[:2] == ["open", -1]


def _only(recording: RecordedCalls, numbers: Iterable[int]) -> RecordedCalls:
    """Return the recording with these requests alone."""
    kept = {*numbers, -1}
    entries = []
    steps = set()
    for line, entry in recording.entries:
        verb = entry[0]
        if verb == "begin":
            rows = [number for number in entry[2] if number in kept]
            if not rows:
                continue
            steps.add(entry[1])
            entry = [*entry[:2], rows, *entry[3:]]
        elif (verb == "end" and entry[1] not in steps) or (_is_of_a_sequence(verb) and entry[1] not in kept):
            continue
        entries.append((line, entry))
    return attrs.evolve(recording, entries=entries)


def _without(recording: RecordedCalls, places: set[int]) -> RecordedCalls:
    return attrs.evolve(recording, entries=[each for at, each in enumerate(recording.entries) if at not in places])
