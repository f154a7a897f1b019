"""Texts: what turns text into the tokens of a model and back, and a chat into a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from prefixloom import InputError

Message = Mapping[str, Any]
"""A message of a chat, as a client sends it: its ``role``, its ``content``, and what else a template may know."""


@attrs.frozen
class ChatPrompt:
    """A chat as the model is given it. ``inputs``: what it carries beside its tokens, such as images."""

    tokens: list[int]
    inputs: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def bytes(self) -> int:
        """The memory of the inputs."""
        return sum(int(getattr(each, "nbytes", 0)) for each in self.inputs.values())


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text, as they come."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; it may be empty, since a character may have several tokens."""

    def end(self) -> str:
        """Return the rest of the text."""


class Tokenizer(Protocol):
    """Text and tokens of one model. ``encode`` and ``chat`` may be called in one thread while another one decodes."""

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer, beside those that the model itself knows."""

    @property
    def parses(self) -> bool:
        """Whether ``parse`` knows the form of an answer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the text of one token by itself, which may be part of a character."""

    def detokenizer(self) -> Detokenizer: ...

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> ChatPrompt:
        """Make the prompt for the answer to a chat. ``InputError``: the template refuses it, or there is none.

        ``more``: further variables of the template.
        """

    def parse(
        self, tokens: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Parse an answer into a message with its ``tool_calls`` and its ``content``; None: their form is not known."""


def plain_text(message: Message, at: int) -> str:
    """Join the parts of a message's content. ``InputError``: a part is no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    other = next((part["type"] for part in content if part["type"] != "text"), None)
    if other is not None:
        raise InputError(f"messages[{at}] has a part of type {other!r}, and this model takes text alone")
    return "".join(part["text"] for part in content)
