"""prefixloom: the prefix cache for hybrid language models, made of plugins."""

from __future__ import annotations

from .cache.cache import Cache
from .cache.match_plan import MatchPlan
from .cache.sequence import Sequence
from .compose.entry import compose
from .compose.registry import make_component, open_store
from .compose.sizing import SequenceNeeds, Traffic
from .contract.admission import AdmissionPolicy, StateView
from .contract.hookspecs import hookimpl
from .contract.identity import Identity
from .contract.manifest import Buffer, Codec, Manifest, TierManifest, parse_memory
from .contract.policy import EvictionPolicy
from .contract.queues import ListQueue, Queue, Use
from .contract.reach import Chunk, Optional, Path, Point, Reach, Sinks, Tail, Window
from .contract.shares import owner_of
from .contract.tier_answers import Restored, TierStats
from .contract.values import (
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
from .device.kernels import move_slots
from .device.streams import Stamp, Stream, ThreadStream, stream_for
from .device.timeline import Activity, Timeline
from .errors import (
    BrokenError,
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
    WorkError,
)
from .insight.explanation import Explanation, Finding
from .insight.figures import Figure
from .insight.history import Histogram, History, Loss
from .insight.stats import CacheStats, ComponentStats
from .keys.pages import PageChain
from .keys.tokens import Tokens, encode, exact_key
from .operations.insert import Inserted
from .operations.lease import Lease
from .tiers.consensus import Consensus, GroupConsensus, LocalConsensus
from .tree.journal import Change, Journal
from .tree.residency import Residency

__all__ = [
    "Activity",
    "AdmissionPolicy",
    "AnchorView",
    "BrokenError",
    "Buffer",
    "Cache",
    "CacheStats",
    "CapacityError",
    "Change",
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
    "Explanation",
    "Figure",
    "Finding",
    "GroupConsensus",
    "Histogram",
    "History",
    "Identity",
    "InputError",
    "Inserted",
    "InvariantError",
    "Journal",
    "LayerFacts",
    "Lease",
    "ListQueue",
    "LocalConsensus",
    "Loss",
    "Manifest",
    "MatchPlan",
    "ModelFacts",
    "NodeView",
    "Op",
    "Optional",
    "Outcome",
    "PageChain",
    "Path",
    "Phase",
    "PluginError",
    "Point",
    "PrefixloomError",
    "Profile",
    "ProtocolError",
    "Queue",
    "RaceError",
    "RankError",
    "Reach",
    "Receipt",
    "Residency",
    "Restored",
    "Sequence",
    "SequenceNeeds",
    "Sinks",
    "SplitRule",
    "Stamp",
    "StateView",
    "StorageError",
    "Stream",
    "Tail",
    "ThreadStream",
    "Tier",
    "TierManifest",
    "TierStats",
    "Timeline",
    "Tokens",
    "Touch",
    "Traffic",
    "Transfer",
    "TransferPlan",
    "Use",
    "WalkView",
    "Window",
    "WorkError",
    "compose",
    "encode",
    "exact_key",
    "hookimpl",
    "make_component",
    "move_slots",
    "open_store",
    "owner_of",
    "parse_memory",
    "stream_for",
]
