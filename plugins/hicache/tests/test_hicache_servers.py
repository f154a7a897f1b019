"""Stores on servers when the network, the server or another client does what a disk never does.

Whatever happens, an answer is a miss, a refusal, or exactly what was put; and it comes in bounded time.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from prefixloom import CompositionError, StorageError, open_store
from prefixloom.storage import Key, Miss, Record, Refused, Stored, seconds, shown_url, without_passwords
from prefixloom.testing.laws.storage import ONE, key_of, record_of
from prefixloom_hicache.servers import server_store, write_memory
from prefixloom_hicache.servers.write_memory import WriteMemory
from tests.support.server_cases import REDIS, S3, value_name
from tests.support.store_servers import (
    Server,
    make_bucket,
    mooncake_servers,
    mooncake_url,
    redis_server,
    redis_url,
    s3_server,
    s3_url,
)

TIMEOUT = 0.4
needs_redis = pytest.mark.outside("redis-server")
needs_mooncake = pytest.mark.outside("mooncake_master", "mooncake_client")
CASES = [pytest.param(REDIS, id="redis", marks=needs_redis), pytest.param(S3, id="s3")]
RECORDS = [record_of(number, 3000 + number) for number in range(12)]
KEYS = [record.key for record in RECORDS]


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "s3"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    """A server that the test may disturb, and its URL."""
    made, url_of = (redis_server(), redis_url) if request.param == "redis" else (s3_server(), s3_url)
    yield url_of(made, timeout=TIMEOUT if "stalled" in request.node.name else 10, prefix="mine"), made
    made.kill()


def reasons(answers: Any) -> set[str]:
    return {getattr(answer, "reason", "fine") for answer in answers}


def within(limit: float, call: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    answer = call()
    took = time.monotonic() - begun
    assert took < limit, f"it took {took:.2f} s"
    return answer


# ---------------------------------------------------------------- the server


def test_a_stalled_server_costs_its_timeout_and_answers_rightly_afterwards(server: tuple[str, Server]) -> None:
    url, process = server
    store = open_store(url)
    store.put(RECORDS[:6])
    process.stall()
    try:
        # one attempt, one more, and for a put the same for "is it there"
        assert reasons(within(6 * TIMEOUT + 2, lambda: store.get(KEYS))) == {"io"}
        assert reasons(within(6 * TIMEOUT + 2, lambda: store.put(RECORDS[6:]))) == {"io"}
        assert store.exists(KEYS[:3]) == (False,) * 3
        assert "the last error of the server" in store.status().notes[0]
    finally:
        process.go_on()
    begun = time.monotonic()
    while reasons(found := store.get(KEYS[:6])) == {"io"} and time.monotonic() < begun + 30:
        pass
    assert found == tuple(RECORDS[:6]), "late answers of calls that were given up are nobody's"
    for answer, record in zip(store.get(KEYS[6:]), RECORDS[6:], strict=True):
        assert answer == record or isinstance(answer, Miss)  # a write may have arrived after its time-out
    store.close()


def test_a_server_that_died_and_comes_back_empty(server: tuple[str, Server]) -> None:
    url, process = server
    store = open_store(url)
    store.put(RECORDS)
    process.kill()
    assert reasons(store.get(KEYS)) == {"io"}
    assert reasons(store.put(RECORDS)) == {"io"}
    process.start()
    if url.startswith("s3"):
        make_bucket(process)
    assert reasons(store.get(KEYS)) == {"absent"}
    assert store.put(RECORDS) == tuple(map(Stored, KEYS))
    assert store.get(KEYS) == tuple(RECORDS)
    store.close()


def test_what_one_client_writes_another_finds(server: tuple[str, Server]) -> None:
    url, _ = server
    one, other = open_store(url), open_store(url)
    assert reasons(other.get(KEYS[:2])) == {"absent"}
    one.put(RECORDS[:2])
    assert other.get(KEYS[:2]) == tuple(RECORDS[:2])
    assert other.put(RECORDS[:3]) == (Stored(KEYS[0], False), Stored(KEYS[1], False), Stored(KEYS[2]))
    assert one.exists(KEYS[:4]) == (True, True, True, False)
    one.close(), other.close()


def test_two_writers_of_the_same_records_agree_who_was_first(server: tuple[str, Server]) -> None:
    url, _ = server
    stores = [open_store(url) for _ in range(3)]
    answers: list[Any] = [None] * 3
    gate = threading.Barrier(3)

    def write(at: int) -> None:
        gate.wait()
        answers[at] = [stores[at].put([record]) for record in RECORDS]

    threads = [threading.Thread(target=write, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(RECORDS)):
        assert sorted(answers[at][number][0].fresh for at in range(3)) == [False, False, True]
    assert stores[0].get(KEYS) == tuple(RECORDS)
    for store in stores:
        store.close()


@needs_redis
def test_a_full_server_refuses_or_evicts_as_it_is_told() -> None:
    large = [record_of(number, 200_000) for number in range(60)]
    for policy, told in (("noeviction", "capacity"), ("allkeys-lru", "absent")):
        process = redis_server("--maxmemory", "6mb", "--maxmemory-policy", policy)
        store = open_store(redis_url(process))
        answers = [store.put([record])[0] for record in large]
        found = store.get([record.key for record in large])
        if told == "capacity":
            assert isinstance(answers[-1], Refused) and answers[-1].reason == "capacity", answers[-1]
            assert "maxmemory" in answers[-1].detail
        else:
            assert all(isinstance(answer, Stored) for answer in answers)
        kept = [answer == record for answer, record in zip(found, large, strict=True)]
        assert 0 < sum(kept) < len(large) and reasons(found) == {"fine", "absent"}
        used, capacity = store.status().used, store.status().capacity
        assert capacity == 6 << 20 and used > 0
        store.close()
        process.kill()


@needs_redis
def test_a_full_server_is_full_for_a_client_that_comes_later() -> None:
    process = redis_server("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    first = open_store(redis_url(process, prefix="first"))
    for number in range(60):
        first.put([record_of(number, 200_000)])
    later = open_store(redis_url(process, prefix="later"))
    (answer,) = later.put([record_of(0, 200_000)])
    assert isinstance(answer, Refused) and answer.reason == "capacity", answer
    for store in (first, later):
        store.close()
    process.kill()


@needs_redis
def test_records_of_redis_live_so_long_after_their_last_use() -> None:
    process = redis_server()
    store = open_store(redis_url(process, ttl="700ms"))
    store.put(RECORDS[:2])

    numbers = iter(range(100, 200))

    def put_again(keys: Sequence[Key]) -> None:
        new = [record_of(next(numbers), 100) for _ in range(8)]  # so many that the store does not ask what is there
        assert store.put([RECORDS[0], *new])[0] == Stored(*keys, fresh=False)

    for use in (store.get, store.exists, put_again, put_again, put_again, store.get):
        time.sleep(0.3)
        use(KEYS[:1])
    assert reasons(store.get(KEYS[:2])) == {"fine", "absent"}
    time.sleep(0.9)
    assert store.exists(KEYS[:1]) == (False,)
    store.close()
    process.kill()


# ---------------------------------------------------------------- what lies on the server


@needs_redis
def test_the_failure_of_one_value_is_no_failure_of_its_batch() -> None:
    store: Any = REDIS.open(0)
    store.put(RECORDS[:3])
    name = value_name(store, KEYS[1])
    store.values.client.delete(name)
    store.values.client.rpush(name, "a list")
    found = store.get(KEYS[:4])
    assert [getattr(answer, "reason", "fine") for answer in found] == ["fine", "corrupt", "fine", "absent"]
    store.close()


@pytest.mark.parametrize("case", CASES)
def test_a_value_of_any_length_is_read_no_further_than_the_buffer(case: Any) -> None:
    store = case.open(0)
    store.put(RECORDS[:1])
    whole = next(iter(store.values.read([value_name(store, KEYS[0])], [1 << 20])))
    name = value_name(store, KEYS[1])
    asked: list[int] = []
    read = store.values.read

    def reading(names: Any, most: Any) -> Any:
        answers = read(names, most)
        asked.extend(len(each) for each in answers)
        return answers

    store.values.read = reading
    for content in (bytes(whole) + bytes(8 << 20), b"garbage" * (1 << 20), b"x", bytes(whole[:-1])):
        store.values.write([(name, (memoryview(content),))])
        (miss,) = store.get(KEYS[1:2], [bytearray(4000)])
        assert isinstance(miss, Miss) and miss.reason == "corrupt"
        assert max(asked) <= 256 + 4000
        assert store.exists(KEYS[1:2]) == (False,), "what is damaged is removed, and can be written again"
    assert store.put(RECORDS[1:2]) == (Stored(KEYS[1]),)
    store.close()


@pytest.mark.parametrize("then", ["it is gone", "it was written again"])
@pytest.mark.parametrize("into", [None, [bytearray(3000)]], ids=["", "into a buffer that is too small for the other"])
@needs_redis
def test_a_value_that_is_replaced_while_it_is_read_is_no_damage(then: str, into: Any) -> None:
    """A server may give the memory of a removed value to another one, while a client still reads from there."""
    store: Any = REDIS.open(0)
    store.put(RECORDS[:2])
    read, other = store.values.read, value_name(store, KEYS[1])

    def reading(names: Any, most: Any) -> Any:
        store.values.read = read
        if then == "it is gone":
            store.values.remove(names)
        return read([other] * len(names), most)

    store.values.read = reading
    (found,) = store.get(KEYS[:1], into)
    assert found == RECORDS[0] if then == "it was written again" else found.reason == "absent"
    assert store.get(KEYS[1:2]) == (RECORDS[1],)
    store.close()


@needs_redis
def test_a_record_of_another_format_stays_for_those_who_read_it() -> None:
    store: Any = REDIS.open(0)
    store.put(RECORDS[:1])
    client, name = store.values.client, value_name(store, KEYS[0])
    content = bytearray(client.get(name))
    content[8] += 1  # the version
    client.set(name, bytes(content))
    assert reasons(store.get(KEYS[:1])) == {"format"}
    assert client.get(name) == bytes(content)
    store.close()


@needs_redis
def test_many_keys_come_in_several_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_store, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(server_store, "BATCH_VALUES", 5)
    store: Any = REDIS.open(0)
    sizes: list[int] = []
    write, read = store.values.write, store.values.read

    def writing(values: Any) -> Any:
        sizes.append(sum(len(part) for _, parts in values for part in parts))
        return write(values)

    def reading(names: Any, most: Any) -> Any:
        sizes.append(sum(most))
        return read(names, most)

    store.values.write, store.values.read = writing, reading
    assert store.put(RECORDS) == tuple(map(Stored, KEYS))
    assert store.get(KEYS, [bytearray(4000) for _ in KEYS]) == tuple(RECORDS)
    assert len(sizes) > 4 and max(sizes) <= 10_000
    store.close()


@needs_redis
def test_a_record_that_is_too_large_for_the_server_is_refused_and_the_others_are_written() -> None:
    store: Any = REDIS.open(0)
    store.values.largest = 256 + 3005
    assert reasons(store.put(RECORDS)) == {"fine", "size"}
    assert store.exists(KEYS) == (True,) * 6 + (False,) * 6
    store.close()


@pytest.mark.parametrize("case", CASES)
def test_the_server_is_asked_for_nothing_that_is_known(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no keys nothing, of what is there no fingerprints, and a fingerprint is noted once."""
    store: Any = case.open(0)
    asked: list[str] = []
    for name in ("read", "write", "present", "remove", "note", "notes"):
        call = getattr(store.values, name)
        monkeypatch.setattr(store.values, name, lambda *given, n=name, c=call: (asked.append(n), c(*given))[1])
    store.put(RECORDS[:2]), store.put(RECORDS[2:4])
    assert asked == ["note", "write", "write"]
    asked.clear()
    assert (store.get([]), store.put([]), store.exists([])) == ((),) * 3
    assert asked == []
    other: Any = case.reopen(store)
    monkeypatch.setattr(server_store, "NOTES_FOR", 0.0)
    monkeypatch.setattr(other.values, "notes", lambda: (asked.append("notes"), {})[1])
    assert other.get(KEYS[:4]) == tuple(RECORDS[:4])
    assert reasons(other.get(KEYS[:2], [bytearray(9), bytearray(9)])) == {"size"}
    assert asked == []
    other.put(RECORDS[4:5])
    other.get([key_of(1, attrs.evolve(ONE, model="another"))])
    other.get(KEYS[5:6])  # the server has lost the note, and it is known to have records
    assert asked == ["notes"]
    other.close()


