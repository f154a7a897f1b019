"""The lab: replays real traces through a composed cache, and tells what it would have saved and what stopped the rest.

A cache is composed on the device "meta", so its pools hold no bytes, and driven as an engine drives it. This room uses
the public verbs of a cache, and must not know what lies behind them, nor any component by name.

Read ``replay`` first: the driver. ``setup`` composes what it drives, ``service`` says how requests overlap in time,
``seen`` is the ideal, and ``outcome`` what was measured. ``plan`` asks many replays what a memory holds. ``bounds``
says what no policy can beat, and ``trace_bounds`` what that means for a trace and a cache. Around these stand rooms:

``traces``      what a replay is driven with
``recordings``  what an engine asked of its cache, written down and made again
``beside``      the cache managers of other engines beside ours
``pages``       what was measured, as one HTML page
``commands``    ``prefixloom replay`` and ``prefixloom plan``
"""

from .outcome import MemorySample, PoolUse, ReplayOutcome
from .plan import CapacityPlan, make_plan
from .recordings.recording import RecordingCache, record
from .recordings.rerun import RecordedCalls, Rerun, Shrunk, rerun, shrink
from .replay import Replay
from .seen import SeenPrefixes
from .service import Service
from .setup import Setup, replay_all
from .traces.reading import RequestFile, read_trace
from .traces.requests import BlockPrompt, LabRequest, TokenPrompt
from .traces.synthetic import SyntheticTrace

__all__ = [
    "BlockPrompt",
    "CapacityPlan",
    "LabRequest",
    "MemorySample",
    "PoolUse",
    "RecordedCalls",
    "RecordingCache",
    "Replay",
    "ReplayOutcome",
    "RequestFile",
    "Rerun",
    "SeenPrefixes",
    "Service",
    "Setup",
    "Shrunk",
    "SyntheticTrace",
    "TokenPrompt",
    "make_plan",
    "read_trace",
    "record",
    "replay_all",
    "rerun",
    "shrink",
]
