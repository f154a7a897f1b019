"""Answers: what a client asks as requests of the engine, and what the engine answers as text."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

from ..contract.requests import Request
from ..contract.texts import ChatPrompt, Detokenizer, Tokenizer
from .access import Tenant
from .endpoints.form import TextPiece, TokenInfo
from .protocol import ApiError, SampledBody
from .stops import StopStrings
from .worker import EngineWorker, News, PendingAnswer

LEAST_LOGPROB = -9999.0
"""What the API tells of a token that the model never says: JSON has no infinity."""


class TextAnswer:
    """One choice: the tokens of one request as text, which ends in front of a stop string."""

    def __init__(
        self, worker: EngineWorker, ticket: PendingAnswer, tokenizer: Tokenizer, stops: Sequence[str], index: int,
        most: float,
    ) -> None:  # fmt: skip
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
        return self._stops.met

    @property
    def cached(self) -> int:
        return self.ticket.cached

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yield the answer as it comes, to its end. Whoever stops early has to ``leave``."""
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

    async def collected(self) -> TextPiece:
        """Wait for the end of the answer, and return it as one piece."""
        pieces = [piece async for piece in self.pieces()]
        tokens = [info for piece in pieces for info in piece.tokens]
        return TextPiece("".join(piece.text for piece in pieces), tokens, pieces[-1].reason)

    def leave(self) -> None:
        """End the answer, if it has not ended: the client has gone, or has what it wants."""
        self._timer.cancel()
        if not self.ticket.over:
            self._worker.abort(self.ticket)


def requests_of(
    asked: SampledBody, prompt: ChatPrompt, most: int, stops: frozenset[int], tenant: Tenant, prefill: str = ""
) -> list[Request]:
    """Return the requests of one prompt, one for each choice. ``most``: how long an answer may be."""
    priority = asked.priority if tenant.priority is None else min(asked.priority, tenant.priority)
    seed = secrets.randbits(60) if asked.seed is None else asked.seed
    tokens = tuple(prompt.tokens)  # one for all choices, so that these cost what one costs
    ends = (frozenset() if asked.ignore_eos else stops) | frozenset(asked.stop_token_ids or ())
    return [
        Request(
            tokens, most, stops=ends, temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p, seed=(seed + choice) % 2**63,
            namespace=tenant.namespace_of(asked.cache_salt), tenant=tenant.name, priority=priority, ttl=asked.ttl,
            logprobs=asked.alternatives is not None, top_logprobs=asked.alternatives or 0,
            label=tenant.name or "a client", inputs=prompt.inputs, prefill=prefill,
        )
        for choice in range(asked.n)
    ]  # fmt: skip