# ---------------------------------------------------------------- what an operator gets wrong


@contextmanager
def answering(said: list[bytes]) -> Iterator[int]:
    """Serve the last of these bytes to whatever is sent, at the port that is yielded."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(1)
                        while connection.recv(65536):
                            connection.sendall(said[-1])

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_that_answers_garbage_is_a_failure() -> None:
    pytest.importorskip("redis")
    with answering(said := [b"+PONG\r\n"]) as port:
        store = open_store(f"redis://127.0.0.1:{port}/0?timeout={TIMEOUT}&protocol=2")
        said.append(b"$9999999999\r\nnonsense" * 100)
        assert reasons(within(6 * TIMEOUT + 2, lambda: store.get(KEYS[:3]))) == {"io"}
        assert reasons(within(6 * TIMEOUT + 2, lambda: store.put(RECORDS[:3]))) == {"io"}
        store.close()


@pytest.mark.parametrize(
    "answer",
    [b"+OK", b"$4\r\nokay", b":7", b"*0", b"*1\r\n:1", b"*2\r\n$3\r\nfoo\r\n:1", b"$-1", b"%1\r\n+a\r\n+b", b"_", b"#t",
     b"-NOPE", b",1.5", b"~1\r\n:1", b"%1\r\n+proto\r\n+x", b"$5\r\n\xff\xff\xff\xff\xff", b"HTTP/1.1 400 Bad Request"],
)  # fmt: skip
def test_a_server_that_greets_with_nonsense_is_no_store(answer: bytes) -> None:
    pytest.importorskip("redis")
    with answering([answer + b"\r\n"]) as port:
        try:
            open_store(f"redis://:sesame@127.0.0.1:{port}/0?timeout={TIMEOUT}&protocol=3").close()
        except StorageError as error:
            assert f":{port}/0" in str(error) and "sesame" not in str(error)


@pytest.mark.parametrize(
    "command",
    [("RPUSH", 1), ("SADD", 1), ("HSET", 1, 2), ("ZADD", 1, 2), ("XADD", "*", 1, 2), ("SET", ""), ("SET", "words")],
    ids=str,
)
@needs_redis
def test_what_others_wrote_under_a_name_is_replaced(command: tuple[Any, ...]) -> None:
    """A record's, and that of the fingerprints."""
    process = redis_server()
    store: Any = open_store(redis_url(process, ttl="1h"))
    assert isinstance(store.put(RECORDS[:1])[0], Stored)
    notes = "prefixloom/fingerprints"
    for name in (value_name(store, KEYS[1]), notes):
        store.values.client.unlink(name)
        store.values.client.execute_command(command[0], name, *command[1:])
    assert reasons(store.get(KEYS[1:2])) == {"corrupt"} and reasons(store.get(KEYS[1:2])) == {"absent"}
    other: Any = open_store(redis_url(process))  # it knows nothing of what was noted before
    assert other.put(RECORDS[1:2]) == (Stored(KEYS[1]),) and other.get(KEYS[1:2]) == (RECORDS[1],)
    assert store.get(KEYS[1:2]) == (RECORDS[1],) and KEYS[1].fingerprint.digest.hex() in other.values.notes()
    for each in (store, other):
        each.close()
    process.kill()


