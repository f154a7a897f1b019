"""Images over HTTP, through the processor of a model's folder: answered as without a server, and cached by pixels."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed: it is part of the extra images")

import torch
from PIL import Image
from transformers import LlavaProcessor

from prefixloom import InputError
from prefixloom_engine.hf import load
from prefixloom_engine.hf.text import LEAST_PIXELS, MOST_PIXELS, FolderTokenizer, load_tokenizer
from prefixloom_engine.server.app import Limits
from prefixloom_engine.server.reading.processes import TextProcesses
from tests.support.hf_images import PATCH, PIXELS, llava_folder
from tests.support.servers import RunningServer, eventually, serving

BEFORE, BEHIND = "Look at this picture, please: ", " What do you see there, and what do you not see?"
PLACES = (PIXELS // PATCH) ** 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    model = load(folder, dtype="float64")
    limits = Limits(bodies=1 << 20)
    texts = TextProcesses(partial(load_tokenizer, folder, images=True))
    with closing(texts), serving(model, texts, capacity={"full": 2048}, limits=limits) as running:
        yield running


def drawn(seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (20, 30, 3), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (30, 20), bytes(data.flatten().tolist()))


def url(image: Image.Image, kind: str = "png") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return data_url(file.getvalue(), kind)


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def asked(*urls: str, count: int = 12) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    content = [{"type": "text", "text": BEFORE}, *parts, {"type": "text", "text": BEHIND}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": count, "temperature": 0, "logprobs": True}


Said = list[tuple[bytes, float]]
"""The tokens of an answer with their log-probabilities."""


def alone(server: RunningServer, folder: Path, *images: Image.Image, count: int = 12) -> Said:
    """What transformers' own ``generate`` answers, with the same processor."""
    tokenizer = load_tokenizer(folder, images=True)
    body = asked(*map(url, images))
    prompt = tokenizer.chat(body["messages"], [], {})
    model: Any = server.server.worker.engine.model
    ids = torch.tensor([prompt.tokens])
    pixels = torch.as_tensor(prompt.inputs["pixel_values"]).to(torch.float64)
    with torch.no_grad():
        told = model.model.generate(
            input_ids=ids, pixel_values=pixels, max_new_tokens=count, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    tokens = told.sequences[0, ids.shape[1] :].tolist()
    scores = [logits[0].log_softmax(-1) for logits in told.logits]
    return [(tokenizer.token_bytes(token), float(row[token])) for token, row in zip(tokens, scores, strict=True)]


def same(said: Said, right: Said) -> bool:
    return [text for text, _ in said] == [text for text, _ in right] and all(
        abs(mine - theirs) < 1e-4 for (_, mine), (_, theirs) in zip(said, right, strict=True)
    )


def test_images_are_answered_as_without_a_server_and_hit_by_their_pixels(server: RunningServer, folder: Path) -> None:
    one, other = drawn(1), drawn(2)
    start = len(f"<user>{BEFORE}")
    whole = start + PLACES + len(BEHIND) + 1 + len("<assistant>")
    with server.client() as client:

        def ask(*urls: str) -> tuple[Said, int]:
            told = client.post("/v1/chat/completions", json=asked(*urls)).json()
            assert told["usage"]["prompt_tokens"] == whole + PLACES * (len(urls) - 1)
            (choice,) = told["choices"]
            said = [(bytes(info["bytes"]), info["logprob"]) for info in choice["logprobs"]["content"]]
            return said, told["usage"]["prompt_tokens_details"]["cached_tokens"]

        right, wrong = alone(server, folder, one), alone(server, folder, other)
        assert not same(right, wrong)
        first, hit = ask(url(one))
        assert same(first, right) and hit == 0
        for kind in ("png", "bmp"):  # the pixels count, and not their format
            again, hit = ask(url(one, kind))
            assert same(again, right) and hit == (whole - 1) // 16 * 16
        second, hit = ask(url(other))
        assert same(second, wrong)
        assert hit == start // 16 * 16, "of another image only what stands before it hits"
        both, hit = ask(url(one), url(other))
        assert same(both, alone(server, folder, one, other))
        assert hit == (start + PLACES) // 16 * 16
        for image, ready in ((one, (whole - 1) // 16 * 16), (drawn(12), start // 16 * 16)):
            told = client.post("/cache/explain", json={"messages": asked(url(image))["messages"]}).json()
            assert (told["tokens"], told["ready"]) == (whole, ready)
    assert server.server.memory.used == 0


def huge(width: int, height: int) -> bytes:
    """A few bytes that say they are a large image, and are one as far as they go."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


UNREADABLE: dict[str, tuple[Callable[[], list[str]], str]] = {
    "address": (lambda: ["http://localhost/x.png"], "the server fetches nothing"),
    "text": (lambda: ["data:image/png,abc"], "cannot be read: it is not in base64"),
    "base64": (lambda: ["data:image/png;base64,&&&&"], "cannot be read"),
    "words": (lambda: [data_url(b"no image at all")], "cannot be read"),
    "cut": (lambda: [url(drawn(1))[:200]], "cannot be read"),
    "gigapixel": (lambda: [data_url(huge(30_000, 30_000))], "cannot be read"),
    "large": (lambda: [data_url(huge(9000, 9000))], f"the images of a request have {MOST_PIXELS} together at most"),
    "large and cut": (lambda: [data_url(huge(5000, 5000)[:60])], "cannot be read"),
    "together": (lambda: [url(Image.new("1", (5000, 4000)))] * 3, "has an image of 20000000 pixels"),
    "many": (
        lambda: [url(Image.new("RGB", (1, 1)))] * (MOST_PIXELS // LEAST_PIXELS + 1), f"each {LEAST_PIXELS} at least"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_image_that_cannot_be_read_or_is_too_large_is_refused(server: RunningServer, name: str) -> None:
    urls, says = UNREADABLE[name]
    with server.client() as client:
        told = client.post("/v1/chat/completions", json=asked(*urls()))
    assert told.status_code == 400, told.text
    assert says in told.json()["error"]["message"]


def test_no_text_of_a_client_reaches_a_loader(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    """transformers fetches addresses, opens files and starts Pillow's programs for whatever a processor is given."""
    drawn(3).save(tmp_path / "there.png")
    with socket.create_server(("127.0.0.1", 0)) as listener, server.client() as client:
        listener.setblocking(False)
        places = [f"http://127.0.0.1:{listener.getsockname()[1]}/x.png", str(tmp_path / "there.png"), "/etc/passwd"]
        places.append(f"file://{tmp_path / 'there.png'}")
        messages = asked(url(drawn(3)))["messages"]
        sizes = {"shortest_edge": 4000}
        variables: list[dict[str, Any]] = [
            {name: value}
            for place in places
            for name in ("images", "image", "videos", "video", "audio", "text")
            for value in (place, [place], [{"type": "image", "url": place}])
        ]
        variables += [{"size": sizes}, {"crop_size": 4000}, {"do_resize": False}, {"images_kwargs": {"size": sizes}}]
        variables += [{"processor_kwargs": {"images": places}}, {"videos_kwargs": {}}, {"tokenizer_kwargs": {}}]
        variables += [{"tokenize": False}, {"return_tensors": "np"}, {"return_dict": False}, {"padding": "max_length"}]
        variables += [{"chat_template": "x"}, {"continue_final_message": True}, {"load_audio_from_video": True}]
        variables += [{"messages": []}, {"tools": []}, {"add_generation_prompt": False}, {"eos_token": "x"}]
        parts: list[Any] = [
            part
            for place in places
            for kind in ("image", "video", "audio", "image_url", "input_image", "file")
            for part in (
                {"type": kind, "url": place}, {"type": kind, kind: place}, {"type": kind, "path": place},
                {"type": kind, kind: {"url": place}}, [{"type": kind, "url": place}],
            )
        ]  # fmt: skip
        bodies = [{"messages": messages, "chat_template_kwargs": each} for each in variables]
        bodies += [{"messages": [{"role": "user", "content": [each]}]} for each in parts]
        for body in bodies:
            refused = client.post("/tokenize", json=body)
            assert refused.status_code == 400, body
            if "chat_template_kwargs" in body:
                assert "no variable of this model's chat template" in refused.json()["error"]["message"], body
        plain = client.post(
            "/tokenize", json={"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
        )
        for place in places:  # what a template may look at, and nobody loads
            more = {"images": [place], "image_url": {"url": place}, "url": place, "path": place}
            text = {"type": "text", "text": "x", **more}
            unknown = {
                "url": place,
                "path": [place],
                "image_url": {"url": place},
                "documents": [place],
                "filename": place,
            }
            body = {"messages": [{"role": "user", "content": [text], **more}], "chat_template_kwargs": unknown, **more}
            assert client.post("/tokenize", json=body).json() == plain.json()
        with pytest.raises(BlockingIOError):  # nobody has come
            listener.accept()


def test_a_template_has_its_own_variables_alone(folder: Path) -> None:
    """A processor takes ``size`` and ``images``; transformers sets ``tools`` and ``eos_token``."""
    read = load_tokenizer(folder, images=True)
    processor = LlavaProcessor.from_pretrained(folder)
    names = "mood images size crop_size videos text padding tools eos_token raise_exception bos_token documents"
    processor.chat_template = (
        "{% generation %}" + "".join(f"{{{{ {name} }}}}" for name in names.split()) + "{% endgeneration %}"
        "{% set own = 1 %}{% for m in messages %}{% if own %}{% continue %}{% endif %}{{ strftime_now(format) }}"
        "{% endfor %}"
    )  # fmt: skip
    told = r"'size', which is no variable of this model's chat template .*: there are documents, format, mood$"
    with pytest.raises(InputError, match=told):
        FolderTokenizer(read._tokenizer, processor).chat([{"role": "user", "content": "x"}], [], {"size": 1})
    processor.chat_template = "{% never"
    with pytest.raises(InputError, match="the model's chat template cannot take"):
        FolderTokenizer(read._tokenizer, processor).chat([{"role": "user", "content": "x"}], [], {"mood": "calm"})


def test_what_images_become_counts_until_they_are_answered(server: RunningServer) -> None:
    """Each of them is small as a file, and large as what the model computes."""
    with server.client() as client:
        body = {**asked(*[url(drawn(1))] * 40), "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as first:
            assert first.status_code == 200
            held = server.server.memory.used
            assert held == 40 * 3 * PIXELS**2 * 4
            server.server.memory.most = held + len(json.dumps(body)) + 1000
            refused = client.post("/v1/chat/completions", json=body)
            assert refused.json()["error"]["code"] == "too_many_bodies"
            server.server.memory.most = 1 << 20
    eventually(lambda: server.server.memory.used == 0 and server.server.worker.load == 0)
