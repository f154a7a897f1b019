"""An honest tenant beside one who tries all at once.

The greedy tenant sends bodies that take long to read, file names and addresses in place of images, more requests than
there is room for, and the highest priority.

``python -m tests.random.greedy_tenant [--turns 80]``: about two minutes.

It starts ``prefixloom serve`` with a tiny model that takes images, and keys for two tenants. The honest one asks its
conversations first on a quiet server, then anew beside the attacks. The exit code is 1 if an answer was refused, if an
address or a file was touched that only an attacker named, or if the server and its processes hold more memory than
``MOST``. The ratio of the two medians is printed: the clock of a busy machine decides nothing here.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.random.attack import Victim

HONEST, GREEDY = "honest-key-0123456789", "greedy-key-0123456789"
MOST = 1500
"""MiB that the server and its processes may hold besides what they held before the attacks."""
CONNECTIONS = 30
PICTURES = (
    "images",
    "image",
    "videos",
    "audio",
    "url",
    "path",
    "chat_template",
    "processor_kwargs",
    "size",
    "crop_size",
)


class Bait(NamedTuple):
    """An address and a file of which an attacker tells the server. Nothing else knows them."""

    url: str
    file: str


class Canary:
    """Sees whether anybody takes the ``bait``."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        self.bait = Bait(f"http://127.0.0.1:{port}/canary.png", str(folder / "canary.png"))
        os.mkfifo(self.bait.file)

    @property
    def touched(self) -> list[str]:
        found = []
        with suppress(BlockingIOError):
            self._socket.accept()[0].close()
            found.append(self.bait.url)
        try:
            os.close(os.open(self.bait.file, os.O_WRONLY | os.O_NONBLOCK))
            found.append(self.bait.file)
        except OSError as error:
            assert error.errno == errno.ENXIO  # nobody has it open for reading
        return found


def client_of(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120, trust_env=False)


def honest(victim: Victim, turns: int, begin: str) -> list[float]:
    """Ask ``turns`` turns of short conversations, and return how long each answer took."""
    seconds, messages = [], []
    with client_of(victim.url, HONEST) as http:
        for turn in range(turns):
            if turn % 4 == 0:
                messages = [{"role": "system", "content": f"{begin} {turn} is polite and short."}]
            messages.append({"role": "user", "content": f"Question {turn}?"})
            begun = time.monotonic()
            told = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0})
            seconds.append(time.monotonic() - begun)
            told.raise_for_status()
            messages.append(told.json()["choices"][0]["message"] | {"content": "Yes."})
    return seconds


Attack = Callable[[httpx.Client, Bait, int], httpx.Response]


def nested(http: httpx.Client, _: Bait, number: int) -> httpx.Response:
    body = b'{"prompt": [' + b"[]," * 2_600_000 + b"[]]}"
    return http.post(("/v1/completions", "/tokenize", "/cache/explain")[number % 3], content=body,
                     headers={"content-type": "application/json"})  # fmt: skip


def named(http: httpx.Client, bait: Bait, number: int) -> httpx.Response:
    value: Any = (bait.url, bait.file, f"file://{bait.file}", {"height": 99999, "width": 99999})[number % 4]
    values = value if number % 8 < 4 or isinstance(value, dict) else [value]
    message = {"role": "user", "content": "Look"}
    body: dict[str, Any] = {"messages": [message], "max_tokens": 2}
    name = PICTURES[number // 8 % len(PICTURES)]
    if number % 3 == 0:
        body["chat_template_kwargs"] = {name: values}
    elif number % 3 == 1:
        kind = ("image", "image_url", "video", "audio", "input_image")[number % 5]
        message["content"] = [{"type": kind, name: value, kind: value if number % 2 else {"url": value}}]  # type: ignore[assignment]
    else:
        body[name] = values
    return http.post("/v1/chat/completions", json=body)


def urgent(http: httpx.Client, _: Bait, number: int) -> httpx.Response:
    body = {"prompt": f"{number} " * 40, "max_tokens": 60, "priority": 2**31 - 1, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


ATTACKS: list[Attack] = [nested, nested, nested, named, named, *[urgent] * CONNECTIONS]


def attack(url: str, bait: Bait, over: Any, answers: Any) -> None:
    """Attack in this process, in a thread for each of ``ATTACKS``, until ``over``; then tell how often what came back.

    Attackers have machines of their own, so this process gives its processor to whoever wants it.
    """
    os.nice(19)
    told: Counter[str] = Counter()

    def again(how: Attack, number: int) -> None:
        with client_of(url, GREEDY) as http:
            while not over.is_set():
                number += 1
                try:
                    answer = how(http, bait, number)
                    told[f"{how.__name__} {answer.status_code}"] += 1
                    if answer.status_code in (429, 503):
                        over.wait(0.05)
                except httpx.HTTPError as error:
                    told[f"{how.__name__} {type(error).__name__}"] += 1

    threads = [threading.Thread(target=again, args=(how, 1000 * at)) for at, how in enumerate(ATTACKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(dict(told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=80)
    args = parser.parse_args()
    from tests.support.hf_images import llava_folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = llava_folder(folder / "model")
        keys = folder / "keys.toml"
        keys.write_text(f'[honest]\nkey = "{HONEST}"\n[greedy]\nkey = "{GREEDY}"\n', encoding="utf-8")
        keys.chmod(0o600)
        canary, victim = Canary(folder), Victim("--memory", "8MiB", "--model", str(model), "--keys", str(keys))
        spawn = multiprocessing.get_context("spawn")
        over, answers, peak = spawn.Event(), spawn.Queue(), 0.0
        try:
            honest(victim, 8, "A warm assistant")
            quiet, held = honest(victim, args.turns, "An assistant"), victim.mebibytes
            attacker = spawn.Process(target=attack, args=(victim.url, canary.bait, over, answers))
            attacker.start()
            touched: list[str] = []

            def watch() -> None:
                nonlocal peak
                while not over.wait(0.05):
                    peak = max(peak, victim.mebibytes)
                    touched.extend(canary.touched)

            watcher = threading.Thread(target=watch)
            watcher.start()
            time.sleep(3)  # the attacks have begun
            try:
                beside = honest(victim, args.turns, "Another assistant")
            except httpx.HTTPError as error:
                print(f"an honest request has no answer: {error!r}")
                return 1
            finally:
                over.set()
                watcher.join()
            print(f"the attacks were answered: {json.dumps(dict(sorted(answers.get(timeout=120).items())))}")
            attacker.join()
            one, two = statistics.median(quiet), statistics.median(beside)
            print(
                f"a quiet server's median answer: {one * 1000:.1f} ms; beside the attacks: {two / one:.2f} times that"
            )
            print(f"memory: {held:.0f} MiB, at most {peak:.0f} beside the attacks; touched: {sorted(set(touched))}")
            return int(bool(touched) or peak > held + MOST)
        finally:
            victim.end()


if __name__ == "__main__":
    raise SystemExit(main())