@pytest.mark.parametrize(
    "options",
    ["proxy_url=nonsense", "user_agent=%0A", "connect_timeout=x", "http1_only=x", "pool_max_idle_per_host=x",
     "region=%00", "metadata_endpoint=zz", "timeout=99999999999999999", "connections=99999999999999999999",
     "conditional_put=x",
     "skip_signature=true&endpoint=http://a%20b", "skip_signature=true&endpoint=http://me:sesame@127.0.0.1:1",
     "proxy_url=http://me:sesame@no:port", "http2_only=http://me:sesame@a", "default_headers=x", "prefix=%00",
     "expires=x"],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_option_that_a_client_cannot_take_is_a_wrong_url(scheme: str, options: str) -> None:
    pytest.importorskip("obstore")
    given = "" if scheme == "s3" else f"&{'google_service_account_key' if scheme == 'gs' else 'azure_storage_token'}=x"
    local = f"{scheme}://bucket?timeout=200ms&aws_metadata_endpoint=http://127.0.0.1:1&{options}{given}"
    with pytest.raises(StorageError, match=f"^{scheme}://bucket") as caught:
        open_store(local if scheme == "s3" else f"{scheme}://bucket?{options}{given}")
    assert "sesame" not in str(caught.value)


@needs_redis
def test_what_is_wrong_with_a_url_is_said_and_no_password_is_shown() -> None:
    process = redis_server("--requirepass", "sesame")
    for url, says in (
        (f"redis://me:secret@127.0.0.1:{process.port}/0", "invalid username-password"),
        (f"redis://127.0.0.1:{process.port}/0", "AuthenticationError"),
        (f"redis://:sesame@127.0.0.1:{process.port}/99", "DB index is out of range"),
        ("redis://127.0.0.1:1/0", r"^redis://127\.0\.0\.1:1/0: .*refused"),
        ("redis://no.such.host.invalid/0", "resolv|not known|Temporary failure"),
        (f"redis://:sesame@127.0.0.1:{process.port}/0?ttl=soon", "ttl='soon'.*this is no time"),
        (f"redis://:sesame@127.0.0.1:{process.port}/0?ttl=0", "more than 0"),
        (f"redis://:sesame@127.0.0.1:{process.port}/0?colour=red", "colour"),
        ("redis://127.0.0.1:port/0", "no URL"),
        ("s3:///only/a/path", "names no bucket"),
        ("s3://prefixes?timeout=x", "timeout='x'"),
        ("s3://prefixes?colour=red", "colour"),
        ("s3://prefixes?url=s3://other", "'url', which is no setting"),
        ("s3://prefixes?connections=0", "connections must be more than 0"),
    ):
        with pytest.raises(StorageError, match=says) as caught:
            open_store(url)
        assert "secret" not in str(caught.value) and "sesame" not in str(caught.value)
    open_store(f"redis://:sesame@127.0.0.1:{process.port}/0").close()
    process.kill()


@pytest.mark.parametrize(
    "password", ["sesame#open", "7#sesame", "sesame/7", "7/sesame", "sesame?7", "7?sesame", "\u2100sesame", "[sesame"]
)
def test_a_password_that_makes_a_url_unreadable_is_not_shown(password: str) -> None:
    for url in (f"redis://me:{password}@127.0.0.1:1/0?ttl=1h", f"redis://:{password}@127.0.0.1:1"):
        with pytest.raises(StorageError) as caught:
            open_store(url)
        assert "sesame" not in str(caught.getrepr(style="short"))


def test_a_bucket_that_is_not_there_is_said_at_once() -> None:
    server = s3_server()
    url = s3_url(server, timeout=5).replace("//prefixes", "//elsewhere")
    with pytest.raises(StorageError, match="elsewhere"):
        open_store(url)
    server.kill()


def test_an_unknown_scheme_names_those_that_are_known() -> None:
    with pytest.raises(CompositionError, match="redis"):
        open_store("ftp://example/")


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("1.5s", 1.5), ("15m", 900.0), ("12h", 43200.0), ("7d", 604800.0), ("20ms", 0.02)]
)
def test_times_in_urls(text: str, value: float) -> None:
    assert seconds(text) == value


