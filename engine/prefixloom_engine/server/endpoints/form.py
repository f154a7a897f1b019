"""Forms: the objects in which the answers to one body are told, whole or in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from ..protocol import SampledBody

if TYPE_CHECKING:
    from ...contract.texts import Tokenizer
    from ..reading.bodies import ReadBody

Object = dict[str, Any]


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


class Answered(Protocol):
    """An answer as its form sees it. ``cut``: a stop string ended it, so that its tokens say more than its text."""

    index: int
    tokens: list[int]

    @property
    def cut(self) -> bool: ...

    @property
    def cached(self) -> int:
        """The tokens of the prompt that the cache had."""


class Form:
    """The objects of the answers to one body. A subclass is an endpoint: its path, its body, and the API's shape.

    ``answers``  all choices of all prompts, once they are asked of the engine
    ``counted``  the tokens of the prompts
    """

    path: ClassVar[str]
    body: ClassVar[type[SampledBody]]
    operation: ClassVar[str]
    """As the conventions of OpenTelemetry for generative AI call it."""
    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, model: str, fingerprint: str, read: ReadBody, tokenizer: Tokenizer) -> None:
        self.asked: Any = read.asked
        self.texts, self.tokenizer = read.texts, tokenizer
        self.prompt = read.prompts[0].tokens if self.parses else []
        self.counted = sum(len(each.tokens) for each in read.prompts)
        self.answers: Sequence[Answered] = ()
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._frame = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    @property
    def parses(self) -> bool:
        """Whether an answer has to be known to its end before its form is."""
        return False

    @property
    def usage(self) -> Object:
        """The tokens of the prompts, of these from the cache, and of the answers.

        The first answer to each prompt tells what of the prompt was cached.
        """
        answered = sum(len(each.tokens) for each in self.answers)
        cached = sum(each.cached for each in self.answers[:: self.asked.n])
        return {
            "prompt_tokens": self.counted,
            "completion_tokens": answered,
            "total_tokens": self.counted + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def answer(self, choices: list[Object]) -> Object:
        return {"id": self.id, "object": self.whole, **self._frame, "choices": choices, "usage": self.usage}

    def chunk(self, choices: list[Object], usage: Object | None = None) -> Object:
        more = {"usage": usage} if self.asked.include_usage else {}
        return {"id": self.id, "object": self.part, **self._frame, "choices": choices, **more}

    def begin(self, index: int) -> list[Object]:
        """Return what a stream says of a choice before its first text."""
        return []

    def choice(self, answer: Answered, piece: TextPiece) -> Object:
        """Return a whole answer, which is one piece."""
        raise NotImplementedError

    def deltas(self, answer: Answered, piece: TextPiece) -> list[Object]:
        """Return a piece of an answer, for a stream."""
        raise NotImplementedError


def shown_token(text: bytes) -> str:
    return text.decode("utf-8", "replace")
