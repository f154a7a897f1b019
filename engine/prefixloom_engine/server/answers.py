"""Answers: what a client asks as requests of the engine, and what the engine answers as text and as the API's objects.

A ``Prompt`` is one prompt of a body, and a ``TextAnswer`` one of its choices. ``Form`` makes the objects of one of the
two interfaces, chats or completions, whole or in pieces.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs

from ..contract.requests import Request
from ..contract.texts import Detokenizer, Tokenizer
from .access import Tenant
from .protocol import ApiError, ChatAsked, CompletionAsked
from .stops import StopStrings
from .worker import EngineWorker, News, PendingAnswer

Object = dict[str, Any]
LEAST_LOGPROB = -9999.0
"""What the API tells of a token that the model never says: JSON has no infinity."""


@attrs.frozen
class TokenInfo:
    """A token of an answer as ``logprobs`` tells it. ``at``: where its text begins in the answer."""

    text: bytes
    logprob: float
    alternatives: Sequence[tuple[bytes, float]]
    at: int


@attrs.frozen
class TextPiece:
    """Some text of an answer with the tokens that begin in it. ``reason``: why the answer ended; "": it goes on."""

    text: str
    tokens: Sequence[TokenInfo] = ()
    reason: str = ""


class TextAnswer:
    """One choice: the tokens of one request as text, which ends in front of a stop string."""

    def __init__(
        self,
        worker: EngineWorker,
        ticket: PendingAnswer,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        index: int,
        most: float,
    ) -> None:
        """``most``: how many seconds the answer may take."""
        self.index, self.ticket = index, ticket
        self.tokens: list[int] = []
        self._worker, self._tokenizer = worker, tokenizer
        self._text: Detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._seen = 0
        """How many characters the tokens so far have, those held back included."""
        self._told = 0
        self._infos: list[TokenInfo] = []
        self._timer = asyncio.get_running_loop().call_later(most, self._expire, most)

    def _expire(self, seconds: float) -> None:
        error = ApiError(504, f"the answer took more than {seconds:g} seconds", code="timeout")
        if not self.ticket.over:
            self.ticket.put(News([], [], [], "error", error, self.ticket.hit))
            self._worker.abort(self.ticket)

    @property
    def cut(self) -> bool:
        """Whether a stop string ended it, so that its tokens say more than its text."""
        return self._stops.met

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """The answer as it comes, to its end. Who leaves early has to ``leave``."""
        reason = ""
        while not reason:
            news = await self.ticket.next()
            if isinstance(news.error, ApiError):
                raise news.error
            if news.error is not None or news.reason == "aborted":
                raise ApiError(503 if news.reason == "aborted" else 500, f"the answer was given up: {news.error}")
            text = self._take(news)
            reason = news.reason
            if self._stops.met:
                if not reason:
                    self._worker.finish(self.ticket)
                reason = "stop"
            elif reason:
                text += self._stops.push(self._text.end())
                reason = "stop" if self._stops.met else reason
                text += self._stops.end()
            self._told += len(text)
            infos = [info for info in self._infos if info.at < self._told or (reason and not self._stops.met)]
            self._infos = self._infos[len(infos) :]
            if text or infos or reason:
                yield TextPiece(text, infos, reason)

    def _take(self, news: News) -> str:
        text = ""
        ends_with_stop = news.reason == "stop"
        for at, token in enumerate(news.tokens):
            self.tokens.append(token)
            silent = ends_with_stop and at == len(news.tokens) - 1  # the stop itself is no text
            fresh = "" if silent else self._text.push(token)
            if news.logprobs:
                self._infos.append(self._info(token, news, at))
            self._seen += len(fresh)
            text += self._stops.push(fresh)
            if self._stops.met:
                break
        return text

    def _info(self, token: int, news: News, at: int) -> TokenInfo:
        name = self._tokenizer.token_bytes
        given = news.alternatives[at] if news.alternatives else ()
        others = [(name(other), max(logprob, LEAST_LOGPROB)) for other, logprob in given]
        return TokenInfo(name(token), max(news.logprobs[at], LEAST_LOGPROB), others, self._seen)

    def leave(self) -> None:
        """End the answer, if it has not ended: the client has gone, or has what it wants."""
        self._timer.cancel()
        if not self.ticket.over:
            self._worker.abort(self.ticket)


# ---------------------------------------------------------------- what is asked


def requests_of(
    asked: ChatAsked | CompletionAsked,
    tokens: Sequence[int],
    inputs: Mapping[str, Any],
    most: int,
    stops: frozenset[int],
    tenant: Tenant,
    prefill: str = "",
) -> list[Request]:
    """The requests of one prompt, one for each choice. ``most``: how long an answer may be."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if isinstance(asked, ChatAsked):
        logprobs, alternatives = bool(asked.logprobs), asked.top_logprobs or 0
    else:
        logprobs, alternatives = asked.logprobs is not None, asked.logprobs or 0
    priority = asked.priority if tenant.priority is None else min(asked.priority, tenant.priority)
    seed = secrets.randbits(60) if asked.seed is None else asked.seed
    tokens = tuple(tokens)  # one for all choices, so that these cost what one costs
    ends = (frozenset() if asked.ignore_eos else stops) | frozenset(asked.stop_token_ids or ())
    return [
        Request(
            tokens, most, stops=ends, temperature=temperature, top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=(seed + choice) % 2**63, namespace=tenant.namespace_of(asked.cache_salt), tenant=tenant.name,
            priority=priority, ttl=asked.ttl, logprobs=logprobs, top_logprobs=alternatives,
            label=tenant.name or "a client", inputs=inputs, prefill=prefill,
        )
        for choice in range(asked.n)
    ]  # fmt: skip


