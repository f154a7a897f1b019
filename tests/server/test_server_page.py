"""The live page in a real browser: a headless Chromium, driven through its WebDriver."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.outside import program
from tests.support.servers import ADMIN, KEYS, RunningServer, serving

pytestmark = pytest.mark.outside("chromium", "chromedriver")


class Browser:
    """One session of a browser, by the WebDriver protocol."""

    def __init__(self, port: int, folder: Path, width: int, dark: bool) -> None:
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
                     f"--user-data-dir={folder}", "--no-proxy-server"]  # fmt: skip
        options = {"binary": program("chromium"), "args": arguments}
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        made = self._ask("POST", "/session", {
            "capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options,
                                             "goog:loggingPrefs": {"browser": "ALL"}}}
        })  # fmt: skip
        self._session = f"/session/{made['sessionId']}"
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.command("Emulation.setEmulatedMedia", features=features)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(method, path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def command(self, name: str, **params: Any) -> Any:
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": params})

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._ask("POST", f"{self._session}/execute/sync", {"script": f"return {script}", "args": []})

    def until(self, script: str) -> Any:
        """Wait until the script's value is true, and return it."""
        for _ in range(300):
            if found := self.run(script):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{script} does not come true; the page shows {self.text}")

    @property
    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    @property
    def complaints(self) -> list[Any]:
        return list(self._ask("POST", f"{self._session}/se/log", {"type": "browser"}))

    def close(self) -> None:
        self._ask("DELETE", self._session)
        self._http.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program("chromedriver"), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/status", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def complete(it: RunningServer, prompt: str, key: str = "") -> None:
    with it.client(key) as client:
        assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (380, True)])
def test_the_page_follows_a_server(driver: int, tmp_path: Path, width: int, dark: bool) -> None:
    with serving(capacity={"full": 512, "swa": 512, "mamba": 24}, chunk=64) as it:
        browser = Browser(driver, tmp_path, width, dark)
        try:
            browser.open(it.root)
            browser.until("document.getElementById('state').textContent === 'live'")
            assert "no request yet" in browser.text
            for number in [*range(8), 7]:
                complete(it, f"{number} a prompt of more than one page " * 4)
            browser.until("/[1-9][0-9.]*% of tokens hit/.test(document.body.innerText)")
            browser.until("document.getElementById('recent').innerText.includes('room')")
            assert "never seen" in browser.text and "mamba" in browser.text
            assert browser.run("document.querySelectorAll('#hot tr').length") >= 1
            browser.run("document.getElementById('prompt').value = '7 a prompt of more than one page '.repeat(4)")
            browser.run("document.getElementById('ask').requestSubmit()")
            browser.until("/tokens hit/.test(document.getElementById('why').innerText)")
            assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
            background = browser.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
            assert browser.complaints == []
            asked = browser.run("performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
            assert set(asked) == {it.root.removeprefix("http://")}, "the page asks nobody else"
        finally:
            browser.close()


def test_the_page_says_when_nobody_answers_and_takes_a_key(driver: int, tmp_path: Path) -> None:
    with serving(keys=KEYS) as it:
        browser = Browser(driver, tmp_path, 800, False)
        browser.open(it.root)
        browser.until("document.getElementById('state').textContent === 'live'")
        browser.run("document.getElementById('prompt').value = 'hello'")
        browser.run("document.getElementById('ask').requestSubmit()")
        browser.until("document.getElementById('why').innerText.includes('wants a key')")
        browser.run(f"document.getElementById('key').value = '{ADMIN}'")
        browser.run("document.getElementById('ask').requestSubmit()")
        browser.until("/tokens hit/.test(document.getElementById('why').innerText)")
    try:
        browser.until("document.getElementById('state').textContent === 'no answer'")
    finally:
        browser.close()