def test_what_is_shown_of_a_url() -> None:
    assert shown_url("redis://u:p:@x@h:1/0?password=x&ttl=1d") == "redis://u:***@h:1/0?password=***&ttl=1d"
    assert shown_url("s3://bucket/a?secret_access_key=x&region=r") == "s3://bucket/a?secret_access_key=***&region=r"
    assert shown_url("file:/var/cache?capacity=20GiB") == "file:/var/cache?capacity=20GiB"
    assert shown_url("redis://h:1/0?prefix=a@b") == "redis://h:1/0?prefix=a@b"
    assert shown_url("redis://u:p?x@h:1/0?ttl=1d") == "redis://u:***@h:1/0?ttl=1d"
    for url in ("http://u:p@h:1/a", "http://u:p@p@h:1/a", "http://u:p&p@h:1/a", "http%3A%2F%2Fu%3Ap%40h%3A1%2Fa"):
        assert shown_url(f"s3://bucket?endpoint={url}") == "s3://bucket?endpoint=http://u:***@h:1/a"
    assert without_passwords("GET redis://:p@h/0, then tcp://a:b@c") == "GET redis://:***@h/0, then tcp://a:***@c"


@needs_redis
def test_a_record_that_is_put_twice_in_a_call_is_written_once() -> None:
    store = REDIS.open(0)
    twice = store.put([RECORDS[0], RECORDS[1], RECORDS[0]])
    assert twice == (Stored(KEYS[0]), Stored(KEYS[1]), Stored(KEYS[0], False))
    assert store.get([KEYS[0], KEYS[0]], [bytearray(4000), bytearray(10)])[0] == RECORDS[0]
    assert isinstance(store.get([key_of("nobody")])[0], Miss)
    assert isinstance(store.get(KEYS[:1])[0], Record)
    store.close()