# ---------------------------------------------------------------- what is answered


@attrs.define
class Usage:
    """The tokens of a body: of its prompts, of these from the cache, and of its answers.

    ``choices``: how many answers each prompt has. The first of them tells what of the prompt was cached.
    """

    prompt: int
    answers: Sequence[TextAnswer]
    choices: int

    @property
    def told(self) -> Object:
        answered = sum(len(each.tokens) for each in self.answers)
        cached = sum(each.ticket.cached for each in self.answers[:: self.choices])
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": answered,
            "total_tokens": self.prompt + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Form:
    """The objects of one answer to one body. A subclass knows one of the two interfaces."""

    prefix = ""
    whole = ""
    part = ""

    def __init__(self, model: str, fingerprint: str) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._frame = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def answer(self, choices: list[Object], usage: Usage) -> Object:
        return {"id": self.id, "object": self.whole, **self._frame, "choices": choices, "usage": usage.told}

    def chunk(self, choices: list[Object], usage: Object | None, *, with_usage: bool) -> Object:
        more = {"usage": usage} if with_usage else {}
        return {"id": self.id, "object": self.part, **self._frame, "choices": choices, **more}

    def begin(self, index: int) -> list[Object]:
        """What a stream says of a choice before its first text."""
        return []

    @property
    def parses(self) -> bool:
        """Whether an answer has to be known to its end before its form is."""
        return False

    def choice(self, answer: TextAnswer, piece: TextPiece) -> Object:
        """A whole answer, which is one piece."""
        raise NotImplementedError

    def deltas(self, answer: TextAnswer, piece: TextPiece) -> list[Object]:
        """A piece of an answer, for a stream."""
        raise NotImplementedError


class CompletionForm(Form):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fingerprint: str, asked: CompletionAsked, echoes: Sequence[str]) -> None:
        super().__init__(model, fingerprint)
        self._logprobs = asked.logprobs is not None
        self._echoes = echoes
        self._choices = asked.n

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def begin(self, index: int) -> list[Object]:
        echo = self._echo(index)
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def choice(self, answer: TextAnswer, piece: TextPiece) -> Object:
        (told,) = self.deltas(answer, piece)
        return {**told, "text": self._echo(answer.index) + piece.text}

    def deltas(self, answer: TextAnswer, piece: TextPiece) -> list[Object]:
        logprobs = self._told(piece.tokens) if self._logprobs else None
        told = {"index": answer.index, "text": piece.text, "logprobs": logprobs}
        return [{**told, "finish_reason": piece.reason or None}]

    def _told(self, tokens: Sequence[TokenInfo]) -> Object:
        return {
            "tokens": [_shown(info.text) for info in tokens],
            "token_logprobs": [info.logprob for info in tokens],
            "top_logprobs": [{_shown(text): logprob for text, logprob in info.alternatives} for info in tokens],
            "text_offset": [info.at for info in tokens],
        }


class ChatForm(Form):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, fingerprint: str, asked: ChatAsked, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> None:
        super().__init__(model, fingerprint)
        self._logprobs = bool(asked.logprobs)
        self._tools = asked.tools if asked.tools and asked.tool_choice != "none" else None
        self._tokenizer, self._prompt = tokenizer, prompt

    @property
    def parses(self) -> bool:
        """An answer may be a call of a tool."""
        return self._tools is not None and self._tokenizer.parses

    def begin(self, index: int) -> list[Object]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, answer: TextAnswer, piece: TextPiece) -> Object:
        message, reason = self._message(answer, piece)
        empty = None if "tool_calls" in message else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **message}
        return {"index": answer.index, "message": message, "logprobs": self._told(piece), "finish_reason": reason}

    def deltas(self, answer: TextAnswer, piece: TextPiece) -> list[Object]:
        delta, reason = self._message(answer, piece)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        told = {"index": answer.index, "delta": delta, "logprobs": self._told(piece)}
        return [{**told, "finish_reason": reason or None}]

    def _message(self, answer: TextAnswer, piece: TextPiece) -> tuple[Object, str]:
        """What a piece says, with the tools that it calls where the tokenizer knows their form; and why it ends."""
        whole = self.parses and not answer.cut
        parsed = self._tokenizer.parse(answer.tokens, self._prompt, self._tools or ()) if whole else None
        if parsed is None:
            return ({"content": piece.text} if piece.text else {}), piece.reason
        message: Object = {}
        reason = piece.reason
        if parsed.get("content"):
            message["content"] = parsed["content"]
        if parsed.get("thinking"):
            message["reasoning_content"] = parsed["thinking"]
        calls = [_tool_call(call) for call in parsed.get("tool_calls") or ()]
        if calls:
            message["tool_calls"] = calls
            reason = "tool_calls" if reason == "stop" else reason
        return message, reason

    def _told(self, piece: TextPiece) -> Object | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {**_named(info.text, info.logprob), "top_logprobs": [_named(*each) for each in info.alternatives]}
                for info in piece.tokens
            ],
            "refusal": None,
        }


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _named(text: bytes, logprob: float) -> Object:
    return {"token": _shown(text), "logprob": logprob, "bytes": list(text)}


def _tool_call(call: Mapping[str, Any]) -> Object:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }
