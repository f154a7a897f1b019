"""The text of a model in a folder on disk: its tokenizer, its chat template, and the processor of its images."""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from prefixloom import CompositionError, InputError

from ..contract.requests import shown
from ..contract.texts import ChatPrompt, Message, plain_text
from .images import FAMILIES
from .loading import read_config, sentence

REPLACEMENT = "\ufffd"
MOST_PENDING = 16
"""After so many tokens that make no whole character, their text is told as it is."""
DATA = "data:"
IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read. Pillow knows others, for some of which it starts programs."""
MOST_PIXELS = 50_000_000
LEAST_PIXELS = 100_000
"""What an image counts as at least, since processors enlarge small ones."""
UNREADABLE = (ValueError, OSError, EOFError, SyntaxError, struct.error, binascii.Error)
"""What Pillow raises of images that are broken."""
SPACE = "\u2581"
BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")
RESERVED = {
    name
    for kind in (PreTrainedTokenizerBase, ProcessorMixin)
    for call in (kind.apply_chat_template, kind.__call__)
    for name in inspect.signature(call).parameters
} - {"documents"} | {"messages", "images", "image", "videos", "video", "audios", "audio"}
"""The variables of a template that transformers sets itself, and what it takes beside these."""


def load_tokenizer(path: str | os.PathLike[str], *, images: bool) -> FolderTokenizer:
    """Return the tokenizer in the folder of a model. ``images``: with the processor of its images, if it takes any."""
    folder = Path(path)
    config = read_config(folder, f"the model in {os.fspath(path)!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        processor = None
        if images and config.model_type in FAMILIES:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a dozen types, from several libraries
        raise CompositionError(
            f"the model in {os.fspath(folder)!r} has no tokenizer that transformers can load: {sentence(error)}"
        ) from error
    return FolderTokenizer(tokenizer, processor)


class FolderTokenizer:
    """A tokenizer of transformers. ``processor``: makes the prompts of a model that takes images."""

    stops: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._taken = taken_by(tokenizer, processor)
        self._variables = variables_of(tokenizer, processor) - self._taken
        self._pieces = _readers(tokenizer)
        self._special = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))

    @property
    def parses(self) -> bool:
        return getattr(self._tokenizer, "response_template", None) is not None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if token not in self._special and isinstance(name, str):
            for read in self._pieces:
                if (piece := read(name)) is not None:
                    return piece
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()

    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self)

    # ------------------------------------------------------------ chats
    def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> ChatPrompt:
        pixels = PixelBudget()
        given = [self._message(message, at, pixels) for at, message in enumerate(messages)]
        maker = self._tokenizer if self._processor is None else self._processor
        for name in more.keys() & self._taken:
            raise InputError(
                f"chat_template_kwargs has {shown(name)}, which is no variable of this model's chat template that a "
                f"request sets: there are {', '.join(sorted(self._variables)) or 'none'}"
            )
        known = {name: each for name, each in more.items() if name in self._variables}  # a processor gets the others
        tensors = {} if self._processor is None else {"return_tensors": "pt"}  # else images are lists of arrays
        try:
            made = maker.apply_chat_template(
                given, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True,
                **tensors, **known,
            )  # fmt: skip
        except Exception as error:  # the template's own, those of its engine, and those of processors
            raise InputError(f"the model's chat template cannot take these messages: {sentence(error)}") from error
        fields = dict(made)
        tokens = fields.pop("input_ids")
        fields.pop("attention_mask", None)
        fields.pop("token_type_ids", None)
        if self._processor is None:
            return ChatPrompt(list(tokens))
        return ChatPrompt(tokens[0].tolist(), {name: each for name, each in fields.items() if each is not None})

    def _message(self, message: Message, at: int, pixels: PixelBudget) -> dict[str, Any]:
        """Return a message as templates know it."""
        out = {**message}
        if self._processor is None:
            out["content"] = plain_text(message, at)
        elif not isinstance(message.get("content"), str):
            out["content"] = [_part(part, at, pixels) for part in message.get("content") or ()]
        if message.get("tool_calls"):
            out["tool_calls"] = [_call(call, at) for call in message["tool_calls"]]
        return out

    def parse(
        self, tokens: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        try:
            parsed = self._tokenizer.parse_response(list(tokens), prefix=list(prompt), tools=list(tools) or None)
        except Exception:  # the model did not keep to the form: its answer is told as it is
            return None
        return parsed if isinstance(parsed, Mapping) else None


# ---------------------------------------------------------------- the bytes of a token


def _readers(tokenizer: Any) -> list[Callable[[str], bytes | None]]:
    """Return what reads the name of a token as bytes, by the steps of its decoder. The first that can is used.

    Decoding a token by itself loses what only its neighbours complete: a part of a character, or a space in front.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    try:
        spec = json.loads(decoder.__getstate__()) if decoder is not None else {}
    except (AttributeError, TypeError, ValueError):
        spec = {}
    steps = [step["type"] for step in spec.get("decoders", [spec]) if "type" in step]
    readers: list[Callable[[str], bytes | None]] = []
    if "ByteLevel" in steps:
        readers.append(_of_byte_letters)
    if "ByteFallback" in steps:
        readers.append(_of_byte_name)
    if "Metaspace" in steps or ("Replace" in steps and SPACE in json.dumps(spec, ensure_ascii=False)):
        readers.append(lambda name: name.replace(SPACE, " ").encode())
    return readers


def _byte_letters() -> dict[str, int]:
    """Return the letters that mean bytes in the names of byte-level tokens: the byte's own if printable, else moved."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(moved)}


LETTERS = _byte_letters()


def _of_byte_letters(name: str) -> bytes | None:
    found = [LETTERS.get(letter) for letter in name]
    return None if None in found else bytes(each for each in found if each is not None)


def _of_byte_name(name: str) -> bytes | None:
    """Return the byte that a name such as <0xE2> says."""
    return bytes([int(name[3:5], 16)]) if BYTE_NAME.fullmatch(name) else None


def _call(call: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return a tool call of an earlier answer with its arguments as an object, as templates take them."""
    if not isinstance(call.get("function"), Mapping):
        raise InputError(f"messages[{at}] has a tool call without a function")
    function = {**call["function"]}
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise InputError(f"messages[{at}] has a tool call whose arguments are no JSON: {error}") from error
    return {**call, "function": function}


# ---------------------------------------------------------------- variables of a chat template


class GenerationTag(Extension):
    """The tag with which templates mark what a model says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def variables_of(tokenizer: Any, processor: Any) -> set[str]:
    """Return the variables that the chat template uses."""
    found = getattr(tokenizer if processor is None else processor, "chat_template", None)
    templates = {"default": found} if isinstance(found, str) else found or {}
    if processor is not None:  # which takes this one alone, and is given what it does not use
        templates = {name: each for name, each in templates.items() if name == "default"}
    environment = Environment(extensions=[GenerationTag, loopcontrols])
    environment.globals.update(raise_exception=None, strftime_now=None)
    names: set[str] = set()
    for template in templates.values():
        try:
            names |= meta.find_undeclared_variables(environment.parse(template))
        except TemplateSyntaxError:  # a chat says so
            continue
    return names


def taken_by(tokenizer: Any, processor: Any) -> set[str]:
    """Return the names of what transformers sets or takes, and of what a processor takes for each kind of input."""
    special = (getattr(tokenizer, name, ()) for name in ("SPECIAL_TOKENS_ATTRIBUTES", "special_tokens_map"))
    taken = RESERVED.union(*special)
    if processor is None:
        return taken
    kinds = get_type_hints(processor.valid_processor_kwargs)
    return taken.union(
        inspect.signature(processor.__call__).parameters,
        kinds,
        *(getattr(kind, "__annotations__", ()) for kind in kinds.values()),
    )


# ---------------------------------------------------------------- images


class PixelBudget:
    """How many pixels the images of one chat may still have. A few bytes can say that they are a huge image."""

    def __init__(self) -> None:
        self.left = MOST_PIXELS

    def take(self, count: int, at: int) -> None:
        self.left -= max(count, LEAST_PIXELS)
        if self.left < 0:
            raise InputError(
                f"messages[{at}] has an image of {count} pixels: the images of a request have {MOST_PIXELS} together "
                f"at most, each {LEAST_PIXELS} at least"
            )


def _part(part: Mapping[str, Any], at: int, pixels: PixelBudget) -> dict[str, Any]:
    if part["type"] == "image_url":
        return {"type": "image", "image": _image(part["image_url"]["url"], at, pixels)}
    if part["type"] != "text":
        raise InputError(
            f"messages[{at}] has a part of type {shown(part['type'])}, and this model takes text and images"
        )
    return {"type": "text", "text": part["text"]}  # and nothing else, which transformers could load


def _image(url: str, at: int, pixels: PixelBudget) -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InputError(
            f"messages[{at}] has an image, which this server cannot read without the package Pillow"
        ) from error

    if not url.startswith(DATA):
        raise InputError(f"messages[{at}] has an image by its address: the server fetches nothing, so send a data: URL")
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        opened = Image.open(io.BytesIO(base64.b64decode(body, validate=True)), formats=IMAGES)
        pixels.take(opened.width * opened.height, at)  # before they are decoded
        return opened.convert("RGB")
    except (*UNREADABLE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"messages[{at}] has an image that cannot be read: {sentence(error)}") from error


# ---------------------------------------------------------------- tokens as they come


class WindowDetokenizer:
    """Text of tokens as they come, by decoding the last few of them again with each new one.

    What a token adds to the text may depend on the tokens before it (a space, or the bytes of one character). So text
    is told once it ends in a whole character, and the tokens of the last text told are the context of the next one.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._fresh()
        if len(self._pending) < MOST_PENDING and (not text or text.endswith(REPLACEMENT)):
            return ""
        if not text:  # so many tokens without a text are special ones: they change nothing of the next one's
            self._pending = []
            return ""
        self._context, self._pending = self._pending, []
        return text

    def end(self) -> str:
        text = self._fresh()
        self._pending = []
        return text

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(before) :]
