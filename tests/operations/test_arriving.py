"""Sequences that arrive: computed in one cache, copied into the slots that another granted, and decoded on exactly.

As a decode server takes them from a prefill server: of attention over everything all positions, of a window its tail,
of a recurrence one state. The pools of the one that receives hold NaN everywhere else, so that whatever was not sent
and is read nevertheless is seen.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.testing.toy import COMPOSITIONS, composition
from tests.support.traffic import TOLERANCE, composed, distance, model_of, prompt

W = 9
"""The window of ``COMPOSITIONS``."""
LENGTH = 50
DECODED = 15
"""So many tokens that the last step ends at 64, a boundary with every page: a state can be published there."""
MOVED = 1e-4
PAGES = pytest.mark.parametrize("page", [1, 4, 16])
TAILS = pytest.mark.parametrize("tail", [0, 1, W])
EACH = pytest.mark.parametrize("name", COMPOSITIONS)


pytestmark = pytest.mark.usefixtures("one_thread")


@attrs.frozen
class Sent:
    """What goes over the wire: the entries of each position by (component, buffer), the states, and the last logits."""

    border: int
    entries: dict[tuple[str, str], dict[int, Tensor]]
    states: dict[tuple[str, str], Tensor]
    logits: Tensor


def send(cache: Cache, sequence: Sequence, logits: Tensor) -> Sent:
    """All that a sequence has of itself at what is committed."""
    border = sequence.committed
    entries: dict[tuple[str, str], dict[int, Tensor]] = {}
    states: dict[tuple[str, str], Tensor] = {}
    for part in cache.composition.parts:
        slots = sequence.pages(part.name)
        for buffer, content in cache.pool(part.name).buffers.items():
            if not part.page_tokens:
                states[part.name, buffer] = content[:, slots[0]].clone()
                continue
            size = part.page_tokens
            entries[part.name, buffer] = {
                p: content[:, slots[p // size], p % size].clone() for p in range(border) if slots[p // size] >= 0
            }
    return Sent(border, entries, states, logits[-1:].clone())


def receive(cache: Cache, sequence: Sequence, sent: Sent, only_needs: bool = False) -> dict[str, int]:
    """A step whose layers are the copy: each page is filled from its start. How many pages each component took."""
    first = {part.name: len(sequence.pages(part.name)) for part in cache.composition.parts}
    sequence.grow(sent.border - sequence.reserved, arriving=True)
    with cache.step([sequence]) as step:
        step.run_ops()
        return filled(cache, sequence, sent, first, only_needs)


def filled(cache: Cache, sequence: Sequence, sent: Sent, first: dict[str, int], only_needs: bool) -> dict[str, int]:
    taken = {}
    for part in cache.composition.parts:
        slots, size = sequence.pages(part.name), part.page_tokens
        needed = {p for low, high in part.reach.needs(sent.border) for p in range(low, high)}
        for buffer, content in cache.pool(part.name).buffers.items():
            if not size:
                content[:, slots[0]] = sent.states[part.name, buffer]
                continue
            granted = [page for page in range(first[part.name], len(slots)) if slots[page] >= 0]
            taken[part.name] = len(granted)
            for p in (p for page in granted for p in range(page * size, min((page + 1) * size, sent.border))):
                if p in needed or not only_needs:
                    content[:, slots[p // size], p % size] = sent.entries[part.name, buffer][p]
    return taken


def poison(cache: Cache) -> Cache:
    for part in cache.composition.parts:
        for buffer in cache.pool(part.name).buffers.values():
            buffer.fill_(torch.nan)
    return cache


def prefilled(name: str, page: int, tokens: list[int], border: int, *, tight: bool = True) -> tuple[Cache, Any, Sent]:
    """A prefill server, its sequence that ran up to ``border`` and goes on, and what it sends."""
    cache = composed(composition(name), page)
    sequence = cache.open(tokens)
    logits = model_of(name).compute(cache, sequence, chunk=16, upto=border)
    if tight:
        cache.reclaim()  # it has nothing left but what it must keep
    return cache, sequence, send(cache, sequence, logits)


def go_on(name: str, cache: Cache, sequence: Sequence, sent: Sent) -> Tensor:
    """The tail, and then token by token; the logits from the border on."""
    model = model_of(name)
    rows = model.compute(cache, sequence)
    _, decoded = model.decode(cache, sequence, torch.cat((sent.logits, rows))[-1:], DECODED)
    return torch.cat((rows, decoded[1:]))


@TAILS
@PAGES
@EACH
def test_a_sequence_that_arrived_goes_on_as_if_it_had_been_computed_here(name: str, page: int, tail: int) -> None:
    """Bitwise as the cache does that computed it, within rounding as with no cache; and what it leaves is exact."""
    model, tokens, border = model_of(name), prompt(random.Random(f"{name} {page}"), LENGTH), LENGTH - tail
    there, sender, sent = prefilled(name, page, tokens, border)
    here = poison(composed(composition(name), page))
    with here.open(tokens) as arrived:
        assert arrived.ready == 0
        taken = receive(here, arrived, sent)
        for part in here.composition.parts:
            if part.page_tokens and part.reach.closed_upward:
                assert taken[part.name] == -(-border // page)
            elif part.page_tokens and name != "chunks and states":
                assert taken[part.name] < -(-border // page) or page == 16
        rows = go_on(name, here, arrived, sent)
        assert torch.equal(rows, go_on(name, there, sender, sent))
        told = arrived.tokens.tolist()
        assert distance(rows, model.reference(told[:-1])[border:]) < TOLERANCE
        assert (arrived.committed, arrived.named) == (64, 65)
    sender.close()
    with here.open([*told[:64], 3], leave=1) as again:
        assert again.ready == 64
        assert distance(model.compute(here, again), model.reference([*told[:64], 3])[64:]) < TOLERANCE


def test_a_page_that_is_filled_only_where_the_end_needs_it_is_wrong_for_a_boundary_before() -> None:
    """Negative control, and why pages are filled from their start: [14, 22) is needed at 22, and [12, 20) at 20."""
    model, tokens = model_of("FS"), prompt(random.Random(1), 22)
    asked = [*tokens[:20], 3]
    for only_needs in (False, True):
        _, sender, sent = prefilled("FS", 4, tokens, 22)
        here = poison(composed(composition("FS"), 4))
        with here.open(tokens) as arrived:
            receive(here, arrived, sent, only_needs)
        with here.open(asked, leave=1) as sequence:
            assert sequence.ready == 20
            moved = distance(model.compute(here, sequence), model.reference(asked)[20:])
            assert (moved < TOLERANCE) is not only_needs
            sequence.abort()
        sender.abort()
