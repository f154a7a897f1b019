"""The laws of a transport: any transport between a prefill and a decode process must pass them."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixloom import InputError
from prefixloom.connections import write_keys
from prefixloom_engine.disaggregation import zmq_transport
from prefixloom_engine.disaggregation.addresses import open_transport
from prefixloom_engine.disaggregation.transport import (
    ANSWER,
    ASK,
    BUSY,
    GONE,
    LONGEST_FRAME,
    MOST_AT_ONCE,
    PART,
    PREFILL,
    PeerGone,
    PeerMessage,
    Transport,
)
from tests.support.transports import all_of, introduced, pair

KINDS_OF_TRANSPORT = ["in process", "zmq", "zmq with keys"]


@pytest.fixture(params=KINDS_OF_TRANSPORT)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    with pair(request.param, tmp_path) as made:
        yield made


def told(messages: list[PeerMessage]) -> list[tuple[bytes, int, list[bytes]]]:
    return [(each.kind, each.number, [bytes(frame) for frame in each.frames]) for each in messages]


@pytest.mark.parametrize("seed", range(2))
def test_messages_come_over_in_order_and_whole(ends: tuple[Transport, Transport], seed: int) -> None:
    rng = random.Random(seed)
    name = introduced(*ends)
    for sender, receiver, peer in ((*ends, name), (*ends[::-1], PREFILL)):
        sent, got = [], list[PeerMessage]()
        for _ in range(60):
            sizes = [rng.choice((0, 1, 13, 400, 300_000)) for _ in range(rng.randrange(3))]
            message = rng.choice((ASK, PART, BUSY)), rng.randrange(1 << 64), [rng.randbytes(size) for size in sizes]
            while not sender.send(peer, *message):
                got += receiver.receive(0.01)
            sent.append(message)
        got += all_of(receiver, len(sent) - len(got))
        assert told(got) == sent


def test_a_side_that_receives_nothing_is_sent_a_bounded_number_of_messages(ends: tuple[Transport, Transport]) -> None:
    prefill, decode = ends
    name = introduced(prefill, decode)
    part, taken, until = bytes(256 << 10), 0, time.monotonic() + 30
    refused = 0
    while refused < 50:  # the system takes some more now and then
        if prefill.send(name, PART, taken, [part]):
            taken, refused = taken + 1, 0
        else:
            refused += 1
            time.sleep(0.01)
        assert taken < 1000, "whatever is sent is kept somewhere"
    got = all_of(decode, MOST_AT_ONCE)
    assert len(got) >= MOST_AT_ONCE // 2
    while not prefill.send(name, ANSWER, 7):
        got += decode.receive(0.01)
        assert time.monotonic() < until, "it takes messages again"


def test_prefill_side_that_closes_is_told_to_the_decode_side(ends: tuple[Transport, Transport]) -> None:
    introduced(*ends)
    ends[0].close()
    assert [each.kind for each in all_of(ends[1], 1)] == [GONE]


def test_message_to_a_side_that_is_gone_or_never_was_is_refused(ends: tuple[Transport, Transport]) -> None:
    prefill, decode = ends
    name = introduced(prefill, decode)
    with pytest.raises(PeerGone):
        prefill.send(b"nobody", BUSY, 0)
    decode.close()
    with pytest.raises(PeerGone):
        for _ in range(3000):
            prefill.send(name, BUSY, 0)
            prefill.receive(0.01)


def test_one_call_returns_a_bounded_number_of_messages(ends: tuple[Transport, Transport]) -> None:
    prefill, decode = ends
    introduced(prefill, decode)
    sent = refused = 0
    while sent < 3 * MOST_AT_ONCE and refused < 50:
        if decode.send(PREFILL, BUSY, sent):
            sent += 1
        else:
            refused += 1
            time.sleep(0.01)
    at_once, until = list[int](), time.monotonic() + 30
    while sum(at_once) < sent and time.monotonic() < until:
        at_once.append(len(prefill.receive(0.01)))
    assert sum(at_once) == sent > MOST_AT_ONCE >= max(at_once)


def test_decode_side_without_a_prefill_process_sends_and_receives_nothing() -> None:
    alone = open_transport("tcp://127.0.0.1:9", "client", None)
    assert not alone.send(PREFILL, BUSY, 0)
    assert alone.receive() == []
    for _ in range(2):
        alone.close()


def test_messages_of_another_form_are_ignored_and_long_frames_end_a_connection(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    with pair("zmq", tmp_path) as (prefill, decode):
        introduced(prefill, decode)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(prefill.address)
            for parts in ([b""], [b"q" * 9], [b"a" + bytes(8), b"", b"", b""], [b"a" + bytes(7)], [b"z" + bytes(8)]):
                stranger.send_multipart(parts)
            stranger.send_multipart([b"a" + (5).to_bytes(8, "little"), b"mine"])
            assert told(all_of(prefill, 1)) == [(ASK, 5, [b"mine"])]
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.send_multipart([b"a" + bytes(8), bytes(LONGEST_FRAME + 1)])
            assert monitor.poll(20_000), "whoever sends a frame that is too long is disconnected"
            stranger.disable_monitor()
            monitor.close()
        assert prefill.receive(0.05) == []


# ---------------------------------------------------------------- keys and addresses


def test_who_has_no_keys_or_others_is_not_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("mine", "theirs"):
        write_keys(tmp_path / name)
    prefill = open_transport("tcp://127.0.0.1:0", "server", tmp_path / "mine")
    mine, theirs = (json.loads((tmp_path / name).read_text()) for name in ("mine", "theirs"))
    guess = tmp_path / "guess"
    guess.touch(0o600)
    guess.write_text(json.dumps({"server": {"public": mine["server"]["public"]}, "client": theirs["client"]}))
    strangers = [open_transport(prefill.address, "client", keys) for keys in (None, tmp_path / "theirs", guess)]
    friend = open_transport(prefill.address, "client", tmp_path / "mine")
    introduced(prefill, friend)
    for _ in range(20):
        for stranger in strangers:
            assert not stranger.send(PREFILL, ASK, 1, [b"let me in"])
            assert stranger.receive(0.01) == [] or stranger.receive() == []
    assert prefill.receive(0.1) == []
    for each in (*strangers, friend, prefill):
        each.close()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        *((f"tcp://{host}:5555", "without keys anybody there may read prompts")
          for host in ("0.0.0.0", "10.0.0.7", "example", "[::]")),
        ("tcp://127.0.0.1:99999", "a port above 65535"),
        *((wrong, "an address is tcp://HOST:PORT") for wrong in ("127.0.0.1:5", "tcp://127.0.0.1", "http://a:80", "")),
    ],
)  # fmt: skip
def test_address_that_is_none_or_can_be_reached_from_elsewhere_without_keys_is_refused(
    address: str, told: str, tmp_path: Path
) -> None:
    for side in ("server", "client"):
        with pytest.raises(InputError, match=told):
            open_transport(address, side, None)
    keys = tmp_path / "keys"
    write_keys(keys)
    open_transport("tcp://0.0.0.0:0", "server", keys).close()
    with pytest.raises(InputError, match="is there already"):
        write_keys(keys)


def test_a_name_is_one_of_ipv6_if_it_has_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"six": {socket.AF_INET6}, "four": {socket.AF_INET}, "both": {socket.AF_INET, socket.AF_INET6}}

    def addresses(host: str, port: None) -> list[tuple[int]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family,) for family in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    found = {
        address: zmq_transport.is_ipv6(address)
        for address in ("tcp://six:1", "tcp://four:1", "tcp://both:1", "tcp://none:1", "tcp://[::1]:1", "ipc:///a[b]:1")
    }
    assert [address for address, is_six in found.items() if is_six] == ["tcp://six:1", "tcp://[::1]:1"]


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pair("zmq", tmp_path) as (prefill, _), pytest.raises(InputError, match="cannot listen at"):
        open_transport(prefill.address, "server", None)


def test_a_local_address_takes_only_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.write_text("mine")
    with pytest.raises(InputError, match="this file is no socket"):
        open_transport(f"ipc://{path}", "server", None)
    assert path.read_text() == "mine"
    path.unlink()
    first = open_transport(f"ipc://{path}", "server", None)
    with pytest.raises(InputError, match="a process listens there"):
        open_transport(f"ipc://{path}", "server", None)
    first.close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    second = open_transport(f"ipc://{path}", "server", None)
    decode = open_transport(f"ipc://{path}", "client", None)
    assert introduced(second, decode)
    decode.close()
    second.close()


def test_a_transport_that_nobody_reads_for_long_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ tells of each connection that ends, and stops when nobody hears it."""
    monkeypatch.setattr(zmq_transport, "RECONNECT_MS", 1)
    monkeypatch.setattr(zmq_transport, "MOST_RECONNECT_MS", 1)
    with socket.create_server(("127.0.0.1", 0)) as flapping:
        flapping.settimeout(2)
        transport = open_transport(f"tcp://127.0.0.1:{flapping.getsockname()[1]}", "client", None)
        with contextlib.suppress(TimeoutError):
            for _ in range(1500):
                flapping.accept()[0].close()
        closing = threading.Thread(target=transport.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


NO_KEYS = ["", "{}", "[]", '{"server": {"public": "short"}}', "not json", '{"server": 5}', "[" * 50_000,
    json.dumps({side: {"public": "~" * 40, "secret": "~" * 40} for side in ("server", "client")})]  # fmt: skip


def test_file_without_keys_or_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for content, mode, told in [*((each, 0o600, "no keys for the server of") for each in NO_KEYS), (
        path.read_text(), 0o640, r"keys has secret keys, and others may [^:]*: chmod 600 [^ ]*keys$"
    )]:  # fmt: skip
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(InputError, match=told):
            open_transport("tcp://127.0.0.1:0", "server", path)
