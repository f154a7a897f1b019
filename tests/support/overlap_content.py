"""What the slots of the overlap traffic hold: hashes of all tokens up to a position, in components of four kinds."""

from __future__ import annotations

from typing import Any

from prefixloom import Buffer, Codec, Component, Manifest, Path, Point, Reach, Window
from tests.support.helpers import part

MASK = (1 << 61) - 1
WINDOW = 10
REWIND = 3
STATES = ("M", "C")


def folded(hashes: list[int], namespace: str, tokens: list[int]) -> list[int]:
    """``hashes`` and those after each of ``tokens``: a new list, since layers in flight read the old one."""
    out = list(hashes)
    for token in tokens:
        out.append((out[-1] * 1_000_003 + token + (7 if namespace == "a" else 1007)) & MASK)
    return out


def component(letter: str) -> Any:
    """F, S, M; and C, a state that rests as int8, which is exact for rows of equal values."""
    reach: Reach = {"F": Path(), "S": Window(WINDOW), "M": Point(), "C": Point()}[letter]
    facts: dict[str, Any] = {"checkpoint_every": 8, "max_rewind": REWIND} if letter in STATES else {}
    if letter == "C":
        manifest = Manifest([Buffer("data", (2,), "float32")], stored_as=Codec("int8", tolerance=0.004), **facts)
        return Component(letter, manifest, reach)
    return part(letter, reach, **facts)


def held_as(letter: str, h: int) -> int:
    """What stands for a hash in a slot: a float32 has no more than 24 bits for it."""
    return h & 0xFFFFFF if letter == "C" else h