@needs_redis
def test_what_is_there_is_asked_only_while_many_records_were_there() -> None:
    store: Any = REDIS.open(0)
    calls: list[str] = []
    present, write = store.values.present, store.values.write
    store.values.present = lambda names: (calls.append(f"{len(names)} asked"), present(names))[1]
    store.values.write = lambda values: (calls.append(f"{len(values)} written"), write(values))[1]

    def put(records: Sequence[Record]) -> tuple[int, list[str]]:
        calls.clear()
        answers = store.put(records)
        assert all(isinstance(answer, Stored) for answer in answers)
        return sum(answer.fresh for answer in answers), list(calls)

    half = len(RECORDS) // 2
    assert put(RECORDS[:half]) == (half, [f"{half} written"])
    assert put(RECORDS[:half]) == (0, [f"{half} written"])
    assert put(RECORDS[:half]) == (0, [f"{half} asked"])
    assert put(RECORDS[half - 1 :]) == (half, [f"{half + 1} asked", f"{half} written"])
    assert put([RECORDS[0]]) == (0, ["1 written"])
    assert store.get(KEYS) == tuple(RECORDS)
    store.close()


@needs_redis
def test_calls_that_write_at_the_same_time_do_not_mix_their_values() -> None:
    store, mixed = REDIS.open(0), []

    def write(seed: int) -> None:
        for turn in range(20):
            numbers = [1000 * seed + 10 * turn + at for at in range(8)]
            records = [record_of(number, 3000 + 100 * seed + number % 10) for number in numbers]
            store.put(records)
            mixed.extend(each for each in records if store.get([each.key])[0] != each)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not mixed
    store.close()


