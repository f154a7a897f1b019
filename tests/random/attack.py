"""Clients that mean harm: what a server in a process of its own does with them, and what is left of it afterwards.

``python -m tests.random.attack [--kinds idle,slow,bodies,malformed,many] [--connections 1000] [--seed 1]``

It starts ``prefixloom serve`` with the built-in model, and asks an honest request after each attack. It prints the
server's memory and open files, how long the honest request took, and what became of the attackers. The exit code is 1
if an honest request was not answered, or if files stayed open in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.servers import spoiled

BODIES = 300
"""So many bodies that never end are sent at once; each needs a thread here."""
BODY = 7_900_000
PAUSE = 25.0
"""Seconds after which a server must have closed connections that ask nothing."""
GOOD = [
    json.dumps({"prompt": "x", "max_tokens": 2}),
    json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 2}),
]


class Victim:
    """The server, from its start to its end, with these ``options`` besides."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "prefixloom", "serve", "--port", "0", "--threads", "1", "--max-running", "4"]
        command += options
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.process.stdout.readline())
        assert found, "the server says where it listens"
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    @property
    def mebibytes(self) -> float:
        """The memory of the server and of the processes that it started."""
        numbers, total = [self.process.pid], 0.0
        while numbers:
            number = numbers.pop()
            with suppress(OSError):
                pages = Path(f"/proc/{number}/statm").read_text(encoding="ascii").split()[1]
                total += int(pages) * os.sysconf("SC_PAGESIZE") / 2**20
                for task in Path(f"/proc/{number}/task").iterdir():
                    numbers += map(int, (task / "children").read_text(encoding="ascii").split())
        return total

    @property
    def files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def honest(self) -> float:
        """Ask a request, and return how long the answer took."""
        begun = time.monotonic()
        answer = self.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "ignore_eos": True})
        answer.raise_for_status()
        return time.monotonic() - begun

    def tell(self, what: str) -> None:
        seconds = self.honest()
        print(f"{what}: {self.mebibytes:.0f} MiB, {self.files} files, a request took {seconds:.2f} s", flush=True)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def end(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait()


def idle(victim: Victim, count: int, _: random.Random) -> None:
    """Connections that send nothing."""
    sockets = [victim.connect() for _ in range(count)]
    victim.tell(f"{count} connections that send nothing")
    time.sleep(PAUSE)
    victim.tell(f"{PAUSE:.0f} s later")
    for each in sockets:
        each.close()


def slow(victim: Victim, count: int, _: random.Random) -> None:
    """Connections that send a byte every two seconds."""
    sockets = [victim.connect() for _ in range(count)]
    begun = time.monotonic()
    while sockets and time.monotonic() - begun < 2 * PAUSE:
        left = []
        for each in sockets:
            try:
                each.sendall(b"P")
                left.append(each)
            except OSError:
                each.close()
        sockets = left
        time.sleep(2)
    victim.tell(f"{count - len(sockets)} of {count} slow connections were cut within {time.monotonic() - begun:.0f} s")
    for each in sockets:
        each.close()


def bodies(victim: Victim, _: int, __: random.Random) -> None:
    """Bodies that never end."""
    sockets = [victim.connect() for _ in range(BODIES)]
    data, peak = b"x" * BODY, 0.0

    def push(each: socket.socket) -> None:
        with suppress(OSError):
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n" + data)

    for each in sockets:
        threading.Thread(target=push, args=(each,), daemon=True).start()
    for _ in range(24):
        time.sleep(0.5)
        peak = max(peak, victim.mebibytes)
    victim.tell(f"{BODIES} bodies without an end, at most {peak:.0f} MiB")
    answers: Counter[str] = Counter()
    time.sleep(PAUSE)
    for each in sockets:
        each.settimeout(0.05)
        try:
            answers[each.recv(12).decode("ascii", "replace") or "closed"] += 1
        except OSError as error:
            answers[type(error).__name__] += 1
        each.close()
    victim.tell(f"their answers: {dict(answers)}")


def malformed(victim: Victim, count: int, rng: random.Random) -> None:
    """Bodies in which something is wrong."""
    answers: Counter[int] = Counter()
    for _ in range(2 * count):
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/cache/explain"))
        answer = victim.http.post(path, content=spoiled(rng, GOOD))
        answers[answer.status_code] += 1
        assert answer.status_code == 200 or answer.json()["error"]["message"], answer.text
    victim.tell(f"{2 * count} malformed bodies: {dict(answers)}")


def many(victim: Victim, count: int, _: random.Random) -> None:
    """Connections that come and go, with garbage, half a request, or a stream that nobody reads."""
    sizes = []
    for number in range(10 * count):
        body = json.dumps({"prompt": f"{number % 50}", "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
        sent = (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", b"garbage\r\n\r\n", b"",
            head + b"50\r\n\r\n{", head + str(len(body)).encode() + b"\r\n\r\n" + body,
        )[number % 5]  # fmt: skip
        with victim.connect() as each, suppress(OSError):
            each.sendall(sent)
            if number % 5 < 2:
                each.recv(1000)
        if number % (2 * count) == 2 * count - 1:
            time.sleep(0.5)
            sizes.append(round(victim.mebibytes))
    time.sleep(3)
    victim.tell(f"{10 * count} connections that came and went, {sizes} MiB on the way")


KINDS: dict[str, Callable[[Victim, int, random.Random], None]] = {
    each.__name__: each for each in (idle, slow, bodies, malformed, many)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    victim = Victim("--memory", "64MiB")
    try:
        for _ in range(30):
            victim.honest()
        files = victim.files
        victim.tell("warm")
        for name in args.kinds.split(","):
            KINDS[name](victim, args.connections, random.Random(args.seed))
        time.sleep(PAUSE)
        victim.tell("in the end")
        return int(victim.files > files + 2)
    finally:
        victim.end()


if __name__ == "__main__":
    raise SystemExit(main())
