"""Makers of components and compositions of one byte per token, for the tests of what fits together."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Buffer, Component, CompositionError, Manifest, Path, Point, Window, compose
from prefixloom.compose.registry import Registry
from prefixloom.contract.composition import Composition

ONE_BYTE = (Buffer("k", (1,), "uint8"),)


def paths(name: str = "whole", **facts: Any) -> Component:
    return Component(name, Manifest(ONE_BYTE, **facts), Path())


def state(name: str = "state", **facts: Any) -> Component:
    return Component(name, Manifest(ONE_BYTE, **facts), Point())


def windowed(name: str = "near", w: int = 8, **facts: Any) -> Component:
    return Component(name, Manifest(ONE_BYTE, **facts), Window(w))


def composed(*plugins: Any, **options: Any) -> Composition:
    if "memory" not in options:
        options.setdefault("capacity", 4096)
    options.setdefault("registry", Registry([]))
    options.setdefault("device", "meta")
    return compose(options.pop("model", None), plugins=plugins, **options).composition


def refused(told: str, *plugins: Any, **options: Any) -> str:
    with pytest.raises(CompositionError, match=told) as caught:
        composed(*plugins, **options)
    return str(caught.value)
