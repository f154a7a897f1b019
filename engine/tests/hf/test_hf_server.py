"""A model of transformers behind the server: its tokenizer, its chat template, and the form of its tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prefixloom import CompositionError, InputError
from prefixloom_engine.hf import HFModel, load
from prefixloom_engine.hf.text import FolderTokenizer, WindowDetokenizer, load_tokenizer
from prefixloom_engine.server.endpoints.chats import ChatAsked, ChatForm
from prefixloom_engine.server.endpoints.form import TextPiece
from prefixloom_engine.server.reading.bodies import ReadBody
from prefixloom_engine.server.reading.processes import TextProcesses
from tests.support.hf_texts import byte_tokenizer
from tests.support.servers import RunningServer, serving

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }}:{{ c.function.arguments.city }}){% endfor %}<|end|>{% endfor %}<assistant>"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "content": {"close": ["<tool_call>", "<|end|>"], "content": "text"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of random weights whose tokens are bytes, and an end."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    texts = TextProcesses(partial(load_tokenizer, folder, images=False))
    with closing(texts), serving(load(folder), texts, capacity={"full": 2048}) as running:
        yield running


def test_a_folder_is_served_with_its_own_template_and_stops(server: RunningServer, folder: Path) -> None:
    tokenizer = load_tokenizer(folder, images=False)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Grüße, "}, {"type": "text", "text": "you"}]}]
    with server.client() as client:
        told = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert tokenizer.decode(told) == "<user>Grüße, you<assistant>"  # the end is special, and no text
        body = {"messages": messages, "max_tokens": 30, "temperature": 0, "logprobs": True}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert len(choice["message"]["content"]) > 0
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
        for wrong, says in (
            ({"messages": [{"role": "robot", "content": "x"}]}, "no robots"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "image_url",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "no JSON"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}]}, "without a function"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]},
                "no JSON",
            ),
            ({"messages": messages, "chat_template_kwargs": {"chat_template": "mine"}}, "'chat_template', which is no"),
            ({"messages": messages, "chat_template_kwargs": {"return_tensors": "pt"}}, "'return_tensors', which is no"),
            ({"messages": messages, "chat_template_kwargs": {"messages": []}}, "'messages', which is no"),
            ({"prompt": "x" * 601}, "the prompt has 601 tokens and 16 of an answer: this server takes 512 together"),
            ({"prompt": "x" * 500, "max_tokens": 13}, "and 13 of an answer: this server takes 512 together at most"),
        ):
            refused = client.post(f"/v1/{'completions' if 'prompt' in wrong else 'chat/completions'}", json=wrong)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]
            assert "prompt" not in wrong or refused.json()["error"]["code"] == "context_length_exceeded"
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 512
        whole = {"prompt": "x" * 500, "max_tokens": 12, "ignore_eos": True}
        assert client.post("/v1/completions", json=whole).json()["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
    ids=["plain", "yarn", "yarn, extended in the config", "linear"],
)
def test_a_models_context_is_what_its_config_says(rope: dict[str, Any], context: int) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **rope},
    )  # fmt: skip
    assert HFModel(LlamaForCausalLM(config).eval()).context == context


def test_templates_get_variables_of_their_own(folder: Path) -> None:
    knowing = PreTrainedTokenizerFast.from_pretrained(folder)
    knowing.chat_template = "{{ mood }}{% for d in documents %}({{ d.text }}){% endfor %}"
    tokenizer = FolderTokenizer(knowing)
    made = tokenizer.chat([{"role": "user", "content": "x"}], [], {"mood": "calm", "documents": [{"text": "y"}]})
    assert tokenizer.decode(made.tokens) == "calm(y)"
    unknown = {"mood": "calm", "documents": [], "enable_thinking": False}  # as clients of many models send it to each
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "x"}], [], unknown).tokens) == "calm"
    with pytest.raises(InputError, match=r"'padding', which is no variable .*: there are documents, mood"):
        tokenizer.chat([{"role": "user", "content": "x"}], [], {"padding": True})


def test_tools_reach_the_template_and_their_calls_come_back_apart(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, images=False)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Sun?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    prompt = tokenizer.chat(messages, TOOLS, {})
    text = tokenizer.decode(prompt.tokens)
    assert text.startswith("<tools>[{") and "<assistant>(weather:Ulm)" in text and "<tool>rain" in text
    assert not tokenizer.parses

    knowing = PreTrainedTokenizerFast.from_pretrained(folder)
    knowing.response_template = RESPONSE
    tokenizer = FolderTokenizer(knowing)
    assert tokenizer.parses

    def form_of(body: dict[str, Any]) -> ChatForm:
        return ChatForm("m", "fp", ReadBody(ChatAsked.model_validate(body), [prompt], []), tokenizer)

    form = form_of({"messages": messages, "tools": TOOLS})
    said = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'

    class Answered:
        index, tokens, cut = 0, tokenizer.encode(said), False

    told = form.choice(Answered(), TextPiece(said, (), "stop"))  # type: ignore[arg-type]
    (made,) = told["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"city": "Köln"}
    assert (told["message"]["content"], told["finish_reason"]) == ("Let me see.", "tool_calls")
    (delta,) = form.deltas(Answered(), TextPiece(said, (), "stop"))  # type: ignore[arg-type]
    assert delta["delta"]["tool_calls"][0]["function"] == made["function"]
    Answered.cut = True
    stopped = form.choice(Answered(), TextPiece("Let me", (), "stop"))  # type: ignore[arg-type]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Let me", "stop")
    assert not form_of({"messages": messages}).parses


def test_tokens_come_as_whole_characters(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, images=False)
    for text in ("plain words", "häuser 🌧️ ok", "日本語", "\ufffd", ""):
        tokens, come = tokenizer.encode(text), tokenizer.detokenizer()
        pieces = [come.push(token) for token in tokens]
        assert "".join([*pieces, come.end()]) == text == tokenizer.decode(tokens)
        assert text == "\ufffd" or not any(piece.endswith("\ufffd") for piece in pieces)


def word_pieces() -> PreTrainedTokenizerFast:
    """Tokens as of SentencePiece: spaces are letters, and what no token has is spelled in bytes."""
    names = ["<s>", "<|end|>", *[f"<0x{byte:02X}>" for byte in range(256)], *"\u2581abcdehinor", "\u2581a", "\u2581the"]
    names += ["he", "the"]
    at = {name: number for number, name in enumerate(names)}
    merges = [("h", "e"), ("\u2581", "a")]
    raw = Tokenizer(models.BPE(at, merges, byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|end|>")


@pytest.mark.parametrize("text", ["a häuser 🌧️ ok", "the end", "日本語", " b  c"])
def test_the_bytes_of_tokens_come_to_the_text(folder: Path, text: str) -> None:
    """A token may be a part of a character, or begin with a space that decoding it alone would drop."""
    for made in (load_tokenizer(folder, images=False), FolderTokenizer(word_pieces())):
        pieces = [made.token_bytes(token) for token in made.encode(text)]
        assert b"".join(pieces).decode() in (text, f" {text}")  # one of the two puts a space in front
        assert all(pieces) and len(pieces) > 3
        assert made.token_bytes(made.encode("<|end|>")[-1]) == b"<|end|>"


def test_a_long_run_of_tokens_without_text_costs_the_same_each(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, images=False)
    end, decoded = tokenizer.encode("<|end|>"), []

    class Counting(FolderTokenizer):
        def __init__(self) -> None:
            pass

        def decode(self, tokens: Any) -> str:
            decoded.append(len(tokens))
            return tokenizer.decode(tokens)

    come = WindowDetokenizer(Counting())
    assert len(end) == 1
    tokens = [*tokenizer.encode("häu"), *end * 2000, *tokenizer.encode("ser 🌧️")]
    assert "".join([*map(come.push, tokens), come.end()]) == "häuser 🌧️"
    assert max(decoded) <= 40


def test_a_folder_without_a_tokenizer_or_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    load(folder).model.save_pretrained(tmp_path)
    with pytest.raises(CompositionError, match="has no tokenizer that transformers can load"):
        load_tokenizer(tmp_path, images=False)
    bare = PreTrainedTokenizerFast.from_pretrained(folder)
    bare.chat_template = None
    with pytest.raises(InputError, match="chat template cannot take these messages"):
        FolderTokenizer(bare).chat([{"role": "user", "content": "x"}], [], {})
