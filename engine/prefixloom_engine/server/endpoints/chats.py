"""``/v1/chat/completions``: the messages of a chat, made into a prompt by the model's own template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ..protocol import MOST_ALTERNATIVES, Message, SampledBody, Several, StrictModel, TemplatedBody
from .form import Answered, Form, Object, TextPiece, shown_token


class ResponseFormat(StrictModel):
    type: Literal["text"]


class ChatAsked(SampledBody, TemplatedBody):
    messages: Several[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tool_choice: Literal["auto", "none"] | None = None
    response_format: ResponseFormat | None = None
    modalities: Several[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _spoken(self) -> ChatAsked:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true alone")
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().offered

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def without_prompts(self) -> ChatAsked:
        update: dict[str, Any] = {"messages": [], "chat_template_kwargs": {}, "logit_bias": None, "user": None}
        return self.model_copy(update=update)


class ChatForm(Form):
    path, body, operation = "/v1/chat/completions", ChatAsked, "chat"
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def parses(self) -> bool:
        """Whether an answer may be a call of a tool."""
        return bool(self.asked.offered) and self.tokenizer.parses

    def begin(self, index: int) -> list[Object]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, answer: Answered, piece: TextPiece) -> Object:
        message, reason = self._message(answer, piece)
        empty = None if "tool_calls" in message else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **message}
        return {"index": answer.index, "message": message, "logprobs": self._logprobs(piece), "finish_reason": reason}

    def deltas(self, answer: Answered, piece: TextPiece) -> list[Object]:
        delta, reason = self._message(answer, piece)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        told = {"index": answer.index, "delta": delta, "logprobs": self._logprobs(piece)}
        return [{**told, "finish_reason": reason or None}]

    def _message(self, answer: Answered, piece: TextPiece) -> tuple[Object, str]:
        """Return what a piece says, with the tools that it calls if the tokenizer knows their form; and why it ends."""
        parsed = None
        if self.parses and not answer.cut:
            parsed = self.tokenizer.parse(answer.tokens, self.prompt, self.asked.offered)
        if parsed is None:
            return ({"content": piece.text} if piece.text else {}), piece.reason
        found = {
            "content": parsed.get("content"),
            "reasoning_content": parsed.get("thinking"),
            "tool_calls": [_tool_call(call) for call in parsed.get("tool_calls") or ()],
        }
        message = {name: each for name, each in found.items() if each}
        return message, "tool_calls" if "tool_calls" in message and piece.reason == "stop" else piece.reason

    def _logprobs(self, piece: TextPiece) -> Object | None:
        if not self.asked.logprobs:
            return None
        return {
            "content": [
                {**_named(info.text, info.logprob), "top_logprobs": [_named(*each) for each in info.alternatives]}
                for info in piece.tokens
            ],
            "refusal": None,
        }


def _named(text: bytes, logprob: float) -> Object:
    return {"token": shown_token(text), "logprob": logprob, "bytes": list(text)}


def _tool_call(call: Mapping[str, Any]) -> Object:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }
