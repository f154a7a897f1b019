"""OpenAI's client for JavaScript, which node runs: another real client, with streams and an agent's tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from prefixloom_engine.contract.texts import ChatPrompt, Message
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.threeway.text import END, ByteTokenizer
from tests.support.outside import program
from tests.support.servers import eventually, greedy, serving

SCRIPT = Path(__file__).parent / "node_client.mjs"
PACKAGE = "openai@6"  # the last one that runs on node 20
RESULT = "[result] "


class Calling(ByteTokenizer):
    """Takes the first answer to a chat with tools for a call of the first of them, and the one after a result as it is.

    The built-in model says nothing that is a call, so what its tokens mean is made up here. All else is real.
    """

    parses = True

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> ChatPrompt:
        plain = []
        for each in messages:
            if each["role"] == "tool":
                plain.append({"role": "user", "content": f"{RESULT}{each['content']}"})
            elif each.get("tool_calls"):
                plain.append({"role": "assistant", "content": each["tool_calls"][0]["function"]["arguments"]})
            else:
                plain.append(dict(each))
        return super().chat(plain, [], more)

    def parse(
        self, tokens: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        if RESULT in self.decode(prompt):
            return None
        name = tools[0]["function"]["name"]
        return {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"city": "Köln"}}}]}


@pytest.fixture(scope="module")
def installed_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text("{}")
    command = [program("npm"), "install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {PACKAGE} in 120 seconds")
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE} here: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.mark.outside("node", "npm")
def test_the_javascript_client_streams_calls_tools_and_knows_the_errors(installed_client: Path) -> None:
    text = Calling()
    call = json.dumps({"city": "Köln"}, ensure_ascii=False)
    turns = [
        {"role": "user", "content": "Sun in Köln?"},
        {"role": "assistant", "content": call},
        {"role": "user", "content": f"{RESULT}rain in Köln"},
    ]
    said = [greedy(text.chat(turns[:count], [], {}).tokens, 50, ends=False) for count in (1, 3)]
    stops = [tokens[6] for tokens in said]  # a client takes no call, and no answer, that is cut for its length
    texts = TextProcesses(Calling)
    with closing(texts), serving(texts=texts) as server:
        done = subprocess.run(
            [program("node"), str(SCRIPT), server.url, json.dumps(stops)], cwd=installed_client, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        eventually(lambda: server.server.worker.load == 0)
        assert server.server.worker.engine.counts.decoded < 1500, "who left was not answered to the end"
    told = json.loads(done.stdout)

    talk = [
        {"role": "system", "content": "You answer in few words. " * 6},
        {"role": "user", "content": "Who are you, Jürgen?"},
    ]
    prompt = text.chat(talk, [], {}).tokens
    right = text.decode(greedy(prompt, 24))
    assert told["models"] == ["built-in"]
    assert told["chat"] == "".join(told["pieces"]) == right
    assert told["usage"]["prompt_tokens"] == told["streamed_usage"]["prompt_tokens"] == len(prompt)
    assert told["streamed_usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 64 * 64 > 0
    assert [each[:2] for each in told["collected"]] == [[0, "assistant"], [1, "assistant"]]
    assert all(each[2] == right for each in told["collected"])
    assert told["completion"] == text.decode(greedy(text.encode("Once"), 8))

    end = min(said[1].index(stop) for stop in {*stops, END} if stop in said[1])
    answer = text.decode(said[1][:end])
    assert told["tool_ran"] == ["Köln", "Köln"]
    for agent in told["agents"]:
        assert agent == {"answer": answer, "roles": ["user", "assistant", "tool", "assistant"]}

    assert told["errors"] == [
        ["BadRequestError", 400, None, "messages"],
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "context_length_exceeded", None],
    ]
