"""Real servers on loopback, each started once in a test process, on a free port, and ended with it.

``redis()`` is Debian's redis-server; ``s3()`` is moto's server, which speaks S3's API; ``azure()`` is Azurite, Azure's
own emulator of its blobs; ``mooncake()`` is Mooncake's master with a service that gives memory. A test of what pip does
not bring says so (``outside``), and a test is skipped where a client or moto is not installed.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import email.utils
import functools
import hmac
import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import attrs
import pytest

from .outside import kept, program

PATIENCE = 60.0


@attrs.define
class Server:
    """A running server. ``command`` starts it again on the same port."""

    port: int
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begun = time.monotonic()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > begun + PATIENCE:
                raise RuntimeError(f"{self.command[0]} does not start")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stall(self) -> None:
        """Let it answer nothing. Connections stay open, and the kernel accepts new ones."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def redis_server(*options: str) -> Server:
    """A server of its own, for a test that disturbs it. The caller kills it."""
    pytest.importorskip("redis")
    port = free_port()
    folder = tempfile.mkdtemp(prefix="prefixloom-redis-")
    atexit.register(shutil.rmtree, folder, True)
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    server = Server(port, [*command, *options])
    atexit.register(server.kill)
    server.start()
    return server


@kept("redis-server")
def redis() -> Server:
    return redis_server()


def s3_server() -> Server:
    """A server of its own, with the bucket ``prefixes``. The caller kills it."""
    moto = Path(sys.executable).with_name("moto_server")
    if not moto.exists() or importlib.util.find_spec("obstore") is None:
        pytest.skip("moto's server, or obstore, is not installed here")
    port = free_port()
    server = Server(port, [str(moto), "-H", "127.0.0.1", "-p", str(port)])
    atexit.register(server.kill)
    server.start()
    make_bucket(server)
    return server


def make_bucket(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request(
        "PUT",
        "/prefixes",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"},
    )
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    connection.close()


@functools.cache
def s3() -> Server:
    return s3_server()


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those of every Azurite."""


@kept("azurite-blob")
def azure() -> Server:
    """Azurite, with the container ``prefixes``."""
    pytest.importorskip("obstore")
    port = free_port()
    server = Server(port, [
        program("azurite-blob"), "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck",
        "--disableTelemetry",
    ])  # fmt: skip
    atexit.register(server.kill)
    server.start()
    make_container(server)
    return server


def make_container(server: Server) -> None:
    """Make a container by Azure's signed request, for which ``obstore`` has no call."""
    date, version, path = email.utils.formatdate(usegmt=True), "2021-08-06", f"/{AZURE_ACCOUNT}/prefixes"
    signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{AZURE_ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")
    headers = {
        "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("PUT", f"{path}?restype=container", headers=headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 201, answer.status
    connection.close()


def mooncake_servers() -> Sequence[Server]:
    """A master, and a service that gives it 256 MiB of memory."""
    master = Server(free_port(), [
        program("mooncake_master"), "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}",
    ])  # fmt: skip
    master.command = [*master.command, f"--rpc_port={master.port}"]
    service = Server(free_port(), [])
    service.command = [
        program("mooncake_client"), f"--port={service.port}", "--host=127.0.0.1", "--protocol=tcp",
        "--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{master.port}",
        "--global_segment_size=256 MB", f"--mmap_arena_pool_size={256 << 20}",
    ]  # fmt: skip
    for each in (master, service):
        atexit.register(each.kill)
        each.start()
    return master, service


@kept("mooncake_master")
def mooncake() -> Sequence[Server]:
    return mooncake_servers()


def mooncake_url(servers: Sequence[Server], **options: object) -> str:
    return f"mooncake://127.0.0.1:{servers[0].port}?" + "&".join(f"{name}={value}" for name, value in options.items())


def redis_url(server: Server, **options: object) -> str:
    return f"redis://127.0.0.1:{server.port}/0?" + "&".join(f"{name}={value}" for name, value in options.items())


def s3_url(server: Server, **options: object) -> str:
    told: dict[str, object] = {
        "endpoint": f"http://127.0.0.1:{server.port}", "allow_http": 1, "region": "us-east-1", "access_key_id": "a",
        "secret_access_key": "b", **options,
    }  # fmt: skip
    return "s3://prefixes?" + "&".join(f"{name}={value}" for name, value in told.items())


def azure_url(server: Server, **options: object) -> str:
    told: dict[str, object] = {
        "endpoint": f"http://127.0.0.1:{server.port}/{AZURE_ACCOUNT}", "allow_http": 1, "account_name": AZURE_ACCOUNT,
        "account_key": AZURE_KEY, **options,
    }  # fmt: skip
    return "az://prefixes?" + urlencode(told)
