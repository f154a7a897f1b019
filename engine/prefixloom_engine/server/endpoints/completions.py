"""``/v1/completions``: prompts as text or as tokens, each of which is continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ..protocol import MOST_ALTERNATIVES, SampledBody, Several, Unserved
from .form import Answered, Form, Object, TextPiece, TokenInfo, shown_token


class CompletionAsked(SampledBody):
    prompt: str | Several[str] | Several[int] | Several[Several[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False
    best_of: int | None = None
    suffix: Unserved[str] = None

    @model_validator(mode="after")
    def _plain(self) -> CompletionAsked:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not served by this server: leave it out, and ask for n choices")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo goes without logprobs: those of the prompt are not computed")
        if not self.prompt or not (isinstance(self.prompt[0], int) or all(self.prompt)):
            raise ValueError("prompt: it has at least one token")
        return self

    @property
    def prompts(self) -> list[Any]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def without_prompts(self) -> CompletionAsked:
        return self.model_copy(update={"prompt": "", "logit_bias": None, "user": None})


class CompletionForm(Form):
    path, body, operation = "/v1/completions", CompletionAsked, "text_completion"
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _echo(self, index: int) -> str:
        return self.texts[index // self.asked.n] if self.texts else ""

    def begin(self, index: int) -> list[Object]:
        echo = self._echo(index)
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def choice(self, answer: Answered, piece: TextPiece) -> Object:
        (told,) = self.deltas(answer, piece)
        return {**told, "text": self._echo(answer.index) + piece.text}

    def deltas(self, answer: Answered, piece: TextPiece) -> list[Object]:
        logprobs = None if self.asked.logprobs is None else _logprobs(piece.tokens)
        told = {"index": answer.index, "text": piece.text, "logprobs": logprobs}
        return [{**told, "finish_reason": piece.reason or None}]


def _logprobs(tokens: Sequence[TokenInfo]) -> Object:
    return {
        "tokens": [shown_token(info.text) for info in tokens],
        "token_logprobs": [info.logprob for info in tokens],
        "top_logprobs": [{shown_token(text): logprob for text, logprob in info.alternatives} for info in tokens],
        "text_offset": [info.at for info in tokens],
    }
