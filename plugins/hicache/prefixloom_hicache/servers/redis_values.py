"""Redis and Valkey as a store: ``redis://HOST:PORT/DB``, and ``rediss://`` with TLS. It needs the extra ``redis``.

The server says how much it keeps and what it evicts (``maxmemory``, ``maxmemory-policy``). With ``ttl``, a record goes
so many seconds after it was last read or written. Each batch is one pipeline: one way to the server and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from prefixloom import StorageError
from prefixloom.storage import UrlOption, options_of, seconds, shown_url

from .schemes import Scheme
from .server_store import ServerStore, opening
from .values import Full
from .write_memory import WriteMemory

LARGEST = 512 << 20
"""Bytes of a value of Redis (``proto-max-bulk-len``)."""
OPTIONS: Mapping[str, UrlOption] = {"prefix": str, "ttl": seconds, "timeout": seconds}


class RedisValues:
    """Values of a Redis server. ``client`` is a ``redis.Redis`` that does not decode its answers."""

    largest = LARGEST

    def __init__(self, client: Any, prefix: str, ttl: float | None) -> None:
        import redis

        self.client, self._full = client, redis.OutOfMemoryError
        self._notes = f"{prefix}/fingerprints"
        self._memory = WriteMemory()
        self._ttl = None if ttl is None else max(1, round(ttl * 1000))

    def read(self, names: Sequence[str], most: Sequence[int]) -> list[memoryview | Exception | None]:
        pipeline = self.client.pipeline(transaction=False)
        for name, size in zip(names, most, strict=True):
            pipeline.getrange(name, 0, size - 1)
        for name in names if self._ttl is not None else ():
            pipeline.pexpire(name, self._ttl)
        answers = pipeline.execute(raise_on_error=False)
        found = [value_of(each) for each in answers[: len(names)]]
        unclear = [at for at, each in enumerate(found) if isinstance(each, memoryview) and not each]
        if unclear:  # GETRANGE answers the same of an empty value as of none, and GET does not
            pipeline = self.client.pipeline(transaction=False)
            for at in unclear:
                pipeline.get(names[at])
            for at, answer in zip(unclear, pipeline.execute(raise_on_error=False), strict=True):
                value = value_of(answer)  # it may have arrived since
                found[at] = value[: most[at]] if isinstance(value, memoryview) else value
        return found

    def write(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> list[bool | Exception]:
        names, lives = [name for name, _ in values], () if self._ttl is None else ("PX", self._ttl)
        pipeline = self.client.pipeline(transaction=False)
        with self._memory.joined([parts for _, parts in values]) as joined:
            for name, piece in zip(names, joined.pieces, strict=True):
                pipeline.execute_command("SET", name, piece, "NX", *lives)
            answers = pipeline.execute(raise_on_error=False)
        there = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        if there and self._ttl is not None:
            with contextlib.suppress(Exception):  # they were there nevertheless
                self._each("PEXPIRE", there, self._ttl)
        return [self._written(each) for each in answers]

    def _written(self, answer: Any) -> bool | Exception:
        if isinstance(answer, self._full):
            return Full(str(answer))
        return answer if isinstance(answer, Exception) else answer is not None

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return whether values exist. Renew any time to live, because who looks for a record is about to use it."""
        return self._each("EXISTS", names) if self._ttl is None else self._each("PEXPIRE", names, self._ttl)

    def remove(self, names: Sequence[str]) -> None:
        self.client.unlink(*names)

    def _each(self, command: str, names: Sequence[str], *arguments: int) -> list[bool]:
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command(command, name, *arguments)
        return [bool(each) for each in pipeline.execute()]

    def note(self, name: str, text: str) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for _ in range(2):
            (answer,) = pipeline.hset(self._notes, name, text).execute(raise_on_error=False)
            if not is_wrong_type(answer):
                break
            self.client.unlink(self._notes)
        if isinstance(answer, Exception):
            raise Full(str(answer)) if isinstance(answer, self._full) else answer

    def notes(self) -> dict[str, str]:
        found = self.client.hgetall(self._notes)
        return {name.decode("ascii", "replace"): text.decode("utf-8", "replace") for name, text in found.items()}

    def room(self) -> tuple[int, int | None]:
        found = self.client.info("memory")
        return int(found.get("used_memory", 0)), int(found.get("maxmemory", 0)) or None

    def close(self) -> None:
        self.client.close()


def value_of(answer: Any) -> memoryview | Exception | None:
    """Return the value in an answer of the server."""
    if is_wrong_type(answer):
        return memoryview(b"")  # a list, or another thing that others wrote there: damage, and so it is removed
    return answer if answer is None or isinstance(answer, Exception) else memoryview(answer)


def is_wrong_type(answer: Any) -> bool:
    """Return whether the server says that a name has no value of this type."""
    return isinstance(answer, Exception) and str(answer).startswith("WRONGTYPE")


def open_redis(
    url: str = "redis://127.0.0.1:6379/0", prefix: str = "prefixloom", ttl: float | None = None, timeout: float = 1.0
) -> ServerStore:
    """Open the store of a Redis server.

    ``ttl``      seconds after which a record goes that nobody reads or writes; None: the server alone decides
    ``timeout``  seconds after which a connection attempt, or a call that gets no bytes, has failed
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise StorageError(
            f"a store on Redis needs the extra redis (pip install 'prefixloom[redis]'): {error}"
        ) from error
    if (ttl is not None and ttl <= 0) or timeout <= 0:
        raise StorageError(f"{shown_url(url)}: ttl and timeout must be more than 0 seconds")
    with opening(url):
        client = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, decode_responses=False,
            retry=Retry(NoBackoff(), 1),  # of a connection that the server has closed meanwhile
        )  # fmt: skip
        client.ping()
    return ServerStore(RedisValues(client, prefix, ttl), prefix)


def open_url(url: str) -> ServerStore:
    """Open ``redis://[USER:PASSWORD@]HOST:PORT/DB?ttl=7d``. What is no option of the store is one of the client."""
    plain, options, others = options_of(url, OPTIONS)
    return open_redis(f"{plain}?{urlencode(others)}" if others else plain, **options)


plain = Scheme("redis", open_redis, open_url, "records on a Redis or Valkey server, shared by several engines")
secure = Scheme("rediss", open_redis, open_url, "as redis, over TLS")
