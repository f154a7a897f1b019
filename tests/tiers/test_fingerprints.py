"""Whatever content depends on beside its tokens has a fingerprint of its own in a store."""

from __future__ import annotations

import itertools
from typing import Any

import attrs

from prefixloom import Buffer, Codec, Component, Manifest, Path, Point, Window, compose
from prefixloom.contract.identity import Identity
from prefixloom.storage import Fingerprint
from prefixloom.testing.inside.backdoor import lane
from prefixloom.tiers import pieces

H = Buffer("h", (3, 8), "float32")
PLAIN: dict[str, Any] = {"buffers": [H], "reach": Point(), "page_size": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "stored as int8": {"stored_as": Codec("int8", 0.004)},
    "stored as bfloat16": {"stored_as": Codec("bfloat16", 0.004)},
    "stored as float16": {"stored_as": Codec("float16", 0.004)},
    "dtype": {"buffers": [attrs.evolve(H, dtype="float64")]},
    "shape": {"buffers": [attrs.evolve(H, shape=(8, 3))]},
    "name": {"buffers": [attrs.evolve(H, name="g")]},
    "layers": {"buffers": [attrs.evolve(H, layers=(0, 1))]},
    "other layers": {"buffers": [attrs.evolve(H, layers=(0, 2))]},
    "a second buffer": {"buffers": [H, attrs.evolve(H, name="g")]},
    "the second buffer first": {"buffers": [attrs.evolve(H, name="g"), H]},
    "layers in another order": {"buffers": [attrs.evolve(H, layers=(2, 0))]},
    "version": {"version": 2},
    "pages": {"reach": Path()},
    "other pages": {"reach": Path(), "page_size": 8},
    "two tokens an entry": {"reach": Path(), "tokens_per_slot": 2},
    "window": {"reach": Window(8), "buffers": [attrs.evolve(H, name="w")]},
}


def fingerprint(reach: Any, buffers: Any, page_size: int, **facts: Any) -> Fingerprint:
    mine = Component("mine", Manifest(buffers, **facts), reach)
    running = {"max_running": 2} if "stored_as" in facts else {}
    keys = Component("keys", Manifest([Buffer("k", (1,), "int8")]), Path())
    cache = compose(None, plugins=[keys, mine], page_size=page_size, capacity={"keys": 64, "mine": 64}, **running)
    return pieces.fingerprint(lane(cache, "mine"), page_size, Identity(model="T", weights="1"))


def digest(**facts: Any) -> bytes:
    return fingerprint(**facts).digest


def test_content_of_another_form_has_another_fingerprint() -> None:
    found = {name: digest(**{**PLAIN, **facts}) for name, facts in {"plain": {}, **OTHERS}.items()}
    same = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert same == []
    assert digest(**PLAIN) == found["plain"]


def test_a_fingerprint_names_each_layer_once_and_in_ascending_order_however_buffers_name_them() -> None:
    buffers = [attrs.evolve(H, layers=(9, 16, 1)), attrs.evolve(H, name="g", layers=(8, 1))]
    assert fingerprint(**{**PLAIN, "buffers": buffers}).layers == (1, 8, 9, 16)
