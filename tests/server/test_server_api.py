"""The API, asked by OpenAI's own client: what it gets is what the engine answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from prefixloom_engine.server.endpoints.chats import ChatAsked
from prefixloom_engine.server.endpoints.completions import CompletionAsked
from prefixloom_engine.server.protocol import SampledBody
from prefixloom_engine.threeway.text import END, ByteTokenizer
from tests.support.servers import RunningServer, greedy, serving

TEXT = ByteTokenizer()
TALK: list[Any] = [
    {"role": "system", "content": "You answer in few words. " * 6},
    {"role": "user", "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]},
]
PROMPT = TEXT.chat(TALK, [], {}).tokens
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url, api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as it:
        yield it


def test_a_chat_is_answered_with_what_the_engine_says(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="built-in", messages=TALK, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    right = greedy(PROMPT, 24)
    assert choice.message.content == TEXT.decode(right)
    assert choice.finish_reason == ("length" if len(right) == 24 else "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(PROMPT)
    again = client.chat.completions.create(model="built-in", messages=TALK, max_completion_tokens=24, temperature=0)
    assert again.choices[0].message == choice.message
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // 64 * 64 > 0


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="built-in", messages=TALK, max_tokens=40, seed=3, logprobs=True, top_logprobs=2
    )
    chunks = list(
        client.chat.completions.create(
            model="built-in",
            messages=TALK,
            max_tokens=40,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == whole.choices[0].message.content
    assert len({each.id for each in chunks}) == 1
    assert [each.choices[0].finish_reason for each in pieces][-1] == whole.choices[0].finish_reason
    told = [info for each in pieces if each.choices[0].logprobs for info in each.choices[0].logprobs.content]
    assert told == whole.choices[0].logprobs.content
    assert all(info.logprob <= 0 and len(info.top_logprobs) == 2 for info in told)


def test_choices_are_drawn_apart_and_seeds_repeat(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> list[str]:
        told = client.completions.create(model="built-in", prompt="Once upon", max_tokens=16, n=3, **more)
        assert [choice.index for choice in told.choices] == [0, 1, 2]
        return [choice.text for choice in told.choices]

    seeded = ask(seed=5)
    assert len(set(seeded)) == 3
    assert ask(seed=5) == seeded
    assert ask() != seeded
    assert len(set(ask(temperature=0))) == 1
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(
        model="built-in", prompt="Once upon", max_tokens=16, n=3, seed=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == seeded
    for cached in (0, 128):
        told = client.completions.create(model="built-in", prompt="twice " * 25, max_tokens=1, n=3)
        assert told.usage is not None and told.usage.prompt_tokens_details is not None
        assert told.usage.prompt_tokens_details.cached_tokens == cached, "of a prompt once, whatever its choices"


def test_several_prompts_as_text_or_tokens_are_answered_side_by_side(client: openai.OpenAI) -> None:
    texts = ["First prompt", "Second one"]
    told = client.completions.create(model="built-in", prompt=texts, max_tokens=8, temperature=0, echo=True)
    as_tokens = client.completions.create(
        model="built-in", prompt=[TEXT.encode(text) for text in texts], max_tokens=8, temperature=0, echo=True
    )
    right = [text + TEXT.decode(greedy(TEXT.encode(text), 8)) for text in texts]
    assert [choice.text for choice in told.choices] == [choice.text for choice in as_tokens.choices] == right
    one = client.completions.create(model="built-in", prompt=TEXT.encode(texts[0]), max_tokens=8, temperature=0)
    assert texts[0] + one.choices[0].text == right[0]
    assert told.usage is not None and told.usage.prompt_tokens == sum(map(len, texts))
    ends = client.completions.create(model="built-in", prompt=[0, 259], max_tokens=1)
    assert ends.usage is not None and ends.usage.prompt_tokens == 2, "the first and the last token that there are"


def test_a_stop_string_ends_the_answer_in_front_of_it(client: openai.OpenAI) -> None:
    def ask(stop: Any, **more: Any) -> Any:
        return client.completions.create(
            model="built-in", prompt="To stop", max_tokens=60, seed=11, stop=stop, logprobs=1, **more
        )

    whole = ask(None).choices[0].text
    stop = whole[9:12]
    at = whole.index(stop)
    for given in (stop, ["not there", stop]):
        told = ask(given)
        (choice,) = told.choices
        assert (choice.text, choice.finish_reason) == (whole[:at], "stop")
        assert told.usage.completion_tokens < 60
        assert all(offset < max(at, 1) for offset in choice.logprobs.text_offset)
        assert "".join(chunk.choices[0].text for chunk in ask(given, stream=True)) == whole[:at]


def test_a_stop_token_ends_the_answer_even_where_the_models_own_do_not(client: openai.OpenAI) -> None:
    tokens = greedy(TEXT.encode("To stop"), 20, ends=False)
    at = next(at for at, token in enumerate(tokens) if at > 3 and token < END)
    told = client.completions.create(
        model="built-in", prompt="To stop", max_tokens=20, temperature=0,
        extra_body={"ignore_eos": True, "stop_token_ids": [tokens[at]]},
    )  # fmt: skip
    first = tokens.index(tokens[at])
    assert (told.choices[0].text, told.choices[0].finish_reason) == (TEXT.decode(tokens[:first]), "stop")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat/completions", {}, 400, "messages: Field required"),
        ("chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "has the role 'robot'"),
        ("chat/completions", {"messages": TALK, "n": 0}, 400, "n: "),
        ("chat/completions", {"messages": TALK, "temperature": -1}, 400, "temperature: "),
        ("chat/completions", {"messages": TALK, "presence_penalty": 0.5}, 400, "presence_penalty: it is not served"),
        ("chat/completions", {"messages": TALK, "top_logprobs": 2}, 400, "top_logprobs goes with logprobs"),
        ("chat/completions", {"messages": TALK, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completions", {"messages": TALK, "tools": TOOLS}, 400, "knows no tools"),
        ("chat/completions", {"messages": TALK, "tools": [{"x": "y" * (1 << 20)}]}, 400, "tools has more than"),
        ("chat/completions", {"messages": TALK, "stop": ""}, 400, "of 1 to 1024 characters"),
        ("completions", {"prompt": "x", "stop": "y" * 1025}, 400, "of 1 to 1024 characters"),
        ("../detokenize", {"tokens": [1] * 5000}, 400, "the prompt has 5000 tokens: this server takes"),
        ("chat/completions", {"messages": TALK, "model": "gpt"}, 404, "the model 'gpt' is not served here"),
        ("completions", {"prompt": ""}, 400, "at least one token"),
        ("completions", {"prompt": [999]}, 400, "the model's tokens are from 0 to 259"),
        ("completions", {"prompt": "x" * 3000}, 400, "the prompt has 3000 tokens"),
        ("completions", {"prompt": "x", "max_tokens": 3000}, 400, "and 3000 of an answer"),
        ("completions", {"prompt": "x", "stop_token_ids": [999]}, 400, "has the stop 999"),
        ("completions", {"prompt": "x", "ttl": -1}, 400, "ttl: "),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix: it is not served"),
        ("completions", {"prompt": "x", "stop_token_ids": [1] * 2000}, 400, "at most 1024 items"),
        ("completions", {"prompt": ["x"] * 40, "n": 2}, 400, "80 answers are asked for at once"),
        ("completions", "[1, 2", 400, "the body is no JSON"),
        ("completions", "\"\\ud800\"", 400, "the body is no JSON"),
        ("nothing", {}, 404, "there is no /v1/nothing here"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_the_apis_own_shape(
    server: RunningServer, path: str, body: Any, status: int, says: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    with server.client() as client:
        answer = client.post(f"/v1/{path}", content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert says in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None] * 200_000},
        {"prompt": [[None]] * 200_000},
        {"prompt": ["x"] * 200_000, "n": 128},
        {"prompt": "x", "stop": [0] * 200_000},
        {"prompt": "x", "logit_bias": {str(token): [] for token in range(100_000)}},
        {"messages": [None] * 200_000},
        {"messages": [{"role": "user", "content": [None] * 200_000}]},
    ],
    ids=lambda body: " ".join(body),
)
def test_a_long_body_is_refused_without_delay(server: RunningServer, body: Any) -> None:
    path = "chat/completions" if "messages" in body else "completions"
    with server.client() as client:
        content = json.dumps(body)
        begun = time.process_time()
        answer = client.post(f"/v1/{path}", content=content)
        took = time.process_time() - begun
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert took < 1


def test_the_neutral_values_that_clients_send_are_taken(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(
        model="built-in", messages=TALK, max_tokens=4, presence_penalty=0, frequency_penalty=0, logit_bias={}, n=1,
        response_format={"type": "text"}, user="somebody", tool_choice="none", tools=TOOLS, parallel_tool_calls=True,
        store=False, metadata={"a": "b"},
    )  # fmt: skip
    assert told.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("kind", "more", "count"),
    [
        (ChatAsked, {"top_logprobs": None}, None), (ChatAsked, {"logprobs": True}, 0), (CompletionAsked, {}, None),
        (ChatAsked, {"logprobs": True, "top_logprobs": 3}, 3), (CompletionAsked, {"logprobs": 0}, 0),
    ],
)  # fmt: skip
def test_log_probabilities_are_computed_where_they_are_asked_for(
    kind: type[SampledBody], more: dict[str, Any], count: int | None
) -> None:
    assert kind.model_validate({"messages": TALK, "prompt": "x", **more}).alternatives == count


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_has_a_default_may_be_null(server: RunningServer, path: str) -> None:
    names = ["model", "n", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "presence_penalty"]
    names += ["frequency_penalty", "logit_bias", "user", "logprobs", "cache_salt", "priority", "ttl", "ignore_eos"]
    names += ["stop_token_ids", *({"completions": ["echo", "best_of", "suffix"]}.get(path, []))]
    names += ["tools", "tool_choice", "response_format", "top_logprobs", "chat_template_kwargs"]
    begin = {"prompt": "x"} if path == "completions" else {"messages": TALK}
    with server.client() as client:
        answer = client.post(f"/v1/{path}", json={**dict.fromkeys(names), **begin, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_models_tokens_and_health_are_told(server: RunningServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["built-in"]
    assert client.models.retrieve("built-in").id == "built-in"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with server.client() as http:
        told = http.post("/tokenize", json={"prompt": "häuser"}).json()
        assert told == {"count": 7, "max_model_len": server.server.bounds.context, "tokens": TEXT.encode("häuser")}
        assert http.post("/tokenize", json={"messages": TALK}).json()["tokens"] == PROMPT
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "häuser"}
        assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.get("/health").json() == {"status": "ok"}
        refused = http.get("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.json()["error"]["message"] == "/v1/completions does not take GET"
