"""prefixloom: the prefix cache for hybrid language models, made of plugins."""

from __future__ import annotations

from .admission import AdmissionPolicy, StateView
from .cache import Cache
from .compose import compose
from .consensus import Consensus, LocalConsensus
from .consensus_group import GroupConsensus
from .errors import (
    CapacityError,
    CompositionError,
    InputError,
    InvariantError,
    PluginError,
    PrefixloomError,
    ProtocolError,
    RaceError,
    RankError,
    StorageError,
)
from .hookspecs import hookimpl
from .keys import Tokens, encode
from .lease import Lease
from .manifest import Buffer, Codec, Manifest, TierManifest
from .plan import MatchPlan
from .policy import EvictionPolicy, Use
from .reach import Chunk, Path, Point, Reach, Sinks, Tail, Window
from .restore import Restored
from .sequence import Sequence
from .sizing import Traffic
from .stats import CacheStats, ComponentStats, TierStats
from .streams import Stream, ThreadStream, stream_for
from .values import (
    AnchorView,
    Claim,
    Component,
    ComponentSpec,
    ComponentType,
    LayerFacts,
    ModelFacts,
    NodeView,
    Op,
    Outcome,
    Phase,
    Profile,
    Receipt,
    SplitRule,
    Tier,
    Touch,
    Transfer,
    TransferPlan,
    WalkView,
)

__all__ = [
    "AdmissionPolicy",
    "AnchorView",
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
    "Consensus",
    "EvictionPolicy",
    "GroupConsensus",
    "InputError",
    "InvariantError",
    "LayerFacts",
    "Lease",
    "LocalConsensus",
    "Manifest",
    "MatchPlan",
    "ModelFacts",
    "NodeView",
    "Op",
    "Outcome",
    "Path",
    "Phase",
    "PluginError",
    "Point",
    "PrefixloomError",
    "Profile",
    "ProtocolError",
    "RaceError",
    "RankError",
    "Reach",
    "Receipt",
    "Restored",
    "Sequence",
    "Sinks",
    "SplitRule",
    "StateView",
    "StorageError",
    "Stream",
    "Tail",
    "ThreadStream",
    "Tier",
    "TierManifest",
    "TierStats",
    "Tokens",
    "Touch",
    "Traffic",
    "Transfer",
    "TransferPlan",
    "Use",
    "WalkView",
    "Window",
    "compose",
    "encode",
    "hookimpl",
    "stream_for",
]
