"""The text of the built-in model: its tokens are bytes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from prefixloom import InputError

from ..contract.texts import ChatPrompt, Message, plain_text
from .layers import Sizes
from .model import SIZES

ROLES = ("system", "user", "assistant")
END = 256
"""The token at the end of each message. Those after it begin a message of each role."""
BYTE_VOCABULARY = END + 1 + len(ROLES)


def text_sizes() -> Sizes:
    """Return the sizes of a small model with these tokens."""
    return attrs.evolve(SIZES["small"], vocabulary=BYTE_VOCABULARY)


class ByteTokenizer:
    """One token for each byte, and four that no text has: the end of a message, and its beginning by role."""

    stops = frozenset([END])
    parses = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < END).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> ChatPrompt:
        if tools:
            raise InputError("the built-in model knows no tools")
        tokens: list[int] = []
        for at, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise InputError(f"messages[{at}] has the role {message['role']!r}; there are {', '.join(ROLES)}")
            tokens += [END + 1 + ROLES.index(message["role"]), *self.encode(plain_text(message, at)), END]
        return ChatPrompt([*tokens, END + 1 + ROLES.index("assistant")])

    def parse(self, tokens: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> None:
        return None


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < END else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)
