"""Reading: makes a body of a client and the tokens of its prompts out of bytes.

``read`` runs in a process apart (``processes``), since a client decides how long it takes and how much memory it
needs. ``written`` and ``unwritten`` carry its result to the server as plain data.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Sequence
from typing import Any

import attrs
from pydantic import BaseModel, ValidationError

from prefixloom import InputError, encode

from ...contract.requests import shown
from ...contract.texts import ChatPrompt, Tokenizer
from ..protocol import ApiError, Body, TemplatedBody, refused

MOST_ITEMS = 1 << 16
"""How many lists, objects and fields a body may have: parsed, a list takes a hundred times the memory of its text."""
MOST_TOOLS = 1 << 20
"""How many characters the tools of a chat may have."""
SERVER = __name__.rpartition(".reading")[0]
"""The package whose bodies come back from a reader."""
LISTED_TOKEN = 40
"""The memory of a token in a list."""
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, or what begins one and never ends."""


@attrs.frozen
class Bounds:
    """What the server takes.

    ``model``       the name of its model
    ``vocabulary``  how many tokens the model knows
    ``context``     how many tokens a prompt and its answer may have together
    ``answers``     how many answers may run or wait at once
    ``answer``      the tokens of an answer to a chat that does not say how many
    ``inputs``      bytes of what a prompt carries beside its tokens, such as images
    """

    model: str
    vocabulary: int
    context: int
    answers: int
    answer: int
    inputs: int

    def check_model(self, model: str | None) -> None:
        if model not in (None, self.model):
            raise ApiError(
                404, f"the model {shown(model)} is not served here; there is {self.model!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def room(self, tokens: int, asked: int | None) -> int:
        """Return how many tokens the answer to a prompt of so many tokens may have. ``ApiError``: it has too many."""
        left = self.context - tokens
        if left < (1 if asked is None else asked):
            more = f" and {asked} of an answer" if asked else ""
            raise ApiError(
                400, f"the prompt has {tokens} tokens{more}: this server takes {self.context} together at most",
                code="context_length_exceeded",
            )  # fmt: skip
        return min(left, self.answer) if asked is None else asked

    def check(self, asked: Body) -> None:
        """Refuse what needs no tokenizer to be refused."""
        self.check_model(asked.model)
        if asked.answers > self.answers:
            raise InputError(
                f"{asked.answers} answers are asked for at once, and this server takes {self.answers} at most"
            )
        for prompt in asked.prompts:
            if not isinstance(prompt, str) and not all(0 <= token < self.vocabulary for token in prompt):
                raise ApiError(400, f"the model's tokens are from 0 to {self.vocabulary - 1}")
        tools = asked.tools if isinstance(asked, TemplatedBody) else None
        if tools and len(json.dumps(tools, ensure_ascii=False)) > MOST_TOOLS:
            raise ApiError(400, f"tools has more than {MOST_TOOLS} characters", param="tools")


@attrs.frozen
class ReadBody:
    """``asked``: a body, without what its prompts were made of. ``texts``: the prompts as text, where they are told."""

    asked: Any
    prompts: Sequence[ChatPrompt]
    texts: Sequence[str]

    @property
    def bytes(self) -> int:
        """The memory of the prompts."""
        return sum(prompt.bytes + LISTED_TOKEN * len(prompt.tokens) for prompt in self.prompts)


def read(
    tokenizer: Tokenizer, kind: type[Body], data: bytes, bounds: Bounds, *, images: bool = True
) -> ReadBody | None:
    """Read a body within the bounds. Return None if it has images and is not to have them here."""
    bare = STRING.sub(b"", data)
    if sum(map(bare.count, (b"[", b"{", b":"))) > MOST_ITEMS:
        raise ApiError(400, f"the body has more than {MOST_ITEMS} lists, objects and fields", code="too_many_items")
    try:
        asked = kind.model_validate_json(data)
    except ValidationError as error:
        raise refused(error) from None
    bounds.check(asked)
    if isinstance(asked, TemplatedBody) and asked.messages:
        told = [each.model_dump(exclude_none=True) for each in asked.messages]
        parts = (part for each in told if not isinstance(each.get("content", ""), str) for part in each["content"])
        if not images and any(part["type"] != "text" for part in parts):
            return None
        made = [tokenizer.chat(told, asked.offered, asked.chat_template_kwargs)]
    else:
        made = [ChatPrompt(tokenizer.encode(each) if isinstance(each, str) else list(each)) for each in asked.prompts]
    for prompt in made:
        bounds.room(len(prompt.tokens), asked.most_tokens)
    if sum(prompt.bytes for prompt in made) > bounds.inputs:
        raise ApiError(400, f"the images of a request are {bounds.inputs} bytes at most, as the model is given them")
    echoed = asked.prompts if asked.echoes else []
    texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in echoed]
    return ReadBody(asked.without_prompts(), made, texts)


# ---------------------------------------------------------------- between the processes


def written(result: ReadBody | ApiError | None) -> bytes:
    """Return a result as bytes."""
    if isinstance(result, ApiError):
        return pickle.dumps((result.status, result.message, result.param, result.code, result.retry_after))
    if result is None:
        return pickle.dumps(None)
    prompts = [
        (_tokens(each.tokens), {name: _buffer(it) for name, it in each.inputs.items()}) for each in result.prompts
    ]
    return pickle.dumps((result.asked, prompts, result.texts), protocol=5)


def unwritten(data: bytes) -> ReadBody | None:
    """Return the body that ``written`` was given. ``ApiError``: it was an error."""
    told = Plain(io.BytesIO(data)).load()
    if told is None:
        return None
    if len(told) == 5:
        status, message, param, code, retry_after = told
        raise ApiError(status, message, param=param, code=code, retry_after=retry_after)
    asked, prompts, texts = told
    made = [
        ChatPrompt(encode(tokens).tolist(), {name: _tensor(*each) for name, each in inputs.items()})
        for tokens, inputs in prompts
    ]
    return ReadBody(asked, made, texts)


class Plain(pickle.Unpickler):
    """Loads plain data and bodies alone, since who sends it has worked on what a stranger sent."""

    def find_class(self, module: str, name: str) -> Any:
        known = sys.modules.get(module) if module.startswith(f"{SERVER}.") else None  # nothing is imported
        kind = getattr(known, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no part of what was read")


def _tokens(tokens: Sequence[int]) -> bytearray:
    return bytearray(encode(tokens))


def _buffer(value: Any) -> tuple[str, tuple[int, ...], bytearray]:
    import torch

    tensor = torch.as_tensor(value).contiguous()
    content = bytearray(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content


def _tensor(dtype: str, shape: Sequence[int], content: bytearray) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(content, dtype=kind).reshape(shape) if content else torch.empty(shape, dtype=kind)
