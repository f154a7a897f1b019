"""Layers under watch: the kit finds out what they read and write, and needs no other truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import Buffer, Chunk, Component, Manifest, Path, Point, Reach, Sinks, Window
from prefixloom.testing import ComponentCase, Truth
from prefixloom.testing.conformance import name_of, verdict
from prefixloom.testing.kit.watching import watch
from prefixloom.testing.laws import arithmetic, facts
from prefixloom.testing.laws import reach as reaches

COVERS, COSTS = "law_the_reach_covers_what_the_layers_read", "law_the_reach_names_nothing_that_no_layer_reads"
GOES_ON, WRITES = "law_layers_go_on_from_what_is_stored", "law_the_manifest_has_all_that_the_layers_write"
SAYS = "law_the_manifest_says_what_content_depends_on"
LAWS = [law for module in (facts, arithmetic, reaches) for name, law in vars(module).items() if name.startswith("law_")]
WIDTH = 4
TABLE = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
Sees = Callable[[int], list[int]]


def attention(sees: Sees, names: tuple[str, str] = ("k", "v"), ahead: int = 0) -> Any:
    """One layer of attention in which the token at q sees these positions, and itself."""

    def layers(tokens: Tensor, start: int, end: int, buffers: dict[str, Tensor], pages: Tensor) -> Tensor:
        k, v = (buffers[name][0] for name in names)
        page = k.shape[1]
        x = TABLE[tokens[: end + ahead]]
        for p in range(start, end):
            row = x[p : p + ahead + 1].sum(0)
            k[pages[p // page], p % page], v[pages[p // page], p % page] = row, row.flip(0)
        out = []
        for q in range(start, end):
            at = torch.tensor([*sees(q), q])
            slots, entries = pages[at // page], at % page
            weights = torch.softmax(k[slots, entries].float() @ x[q], 0)
            out.append(weights @ v[slots, entries].float())
        return torch.stack(out)

    return layers


def late(kept: dict[int, Tensor]) -> Any:
    """A state, and beyond 60 tokens something that is kept elsewhere as well."""
    plain = recurrence()

    def layers(tokens: Tensor, start: int, end: int, buffers: dict[str, Tensor], pages: Tensor) -> Tensor:
        out: Tensor = plain(tokens, start, end, buffers, pages)
        if start < 60 < end:
            kept[0] = out[60 - start]
        if end > 60:
            out[max(0, 61 - start) :] += kept[0]
        return out

    return layers


def blocks(dtype: torch.dtype) -> Any:
    """A state that is written at the end of each block of 8 and of each call only: its grid is 8, and not 1."""

    def layers(tokens: Tensor, start: int, end: int, buffers: dict[str, Tensor], pages: Tensor) -> Tensor:
        out = []
        for at in range(start, end):
            h = 0.5 * buffers["h"][0, pages[0]].float() + TABLE[tokens[at]]
            out.append(h)
            if at % 8 == 7 or at == end - 1:
                buffers["h"][0, pages[0]] = h
        return torch.stack(out).to(dtype)

    return layers


def recurrence(kept: dict[str, Tensor] | None = None) -> Any:
    """A state that decays, and grows by each token. ``kept``: where it is kept instead, wrongly."""

    def layers(tokens: Tensor, start: int, end: int, buffers: dict[str, Tensor], pages: Tensor) -> Tensor:
        h = buffers["h"][0, pages[0]].float() if kept is None or not start else kept["h"]
        out = []
        for token in tokens[start:end]:
            h = 0.9 * h + TABLE[token]
            out.append(h)
        buffers["h"][0, pages[0]] = h
        if kept is not None:
            kept["h"] = h
        return torch.stack(out)

    return layers


def window(w: int) -> Sees:
    return lambda q: list(range(max(0, q - w + 1), q))


def sinks(q: int) -> list[int]:
    return sorted({*range(min(q, 3)), *window(8)(q)})


def kv(dtype: str = "float32", **facts: Any) -> Manifest:
    return Manifest([Buffer("k", (WIDTH,), dtype), Buffer("v", (WIDTH,), dtype)], **facts)


def state(dtype: str = "float32") -> Manifest:
    return Manifest([Buffer("h", (WIDTH,), dtype)])


def case_of(layers: Any, reach: Reach, manifest: Manifest) -> ComponentCase:
    return ComponentCase(lambda: Component("subject", manifest, reach), Truth(layers=layers, grid=1))


def found(layers: Any, reach: Reach, manifest: Manifest) -> dict[str, str]:
    """The laws that do not hold, each with how it does not."""
    case = case_of(layers, reach, manifest)
    watch(case)
    verdicts = [verdict(law, case) for law in LAWS]
    assert case.believed == ()
    return {each.law: each.status for each in verdicts if each.status in ("broken", "wasteful")}


RIGHT: dict[str, tuple[Any, Reach, Manifest]] = {
    "a path": (attention(lambda q: list(range(q))), Path(), kv()),
    "a window": (attention(window(8)), Window(8), kv()),
    "a window of 300": (attention(window(300)), Window(300), kv()),
    "a chunk": (attention(lambda q: list(range(q - q % 16, q))), Chunk(16), kv()),
    "sinks and a window": (attention(sinks), Sinks(3) | Window(8), kv()),
    "entries of 16 bits": (attention(window(8)), Window(8), kv("bfloat16")),
    "a draft": (attention(lambda q: list(range(q)), ahead=1), Path(), kv(lookahead=1)),
    "pages of its own": (attention(window(8)), Window(8), kv(page_size=16)),
    "a state": (recurrence(), Point(), state()),
}
WRONG: dict[str, tuple[Any, Reach, Manifest, str, str]] = {
    "7 for 8": (attention(window(8)), Window(7), kv(), COVERS, "broken"),
    "299 for 300": (attention(window(300)), Window(299), kv(), COVERS, "broken"),
    "a forgotten sink": (attention(sinks), Sinks(2) | Window(8), kv(), COVERS, "broken"),
    "a chunk for a window": (attention(window(16)), Chunk(16), kv(), COVERS, "broken"),
    "a chunk for a window, going on": (attention(window(16)), Chunk(16), kv(), GOES_ON, "broken"),
    "9 for 8": (attention(window(8)), Window(9), kv(), COSTS, "wasteful"),
    "a path for a window": (attention(window(8)), Path(), kv(), COSTS, "wasteful"),
    "no lookahead": (attention(lambda q: list(range(q)), ahead=1), Path(), kv(), SAYS, "broken"),
    "too much lookahead": (attention(lambda q: list(range(q))), Path(), kv(lookahead=1), SAYS, "wasteful"),
    "a buffer that nobody writes": (attention(window(8), names=("k", "k")), Window(8), kv(), WRITES, "wasteful"),
    "states that depend on how steps were cut": (blocks(torch.float32), Point(), state(), GOES_ON, "broken"),
    "such states, and outputs of 16 bits": (blocks(torch.bfloat16), Point(), state("bfloat16"), GOES_ON, "broken"),
    "a state of more bits than are written": (recurrence(), Point(), state("float64"), GOES_ON, "wasteful"),
    "a state of 16 bits": (recurrence(), Point(), state("bfloat16"), GOES_ON, "broken"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_need_no_other_truth(name: str) -> None:
    assert found(*RIGHT[name]) == {}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_the_layers_is_found(name: str) -> None:
    *given, law, status = WRONG[name]
    assert found(*given).get(law) == status


def test_what_is_kept_outside_of_the_buffers_is_found() -> None:
    """It serves one sequence well, and another one as if it were the first."""
    assert found(recurrence({}), Point(), state()) == {GOES_ON: "broken"}


def test_what_is_kept_elsewhere_late_is_found() -> None:
    assert found(late({}), Point(), state()) == {GOES_ON: "broken"}


def test_a_buffer_that_the_manifest_lacks_is_named() -> None:
    case = case_of(attention(window(8), names=("k", "values")), Window(8), kv())
    told = verdict(LAWS[0], case)
    assert (told.law, told.status) == (GOES_ON, "broken")
    assert "the layers ask for the buffer 'values', and the manifest has k, v" in told.told


def test_what_layers_raise_or_return_is_told() -> None:
    def raises(*_: Any) -> Tensor:
        raise ValueError("no such thing")

    assert (
        "the layers raise ValueError over [0, 48): no such thing"
        in verdict(LAWS[0], case_of(raises, Path(), kv())).told
    )
    silent = case_of(lambda *_: None, Path(), kv())
    assert "must return a tensor of outputs, got None" in verdict(LAWS[0], silent).told


def test_every_law_that_layers_prove_is_tried_here() -> None:
    assert {COVERS, COSTS, GOES_ON, WRITES, SAYS} <= {name_of(law) for law in LAWS}
