"""What a server tells of itself: metrics for Prometheus, the data of the page, and why a prompt would miss."""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from prefixloom import InputError, TierManifest
from prefixloom_engine.server import explaining, insight, top
from prefixloom_hicache import HostTier
from tests.support.places import ROOT
from tests.support.servers import ADMIN, ALICE, BOB, KEYS, RunningServer, serving

PROMPT = "a prompt of more than one page " * 4
SMALL = {"full": 512, "swa": 512, "mamba": 24}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as it:
        yield it


def complete(it: RunningServer, prompt: str, key: str = "", **more: Any) -> dict[str, Any]:
    with it.client(key) as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]  # type: ignore[no-any-return]


def metrics(it: RunningServer) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """By name and labels, as Prometheus's own parser reads them."""
    with it.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def explain(it: RunningServer, key: str = "", **body: Any) -> Any:
    with it.client(key) as client:
        return client.post("/cache/explain", json=body)


OF_MODEL = (("engine", "0"), ("model_name", "built-in"))


def test_metrics_have_the_names_that_users_of_engines_know_and_agree_with_the_answers() -> None:
    with serving() as it:
        used = [complete(it, PROMPT), complete(it, PROMPT + "and more"), complete(it, PROMPT, stop="\0")]
        told = metrics(it)
    prompt = sum(each["prompt_tokens"] for each in used)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    assert cached > 0
    for name, value in {
        "vllm:prefix_cache_queries_total": prompt, "vllm:prefix_cache_hits_total": cached,
        "vllm:prompt_tokens_total": prompt, "vllm:prompt_tokens_cached_total": cached,
        "vllm:generation_tokens_total": sum(each["completion_tokens"] for each in used),
        "vllm:time_to_first_token_seconds_count": 3, "vllm:e2e_request_latency_seconds_count": 3,
        "vllm:request_queue_time_seconds_count": 3, "vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0,
    }.items():  # fmt: skip
        assert told[name][OF_MODEL] == value, name
    assert sum(told["vllm:request_success_total"].values()) == 3
    for name in ("vllm:kv_cache_usage_perc", "sglang:swa_token_usage", "sglang:full_token_usage", "sglang:mamba_usage"):
        assert told[name][OF_MODEL] == 0.0, name
    missed = told["prefixloom:missed_tokens_total"]
    assert sum(missed.values()) == prompt - cached
    assert {dict(labels)["reason"] for labels in missed} <= {"new", "page", "left", "never kept"}


def test_the_time_of_a_token_is_that_of_the_tokens_after_the_first() -> None:
    registry = CollectorRegistry()
    requests = insight.Requests(registry, "m")
    for count, last in ((1, 11.0), (5, 13.0)):
        requests.ended(SimpleNamespace(
            begun=10.0, admitted_at=0.0, first_at=11.0, last_at=last, count=count, reason="stop",
        ))  # fmt: skip
    labels = {"model_name": "m", "engine": "0"}
    for name, value in (("count", 1), ("sum", 0.5)):
        assert registry.get_sample_value(f"vllm:request_time_per_output_token_seconds_{name}", labels) == value
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_sum", labels) == 2.0
    assert registry.get_sample_value("vllm:generation_tokens_total", labels) == 6


def test_missed_and_lost_are_told_by_component_and_cause() -> None:
    with serving(capacity=SMALL, chunk=64) as it:
        for turn in range(2):
            for number in range(8):
                complete(it, f"{number} {PROMPT}", cache_salt=str(turn * number))
        told = metrics(it)
    lost = {tuple(dict(labels).values()) for labels in told["prefixloom:lost_pages_total"]}
    assert any("room" in labels for labels in lost), lost
    assert any("evicted" in dict(labels).values() for labels in told["prefixloom:missed_tokens_total"])
    assert sum(v for k, v in told["prefixloom:evicted_age_seconds_count"].items()) > 0
    assert sum(v for k, v in told["prefixloom:reuse_gap_seconds_count"].items()) > 0


def test_many_scrapers_ask_the_engine_once(server: RunningServer) -> None:
    metrics(server)
    before = server.server.worker.engine.cache.stats
    asked = []
    server.server.worker.engine.cache.stats = lambda: asked.append(1) or before()  # type: ignore[method-assign, func-returns-value]
    begun = time.monotonic()
    try:
        for _ in range(12):
            metrics(server)
    finally:
        del server.server.worker.engine.cache.stats
    seconds = time.monotonic() - begun
    assert len(asked) <= 4 * seconds + 4, "the engine is asked twice a second at most, each time for two figures"


def test_no_prompt_no_salt_and_no_key_is_in_figures() -> None:
    with serving(keys=KEYS) as it:
        complete(it, "a secret that nobody is to see " * 5, ALICE, cache_salt="hidden")
        with it.client() as client:
            shown = client.get("/metrics").text + client.get("/insight").text
    assert 'owner="alice"' in shown, "tenants are shown by name"
    assert "secret" not in shown and ALICE not in shown and "hidden" not in shown


def test_the_data_of_the_page(server: RunningServer) -> None:
    with server.client() as client:
        client.get("/insight")  # whoever asks soon after is told the same
        complete(server, "hot " * 40)
        complete(server, "hot " * 40)
        time.sleep(insight.FRESH_SECONDS)
        told, page = client.get("/insight").json(), client.get("/")
    assert told["model"] == "built-in" and told["running"] == 0
    assert told["stats"]["components"].keys() == {"full", "swa", "mamba"}
    assert any(each["hits"] >= 1 and each["tokens"] > 0 for each in told["hot"])
    assert "http://" not in page.text and "https://" not in page.text, "the page asks nobody else"


