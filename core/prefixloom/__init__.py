"""prefixloom: the prefix cache for hybrid language models, made of plugins."""

from __future__ import annotations

from .compose import compose
from .errors import (
    CapacityError,
    CompositionError,
    InputError,
    InvariantError,
    PluginError,
    PrefixloomError,
    ProtocolError,
)
from .hookspecs import hookimpl
from .manifest import Buffer, Codec, Manifest
from .policy import EvictionPolicy
from .reach import Chunk, Path, Point, Reach, Sinks, Tail, Window
from .values import Claim, Component, ComponentSpec, ComponentType, LayerFacts, ModelFacts, Op, Profile, Receipt, Touch

__all__ = [
    "Buffer",
    "CapacityError",
    "Chunk",
    "Claim",
    "Codec",
    "Component",
    "ComponentSpec",
    "ComponentType",
    "CompositionError",
    "EvictionPolicy",
    "InputError",
    "InvariantError",
    "LayerFacts",
    "Manifest",
    "ModelFacts",
    "Op",
    "Path",
    "PluginError",
    "Point",
    "PrefixloomError",
    "Profile",
    "ProtocolError",
    "Reach",
    "Receipt",
    "Sinks",
    "Tail",
    "Touch",
    "Window",
    "compose",
    "hookimpl",
]
