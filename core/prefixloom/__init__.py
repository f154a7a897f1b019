"""prefixloom: the prefix cache for hybrid language models, made of plugins."""

from __future__ import annotations

from .cache import Cache
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
from .keys import Tokens, encode
from .lease import Lease
from .manifest import Buffer, Codec, Manifest
from .plan import MatchPlan
from .policy import EvictionPolicy
from .reach import Chunk, Path, Point, Reach, Sinks, Tail, Window
from .sequence import Sequence
from .stats import CacheStats, ComponentStats
from .values import Claim, Component, ComponentSpec, ComponentType, LayerFacts, ModelFacts, Op, Profile, Receipt, Touch

__all__ = [
    "Buffer",
    "Cache",
    "CacheStats",
    "CapacityError",
    "Chunk",
    "Claim",
    "Codec",
    "Component",
    "ComponentSpec",
    "ComponentStats",
    "ComponentType",
    "CompositionError",
    "EvictionPolicy",
    "InputError",
    "InvariantError",
    "LayerFacts",
    "Lease",
    "Manifest",
    "MatchPlan",
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
    "Sequence",
    "Sinks",
    "Tail",
    "Tokens",
    "Touch",
    "Window",
    "compose",
    "encode",
    "hookimpl",
]