def test_a_prompt_is_explained(server: RunningServer) -> None:
    first = explain(server, prompt="never asked " * 20).json()
    assert first["findings"][0]["reason"] == "new"
    complete(server, "asked " * 30)
    told = explain(server, prompt="asked " * 30).json()
    assert told["ready"] > 0 and told["sentences"][0] == f"{told['ready']} of {told['tokens']} tokens hit."
    salted = explain(server, prompt="asked " * 30, cache_salt="x").json()
    assert (salted["ready"], salted["findings"][0]["reason"]) == (0, "new")
    tokens = explain(server, prompt=[1, 2, 3]).json()
    assert tokens["tokens"] == 3
    longest = server.server.bounds.context
    assert explain(server, prompt=[1] * longest).json()["tokens"] == longest
    assert explain(server, prompt=[1] * (longest + 1)).status_code == 400
    chat = explain(server, messages=[{"role": "user", "content": "hello"}])
    assert chat.status_code == 200
    with server.client() as client:
        by_get = client.get("/cache/explain", params={"prompt": "asked " * 30})
        assert client.get("/cache/explain", params={"prompt": "x", "cache_salt": "y" * 600}).status_code == 400
        assert client.get("/cache/explain").status_code == 400
    assert by_get.json()["ready"] == told["ready"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"prompt": ""}, 400), ({"prompt": [10**6]}, 400), ({"prompt": "x", "messages": [{}]}, 400),
     ({"prompt": "x", "model": "another"}, 404)],
)  # fmt: skip
def test_what_cannot_be_explained_is_refused(server: RunningServer, body: dict[str, Any], status: int) -> None:
    answer = explain(server, **body)
    assert (answer.status_code, answer.json()["error"]["message"] != "") == (status, True)


def test_a_tenant_learns_nothing_of_others() -> None:
    with serving(keys=KEYS, capacity=SMALL, chunk=64) as it:
        assert explain(it, prompt=PROMPT).status_code == 401
        complete(it, PROMPT, ALICE)
        assert explain(it, ALICE, prompt=PROMPT).json()["ready"] > 0
        told = explain(it, BOB, prompt=PROMPT).json()
        assert told["ready"] == 0 and {each["reason"] for each in told["findings"]} <= {"new", "page", "left"}
        assert explain(it, BOB, prompt=PROMPT, namespace="alice").status_code == 403
        of_alice = explain(it, ADMIN, prompt=PROMPT, namespace="alice").json()
        assert of_alice["ready"] > 0
        for number in range(8):  # of what alice has, more than half goes for bob
            complete(it, f"{number} {PROMPT}", ALICE if number < 3 else BOB)
        mine = json.dumps(explain(it, ALICE, prompt=PROMPT).json())
        whole = json.dumps(explain(it, ADMIN, prompt=PROMPT, namespace="alice").json())
        assert "evicted" in mine and "bob" not in mine
        assert "'bob'" in whole


def test_the_live_page_shows_each_pool_and_what_the_host_has_of_it() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    with serving(tier=HostTier(TierManifest(capacity=4096))) as it, it.client() as client:
        complete(it, PROMPT)
        console.print(top.frame(client.get("/insight").json()))
    rows = [line.split("  ")[0] for line in console.export_text().splitlines()]
    for name in ("full", "swa", "mamba"):
        assert rows.count(name) == rows.count(f"{name} (host)") == 1, rows


def test_the_commands(server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    def run(module: Any, *given: str) -> int:
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        return module.run(parser.parse_args([*given, "--server", server.root]))  # type: ignore[no-any-return]

    complete(server, "asked by command " * 9)
    file = tmp_path / "prompt.txt"
    file.write_text("asked by command " * 9)
    assert run(explaining, f"@{file}") == 0
    assert "tokens hit." in capsys.readouterr().out
    assert run(explaining, "x", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 1
    assert run(explaining, "hello", "--chat", "--salt", "s") == 0
    assert run(explaining, "") == 1
    assert "give a prompt" in capsys.readouterr().err
    assert run(top, "--once") == 0
    shown = capsys.readouterr().out
    assert "built-in" in shown and "mamba" in shown and "why tokens missed" in shown
    with pytest.raises(InputError, match="cannot be read"):
        run(explaining, "@/nowhere")
    with pytest.raises(InputError, match="seconds from"):
        run(top, "--every", "never")


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((ROOT / "docs/insight-dashboard.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|sglang|prefixloom):\w+", target["expr"])
    }
    with serving(capacity=SMALL, chunk=64) as it:
        for number in range(8):
            complete(it, f"{number} {PROMPT}")
        there = metrics(it).keys()
    assert asked and asked <= there, asked - there


def test_an_error_in_the_accounting_harms_no_step(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as it:
        complete(it, PROMPT)
        cache = it.server.worker.engine.cache

        def broken(_: Any) -> None:
            raise RuntimeError("the accounting is broken")

        cache.account = broken  # type: ignore[method-assign, assignment]
        try:
            assert complete(it, PROMPT)["completion_tokens"] == 3
        finally:
            del cache.account
    assert "why prompts miss is counted no more" in caplog.text
    assert "a step of the engine raised" not in caplog.text
