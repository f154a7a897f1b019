"""``prefixloom serve --trace`` and ``prefixloom demo --trace``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from prefixloom.cli import main
from tests.server.test_serve_command import BODY, process
from tests.support.traces import read_trace


def test_a_server_writes_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with process("--trace", str(path), "--host-memory", "64MiB") as (server, client):
        told = [client.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2)]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)
    first, second = read_trace(path).spans("request")
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told]
    assert [first.values["hit"], second.values["hit"]] == cached and cached[1] > 0
    assert [first.values["prompt"], first.values["tokens"]] == [told[0]["prompt_tokens"], told[0]["completion_tokens"]]
    assert first.values["reason"] == "length"


def test_a_server_whose_trace_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--trace", str(tmp_path / "no" / "folder")]) != 0
    assert "the trace cannot be written" in capsys.readouterr().err


def test_a_demo_writes_what_its_cached_engine_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    assert main(["demo", "--size", "tiny", "--conversations", "3", "--turns", "2", "--json", "--trace", str(path)]) == 0
    capsys.readouterr()
    read = read_trace(path)
    assert len(read.spans("request")) >= 6
    assert any(int(span.values["hit"]) > 0 for span in read.spans("request"))
    assert any(name.startswith("host tier") or "copies" in name for name in read.tracks)