@needs_redis
def test_a_client_is_closed_after_the_last_call_that_uses_it() -> None:
    store: Any = REDIS.open(0)
    entered, go_on, order = threading.Event(), threading.Event(), []
    present, close = store.values.present, store.values.close

    def slow(names: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        order.append("answered")
        return present(names)

    store.values.present = slow
    store.values.close = lambda: (order.append("closed"), close())
    asked: list[Any] = []
    thread = threading.Thread(target=lambda: asked.append(store.exists(KEYS[:1])))
    thread.start()
    assert entered.wait(20)
    store.close()
    assert order == [] and isinstance(store.get(KEYS[:1])[0], Miss)
    go_on.set()
    thread.join(20)
    assert order == ["answered", "closed"] and asked == [(False,)]


@pytest.mark.parametrize("case", CASES)
def test_an_empty_value_is_damage_and_is_written_again(case: Any) -> None:
    store = case.open(0)
    store.put(RECORDS[:2])
    empty = value_name(store, KEYS[0])
    if case is REDIS:
        store.values.client.set(empty, b"")
    else:
        store.values.client.put(store.values.bucket, empty, b"", use_multipart=False)
    assert [getattr(each, "reason", "fine") for each in store.get(KEYS[:3])] == ["corrupt", "fine", "absent"]
    assert store.put(RECORDS[:1]) == (Stored(KEYS[0]),)
    assert store.get(KEYS[:2]) == tuple(RECORDS[:2])
    store.close()


class Arriving:
    """A client of Redis, before whose second pipeline a value arrives that another client has written."""

    def __init__(self, client: Any, arrive: Callable[[], object]) -> None:
        self.client, self.arrive, self.pipelines = client, arrive, 0

    def pipeline(self, **options: Any) -> Any:
        self.pipelines += 1
        if self.pipelines == 2:
            self.arrive()
        return self.client.pipeline(**options)


@needs_redis
def test_a_value_that_arrives_while_it_is_read_stays() -> None:
    store: Any = REDIS.open(0)
    other = REDIS.abandon(store)
    client = store.values.client
    store.values.client = arriving = Arriving(client, lambda: other.put(RECORDS[:1]))
    (answer,) = store.get(KEYS[:1])
    store.values.client = client
    assert arriving.pipelines >= 2 and (answer == RECORDS[0] or answer.reason == "absent")
    assert store.get(KEYS[:1]) == (RECORDS[0],)
    for each in (store, other):
        each.close()


@pytest.mark.parametrize("prefix", ["", "A", "a b", "../x", "a//b", "a/", "\u00fc"])
def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(StorageError, match="a prefix has lower-case letters"):
        server_store.ServerStore(SimpleNamespace(largest=1), prefix)  # type: ignore[arg-type]


def test_memory_that_a_client_may_still_read_is_not_used_again() -> None:
    memory, values = WriteMemory(), [[memoryview(bytes(100)), memoryview(b"payload")]]

    def address() -> int:
        with memory.joined(values) as joined:
            assert bytes(joined.pieces[0]) == bytes(100) + b"payload"
            return ctypes.addressof(ctypes.c_char.from_buffer(joined.pieces[0]))

    first = address()
    assert address() == first
    with memory.joined(values) as joined:
        kept, joined.keep = joined.pieces[0], False
    with memory.joined([[memoryview(b"x" * 107)]]):
        assert bytes(kept[:100]) == bytes(100)
    with pytest.raises(RuntimeError), memory.joined(values) as joined:
        kept = joined.pieces[0]
        raise RuntimeError
    with memory.joined([[memoryview(b"x" * 107)]]):
        assert bytes(kept[:100]) == bytes(100)


def test_an_error_is_shown_in_one_line_of_at_most_300_characters() -> None:
    assert server_store.shown(ValueError("two\n  lines")) == "ValueError: two lines"
    assert server_store.shown(ValueError()) == "ValueError"
    assert server_store.shown(ValueError("x" * 400)) == "ValueError: " + "x" * 288


@pytest.mark.parametrize(("size", "again"), [(200, True), (201, False)])
def test_memory_is_kept_up_to_the_size_of_a_call(size: int, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_memory, "KEPT_BYTES", 200)
    memory = WriteMemory()
    with memory.joined([[memoryview(bytes(size))]]) as joined:
        held = joined.pieces[0]
    with memory.joined([[memoryview(b"x" * size)]]):
        assert (bytes(held) == b"x" * size) is again


def test_a_note_of_no_bytes_hides_no_other() -> None:
    """A bucket's tools make objects of no bytes, and its rules remove some after they were listed."""
    store: Any = S3.open(0)
    notes = value_name(store, KEYS[0]).partition("/")[0] + "/fingerprints"
    assert isinstance(store.put(RECORDS[:1])[0], Stored)
    for name in ("0", "1", "2"):
        store.values.client.put(store.values.bucket, f"{notes}/{name}", b"", use_multipart=False)
    other: Any = S3.reopen(store)
    (missed,) = other.get([key_of(1, attrs.evolve(ONE, model="another"))])
    assert missed.reason == "fingerprint" and "model" in missed.detail, missed
    other.close()


# ---------------------------------------------------------------- Mooncake


@needs_mooncake
def test_what_lay_in_a_process_that_died_is_a_miss_and_a_store_without_memory_is_full() -> None:
    master, service = mooncake_servers()
    store, other = open_store(mooncake_url((master, service))), open_store(mooncake_url((master, service)))
    assert store.put(RECORDS) == tuple(map(Stored, KEYS))
    assert other.get(KEYS) == tuple(RECORDS)
    service.kill()
    assert reasons(store.get(KEYS)) <= {"io", "absent"}
    begun = time.monotonic()
    while reasons(store.get(KEYS)) != {"absent"} and time.monotonic() < begun + 60:
        time.sleep(0.2)  # until the master has noticed
    assert reasons(store.get(KEYS)) == {"absent"}
    assert reasons(store.put(RECORDS)) == {"capacity"}
    store.close(), other.close()
    master.kill()


@needs_mooncake
def test_what_is_wrong_with_a_url_of_mooncake_is_said() -> None:
    for url, says in (
        ("mooncake://127.0.0.1:1", "the master cannot be reached"),
        ("mooncake://host", "the master cannot be reached"),
        ("mooncake:///path", "names no master"),
        ("mooncake://host:1?colour=red", "has 'colour': the store takes"),
        ("mooncake://host:1?segment=many", "segment='many'"),
    ):
        with pytest.raises(StorageError, match=says):
            open_store(url)


@needs_mooncake
def test_a_master_of_mooncake_may_have_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Client:
        def setup(self, *given: object) -> int:
            asked.append(given[-1])
            return -1

    monkeypatch.setattr(pytest.importorskip("mooncake.store"), "MooncakeDistributedStore", Client)
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    master = f"[::1]:{listening.getsockname()[1]}"
    with listening, pytest.raises(StorageError, match="the client cannot be set up, error -1"):
        open_store(f"mooncake://{master}")
    assert asked == [master]


@needs_mooncake
def test_clients_of_mooncake_that_begin_at_the_same_time_write_their_records() -> None:
    """Each notes its fingerprint first, and all notes are one value."""
    servers = mooncake_servers()
    for turn in range(10):
        stores = [open_store(mooncake_url(servers, prefix=f"turn-{turn}")) for _ in range(2)]
        records = [record_of(1, 100, attrs.evolve(ONE, model=f"model {number}")) for number in range(2)]
        with ThreadPoolExecutor(2) as threads:
            answers = [*threads.map(lambda store, record: store.put([record]), stores, records)]
        assert answers == [(Stored(record.key),) for record in records]
        for store in stores:
            store.close()
    for server in servers:
        server.kill()


@needs_mooncake
def test_notes_of_mooncake_that_are_none_are_replaced() -> None:
    servers = mooncake_servers()
    for garbage in (b"[" * 100_000, b"[1]", b"\xff", b"{"):
        store: Any = open_store(mooncake_url(servers, prefix="noted"))
        assert store.values.client.upsert("noted/fingerprints", garbage) == 0
        assert isinstance(store.put(RECORDS[:1])[0], Stored)
        assert list(store.values.notes()) == [ONE.digest.hex()]
        store.close()
    for server in servers:
        server.kill()
