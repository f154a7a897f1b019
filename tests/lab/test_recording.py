"""Recordings: an engine's calls, written without text, made again with the same decisions, and shrunk."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Cache,
    CapacityError,
    Change,
    Component,
    CompositionError,
    InputError,
    InvariantError,
    Manifest,
    Point,
    ProtocolError,
    Sequence,
    Window,
    compose,
    hookimpl,
)
from prefixloom import Path as PathReach
from prefixloom.lab import RecordedCalls, Replay, read_trace, record, rerun, shrink
from prefixloom.lab.recordings.recording import RecordingCache

KV = Manifest([Buffer("kv", (2,), "float32")])
PAGE = 4
TOKEN = 1_987_654_321  # so long that no hash or time has its digits by chance


def cache(lookahead: int = 0, *, policy: str = "lru", debug: bool = False, **capacity: int) -> Cache:
    kv = Manifest([Buffer("kv", (2,), "float32")], lookahead=lookahead)
    parts = [Component("whole", kv, PathReach()), Component("near", KV, Window(9)), Component("state", KV, Point())]
    sizes = {"whole": 160, "near": 120, "state": 9, **capacity}
    return compose(None, plugins=parts, page_size=PAGE, capacity=sizes, max_running=3, debug=debug, policy=policy)


def drive(cache: Cache, seed: int, calls: int = 120) -> None:
    """Random calls of an engine: conversations that go on and part, in a cache that is too small for them."""
    rng = random.Random(seed)
    told: list[list[int]] = [[9] * 24, [8] * 17]
    running: list[tuple[Sequence, list[int]]] = []
    for _ in range(calls):
        what = rng.random()
        try:
            if what < 0.3 and len(running) < 3:
                before = rng.choice(told[-4:])
                prompt = before[: rng.choice((len(before), 12, 50))] + [
                    rng.randrange(3) for _ in range(rng.randrange(9))
                ]
                sequence = cache.open(
                    prompt, leave=rng.randrange(2), namespace=rng.choice(("", "", "", "other")),
                    extra=((2, 5, "image"),) if rng.random() < 0.1 else (), priority=rng.randrange(3),
                    until=rng.choice((math.inf, 100 * rng.random())),
                )  # fmt: skip
                running.append((sequence, prompt))
            elif what < 0.75 and running:
                sequence, names = rng.choice(running)
                if sequence.named <= sequence.reserved:
                    more = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
                    sequence.append(more)
                    names += more
                sequence.grow(min(sequence.named - sequence.reserved, rng.choice((4, 8, 40))))
                with cache.step([sequence]) as step:
                    step.run_ops()
                if rng.random() < 0.9:
                    sequence.publish()
            elif what < 0.93 and running:
                sequence, names = running.pop(rng.randrange(len(running)))
                told.append(names)
                sequence.close() if rng.random() < 0.9 else sequence.abort()
            elif what < 0.96:
                cache.evict({"near": rng.randrange(3), "state": rng.randrange(2)})
            elif what < 0.99:
                cache.expire(100 * rng.random())
            else:
                cache.drop_namespace("other")
        except CapacityError:
            continue
    for sequence, _ in running:
        sequence.close()


def shapes(changes: list[Change]) -> list[Any]:
    """Changes without text: what is removed and stored, where, why and in which order."""
    return [(each.kind, each.component, each.tokens.count, each.spans, each.boundary, each.cause) for each in changes]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_made_again_a_recording_gives_the_same_decisions_and_evicts_the_same(
    seed: int, lookahead: int, tmp_path: Path
) -> None:
    original, again = cache(lookahead), cache(lookahead)
    seen = original.journal(), again.journal()
    with record(original, tmp_path / "calls") as recorded:
        drive(recorded, seed)
    done = rerun(RecordedCalls.read(tmp_path / "calls"), again)
    assert done.told == ()
    assert done.differences == 0 < done.calls
    assert original.stats().hit_tokens == again.stats().hit_tokens > 0
    assert sum(each.evicted for each in original.stats().components.values()) > 0
    assert shapes(seen[0].take()) == shapes(seen[1].take())


def test_on_another_composition_a_recording_is_refused_and_a_difference_is_told(tmp_path: Path) -> None:
    with record(cache(), tmp_path / "calls") as recorded:
        drive(recorded, 4)
    recording = RecordedCalls.read(tmp_path / "calls")
    with pytest.raises(CompositionError, match="policy lru, and this one has lfu"):
        rerun(recording, cache(policy="lfu"))
    with pytest.raises(CompositionError, match="pools"):
        rerun(recording, cache(state=12))
    done = rerun(recording, cache(policy="lfu"), keep=lambda entry: entry)
    assert done.differences > 0
    assert "was" in done.told[0]


def test_a_recording_has_no_text_and_two_have_no_hash_in_common_but_with_one_salt(tmp_path: Path) -> None:
    def hashes(name: str, salt: bytes | None) -> list[str]:
        with record(cache(), tmp_path / name, salt=salt) as recorded, recorded.open([TOKEN] * 8, namespace="tenant"):
            pass
        text = (tmp_path / name).read_text()
        assert "tenant" not in text
        assert str(TOKEN) not in text
        return [json.loads(text.splitlines()[1])[5]]

    assert hashes("a", None) != hashes("b", None)
    assert hashes("c", b"same") == hashes("d", b"same")


def test_a_recording_says_what_hit_and_why(tmp_path: Path) -> None:
    recorded = record(cache(), tmp_path / "calls.gz")
    recorded.history()
    for _ in range(2):
        with recorded.open(range(20), leave=1) as sequence:
            recorded.account(sequence)
            sequence.grow(20 - sequence.ready)
            with recorded.step([sequence]) as step:
                step.run_ops()
    recorded.finish()
    entries = [json.loads(line) for line in gzip.decompress((tmp_path / "calls.gz").read_bytes()).splitlines()]
    opened = [entry for entry in entries if entry[0] == "open"]
    assert [entry[9:] for entry in opened] == [[0, 0, None, 0], [0, 20, "state", 0]]
    assert [entry[2][0][2:] for entry in entries if entry[0] == "why"] == [["new", ""], ["never kept", "state"]]


def test_a_recording_is_a_trace_for_other_caches(tmp_path: Path) -> None:
    with record(cache(), tmp_path / "calls") as recorded:
        for user in range(3):
            for turn in range(1, 4):
                with recorded.open([user] * 10 * turn, leave=1) as sequence:
                    sequence.grow(10 * turn - sequence.ready)
                    with recorded.step([sequence]) as step:
                        step.run_ops()
                    sequence.append([user] * 3)
    trace = read_trace(tmp_path / "calls")
    requests = list(trace)
    assert trace.format == "recording"
    assert [request.prompt.count for request in requests] == [10, 20, 30] * 3
    assert [request.output for request in requests] == [3] * 9
    assert requests[0].prompt.tokens()[: 4 * 8] == requests[1].prompt.tokens()[: 4 * 8]
    assert requests[2].prompt.tokens()[:16] != requests[3].prompt.tokens()[:16]
    path = Component("path", KV, PathReach())
    outcome = Replay(compose(None, plugins=[path], page_size=PAGE, capacity=1000, device="meta")).run(trace)
    assert (outcome.requests, outcome.prompt, outcome.hit) == (9, 180, 3 * (8 + 20))


class LeaksAfterEight(Component):
    """Takes a slot for itself when a prefix of ``long`` tokens is published after one of 8: only debug mode sees it."""

    pool: Any = None
    long = 32

    def __init__(self) -> None:
        super().__init__("path", KV, PathReach())
        self.seen = False

    @hookimpl
    def commit_insert(self, walk: Any) -> None:
        self.seen |= walk.boundary == 8
        if self.seen and walk.boundary == self.long:
            self.pool.take(1)


class NeverLeaks(LeaksAfterEight):
    long = 36


def leaking(kind: Callable[[], Component], debug: bool = True) -> Cache:
    return compose(None, plugins=[kind()], page_size=PAGE, capacity=400, debug=debug)


def test_shrinking_leaves_the_fewest_requests_that_still_fail(tmp_path: Path) -> None:
    with record(leaking(LeaksAfterEight, debug=False), tmp_path / "calls") as recorded:
        lengths = [16, 12, 8, 24, 16, 20, 12, 32, 4, 16]
        for number, length in enumerate(lengths):
            recorded.expire(number)
            with recorded.open([number] * length) as sequence:
                sequence.grow(length)
                with recorded.step([sequence]) as step:
                    step.run_ops()
    recording = RecordedCalls.read(tmp_path / "calls")
    assert len(recording.requests) == 10
    shrunk = shrink(recording, lambda: leaking(LeaksAfterEight))
    assert shrunk is not None
    assert isinstance(shrunk.error, InvariantError)
    assert shrunk.recording.requests == [2, 7]
    assert "expire" not in {entry[0] for _, entry in shrunk.recording.entries}
    shrunk.recording.write(tmp_path / "small.gz")
    again = RecordedCalls.read(tmp_path / "small.gz")
    assert [entry for _, entry in again.entries] == [entry for _, entry in shrunk.recording.entries]
    assert shrink(recording, lambda: leaking(NeverLeaks)) is None


def test_a_rewind_of_named_tokens_is_recorded(tmp_path: Path) -> None:
    def made() -> Cache:
        return compose(None, plugins=[Component("path", KV, PathReach())], page_size=PAGE, capacity=400, max_rewind=8)

    original, again = made(), made()
    with record(original, tmp_path / "calls") as recorded:
        for last in (5, 6, 5):
            with recorded.open([1] * 10) as sequence:
                sequence.grow(10 - sequence.reserved)
                sequence.fill()
                sequence.commit()
                sequence.append([2, 3, 4])
                sequence.grow(3)
                sequence.rewind(3)
                sequence.append([last] * 6)
                sequence.grow(6)
                sequence.fill()
                sequence.commit()
    done = rerun(RecordedCalls.read(tmp_path / "calls"), again)
    assert done.told == ()
    assert again.stats().nodes == original.stats().nodes
    assert again.stats().components["path"].cached == original.stats().components["path"].cached == 2 + 2 * 2


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    used = cache()
    used.open([1]).close()
    with pytest.raises(ProtocolError, match="not used yet"):
        record(used, tmp_path / "a")
    with pytest.raises(InputError, match="cannot be written"):
        record(cache(), tmp_path / "no" / "folder")
    with record(cache(), tmp_path / "b") as recorded, pytest.raises(ProtocolError, match="not recorded"):
        recorded.lease(recorded.match([1]))


def test_an_error_of_the_file_ends_the_recording_and_no_request(tmp_path: Path) -> None:
    recorded = record(cache(), Path("/dev/full"))
    assert isinstance(recorded, RecordingCache)
    for number in range(3000):
        with recorded.open([number % 7] * 9, leave=1) as sequence:
            sequence.grow(9 - sequence.ready)
            sequence.fill()
            sequence.commit()
    assert recorded.failed is not None
    recorded.finish()


@pytest.mark.parametrize("name", ["calls", "calls.gz"])
def test_a_recording_ends_at_its_size_and_is_its_owners_alone(tmp_path: Path, name: str) -> None:
    recorded = record(cache(), tmp_path / name, size=5000)
    for number in range(300):
        recorded.open([number % 7] * 9, leave=1).abort()
    recorded.finish()
    assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert recorded.failed is not None and "the size that it may have" in str(recorded.failed)
    read = gzip.open if name.endswith(".gz") else open
    with read(tmp_path / name, "rb") as file:
        written = file.read()
    assert 4500 < len(written) <= 5000 and written.endswith(b"]\n")


def test_a_recording_whose_last_line_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    with record(cache(), tmp_path / "calls") as recorded:
        drive(recorded, 2)
    text = (tmp_path / "calls").read_bytes()
    (tmp_path / "cut").write_bytes(text[:-5])
    assert len(RecordedCalls.read(tmp_path / "cut").entries) == len(RecordedCalls.read(tmp_path / "calls").entries) - 1


@pytest.mark.parametrize("name", ["calls.rec", "calls.rec.gz"])
def test_an_engine_that_is_killed_leaves_a_recording_of_what_it_has_served(tmp_path: Path, name: str) -> None:
    recorder = record(cache(), tmp_path / name)
    for number in range(6):
        with recorder.open([number] * 20) as sequence:
            sequence.grow(20)
            with recorder.step([sequence]) as step:
                step.run_ops()
    left = tmp_path / f"left.{name}"
    left.write_bytes((tmp_path / name).read_bytes())  # nothing was finished
    recorder.finish()
    recording = RecordedCalls.read(left)
    assert len(recording.requests) == 6
    assert rerun(recording, cache()).differences == 0


HEAD = '["recording",1,4,0,"model","lru",{"whole":[8,4]}]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no line"),
        ('["recording",2,4,0,"m","lru",{}]\n', "version 2"),
        ('["recording",1,0,0,"model","lru",{"whole":[8,4]}]\n', "line 1: the head of a recording is expected"),
        ('["recording",1,4,0,"model","lru",[]]\n', "line 1: the head of a recording is expected"),
        (HEAD + '{"a": 1}\n', "line 2: an entry of a recording is expected"),
        (HEAD + '["sing"]\n', "line 2: an entry of a recording is expected"),
        (HEAD + '["open"]\n', "line 2: an entry of a recording is expected"),
        (HEAD + '[["open"]]\n', "line 2: an entry of a recording is expected"),
        (HEAD + '[1,\n["poll"]\n', "line 2: a JSON array is expected"),
        (HEAD + '["close",7,0.5]\n', "line 2: this does not follow from the lines above"),
        (HEAD + '["append",7,4,"",0]\n', "line 2: this does not follow from the lines above"),
    ],
)
def test_a_damaged_recording_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "damaged.rec"
    path.write_text(text)
    with pytest.raises(InputError, match=expected):
        list(read_trace(path))
    if "follow" not in expected:
        with pytest.raises(InputError, match=expected):
            RecordedCalls.read(path)
