"""A storage backend under test: the case and its laws. No backend is known here.

from prefixloom.testing import BackendCase, parametrize_with_laws

@parametrize_with_laws(BackendCase("mine", lambda capacity: MyBackend(capacity)))
def test_conformance(case, law):
    law(case)
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ...errors import CompositionError
from ...storage import Backend, BackendType, Fingerprint, Key, Miss, Record, Refused, Status, Stored
from ...storage import opened as open_backend
from ..kit.case import NotApplicable

MIB = 1 << 20


@attrs.frozen
class BackendCase:
    """A backend to be tested.

    ``open``     makes a new, empty store with a capacity of about so many bytes
    ``reopen``   closes a store and opens it again, as a later process would; None: it does not outlive its process
    ``abandon``  opens it again without closing it, as after a crash; None: use ``reopen``
    ``damage``   changes the stored bytes of a key behind the backend's back: it combines byte ``at`` of the payload
                 (negative: of what is stored before the payload) with ``mask`` by exclusive or; None: impossible
    ``small``    a capacity that a few hundred records of 4 KiB exceed; 0: a server bounds the store, and counts its
                 records, so that laws of room and of numbers say nothing of it
    """

    name: str
    open: Callable[[int], Backend]
    reopen: Callable[[Backend], Backend] | None = None
    abandon: Callable[[Backend], Backend] | None = None
    damage: Callable[[Backend, Any, int, int], None] | None = None
    small: int = MIB

    @property
    def laws(self) -> tuple[Callable[[BackendCase], None], ...]:
        return tuple(law for name, law in globals().items() if name.startswith("law_"))

    @property
    def untested(self) -> tuple[str, ...]:
        """Return what no law tests, because the case does not say how."""
        lacking = [what for what in ("damage", "reopen", "small") if not getattr(self, what)]
        return tuple(f"{self.name} has no {what}: say how in a BackendCase" for what in lacking)

    def needs(self, what: str) -> None:
        """Leave a law that needs what this case does not say."""
        if not getattr(self, what):
            raise NotApplicable(f"{self.name} has no {what}")

    def __str__(self) -> str:
        return self.name


ONE = Fingerprint("toy", "bfloat16", 16, "kv", "1", shapes={"kv": (2, 64)}, shards={"tensor": (0, 2)})
ROOMY = 64 << 20


def content(seed: object, size: int) -> bytes:
    """Return bytes that identify where they belong."""
    return hashlib.shake_128(repr(seed).encode()).digest(size)


def key_of(seed: object, fingerprint: Fingerprint = ONE) -> Key:
    return Key(content(("key", seed), 32), fingerprint)


def record_of(seed: int, size: int = 700, fingerprint: Fingerprint = ONE, component: str = "kv") -> Record:
    return Record(
        key_of(seed, fingerprint), component, 16 * seed, 16 * seed + 16, "layer_first", memoryview(content(seed, size))
    )


@contextmanager
def opened(case: BackendCase, capacity: int = ROOMY) -> Iterator[Backend]:
    backend = case.open(capacity or ROOMY)
    try:
        yield backend
    finally:
        backend.close()


def stored(backend: Backend, *records: Record) -> None:
    answers = backend.put(records)
    assert answers == tuple(Stored(record.key) for record in records), answers


def same(found: Record | Miss, record: Record) -> None:
    """Check that what was found equals the record in every field."""
    assert isinstance(found, Record), found
    assert found == record, f"got {found}, put {record}"
    assert found.payload.readonly
    assert found.checksum == record.checksum, "the checksum goes with the record"


def counts(case: BackendCase, backend: Backend, records: int) -> None:
    assert backend.status().records == (records if case.small else None), backend.status()


def missed(found: Record | Miss, reason: str) -> None:
    assert isinstance(found, Miss) and found.reason == reason, f"expected a miss ({reason}), got {found}"


# ---------------------------------------------------------------- reading and writing


def law_what_was_put_comes_back_bitwise(case: BackendCase) -> None:
    sizes = (1, 2, 255, 256, 257, 4095, 4096, 4097, 70_000, 524_288)
    records = [record_of(i, size) for i, size in enumerate(sizes)]
    state = Record(key_of("state"), "é" * 31 + "!", 4096, 4096, "page_first/2", memoryview(content("state", 999)))
    with opened(case) as backend:
        stored(backend, *records, state)
        for found, record in zip(backend.get([r.key for r in (*records, state)]), (*records, state), strict=True):
            same(found, record)


def law_answers_stand_in_the_order_of_what_was_asked(case: BackendCase) -> None:
    records = [record_of(i, 100 + i) for i in range(8)]
    order = (5, 0, 7, 5, 3, 3)
    with opened(case) as backend:
        stored(backend, *records[:4])
        asked = [records[i].key for i in order]
        assert backend.exists(asked) == tuple(i < 4 for i in order)
        stored(backend, *reversed(records[4:]))
        for found, i in zip(backend.get(asked), order, strict=True):
            same(found, records[i])


def law_nothing_asked_is_nothing_answered(case: BackendCase) -> None:
    with opened(case) as backend:
        assert (backend.get([]), backend.get([], []), backend.put([])) == ((), (), ())
        assert backend.exists([]) == ()


def law_an_absent_key_is_a_miss(case: BackendCase) -> None:
    with opened(case) as backend:
        missed(backend.get([key_of(1)])[0], "absent")
        stored(backend, record_of(1))
        near = bytearray(key_of(1).content)
        near[-1] ^= 1
        missed(backend.get([Key(bytes(near), ONE)])[0], "absent")
        near[-1], near[0] = near[-1] ^ 1, near[0] ^ 0x80
        missed(backend.get([Key(bytes(near), ONE)])[0], "absent")


def law_a_read_into_a_buffer_fills_its_beginning_and_nothing_else(case: BackendCase) -> None:
    records = [record_of(i, size) for i, size in enumerate((1, 700, 4096))]
    buffers = [bytearray(b"\xee" * 5000) for _ in records]
    with opened(case) as backend:
        stored(backend, *records)
        for found, record, buffer in zip(backend.get([r.key for r in records], buffers), records, buffers, strict=True):
            same(found, record)
            size = len(record.payload)
            assert bytes(buffer[:size]) == bytes(record.payload), "the buffer has the payload"
            assert bytes(buffer[size:]) == b"\xee" * (5000 - size), "written behind the payload"
            buffer[0] ^= 0xFF
            assert isinstance(found, Record) and found.payload[0] == buffer[0], "the payload is a view of the buffer"
        same(backend.get([records[1].key])[0], records[1])


def law_a_buffer_that_is_too_small_is_a_miss_and_stays_within_bounds(case: BackendCase) -> None:
    whole = bytearray(b"\xee" * 1000)
    with opened(case) as backend:
        stored(backend, record_of(1, 700))
        missed(backend.get([key_of(1)], [memoryview(whole)[:699]])[0], "size")
        assert whole[699:] == b"\xee" * 301
        same(backend.get([key_of(1)], [memoryview(whole)[:700]])[0], record_of(1, 700))


def law_a_payload_is_not_looked_at_after_the_put(case: BackendCase) -> None:
    source = bytearray(content("source", 900))
    record = Record(key_of(1), "kv", 0, 16, "layer_first", memoryview(source))
    with opened(case) as backend:
        stored(backend, record)
        before = bytes(source)
        source[:] = bytes(900)
        found = backend.get([record.key])[0]
        assert isinstance(found, Record) and bytes(found.payload) == before, "the store kept the caller's buffer"


def law_what_was_read_does_not_change_afterwards(case: BackendCase) -> None:
    with opened(case, case.small) as backend:
        stored(backend, record_of(1))
        found = backend.get([key_of(1)])[0]
        for i in range(2, 402):
            backend.put([record_of(i, 4096)])
        same(found, record_of(1))
    same(found, record_of(1))


def law_content_that_changed_before_the_put_never_comes_back(case: BackendCase) -> None:
    source = bytearray(content("source", 900))
    record = Record(key_of(1), "kv", 0, 16, "layer_first", memoryview(source))
    source[450] ^= 1
    with opened(case) as backend:
        backend.put([record])
        assert isinstance(backend.get([record.key])[0], Miss), "the checksum is not what the payload came to"


def law_a_key_is_written_once(case: BackendCase) -> None:
    other = Record(key_of(1), "kv", 16, 32, "layer_first", memoryview(content("other", 300)))
    with opened(case) as backend:
        stored(backend, record_of(1))
        used = backend.status().used
        assert backend.put([record_of(1), other]) == (Stored(key_of(1), fresh=False),) * 2
        assert not case.small or backend.status().used == used
        same(backend.get([key_of(1)])[0], record_of(1))
        assert backend.put([record_of(2), record_of(2)]) == (Stored(key_of(2)), Stored(key_of(2), fresh=False))


def law_a_read_exists_if_and_only_if_it_hits(case: BackendCase) -> None:
    with opened(case, case.small) as backend:
        for i in range(300):
            backend.put([record_of(i, 4096)])
        keys = [key_of(i) for i in range(300)]
        assert backend.exists(keys) == tuple(isinstance(found, Record) for found in backend.get(keys))


# ---------------------------------------------------------------- fingerprints


def law_another_fingerprint_finds_nothing_and_is_told_why(case: BackendCase) -> None:
    changes: dict[str, Any] = {
        "model": "other", "weights": "v2", "dtype": "float16", "page_size": 32, "plugin": "kv2", "plugin_version": "2",
        "layout": "page_first", "shapes": {"kv": (2, 128)}, "layers": (1, 2), "shards": {"tensor": (1, 2)}, "format": 2,
    }  # fmt: skip
    with opened(case) as backend:
        stored(backend, record_of(1))
        for fact, value in changes.items():
            other = attrs.evolve(ONE, **{fact: value})
            assert backend.exists([key_of(1, other)]) == (False,), fact
            told(backend.get([key_of(1, other)])[0], fact)
            told(backend.get([key_of(77, other)])[0], fact)
        same(backend.get([key_of(1)])[0], record_of(1))


def told(found: Record | Miss, fact: str) -> None:
    missed(found, "fingerprint")
    assert isinstance(found, Miss) and found.detail.startswith(f"{fact} is "), f"it does not name {fact}: {found}"


def law_two_fingerprints_share_a_store_without_meeting(case: BackendCase) -> None:
    other = attrs.evolve(ONE, dtype="float16")
    theirs = Record(key_of(1, other), "kv", 16, 32, "layer_first", memoryview(content("x", 800)))
    with opened(case) as backend:
        stored(backend, record_of(1), theirs)
        for found, record in zip(backend.get([key_of(1), key_of(1, other)]), (record_of(1), theirs), strict=True):
            same(found, record)


# ---------------------------------------------------------------- room


def law_a_store_never_takes_more_than_its_capacity(case: BackendCase) -> None:
    case.needs("small")
    with opened(case, case.small) as backend:
        capacity = backend.status().capacity
        assert capacity is not None and capacity <= case.small
        for i in range(600):
            (answer,) = backend.put([record_of(i, 1 + (i * 2654435761) % 9000)])
            assert isinstance(answer, Stored), answer
            status = backend.status()
            assert status.used <= capacity == status.capacity, f"{status.used} of {capacity} after {i} records"
            same(backend.get([key_of(i)])[0], record_of(i, 1 + (i * 2654435761) % 9000))
        assert status.evicted > 0 and status.stored == 600
        assert status.records is not None and status.records + status.evicted == 600, f"{status}"
        assert sum(backend.exists([key_of(i) for i in range(600)])) == status.records


def law_what_is_larger_than_the_store_is_refused_and_costs_nothing(case: BackendCase) -> None:
    case.needs("small")
    with opened(case, case.small) as backend:
        stored(backend, record_of(1))
        large = record_of(2, 2 * case.small)
        answers = backend.put([large, record_of(3)])
        assert isinstance(answers[0], Refused) and answers[0].reason == "size", answers[0]
        assert answers[1] == Stored(key_of(3))
        assert backend.status().refused == {"size": 1}
        assert backend.exists([key_of(1), key_of(2), key_of(3)]) == (True, False, True)


# ---------------------------------------------------------------- counting, closing, threads


def law_every_answer_is_counted_once(case: BackendCase) -> None:
    with opened(case) as backend:
        status = backend.status()
        assert status == Status(0 if case.small else None, status.used, status.capacity)
        backend.put([record_of(1), record_of(2), record_of(1)])
        backend.get([key_of(1), key_of(2), key_of(3), key_of(1)])
        backend.get([key_of(1)], [bytearray(3)])
        backend.exists([key_of(1), key_of(9)])
        status = backend.status()
        assert (status.stored, status.hits) == (2, 3), status
        counts(case, backend, 2)
        assert (status.misses, status.refused) == ({"absent": 1, "size": 1}, {}), status


def law_a_closed_store_answers(case: BackendCase) -> None:
    with opened(case) as backend:
        stored(backend, record_of(1))
        backend.close()
        backend.close()
        missed(backend.get([key_of(1)])[0], "closed")
        (answer,) = backend.put([record_of(2)])
        assert isinstance(answer, Refused) and answer.reason == "closed", answer
        assert backend.exists([key_of(1)]) == (False,)
        assert backend.status().misses == {"closed": 1}


def law_threads_at_once_get_what_they_asked_for(case: BackendCase) -> None:
    wrong: list[str] = []

    def work(backend: Backend, mine: int) -> None:
        try:
            for i in range(60):
                seed = (i * 7 + mine * 3) % 40
                backend.put([record_of(seed, 3000 + seed)])
                found = backend.get([key_of(seed)])[0]
                if isinstance(found, Record):
                    same(found, record_of(seed, 3000 + seed))
                elif found.reason != "absent":
                    wrong.append(str(found))
        except BaseException as error:
            wrong.append(repr(error))

    with opened(case, case.small) as backend:
        threads = [threading.Thread(target=work, args=(backend, mine)) for mine in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]
        counts(case, backend, sum(backend.exists([key_of(i) for i in range(40)])))


# ---------------------------------------------------------------- lasting, and damage


def law_what_was_stored_is_there_after_reopening(case: BackendCase) -> None:
    case.needs("reopen")
    assert case.reopen is not None
    records = [record_of(i, (1 + 37 * i, 32_767 + i, 70_000)[i % 3]) for i in range(40)]
    backend = case.open(ROOMY)
    stored(backend, *records)
    backend = case.reopen(backend)
    try:
        counts(case, backend, 40)
        for found, record in zip(backend.get([r.key for r in records]), records, strict=True):
            same(found, record)
        assert backend.put([records[3], record_of(99)]) == (Stored(key_of(3), fresh=False), Stored(key_of(99)))
    finally:
        backend.close()


def law_what_was_stored_is_there_after_the_process_died(case: BackendCase) -> None:
    case.needs("reopen")
    assert case.reopen is not None
    backend = case.open(ROOMY)
    for i in range(10):
        stored(backend, record_of(i))
    backend = (case.abandon or case.reopen)(backend)
    try:
        for i in range(10):
            same(backend.get([key_of(i)])[0], record_of(i))
    finally:
        backend.close()


def law_a_reopened_store_says_that_the_fingerprint_is_another(case: BackendCase) -> None:
    case.needs("reopen")
    assert case.reopen is not None
    backend = case.open(ROOMY)
    stored(backend, record_of(1))
    backend = case.reopen(backend)
    try:
        told(backend.get([key_of(1, attrs.evolve(ONE, model="other"))])[0], "model")
        same(backend.get([key_of(1)])[0], record_of(1))
    finally:
        backend.close()


def law_damage_is_a_counted_miss(case: BackendCase) -> None:
    case.needs("damage")
    assert case.damage is not None
    spots = [(at, mask) for at in (0, 1, 350, 698, 699) for mask in (0x01, 0x80)]
    with opened(case) as backend:
        for i, (at, mask) in enumerate(spots):
            stored(backend, record_of(i))
            case.damage(backend, key_of(i), at, mask)
            missed(backend.get([key_of(i)])[0], "corrupt")
            missed(backend.get([key_of(i)])[0], "absent")
            stored(backend, record_of(i))
            same(backend.get([key_of(i)])[0], record_of(i))
        assert backend.status().misses == {"corrupt": len(spots), "absent": len(spots)}


@contextmanager
def installed_case(kind: BackendType, options: Mapping[str, Any]) -> Iterator[BackendCase]:
    """Make a case of an installed kind of store. A store that takes a folder gets its own, and is reopened there.

    The store's ``open`` must take ``capacity``. A store that lasts must also take ``directory``, ``folder`` or
    ``path``.
    """
    parameters = inspect.signature(kind.open).parameters
    place = next((name for name in ("directory", "folder", "path") if name in parameters and name not in options), None)
    if "capacity" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise CompositionError(
            f"storage {kind.name!r}: its open takes no capacity, and the laws are of one that has one"
        )
    homes: dict[int, tuple[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="prefixloom-store-") as root:

        def at(folder: str, capacity: int) -> Backend:
            where = {place: Path(folder) / "store"} if place else {}
            backend = open_backend(kind, capacity=capacity, **where, **options)
            homes[id(backend)] = folder, capacity
            return backend

        def reopen(backend: Backend) -> Backend:
            backend.close()
            return at(*homes[id(backend)])

        yield BackendCase(
            kind.name, lambda capacity: at(tempfile.mkdtemp(dir=root), capacity), reopen if place else None
        )
