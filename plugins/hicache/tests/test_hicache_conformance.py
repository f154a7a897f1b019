"""Each law of the conformance suite of stores sees a store that breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from prefixloom.storage import FAULTS, HEADER_BYTES, REASONS, Key, Miss, Record, Refused, Status, Stored, encode_header
from prefixloom.testing import BackendCase, report_on
from prefixloom.testing.laws import storage as laws
from prefixloom_hicache import MemoryBackend
from tests.support.hicache_cases import damage_memory

# ---------------------------------------------------------------- broken backends


class Kept(MemoryBackend):
    """Lasts beyond its closing, as a store on a disk does: what the mutants of reopening start from."""

    def reopened(self) -> MemoryBackend:
        new = type(self)(self.capacity)
        new._frames, new._used = self._frames, self._used
        new._digests, new._fingerprints = self._digests, self._fingerprints
        return new


class CutsTheEnd(MemoryBackend):
    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        def cut(found: Record | Miss) -> Record | Miss:
            if isinstance(found, Miss) or len(found.payload) < 4096:
                return found
            return attrs.evolve(found, payload=found.payload[:-1], checksum=None)

        return tuple(map(cut, super().get(keys, into)))


class AnswersInOrderOfKeys(MemoryBackend):
    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        return super().exists(sorted(keys, key=lambda key: key.content))


class RaisesOnNothing(MemoryBackend):
    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        assert records
        return super().put(records)


class ComparesHalfTheKey(MemoryBackend):
    def _read(self, key: Key, into: memoryview | None) -> Record | Miss:
        near = [a for a in self._frames if a[:32] == key.address[:32]]
        return super()._read(Key(near[0][16:], key.fingerprint) if near else key, into)


class ForgetsTheBuffer(MemoryBackend):
    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        return super().get(keys, None)


class ReadsPastTheBuffer(MemoryBackend):
    def _read(self, key: Key, into: memoryview | None) -> Record | Miss:
        if into is not None and into.obj is not None and len(into) == 699:
            into = memoryview(into.obj)[:700]  # type: ignore[arg-type]
        return super()._read(key, into)


class KeepsTheCallersBuffer(MemoryBackend):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._records: dict[bytes, Record] = {}

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        self._records.update((record.key.address, record) for record in records)
        return super().put(records)

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        found = super().get(keys, into)
        return found if into else tuple(self._records.get(k.address, f) for k, f in zip(keys, found, strict=True))


class LendsItsOwnBuffer(MemoryBackend):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._buffer = bytearray(1 << 20)

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        return super().get(keys, [self._buffer] if into is None and len(keys) == 1 else into)

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        self._buffer[:100] = bytes(100)
        return super().put(records)


class TrustsWhatItReads(MemoryBackend):
    def _write(self, record: Record) -> Stored | Refused:
        return super()._write(attrs.evolve(record, checksum=None))


class WritesAgain(MemoryBackend):
    def _write(self, record: Record) -> Stored | Refused:
        if record.key.address in self._frames:
            self._drop(record.key.address)
        return super()._write(record)


class SaysThatEverythingExists(MemoryBackend):
    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        return tuple(True for _ in keys)


class NeverSaysWhy(MemoryBackend):
    def _read(self, key: Key, into: memoryview | None) -> Record | Miss:
        found = super()._read(key, into)
        return Miss(key, "absent") if isinstance(found, Miss) and found.reason == "fingerprint" else found


class IgnoresTheFingerprint(MemoryBackend):
    def _write(self, record: Record) -> Stored | Refused:
        if any(address[16:] == record.key.content for address in self._frames):
            return self._counts.stored(record.key, fresh=False)
        return super()._write(record)


class TakesTwiceItsRoom(MemoryBackend):
    def __init__(self, capacity: int) -> None:
        super().__init__(2 * capacity)

    def status(self) -> Status:
        return attrs.evolve(super().status(), capacity=self.capacity // 2)


class EvictsForWhatCannotFit(MemoryBackend):
    def _write(self, record: Record) -> Stored | Refused:
        if len(record.payload) > self.capacity:
            for address in list(self._frames):
                self._digests[address[:16]] -= 1
                self._used -= len(self._frames.pop(address))
        return super()._write(record)


class CountsQuestions(MemoryBackend):
    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        self.get(keys)
        return super().exists(keys)


class RaisesWhenClosed(MemoryBackend):
    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        if self._closed:
            raise ValueError("closed")
        return super().exists(keys)


class MixesThreads(MemoryBackend):
    """A batch is answered from one field, without a lock."""

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        self._asked = keys
        for _ in range(200):
            found = super().get(self._asked, into)
        return found


class LosesTheLast(Kept):
    def reopened(self) -> MemoryBackend:
        address, frame = self._frames.popitem()
        self._digests[address[:16]] -= 1
        self._used -= len(frame)
        return super().reopened()


class ForgetsFingerprints(Kept):
    def reopened(self) -> MemoryBackend:
        self._fingerprints.clear()
        return super().reopened()


class ServesDamage(MemoryBackend):
    def _read(self, key: Key, into: memoryview | None) -> Record | Miss:
        frame = self._frames.get(key.address)
        if frame is not None:
            payload = bytes(frame[HEADER_BYTES:])
            fixed = Record(key, "kv", 0, 16, "layer_first", memoryview(payload))
            frame[:HEADER_BYTES] = encode_header(fixed)
        return super()._read(key, into)


KILLS: dict[str, type[MemoryBackend]] = {
    "law_what_was_put_comes_back_bitwise": CutsTheEnd,
    "law_answers_stand_in_the_order_of_what_was_asked": AnswersInOrderOfKeys,
    "law_nothing_asked_is_nothing_answered": RaisesOnNothing,
    "law_an_absent_key_is_a_miss": ComparesHalfTheKey,
    "law_a_read_into_a_buffer_fills_its_beginning_and_nothing_else": ForgetsTheBuffer,
    "law_a_buffer_that_is_too_small_is_a_miss_and_stays_within_bounds": ReadsPastTheBuffer,
    "law_a_payload_is_not_looked_at_after_the_put": KeepsTheCallersBuffer,
    "law_what_was_read_does_not_change_afterwards": LendsItsOwnBuffer,
    "law_content_that_changed_before_the_put_never_comes_back": TrustsWhatItReads,
    "law_a_key_is_written_once": WritesAgain,
    "law_a_read_exists_if_and_only_if_it_hits": SaysThatEverythingExists,
    "law_another_fingerprint_finds_nothing_and_is_told_why": NeverSaysWhy,
    "law_two_fingerprints_share_a_store_without_meeting": IgnoresTheFingerprint,
    "law_a_store_never_takes_more_than_its_capacity": TakesTwiceItsRoom,
    "law_what_is_larger_than_the_store_is_refused_and_costs_nothing": EvictsForWhatCannotFit,
    "law_every_answer_is_counted_once": CountsQuestions,
    "law_a_closed_store_answers": RaisesWhenClosed,
    "law_threads_at_once_get_what_they_asked_for": MixesThreads,
    "law_what_was_stored_is_there_after_reopening": LosesTheLast,
    "law_what_was_stored_is_there_after_the_process_died": LosesTheLast,
    "law_a_reopened_store_says_that_the_fingerprint_is_another": ForgetsFingerprints,
    "law_damage_is_a_counted_miss": ServesDamage,
}


def case_of(cls: type[MemoryBackend]) -> BackendCase:
    reopen: Callable[[Any], Any] | None = (lambda store: store.reopened()) if issubclass(cls, Kept) else None
    return BackendCase(cls.__name__, cls, reopen=reopen, damage=damage_memory)


@pytest.mark.parametrize("law", KILLS)
def test_a_law_sees_the_backend_that_breaks_it(law: str) -> None:
    report = report_on(case_of(KILLS[law]), [getattr(laws, law)])
    assert [verdict.law for verdict in report.broken] == [law]


def test_the_laws_hold_of_what_the_mutants_started_from() -> None:
    case = case_of(Kept)
    assert {(verdict.law, verdict.status) for verdict in report_on(case).verdicts} == {(law, "holds") for law in KILLS}
    assert case.untested == ()


def test_a_case_without_a_way_to_do_it_skips_the_law_and_says_so() -> None:
    report = report_on(BackendCase("plain", MemoryBackend), [laws.law_damage_is_a_counted_miss])
    assert [(verdict.status, verdict.told) for verdict in report.verdicts] == [
        ("not applicable", "plain has no damage")
    ]
    assert "plain has no damage: say how in a BackendCase" in report.untested


def test_a_record_that_fills_the_memory_is_stored_and_one_byte_more_is_not() -> None:
    store = MemoryBackend(HEADER_BYTES + 700)
    assert store.put([laws.record_of(1, 700)]) == (Stored(laws.key_of(1)),)
    (answer,) = store.put([laws.record_of(2, 701)])
    assert isinstance(answer, Refused) and answer.reason == "size"
    assert store.put([laws.record_of(2, 700)]) == (Stored(laws.key_of(2)),)
    assert store.exists([laws.key_of(1), laws.key_of(2)]) == (False, True)
    assert store.status().records == 1


def test_the_reasons_of_the_contract_are_distinct_words() -> None:
    assert len(set(REASONS)) == len(REASONS) == 14
    assert set(REASONS) > FAULTS
    assert not any(a.startswith(b) for a, b in itertools.permutations(REASONS, 2))
