"""Object stores as a store, through ``obstore``: ``s3://BUCKET/PREFIX``, ``gs://...``, ``az://...``. Extra ``objects``.

Credentials are those that the client finds itself, as in the variables of the field (``AWS_ACCESS_KEY_ID`` ...), and
its settings may stand behind the ``?`` of the URL. An object is written only where there is none of its name. The
bucket's own lifecycle rules say what goes, and when. A batch is as many requests at once as ``connections`` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prefixloom import StorageError
from prefixloom.storage import UrlOption, options_of, seconds, shown_url, yes_or_no

from .schemes import Scheme
from .server_store import ServerStore, opening
from .write_memory import WriteMemory

LARGEST = 4 << 30
LONGEST_NOTE = 1 << 16
"""Bytes of a note that are read."""
NOTHING_THERE = "416 Range Not Satisfiable"
"""What the client says of a read from an object of no bytes."""
OPTIONS: Mapping[str, UrlOption] = {
    "prefix": str, "timeout": seconds, "connections": int, "allow_http": yes_or_no,
}  # fmt: skip
CLIENT_SETTINGS = frozenset((
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type", "http1_only", "http2_only",
    "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses",
    "read_timeout", "root_certificate", "user_agent",
))  # fmt: skip
"""Settings of the client's connections. Among those of a store they make it panic."""
T = TypeVar("T")


class ObjectValues:
    """Values of one bucket. ``store`` is a store of ``obstore``."""

    largest = LARGEST

    def __init__(self, store: Any, prefix: str, connections: int) -> None:
        import obstore

        self.client, self.bucket = obstore, store
        self._notes = f"{prefix}/fingerprints"
        self._memory = WriteMemory()
        self._threads = ThreadPoolExecutor(connections, "prefixloom-objects")

    def _each(self, call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        if len(items) == 1:
            return [call(items[0])]
        return [*self._threads.map(call, items)]

    def read(self, names: Sequence[str], most: Sequence[int]) -> list[memoryview | Exception | None]:
        def one(asked: tuple[str, int]) -> memoryview | Exception | None:
            try:
                return memoryview(self.client.get_range(self.bucket, asked[0], start=0, length=asked[1]))
            except FileNotFoundError:
                return None
            except Exception as error:
                return memoryview(b"") if NOTHING_THERE in str(error) else error

        return self._each(one, [*zip(names, most, strict=True)])

    def write(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> list[bool | Exception]:
        from obstore.exceptions import AlreadyExistsError

        def one(value: tuple[str, memoryview]) -> bool | Exception:
            try:
                self.client.put(self.bucket, value[0], value[1], mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                return False
            except Exception as error:
                return error

        with self._memory.joined([parts for _, parts in values]) as joined:
            found = self._each(one, [*zip([name for name, _ in values], joined.pieces, strict=True)])
            joined.keep = not any(isinstance(each, Exception) for each in found)
        return found

    def present(self, names: Sequence[str]) -> list[bool]:
        return self._each(self._is_there, names)

    def _is_there(self, name: str) -> bool:
        try:
            self.client.head(self.bucket, name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
            self.client.delete(self.bucket, [*names])

    def note(self, name: str, text: str) -> None:
        self.client.put(self.bucket, f"{self._notes}/{name}", text.encode(), use_multipart=False)

    def notes(self) -> dict[str, str]:
        names = [each["path"] for lot in self.client.list(self.bucket, self._notes) for each in lot]
        found = zip(names, self.read(names, [LONGEST_NOTE] * len(names)), strict=True)
        return {  # one may be gone since it was listed
            name.rpartition("/")[2]: bytes(content).decode("utf-8", "replace")
            for name, content in found
            if isinstance(content, memoryview)
        }

    def room(self) -> tuple[int, int | None]:
        return 0, None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def open_objects(
    url: str, prefix: str = "prefixloom", timeout: float = 1.0, connections: int = 32, **settings: Any
) -> ServerStore:
    """Open the store of a bucket.

    ``timeout``      seconds after which a request has failed; it is tried once more
    ``connections``  how many requests a batch has at once, at most
    ``settings``     the client's own, such as ``endpoint`` and ``region``
    """
    try:
        import obstore
        from obstore.store import from_url
    except ImportError as error:
        raise StorageError(
            f"an object store needs the extra objects (pip install 'prefixloom[objects]'): {error}"
        ) from error
    if timeout <= 0 or connections < 1:
        raise StorageError(f"{shown_url(url)}: timeout and connections must be more than 0")
    with opening(url):
        limit = timedelta(seconds=timeout)
        client: Any = {"timeout": limit, "connect_timeout": limit}
        client |= {name: settings.pop(name) for name in CLIENT_SETTINGS & settings.keys()}
        retry: Any = {"max_retries": 1, "retry_timeout": 2 * limit}
        told: Any = settings
        store = from_url(url, config=told, client_options=client, retry_config=retry)
        next(iter(obstore.list(store, f"{prefix}/fingerprints", chunk_size=1)), None)
    return ServerStore(ObjectValues(store, prefix, connections), prefix)


def open_url(url: str) -> ServerStore:
    """Open ``s3://BUCKET/PREFIX?region=...&endpoint=...``. Other options are settings of the client."""
    plain, options, others = options_of(url, OPTIONS)
    if not urlsplit(plain).netloc:
        raise StorageError(f"{shown_url(url)} names no bucket: write {urlsplit(plain).scheme}://BUCKET/PREFIX")
    if "url" in others:
        raise StorageError(f"{shown_url(url)} has 'url', which is no setting")
    return open_objects(plain, **{**others, **options})


s3 = Scheme(
    "s3", open_objects, open_url, "records as objects of S3, or of what speaks its API, shared by several engines"
)
gs = Scheme("gs", open_objects, open_url, "records as objects of Google Cloud Storage")
az = Scheme("az", open_objects, open_url, "records as blobs of Azure")
